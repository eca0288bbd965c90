"""The checkpoints of a run that trains."""

import contextlib
import copy
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from mhe_jax.config import InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import path_of
from mhe_jax.training import group
from mhe_jax.training.checkpoint import faults
from mhe_jax.training.checkpoint.faults import NotSaved, told
from mhe_jax.training.checkpoint.reading import (
    DIRECTORY,
    VALIDATION,
    Meta,
    best,
    quiet_orbax,
    read_meta,
    restore_items,
    steps_in,
)
from mhe_jax.training.state import TrainState


def check_path(workdir: str | Path) -> None:
    """Raises InputError if no checkpoint below `workdir` could be read once it is written.

    When Orbax merges what the processes wrote, it takes the path for a pattern.
    """
    path = str(path_of(workdir).absolute())
    if set("*?[") & set(path):
        raise InputError(f"workdir={path}: takes a path without *, ? and [")


class Checkpoints:
    """The checkpoints of one run: the last `keep` and the best.

    `meta` is JSON: whatever the caller wants back. Where its `validated_step` is the step that is
    saved, its `validation`, with a `loss` and maybe a `score`, says how good that is.

    Opening verifies the newest step. If it is not as it was written, it moves to
    `checkpoints_unreadable`, `notes` has a line on it, and the one before it is the newest;
    InputError if none can be read. Of the others only `meta` is verified: the rest when it is read.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        check_path(workdir)
        self._directory = path_of(workdir).absolute() / DIRECTORY
        self._saving = 0
        self.notes: list[str] = []  # what people must know
        if self._directory.exists() and not self._directory.is_dir():
            raise InputError(f"{self._directory}: is a file, not a directory")
        with told(InputError, str(workdir)):
            unreadable = self._put_aside_damaged() if jax.process_index() == 0 else ""
            if unreadable := group.of_first("unreadable checkpoints", unreadable):
                raise InputError(unreadable)
            self._metas = {n: read_meta(path) for n, path in steps_in(self._directory).items()}
            quiet_orbax()
            policies = [managers.LatestN(keep), _Best(self)]
            options = ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
                preservation_policy=managers.AnyPreservationPolicy(policies),
            )
            self._manager = ocp.CheckpointManager(str(self._directory), options=options)
        self._hook = threading.excepthook
        threading.excepthook = self._uncaught

    def _put_aside_damaged(self) -> str:
        """Returns why nothing can be read, if so; then nothing is touched either."""
        steps, damaged, newest = steps_in(self._directory), {}, None
        for step, path in reversed(steps.items()):
            try:
                if newest is None:
                    faults.verify(path)
                read_meta(path)
                newest = newest or path
            except (ValueError, OSError) as error:
                damaged[step] = faults.reason_of(error)
        if damaged and newest is None:
            each = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            return f"{self._directory}: no checkpoint can be read: {each}"
        for step, reason in damaged.items():
            new = self._directory.with_name(f"{DIRECTORY}_unreadable") / str(step)
            while new.exists():
                new = new.with_name(f"{new.name}_again")
            new.parent.mkdir(exist_ok=True)
            steps[step].rename(new)
            self.notes.append(f"warning: {steps[step]} cannot be read ({reason}); it is now {new}")
        return ""

    def _seal(self) -> None:
        # In process 0, when all have written and before the step counts; on a disk it has a
        # temporary name until then.
        name = re.compile(rf"{self._saving}(\.orbax-checkpoint-tmp.*)?")
        (step,) = (path for path in self._directory.iterdir() if name.fullmatch(path.name))
        faults.write(step)

    def _uncaught(self, uncaught: threading.ExceptHookArgs) -> None:
        # An error that ends a thread of Orbax reaches us too, by `wait` or the next `save`.
        if not type(uncaught.thread).__module__.startswith("orbax."):
            self._hook(uncaught)

    @property
    def latest_step(self) -> int | None:
        """The newest step there is, if any."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step with the best validation; of equal ones the first."""
        return best(self._metas)

    def is_best(self, step: int, meta: Meta) -> bool:
        """Whether `meta` says that `step` is better than all that are kept."""
        return best({**self._metas, step: meta}) == step

    def best_meta(self) -> Meta | None:
        """The metadata that were saved with the best checkpoint."""
        return None if self.best_step is None else self._metas[self.best_step]

    def save(self, state: TrainState, step: int, meta: Meta) -> None:
        """Begins to write `state`, which is at `step`; NotSaved also of one begun before.

        An existing checkpoint is left alone, but for the validation that `meta` has of it, which
        came only in the run that went on from there.
        """
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
                text = faults.with_sum(json.dumps(later))
                write_whole(self._directory / str(step) / VALIDATION, text)

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The newest state, laid out as the shapes and shardings of `abstract`."""
        step: Any = self.latest_step
        items = {"params": abstract.params, "optimizer": _optimizer(abstract)}
        if abstract.ema_params is not None:
            items["ema_params"] = abstract.ema_params
        found = restore_items(self._directory / str(step), items)
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
        return max(steps_in(self._directory), default=None)

    def close(self) -> None:
        """Finishes writing, and lets go of threads."""
        try:
            self.wait()
        finally:
            threading.excepthook = self._hook
            with contextlib.suppress(Exception):  # has been told
                self._manager.close()


class _Best(managers.PreservationPolicy):
    """Preserves the best step: Orbax's `BestN`, but by the metadata that we save."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(
        self,
        checkpoints: Sequence[managers.PolicyCheckpointInfo],
        *,
        context: managers.PreservationContext,
    ) -> list[bool]:
        return [info.step == self._checkpoints.best_step for info in checkpoints]


def _optimizer(state: TrainState) -> dict[str, Any]:
    return {"opt_state": state.opt_state, "step": state.step, "key": state.key}
