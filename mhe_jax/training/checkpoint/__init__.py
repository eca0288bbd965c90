"""Checkpoints by Orbax: written while training goes on, whole or not at all.

    WORKDIR/checkpoints/STEP    params; ema_params, where there is an average; optimizer (its state,
                                the step, the key); meta (JSON); checksums of every file of these;
                                validation, where it came in a later process

The last `keep_checkpoints` stay, and the one with the best validation (`tasks.sums.criterion`). A
crash in any write leaves complete older ones. A run goes on from the newest step that is as it was
written, on any mesh, and moves newer ones to `checkpoints_unreadable`.

A run may have a `model.safetensors` instead, with parameters alone: an exported one has.
"""

import contextlib
import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from mhe_jax.config import InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import path_of
from mhe_jax.data import AnyTokenizer
from mhe_jax.training import group
from mhe_jax.training.checkpoint import steps as on_disk
from mhe_jax.training.checkpoint.steps import DIRECTORY, VALIDATION, Meta, NotSaved, told
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_params
from mhe_jax.training.state import TrainState


def check_path(workdir: str | Path) -> None:
    """Raises InputError for a path that Orbax, when it merges its files, takes for a pattern."""
    path = str(path_of(workdir).absolute())
    if set("*?[") & set(path):
        raise InputError(f"workdir={path}: takes a path without *, ? and [")


def check_tokenizer(meta: Meta, tokenizer: AnyTokenizer) -> None:
    """Raises InputError if `meta` names another tokenizer."""
    if meta.get("tokenizer", tokenizer.key) != tokenizer.key:
        raise InputError(f"{tokenizer.name}: is not the tokenizer of the checkpoint")


class Checkpoints:
    """The checkpoints of one run: the last `keep` and the best.

    `meta` is JSON: whatever the caller wants back. Where its `validated_step` is the step that is
    saved, its `validation`, with a `loss` and maybe a `score`, says how good that is. Opening
    verifies the newest step, and `meta` of the others; InputError if none can be read.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        check_path(workdir)
        on_disk.quiet_orbax()
        self._directory = path_of(workdir).absolute() / DIRECTORY
        self._saving = 0
        self.notes: list[str] = []  # what people must know
        with told(InputError, str(workdir)):
            with group.fine_in_all():
                if jax.process_index() == 0:
                    self._put_aside_damaged()
            steps = on_disk.steps_in(self._directory)
            self._metas = {step: on_disk.read_meta(path) for step, path in steps.items()}
            policies = [managers.LatestN(keep), _Best(self)]
            options = ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
                preservation_policy=managers.AnyPreservationPolicy(policies),
            )
            self._manager = ocp.CheckpointManager(str(self._directory), options=options)

    def _put_aside_damaged(self) -> None:
        """InputError if nothing can be read; then nothing is touched either."""
        steps, damaged, newest = on_disk.steps_in(self._directory), {}, None
        for step, path in reversed(steps.items()):
            try:
                if newest is None:
                    on_disk.verify(path)
                on_disk.read_meta(path)
                newest = newest or path
            except (ValueError, OSError) as error:
                damaged[step] = error
        if damaged and newest is None:
            each = "; ".join(map(str, damaged.values()))
            raise InputError(f"{self._directory}: no checkpoint can be read: {each}")
        for step, error in damaged.items():
            new = self._directory.with_name(f"{DIRECTORY}_unreadable") / str(step)
            while new.exists():
                new = new.with_name(f"{new.name}_again")
            new.parent.mkdir(exist_ok=True)
            steps[step].rename(new)
            self.notes.append(f"warning: {error}; the step is now at {new}")

    def _seal(self) -> None:
        # In process 0, when all have written and before the step counts; on a disk it has a
        # temporary name until then.
        name = re.compile(rf"{self._saving}(\.orbax-checkpoint-tmp.*)?")
        (step,) = (path for path in self._directory.iterdir() if name.fullmatch(path.name))
        on_disk.write_checksums(step)

    @property
    def latest_step(self) -> int | None:
        """The newest step there is, if any."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step with the best validation; of equal ones the first."""
        return on_disk.best(self._metas)

    def is_best(self, step: int, meta: Meta) -> bool:
        """Whether `meta` says that `step` is better than all that are kept."""
        return on_disk.best({**self._metas, step: meta}) == step

    def best_meta(self) -> Meta | None:
        """The metadata that were saved with the best checkpoint."""
        return None if self.best_step is None else self._metas[self.best_step]

    def save(self, state: TrainState, step: int, meta: Meta) -> None:
        """Begins to write `state`, or in an existing step the validation that came after it."""
        meta = copy.deepcopy(meta)  # it is written while the caller goes on
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(_optimizer(state)),
            "meta": ocp.args.JsonSave(meta),
        }
        if state.ema_params is not None:
            items["ema_params"] = ocp.args.StandardSave(state.ema_params)
        with told(NotSaved, f"cannot write {self._directory}"):
            self._manager.wait_until_finished()
            exists = step in self._manager.all_steps()
            if exists and meta.get("validated_step") != step:
                return
            self._metas[step] = meta
            if not exists:
                self._saving = step
                # `force` skips Orbax's rule that steps only grow, which refuses silently.
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            elif jax.process_index() == 0:
                later = {name: meta[name] for name in ("validated_step", "validation")}
                text = on_disk.with_sum(json.dumps(later))
                write_whole(self._directory / str(step) / VALIDATION, text)

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The newest state, laid out as the shapes and shardings of `abstract`."""
        step: Any = self.latest_step
        items = {"params": abstract.params, "optimizer": _optimizer(abstract)}
        if abstract.ema_params is not None:
            items["ema_params"] = abstract.ema_params
        found = on_disk.read_arrays(self._directory / str(step), items)
        ema = found.get("ema_params")
        state = TrainState(params=found["params"], ema_params=ema, **found["optimizer"])
        return state, copy.deepcopy(self._metas[step])

    def wait(self) -> None:
        """Waits until everything begun is on disk, or raises NotSaved."""
        with told(NotSaved, f"cannot write {self._directory}"):
            self._manager.wait_until_finished()

    def last_good(self) -> int | None:
        """The newest step that is on disk, whatever became of the others."""
        with contextlib.suppress(NotSaved):
            self.wait()
        return max(on_disk.steps_in(self._directory), default=None)

    def close(self) -> None:
        """Finishes writing, and lets go of threads; what went wrong is for `wait` to tell."""
        with contextlib.suppress(NotSaved):
            self.wait()
        with contextlib.suppress(Exception):
            self._manager.close()


class _Best(managers.PreservationPolicy):
    """Preserves the best step: Orbax's `BestN`, but by the metadata that we save."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(
        self, checkpoints: Sequence[managers.PolicyCheckpointInfo], *, context: Any
    ) -> list[bool]:
        return [info.step == self._checkpoints.best_step for info in checkpoints]


def _optimizer(state: TrainState) -> dict[str, Any]:
    return {"opt_state": state.opt_state, "step": state.step, "key": state.key}


def restore_params(
    workdir: str | Path,
    which: str,
    abstract_params: Any,
    average: int = 1,
    tokenizer: AnyTokenizer | None = None,
) -> tuple[Any, list[int]]:
    """Parameters to evaluate, and the steps they are from.

    `which` is 'best' on the validation split (or the last, if none was validated), 'last' (with
    `average`, the mean of this many newest checkpoints), or a step number. They are the averaged
    ones, where the run has these. Without checkpoints a `model.safetensors` is the best and the
    last. InputError if there is no such checkpoint, it is damaged, or of another `tokenizer`.
    """
    paths = on_disk.steps_in(path_of(workdir) / DIRECTORY)
    weights = path_of(workdir) / WEIGHTS
    if not paths and weights.exists():
        params, meta = read_params(weights, abstract_params)
        steps = json.loads(meta.get("steps", "[]"))
        if which not in ("best", "last", *map(str, steps)):
            raise InputError(f"{workdir} has no checkpoint {which!r}; it is of steps {steps}")
        if tokenizer is not None:
            check_tokenizer(meta, tokenizer)
        return params, steps
    steps = [*paths][-average:] if which in ("best", "last") else []
    steps = steps or [step for step in paths if str(step) == which]
    if which == "best":
        scored = on_disk.best({step: on_disk.read_meta(path) for step, path in paths.items()})
        steps = steps if scored is None else [scored]
    if len(steps) != average:
        wanted = f"{average} checkpoints" if average > 1 else "checkpoint"
        there = f"there are: {', '.join(map(str, paths)) or 'none'}; takes a step, best or last"
        raise InputError(f"{workdir} has no {wanted} {which!r}; {there}")
    total = None
    for step in steps:
        if tokenizer is not None:
            check_tokenizer(on_disk.read_meta(paths[step]), tokenizer)
        name = "ema_params" if "ema_params" in on_disk.verify(paths[step], []) else "params"
        on_disk.verify(paths[step], [name])
        params = on_disk.read_arrays(paths[step], {name: abstract_params})[name]
        total = params if total is None else jax.tree.map(jnp.add, total, params)
    return jax.tree.map(lambda x: x / average, total) if average > 1 else total, steps
