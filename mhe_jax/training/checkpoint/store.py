"""Calls of Orbax itself: managers of a run's directories, one read, one write."""

import contextlib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.data import AnyTokenizer
from mhe_jax.tasks.sums import criterion
from mhe_jax.training.checkpoint import checksums
from mhe_jax.training.state import TrainState

Meta = dict[str, Any]


class NotSaved(OSError):
    """A checkpoint could not be written; the message says which and why."""


def check_tokenizer(meta: Meta, tokenizer: AnyTokenizer) -> None:
    """Raises InputError if `meta` names another tokenizer."""
    if meta.get("tokenizer", tokenizer.key) != tokenizer.key:
        raise InputError(f"{tokenizer.name}: is not the tokenizer of the checkpoint")


def attempt(read: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `read` and "", or None and the reason why there is none."""
    try:
        return read(), ""
    except Exception as error:  # each library on the way has its own
        return None, reason_of(error)


def reason_of(error: BaseException) -> str:
    """The message of ours or of the operating system in `error`, else its first words."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, checksums.Damaged):
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


@contextlib.contextmanager
def writing(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Turns every error inside, often long after its cause, into a NotSaved."""
    try:
        yield
    except NotSaved:
        raise
    except Exception as error:
        raise NotSaved(f"cannot write {manager.directory}: {reason_of(error)}") from error


def optimizer_item(state: TrainState) -> dict[str, Any]:
    return {"opt_state": state.opt_state, "step": state.step, "key": state.key}


def check_path(workdir: str | Path) -> None:
    """Raises InputError if no checkpoint below `workdir` could be read once it is written.

    When Orbax merges what the processes wrote, it takes the path for a pattern.
    """
    path = str(path_of(workdir).absolute())
    if set("*?[") & set(path):
        raise InputError(f"workdir={path}: takes a path without *, ? and [")


def has_steps(workdir: str | Path, name: str) -> bool:
    """Whether `name` of a run has a checkpoint, readable or not; in a bucket, a complete one.

    There a step has its own name from the start, and one more file once it is complete.
    """
    place = path_of(workdir)
    whole = "/commit_success.txt" if isinstance(place, Bucket) else ""
    return any(place.glob(f"{name}/[0-9]*{whole}"))


def make_manager(workdir: str | Path, name: str, **options: Any) -> ocp.CheckpointManager:
    quiet_orbax()
    path = path_of(workdir).absolute() / name
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, not a directory")
    seal, registry = checksums.Seal(), ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ("params", "ema_params", "optimizer"):
        handler = checksums.Arrays(seal)
        registry.add(item, ocp.args.StandardSave, handler)
        registry.add(item, ocp.args.StandardRestore, handler)
    handler = checksums.Json()
    registry.add("meta", ocp.args.JsonSave, handler)
    registry.add("meta", ocp.args.JsonRestore, handler)
    return ocp.CheckpointManager(
        str(path),
        handler_registry=registry,
        options=ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(post_finalization_callback=seal),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=name
            ),
            **options,
        ),
    )


def save(manager: ocp.CheckpointManager, step: int, items: dict[str, Any]) -> None:
    # `force` skips Orbax's rule that steps only grow, which refuses silently.
    with writing(manager):
        if not manager.save(step, args=ocp.args.Composite(**items), force=True):
            raise RuntimeError(f"Orbax did not save step {step} in {manager.directory}")


def read_meta(manager: ocp.CheckpointManager, step: int) -> Meta:
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    return checked_meta(manager.restore(step, args=args)["meta"])


def checked_meta(meta: Any) -> Meta:
    if not isinstance(meta, dict):
        raise ValueError("meta is no JSON object")
    return meta


def worth_of(manager: ocp.CheckpointManager, step: int) -> tuple[float, ...]:
    return criterion(read_meta(manager, step)["validation"])


def best_of(manager: ocp.CheckpointManager) -> int | None:
    found = []
    for step in manager.all_steps():
        worth, reason = attempt(lambda step=step: worth_of(manager, step))
        if worth is None:
            raise InputError(f"{manager.directory}/{step}: cannot be read: {reason}")
        found.append((worth, step))
    return min(found, default=((), None))[1]


def quiet_orbax() -> None:
    """Makes Orbax report, of many reads or writes at once, only the first that fails."""
    if not isinstance(sys.unraisablehook, _NotOfOrbax):
        sys.unraisablehook = _NotOfOrbax(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_no_left_over)
    logging.getLogger("absl").addFilter(_no_traceback)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class _NotOfOrbax:
    """Drops reports of the others once the first failure has ended their loop."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        of_orbax = inspect.iscoroutine(unraisable.object)  # nothing else here has any
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _no_left_over(record: logging.LogRecord) -> bool:
    """Drops what asyncio says of reads and writes that were under way when the first failed."""
    message = record.getMessage().partition("\n")[0]
    return not message.endswith(
        ("exception was never retrieved", "was destroyed but it is pending!")
    )


def _no_traceback(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)
