"""Reads the parameters of a run, for evaluation and for a run that starts from it.

They come from checkpoints or, if a run has none, from a `model.safetensors`, as in an exported run.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import path_of
from mhe_jax.data import AnyTokenizer
from mhe_jax.training.checkpoint import checksums
from mhe_jax.training.checkpoint.store import (
    DIRECTORY,
    Meta,
    best,
    check_tokenizer,
    make_manager,
    read_meta,
    steps_in,
    told,
    worth,
)
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_params


def restore_params(
    workdir: str | Path,
    which: str,
    abstract_params: Any,
    average: int = 1,
    tokenizer: AnyTokenizer | None = None,
) -> tuple[Any, list[int]]:
    """Parameters to evaluate, and the steps they are from.

    `which` is 'best' on the validation split, 'last' (with `average`, the mean of this many newest
    checkpoints), 'best or last' where nothing may have been validated, or a step number. They get
    the shapes and shardings of `abstract_params`, and must be of this `tokenizer`, where given.

    Where the run keeps an exponential average, each checkpoint counts with its averaged parameters.
    A run without checkpoints, but with a `model.safetensors`, has these parameters as its best and
    its last, whatever `average` is. InputError if there is no such checkpoint, or it is damaged.
    """
    paths = steps_in(path_of(workdir) / DIRECTORY)
    weights = path_of(workdir) / WEIGHTS
    if not paths and weights.exists():
        return _restore_tensors(weights, which, abstract_params, tokenizer)
    with contextlib.closing(make_manager(workdir, read_only=True)) as manager:
        steps = _chosen(manager, paths, which, average)
        if len(steps) != average:
            there = ", ".join(map(str, paths)) or "none"
            wanted = f"{average} checkpoints" if average > 1 else "checkpoint"
            takes = "takes a step, last, or best if one was validated"
            raise InputError(f"{workdir} has no {wanted} {which!r}; there are: {there}; {takes}")
        total = None
        for step in steps:
            if tokenizer is not None:
                check_tokenizer(_verified_meta(manager, paths[step], step), tokenizer)
            params = _restore(manager, paths[step], step, abstract_params)
            total = params if total is None else jax.tree.map(jnp.add, total, params)
    return jax.tree.map(lambda x: x / average, total) if average > 1 else total, steps


def _chosen(manager, paths: dict[int, Path], which: str, average: int) -> list[int]:
    if which.startswith("best"):
        found = best({n: worth(n, _verified_meta(manager, path, n)) for n, path in paths.items()})
        if found is not None or which == "best":
            return [] if found is None else [found]
    if which.endswith("last"):
        return [*paths][-average:]
    return [step for step in paths if str(step) == which]


def _verified_meta(manager: ocp.CheckpointManager, path: Path, step: int) -> Meta:
    with told(InputError, f"{path}: cannot be read"):
        checksums.verify(path, ["meta"])
        return read_meta(manager, step)


def _restore(manager: ocp.CheckpointManager, path: Path, step: int, abstract_params: Any) -> Any:
    with told(InputError, f"{path}: cannot be read"):
        name = "ema_params" if "ema_params" in checksums.verify(path, []) else "params"
        checksums.verify(path, [name])
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(abstract_params)})
        return manager.restore(step, args=args)[name]


def _restore_tensors(
    path: Path, which: str, abstract_params: Any, tokenizer: AnyTokenizer | None
) -> tuple[Any, list[int]]:
    params, meta = read_params(path, abstract_params)
    with told(InputError, f"{path}: its steps cannot be read"):
        steps = [int(step) for step in json.loads(meta.get("steps", "[]"))]
    if which not in ("best", "last", "best or last", *map(str, steps)):
        there = ", ".join(map(str, steps)) or "unknown"
        raise InputError(f"{path.parent} has no checkpoint {which!r}, but one of steps {there}")
    if tokenizer is not None:
        check_tokenizer(meta, tokenizer)
    return params, steps
