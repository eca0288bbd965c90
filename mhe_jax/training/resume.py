"""Rules for the run that a working directory holds: what may change since it began, what stays."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhe_jax import data
from mhe_jax.config import Config, InputError, OptimizerConfig
from mhe_jax.config.fields import leaves, load_json, save_json, to_dict
from mhe_jax.config.files import CONFIG, METRICS, RESULT, TOKENIZER
from mhe_jax.config.places import path_of
from mhe_jax.training.checkpoint.reading import DIRECTORY, steps_in

DRAFT = f".{TOKENIZER}.draft"

# Keys of texts in the meta of a checkpoint: their split, and what a run has done with it.
TEXTS = {
    "text": ("data.train", "learned from"),
    "validation_text": ("data.validation", "been validated on"),
}

# What may differ: how long and how often, how the same numbers are computed and where things lie,
# and the numbers of the optimizer. All else changes what is learned, what the best checkpoint is
# the best of, or the shape of the state.
MAY_CHANGE = re.compile(
    r"workdir|mesh\..*"
    r"|evaluation\.(?!spelling_noise|seed|answer_length|no_answer_threshold).*"
    r"|train\.(?!seed|init_from|eval_batches).*"
    r"|data\.(directory|cache_directory|test)"
    r"|model\.remat|model\.kronecker\.apply|model\.attention(_by_role\.\w+)?\.(form|engine)"
    r"|optimizer\.(?!name|ema_decay|head_embedding_rate).*"
)


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
    """Raises InputError if resuming or beginning would destroy something that lies there.

    A run that has lost its tokenizer cannot resume: another would not mean the same. A new run does
    not overwrite what it finds under the names of its own files.
    """
    tokenizer = workdir / TOKENIZER
    if holds_run(workdir):
        if not tokenizer.exists() and config.model.has_pieces:
            raise InputError(f"{tokenizer}: no such file")
        return
    left = [path for name in (METRICS, RESULT) if (path := workdir / name).exists()]
    for path in (*left, *steps_in(workdir / DIRECTORY).values()):
        raise InputError(f"{path} is there, but no {CONFIG}: give another --workdir")
    given = data.tokenizer_file(config)
    kept = tokenizer.read_bytes() if given and tokenizer.exists() else None
    if given and kept and kept != data.read_tokenizer(config, given).model:
        raise InputError(f"{tokenizer}: differs from {given}: give another --workdir")


def own_tokenizer(workdir: Path) -> Path:
    """Where the tokenizer of the run lies or is to be made.

    A new one is a draft until the run begins: a start that ends before then may have wanted
    another than the next, and a file under the name of the tokenizer itself is the user's.
    """
    kept = workdir / TOKENIZER
    return kept if kept.exists() or holds_run(workdir) else workdir / DRAFT


def drop_draft(workdir: Path) -> None:
    """Deletes the tokenizer of a start that did not become a run."""
    (workdir / DRAFT).unlink(missing_ok=True)


def begin(config: Config, workdir: Path) -> None:
    """Makes the working directory hold a run from here on."""
    if (workdir / DRAFT).exists():
        (workdir / DRAFT).replace(workdir / TOKENIZER)
    save_json(config, workdir / CONFIG)


def check_text(workdir: Path, meta: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Raises InputError if a checkpoint is of another text; one that has not trained has none."""
    for name, text in texts.items():
        if meta.get(name, text) != text:
            split, done = TEXTS[name]
            raise InputError(
                f"{split} has changed: it is not the text that the run in {workdir} has "
                f"{done}: go on with the old text, or give another --workdir"
            )


def check_length(workdir: Path, done: int, num_steps: int, changed: Sequence[str]) -> None:
    """Raises InputError if steps would be taken back, or a new number would train nothing."""
    if done > num_steps:
        raise InputError(f"train.num_steps is {num_steps}: {workdir} has done {done} already")
    for line in changed:
        if done == num_steps and line.startswith("optimizer."):
            raise InputError(
                f"{line}: all {done} steps of {workdir} are done: give more train.num_steps, or "
                "another --workdir"
            )


def note_changes(
    optimizer: OptimizerConfig, num_steps: int, meta: dict[str, Any], done: int
) -> None:
    """Adds to `meta` which fields change after `done` steps, such that it is another training.

    The meta of a checkpoint says with which its last step was made: a run may have been killed
    before any step with those of its config.
    """
    fields = {f"optimizer.{name}": value for name, value in to_dict(optimizer).items()}
    if optimizer.schedule in ("linear", "cosine"):  # the others do not know the last step
        fields["train.num_steps"] = num_steps
    before = meta.get("fields", fields) if done else fields
    changed = [
        f"step {done}: {name} {before[name]!r} -> {value!r}"
        for name, value in fields.items()
        if before.get(name, value) != value
    ]
    meta |= {"fields": fields, "changed": [*meta.get("changed", []), *changed]}
