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
from mhe_jax.training.checkpoint.checksums import items_of
from mhe_jax.training.checkpoint.store import (
    attempt,
    best_of,
    check_tokenizer,
    make_manager,
    read_meta,
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
      which: 'best' on the validation split, 'last', or a step number.
      abstract_params: their shapes, with the shardings to give them.
      average: with 'last', the mean of this many newest checkpoints.
      tokenizer: must be that of the checkpoints; None does not check.

    Where the run keeps an exponential average, each checkpoint counts with its averaged parameters.
    A run without checkpoints, but with a `model.safetensors`, has these parameters as its best and
    its last, whatever `average` is: it is of a run whose config may say so.

    Raises:
      InputError: no such checkpoint; the message names those that exist.
    """
    last = make_manager(workdir, "checkpoints", create=False)
    best = make_manager(workdir, "checkpoints_best", create=False)
    try:
        steps, best_step = sorted(last.all_steps()), best_of(best)
        weights = path_of(workdir) / WEIGHTS
        if not steps and best_step is None and weights.exists():
            return _restore_tensors(weights, which, abstract_params, tokenizer)
        there = ", ".join(map(str, steps)) or "none"
        if best_step is not None:
            there += f"; best: {best_step}"
        if average < 1 or (average > 1 and which != "last"):
            raise InputError(
                f"evaluation.average_checkpoints={average}: allowed is 1, or more with "
                "evaluation.checkpoint=last"
            )
        if which == "best":
            chosen = [] if best_step is None else [(best, best_step)]
        elif which == "last":
            chosen = [(last, step) for step in steps[-average:]]
        elif which.isdecimal():
            step = int(which)
            chosen = [(last, step)] if step in steps else []
            chosen = chosen or ([(best, step)] if step == best_step else [])
        else:
            raise InputError(
                f"evaluation.checkpoint={which!r}: allowed are best, last, or a step ({there})"
            )
        if len(chosen) < average:
            wanted = f"{average} checkpoints" if average > 1 else f"checkpoint {which!r}"
            # Nothing was validated, as in a converted run.
            hint = "; take 'last'" if which == "best" and steps else ""
            raise InputError(f"{workdir} has no {wanted}; there are: {there}{hint}")
        total = None
        for manager, step in chosen:
            if tokenizer is not None:
                meta, reason = attempt(lambda of=manager, step=step: read_meta(of, step))
                if meta is None:
                    raise InputError(f"{manager.directory}/{step}: cannot be read: {reason}")
                check_tokenizer(meta, tokenizer)
            params = _restore_evaluated(manager, step, abstract_params)
            total = params if total is None else jax.tree.map(jnp.add, total, params)
        if average > 1:
            total = jax.tree.map(lambda x: x / average, total)
        return total, [step for _, step in chosen]
    finally:
        last.close()
        best.close()


def _restore_tensors(
    path: Path, which: str, abstract_params: Any, tokenizer: AnyTokenizer | None
) -> tuple[Any, list[int]]:
    params, meta = read_params(path, abstract_params)
    steps, _ = attempt(lambda: [int(step) for step in json.loads(meta.get("steps", "[]"))])
    steps = steps or []
    if which not in ("best", "last", *map(str, steps)):
        there = f"of steps {', '.join(map(str, steps))}" if steps else "of no known step"
        raise InputError(f"{path.parent} has no checkpoint {which!r}, only {path.name}, {there}")
    if tokenizer is not None:
        check_tokenizer(meta, tokenizer)
    return params, steps


def _restore_evaluated(manager: ocp.CheckpointManager, step: int, abstract_params: Any) -> Any:
    def restore() -> Any:
        items = items_of(path_of(manager.directory) / str(step))
        name = "ema_params" if "ema_params" in items else "params"
        args = {name: ocp.args.StandardRestore(abstract_params)}
        return manager.restore(step, args=ocp.args.Composite(**args))[name]

    params, reason = attempt(restore)
    if params is None:
        raise InputError(f"{manager.directory}/{step}: cannot be read: {reason}")
    return params
