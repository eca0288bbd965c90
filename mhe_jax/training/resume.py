"""The run that a working directory holds: who may train in it, what may change since it began."""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, load_json, to_dict
from mhe_jax.config.files import CONFIG, METRICS, RESULT, TOKENIZER
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.data import tokenizer_file
from mhe_jax.data.tokenizer import read_model
from mhe_jax.training.checkpoint.steps import DIRECTORY, steps_in

LOCK = "lock"
SHOWN_WITHIN = 60.0  # seconds that a network disk may take to show a file of another host

# Keys of texts in the meta of a checkpoint, and their splits.
TEXTS = {"text": "data.train", "validation_text": "data.validation"}

# What may differ: how long and how often, how the same numbers are computed and where things lie,
# and the numbers of the optimizer.
MAY_CHANGE = re.compile(
    r"workdir|mesh\..*"
    r"|evaluation\.(?!spelling_noise|seed|answer_length|no_answer_threshold).*"
    r"|train\.(?!seed|init_from|eval_batches).*"
    r"|data\.(directory|cache_directory|test)"
    r"|model\.remat|model\.kronecker\.apply|model\.attention(_by_role\.\w+)?\.(form|engine)"
    r"|optimizer\.(?!name|ema_decay|head_embedding_rate).*"
)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes `workdir`; in the block no other process trains in it, but for a bucket.

    The tokenizer of a start that became no run is deleted: the next may want another.
    """
    lock, tokenizer = filelock.FileLock(workdir / LOCK), workdir / TOKENIZER
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not isinstance(workdir, Bucket):
            lock.acquire(blocking=False)
        kept = tokenizer.exists()
    except filelock.Timeout:
        raise InputError(f"{workdir}: another process trains here") from None
    except OSError as error:
        is_file = isinstance(error, FileExistsError)
        reason = "is a file; takes a directory" if is_file else error.strerror
        raise InputError(f"workdir={workdir}: {reason}") from None
    try:
        yield
    finally:
        if not kept and not holds_run(workdir):
            tokenizer.unlink(missing_ok=True)
        if lock.is_locked:
            (workdir / LOCK).unlink(missing_ok=True)
            lock.release()


def check_shared(workdir: Path) -> None:
    """Raises InputError if this process does not see the lock of process 0 in `workdir`."""
    late = time.monotonic() + SHOWN_WITHIN
    while not isinstance(workdir, Bucket) and not (workdir / LOCK).exists():
        if time.monotonic() > late:
            raise InputError(f"workdir={workdir}: is not the directory of process 0")
        time.sleep(0.1)


def holds_run(workdir: Path) -> bool:
    """Whether it already holds a run."""
    return (workdir / CONFIG).exists()


def changed_fields(config: Config) -> list[str]:
    """Differences from the run in `config.workdir`, as `name: old -> new`; [] without a run.

    InputError where the run cannot resume with one of them.
    """
    workdir = path_of(config.workdir)
    if not holds_run(workdir):
        return []
    old, new = (leaves(to_dict(one)) for one in (load_json(workdir / CONFIG), config))
    changed = []
    for name, value in new.items():
        if old[name] == value:
            continue
        # The same number of batches of another size is other data.
        part = name == "evaluation.batch_size" and config.train.eval_batches is not None
        if part or not MAY_CHANGE.fullmatch(name):
            raise InputError(
                f"{workdir} holds a run with {name}={old[name]!r}, not {value!r}: "
                "go on with the old value, or give another --workdir"
            )
        changed.append(f"{name}: {old[name]!r} -> {value!r}")
    return changed


def check_files(config: Config, workdir: Path) -> None:
    """Raises InputError if the run has lost its tokenizer, or a new run's files are there."""
    tokenizer = workdir / TOKENIZER
    if holds_run(workdir):
        if not tokenizer.exists() and config.model.has_pieces:
            raise InputError(f"{tokenizer}: no such file")
        return
    named = tokenizer_file(config)
    if named and tokenizer.exists() and read_model(named) != tokenizer.read_bytes():
        raise InputError(f"{tokenizer} is there, and is not {named}: give another --workdir")
    left = [path for name in (METRICS, RESULT) if (path := workdir / name).exists()]
    for path in (*left, *steps_in(workdir / DIRECTORY).values()):
        raise InputError(f"{path} is there, but no {CONFIG}: give another --workdir")


def check_text(workdir: Path, meta: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Raises InputError if a checkpoint is of another text; one that has not trained has none."""
    for name, text in texts.items():
        if meta.get(name, text) != text:
            raise InputError(
                f"{TEXTS[name]} is not the text that the run in {workdir} began with: go on with "
                "the old text, or give another --workdir"
            )


def check_length(workdir: Path, done: int, num_steps: int, changed: Sequence[str]) -> None:
    """Raises InputError if steps would be taken back, or a new number would train nothing."""
    if done > num_steps:
        raise InputError(f"train.num_steps is {num_steps}: {workdir} has done {done} already")
    for line in changed:
        if done == num_steps and line.startswith("optimizer."):
            raise InputError(f"{line}: all {done} steps of {workdir} are done: give more steps")


def note_changes(config: Config, meta: dict[str, Any], done: int) -> None:
    """Adds to `meta` which numbers of the optimizer change after `done` steps, for the result."""
    fields = {f"optimizer.{name}": value for name, value in to_dict(config.optimizer).items()}
    if config.optimizer.schedule in ("linear", "cosine"):  # the others do not know the last step
        fields["train.num_steps"] = config.train.num_steps
    before = fields | meta.get("fields", {}) if done else fields
    changes = [name for name, value in fields.items() if before[name] != value]
    told = [f"step {done}: {name} {before[name]!r} -> {fields[name]!r}" for name in changes]
    meta |= {"fields": fields, "changed": [*meta.get("changed", []), *told]}
