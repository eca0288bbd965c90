"""The checkpoints of a run that trains."""

import contextlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from mhe_jax.config import InputError
from mhe_jax.config.places import path_of
from mhe_jax.training.checkpoint import checksums
from mhe_jax.training.checkpoint.store import (
    DIRECTORY,
    Meta,
    NotSaved,
    best,
    check_path,
    make_manager,
    read_meta,
    reason_of,
    steps_in,
    told,
    worth,
)
from mhe_jax.training.cluster import group
from mhe_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of one run: the last `keep` and the best.

    `meta` is JSON: whatever the caller wants back. Where its `validated_step` is the step that is
    saved, its `validation`, with a `loss` and maybe a `score`, says how good that is.

    Opening verifies all steps. Those that are not as they were written move to
    `checkpoints_unreadable`, and `notes` has a line on each; InputError if none can be read.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        check_path(workdir)
        self._directory = path_of(workdir) / DIRECTORY
        self._saving = 0
        self._found: dict[int, tuple[float, ...] | None] = {}
        self.notes: list[str] = []  # what people must know
        with told(InputError, str(workdir)):
            unreadable = self._put_aside_damaged() if jax.process_index() == 0 else ""
            if unreadable := group.of_first("unreadable checkpoints", unreadable):
                raise InputError(unreadable)
            self._manager = make_manager(
                workdir,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
                preservation_policy=managers.AnyPreservationPolicy(
                    [managers.LatestN(keep), _Best(self)]
                ),
            )
            for step in self._manager.all_steps():
                self._found[step] = worth(step, read_meta(self._manager, step))
        self._hook = threading.excepthook
        threading.excepthook = self._uncaught

    def _put_aside_damaged(self) -> str:
        """Returns why nothing can be read, if so; then nothing is touched either."""
        steps, damaged = steps_in(self._directory), {}
        for step, path in steps.items():
            try:
                checksums.verify(path)
            except (checksums.Damaged, OSError) as error:
                damaged[step] = reason_of(error)
        if damaged and len(damaged) == len(steps):
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
        checksums.write(step)

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
        return best(self._found)

    def is_best(self, step: int, meta: Meta) -> bool:
        """Whether `meta` says that `step` is better than all that are kept."""
        return best({**self._found, step: worth(step, meta)}) == step

    def save(self, state: TrainState, step: int, meta: Meta) -> None:
        """Begins to write `state`, which is at `step`; NotSaved also of one begun before.

        An existing checkpoint is left alone, but for one that was validated only afterwards, in
        the run that went on from it, and is the best.
        """
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(_optimizer(state)),
            "meta": ocp.args.JsonSave(meta),
        }
        if state.ema_params is not None:
            items["ema_params"] = ocp.args.StandardSave(state.ema_params)
        with told(NotSaved, f"cannot write {self._directory}"):
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                if not self.is_best(step, meta):
                    return
                self._manager.delete(step)
            self._saving = step
            self._found[step] = worth(step, meta)
            # `force` skips Orbax's rule that steps only grow, which refuses silently.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The newest state, laid out as the shapes and shardings of `abstract`."""
        step: Any = self.latest_step
        items = {
            "params": ocp.args.StandardRestore(abstract.params),
            "optimizer": ocp.args.StandardRestore(_optimizer(abstract)),
        }
        if abstract.ema_params is not None:
            items["ema_params"] = ocp.args.StandardRestore(abstract.ema_params)
        with told(InputError, f"{self._directory}/{step}: cannot be read"):
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
            meta = read_meta(self._manager, step)
        ema = found.get("ema_params")
        return TrainState(params=found["params"], ema_params=ema, **found["optimizer"]), meta

    def best_meta(self) -> Meta | None:
        """The metadata that was saved with the best checkpoint."""
        self.wait()
        return None if self.best_step is None else read_meta(self._manager, self.best_step)

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
