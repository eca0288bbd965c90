"""What writing and reading checkpoints share: calls of Orbax, errors as one line."""

import contextlib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.data import AnyTokenizer
from mhe_jax.tasks.sums import criterion
from mhe_jax.training.checkpoint.checksums import Damaged

DIRECTORY = "checkpoints"
Meta = dict[str, Any]


class NotSaved(OSError):
    """A checkpoint could not be written; the message says which and why."""


def check_tokenizer(meta: Meta, tokenizer: AnyTokenizer) -> None:
    """Raises InputError if `meta` names another tokenizer."""
    if meta.get("tokenizer", tokenizer.key) != tokenizer.key:
        raise InputError(f"{tokenizer.name}: is not the tokenizer of the checkpoint")


def check_path(workdir: str | Path) -> None:
    """Raises InputError if no checkpoint below `workdir` could be read once it is written.

    When Orbax merges what the processes wrote, it takes the path for a pattern.
    """
    path = str(path_of(workdir).absolute())
    if set("*?[") & set(path):
        raise InputError(f"workdir={path}: takes a path without *, ? and [")


def steps_in(directory: Path) -> dict[int, Path]:
    """The steps that were saved whole, by number.

    In a bucket a step has its name from the start, and one more object once it is complete.
    """
    if not directory.is_dir():
        return {}
    found = {int(path.name): path for path in directory.iterdir() if path.name.isdecimal()}
    if isinstance(directory, Bucket):
        found = {n: p for n, p in found.items() if (p / "commit_success.txt").exists()}
    return dict(sorted(found.items()))


def make_manager(workdir: str | Path, **options: Any) -> ocp.CheckpointManager:
    # An error of many reads or writes at once is told once, by us: Orbax and asyncio log each, with
    # a traceback; those still under way when the first has ended their loop say so by themselves.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _unraisable
    directory = path_of(workdir).absolute() / DIRECTORY
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: is a file, not a directory")
    return ocp.CheckpointManager(str(directory), options=ocp.CheckpointManagerOptions(**options))


def _unraisable(found: Any, hook: Callable[[Any], Any] = sys.unraisablehook) -> None:
    if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
        hook(found)


def read_meta(manager: ocp.CheckpointManager, step: int) -> Meta:
    meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    if not isinstance(meta, dict):
        raise ValueError("meta is no JSON object")
    return meta


def worth(step: int, meta: Meta) -> tuple[float, ...] | None:
    """The criterion of a step, lowest for the best; None where its parameters are not scored."""
    scored = meta.get("validated_step") == step
    return criterion(meta["validation"]) if scored else None


def best(worths: Mapping[int, tuple[float, ...] | None]) -> int | None:
    """The step that is worth most, of equal ones the first; None where none is scored."""
    scored = [(found, step) for step, found in worths.items() if found is not None]
    return min(scored)[1] if scored else None


@contextlib.contextmanager
def told(error_type: type[Exception], what: str) -> Iterator[None]:
    """Turns every error inside, which each library on the way has its own of, into one line."""
    try:
        yield
    except (InputError, NotSaved):
        raise
    except Exception as error:
        raise error_type(f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The message of ours or of the operating system in `error`, else its first words."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Damaged):
            return str(found)
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        if match := re.search(r": ([^:]+) \[os_error_code=", str(found)):  # tensorstore's way
            return match[1]
        found = found.__cause__ or found.__context__
    words = " ".join(str(error).split())
    if re.match("RESOURCE_EXHAUSTED: .*OCDBT", words):  # of a file, without the system's own word
        return "No space left on device"
    return f"{type(error).__name__}: {words if len(words) <= 200 else words[:200] + ' ...'}"
