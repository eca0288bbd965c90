"""Reads the parameters of a run, for evaluation and for a run that starts from it.

They come from checkpoints or, if a run has none, from a `model.safetensors`, as in an exported run.
"""

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

    Args:
      workdir: of the run.
      which: 'best' on the validation split, 'last', 'best or last' where nothing may have been
        validated, or a step number.
      abstract_params: their shapes, with the shardings to give them.
      average: with 'last', the mean of this many newest checkpoints.
      tokenizer: must be that of the checkpoints; None does not check.

    Where the run keeps an exponential average, each checkpoint counts with its averaged parameters.
    A run without checkpoints, but with a `model.safetensors`, has these parameters as its best and
    its last, whatever `average` is: it is of a run whose config may say so.

    Raises:
      InputError: no such checkpoint, and which there are; or one is damaged, and its file.
    """
    paths = steps_in(path_of(workdir) / DIRECTORY)
    weights = path_of(workdir) / WEIGHTS
    if not paths and weights.exists():
        return _restore_tensors(weights, which, abstract_params, tokenizer)
    if average < 1 or (average > 1 and which != "last"):
        raise InputError(
            f"evaluation.average_checkpoints={average}: allowed is 1, or more with "
            "evaluation.checkpoint=last"
        )
    manager = make_manager(workdir, read_only=True)
    try:
        steps = _chosen(manager, paths, which, average)
        there = ", ".join(map(str, paths)) or "none"
        if not steps and which not in ("best", "last", "best or last") and not which.isdecimal():
            raise InputError(
                f"evaluation.checkpoint={which!r}: allowed are best, last, or a step ({there})"
            )
        if len(steps) < average:
            wanted = f"{average} checkpoints" if average > 1 else f"checkpoint {which!r}"
            hint = "; take 'last'" if which == "best" and paths else ""
            raise InputError(f"{workdir} has no {wanted}; there are: {there}{hint}")
        total = None
        for step in steps:
            if tokenizer is not None:
                check_tokenizer(_verified_meta(manager, paths[step], step), tokenizer)
            params = _restore(manager, paths[step], step, abstract_params)
            total = params if total is None else jax.tree.map(jnp.add, total, params)
    finally:
        manager.close()
    return jax.tree.map(lambda x: x / average, total) if average > 1 else total, steps


def _chosen(manager, paths: dict[int, Path], which: str, average: int) -> list[int]:
    if which.startswith("best"):
        worths = {n: worth(n, _verified_meta(manager, path, n)) for n, path in paths.items()}
        scored = {step: found for step, found in worths.items() if found is not None}
        if scored or which == "best":
            return sorted(scored, key=lambda step: (scored[step], step))[:1]
    if which.endswith("last"):
        return [*paths][-average:]
    return [int(which)] if which.isdecimal() and int(which) in paths else []


def _verified_meta(manager: ocp.CheckpointManager, path: Path, step: int) -> Meta:
    with told(InputError, f"{path}: cannot be read"):
        checksums.verify(path, ["meta"])
        return read_meta(manager, step)


def _restore(manager: ocp.CheckpointManager, path: Path, step: int, abstract_params: Any) -> Any:
    with told(InputError, f"{path}: cannot be read"):
        name = "ema_params" if "ema_params" in checksums.items_of(path) else "params"
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
        there = f"of steps {', '.join(map(str, steps))}" if steps else "of no known step"
        raise InputError(f"{path.parent} has no checkpoint {which!r}, only {path.name}, {there}")
    if tokenizer is not None:
        check_tokenizer(meta, tokenizer)
    return params, steps
