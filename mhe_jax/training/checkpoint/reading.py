"""What is on disk: the steps of a run, their metadata, and their parameters for who goes on."""

import contextlib
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.data import AnyTokenizer
from mhe_jax.tasks.sums import criterion
from mhe_jax.training.checkpoint import faults
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_params

DIRECTORY = "checkpoints"
VALIDATION = "validation"  # in a step: metadata of a validation that came after it was saved
Meta = dict[str, Any]


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


def read_meta(step: Path) -> Meta:
    """The metadata of a step as they were written; InputError if they are not there."""
    with faults.told(InputError, f"{step}: cannot be read"):
        faults.verify(step, ["meta"])
        meta = json.loads((step / "meta" / "metadata").read_bytes())
        later = step / VALIDATION
        return meta | (json.loads(faults.without_sum(later)) if later.exists() else {})


def best(metas: Mapping[int, Meta]) -> int | None:
    """The step whose parameters scored best, of equal ones the first; None if none was scored."""
    scored = [n for n, meta in metas.items() if meta.get("validated_step") == n]
    return min(scored, key=lambda n: (criterion(metas[n]["validation"]), n), default=None)


def check_tokenizer(meta: Meta, tokenizer: AnyTokenizer) -> None:
    """Raises InputError if `meta` names another tokenizer."""
    if meta.get("tokenizer", tokenizer.key) != tokenizer.key:
        raise InputError(f"{tokenizer.name}: is not the tokenizer of the checkpoint")


def restore_items(step: Path, items: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a step, laid out as the shapes and shardings given for each item."""
    quiet_orbax()
    with (
        faults.told(InputError, f"{step}: cannot be read"),
        contextlib.closing(ocp.StandardCheckpointer()) as reader,
    ):
        place = step.absolute()
        return {name: reader.restore(str(place / name), item) for name, item in items.items()}


def restore_params(
    workdir: str | Path,
    which: str,
    abstract_params: Any,
    average: int = 1,
    tokenizer: AnyTokenizer | None = None,
) -> tuple[Any, list[int]]:
    """Parameters to evaluate, and the steps they are from.

    `which` is 'best' on the validation split (or the last, if none was validated), 'last' (with
    `average`, the mean of this many newest checkpoints), or a step number. They get
    the shapes and shardings of `abstract_params`, and must be of this `tokenizer`, where given.

    Where the run keeps an exponential average, each checkpoint counts with its averaged parameters.
    A run without checkpoints, but with a `model.safetensors`, has these parameters as its best and
    its last, whatever `average` is. InputError if there is no such checkpoint, or it is damaged.
    """
    paths = steps_in(path_of(workdir) / DIRECTORY)
    weights = path_of(workdir) / WEIGHTS
    if not paths and weights.exists():
        return _restore_tensors(weights, which, abstract_params, tokenizer)
    steps = _chosen(paths, which, average)
    if len(steps) != average:
        there = ", ".join(map(str, paths)) or "none"
        wanted = f"{average} checkpoints" if average > 1 else "checkpoint"
        takes = "takes a step, best or last"
        raise InputError(f"{workdir} has no {wanted} {which!r}; there are: {there}; {takes}")
    total = None
    for step in steps:
        if tokenizer is not None:
            check_tokenizer(read_meta(paths[step]), tokenizer)
        params = _restore(paths[step], abstract_params)
        total = params if total is None else jax.tree.map(jnp.add, total, params)
    return jax.tree.map(lambda x: x / average, total) if average > 1 else total, steps


def _chosen(paths: Mapping[int, Path], which: str, average: int) -> list[int]:
    if which == "best":
        found = best({step: read_meta(path) for step, path in paths.items()})
        if found is not None:
            return [found]
    if which in ("best", "last"):
        return [*paths][-average:]
    return [step for step in paths if str(step) == which]


def _restore(step: Path, abstract_params: Any) -> Any:
    with faults.told(InputError, f"{step}: cannot be read"):
        name = "ema_params" if "ema_params" in faults.verify(step, []) else "params"
        faults.verify(step, [name])
    return restore_items(step, {name: abstract_params})[name]


def _restore_tensors(
    path: Path, which: str, abstract_params: Any, tokenizer: AnyTokenizer | None
) -> tuple[Any, list[int]]:
    params, meta = read_params(path, abstract_params)
    with faults.told(InputError, f"{path}: its steps cannot be read"):
        steps = [int(step) for step in json.loads(meta.get("steps", "[]"))]
    if which not in ("best", "last", *map(str, steps)):
        there = ", ".join(map(str, steps)) or "unknown"
        raise InputError(f"{path.parent} has no checkpoint {which!r}, but one of steps {there}")
    if tokenizer is not None:
        check_tokenizer(meta, tokenizer)
    return params, steps


def quiet_orbax() -> None:
    """An error of many reads or writes at once is told once, by us.

    Orbax and asyncio log each, with a traceback; those still under way when the first has ended
    their loop say so by themselves.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _unraisable


def _unraisable(found: Any, hook: Callable[[Any], Any] = sys.unraisablehook) -> None:
    if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
        hook(found)
