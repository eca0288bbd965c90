"""The checkpoints of a run that trains."""

import contextlib
import math
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import path_of
from mhe_jax.tasks.sums import criterion
from mhe_jax.training.checkpoint.checksums import items_of, verify
from mhe_jax.training.checkpoint.store import (
    Meta,
    NotSaved,
    attempt,
    check_path,
    checked_meta,
    make_manager,
    optimizer_item,
    read_meta,
    reason_of,
    save,
    worth_of,
    writing,
)
from mhe_jax.training.cluster import group
from mhe_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of one run.

    `meta` is JSON: whatever the caller wants back; for `save_best` it must have `validation` with a
    `loss`, and maybe a `score`.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        check_path(workdir)
        try:
            self._last = make_manager(
                workdir, "checkpoints", max_to_keep=keep, cleanup_tmp_directories=True
            )
            self._best = make_manager(workdir, "checkpoints_best", cleanup_tmp_directories=True)
        except OSError as error:
            raise InputError(f"{workdir}: {reason_of(error)}") from error
        self._hook = threading.excepthook
        threading.excepthook = self._uncaught
        self.notes: list[str] = []  # what people must know
        self._found: dict[int, tuple[float, ...]] = {}
        self._whole = self.latest_step  # the newest step that is surely on disk
        self._aside: list[tuple[ocp.CheckpointManager, int, str, str]] = []
        try:
            self._read_best()
        except BaseException:
            # Not `close`: it would delete what has not been read yet.
            self._let_go().close()
            raise

    def _read_best(self) -> None:
        for step in sorted(self._best.all_steps()):
            worth, reason = attempt(lambda step=step: self._verified_worth(step))
            if not group.all_of_them(worth is not None):
                reason = reason or "another process cannot read it"
                self._aside.append((self._best, step, "unreadable", f"cannot be read ({reason})"))
            else:
                self._found[step] = worth

    def _verified_worth(self, step: int) -> tuple[float, ...]:
        # Verifies the parameters too: when evaluation reads them, it is too late to make others.
        directory = path_of(self._best.directory) / str(step)
        verify(directory, items_of(directory))
        return worth_of(self._best, step)

    def _uncaught(self, uncaught: threading.ExceptHookArgs) -> None:
        # An error that ends a thread of Orbax reaches us too, by `wait` or the next `save`.
        if not type(uncaught.thread).__module__.startswith("orbax."):
            self._hook(uncaught)

    @property
    def latest_step(self) -> int | None:
        """The newest step there is, None where there is none."""
        return self._last.latest_step()

    @property
    def best_criterion(self) -> tuple[float, ...] | None:
        """The lowest `tasks.sums.criterion` of those that are kept."""
        return min(self._found.values(), default=None)

    def save(self, state: TrainState, step: int, meta: Meta) -> None:
        """Begins to write `state`, which is at `step`; an existing checkpoint is left alone.

        Raises:
          NotSaved: this one, or one begun before, cannot be written.
        """
        if self.latest_step == step:
            return
        # A best checkpoint of an earlier step must be complete before this one. One of the same
        # step may still be under way: a run that resumes from here would notice, see the loop.
        with writing(self._best):
            if step not in self._best.all_steps():
                self._best.wait_until_finished()
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(optimizer_item(state)),
            "meta": ocp.args.JsonSave(meta),
        }
        if state.ema_params is not None:
            items["ema_params"] = ocp.args.StandardSave(state.ema_params)
        before = self.latest_step
        save(self._last, step, items)  # waits for the one before
        self._whole = before

    def save_best(self, params: Any, step: int, meta: Meta) -> None:
        """Begins to write `params` as the best; older ones are deleted once these are complete.

        Raises:
          NotSaved: this one, or one begun before, cannot be written.
        """
        with writing(self._best):
            self._best.wait_until_finished()
            self._prune()
            # A step of this number can be left from a run that was killed before its own
            # checkpoint.
            if step in self._best.all_steps():
                self._best.delete(step)
        items = {"params": ocp.args.StandardSave(params), "meta": ocp.args.JsonSave(meta)}
        save(self._best, step, items)
        self._found[step] = criterion(meta["validation"])

    def _prune(self) -> None:
        # A run that goes on from the last checkpoint with other fields takes the best up to there.
        kept = {self._best_step(), self._best_step(self._whole)}
        kept |= {step for of, step, *_ in self._aside if of is self._best}
        for step in self._best.all_steps():
            if step not in kept:
                self._best.delete(step)
        self._found = {step: found for step, found in self._found.items() if step in kept}

    def _best_step(self, up_to: float | None = math.inf) -> int | None:
        last = -1 if up_to is None else up_to
        there = [(found, step) for step, found in self._found.items() if step <= last]
        return min(there, default=((), None))[1]

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The newest state that can be read, laid out as the shapes and shardings of `abstract`.

        Newer ones that cannot be read are left to `put_aside`.

        Raises:
          InputError: there is none.
        """
        failed: list[tuple[int, str]] = []
        for step in sorted(self._last.all_steps(), reverse=True):
            found, reason = attempt(lambda step=step: self._restore(step, abstract))
            if group.all_of_them(found is not None):
                self._aside += [
                    (self._last, step, "unreadable", f"cannot be read ({reason})")
                    for step, reason in failed
                ]
                assert found is not None
                return found
            failed.append((step, reason or "another process cannot read it"))
        if failed:
            each = "; ".join(f"step {step}: {reason}" for step, reason in failed)
            raise InputError(f"{self._last.directory}: no checkpoint can be read: {each}")
        raise InputError(f"no checkpoint in {self._last.directory}")

    def _restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Meta]:
        items = {
            "params": ocp.args.StandardRestore(abstract.params),
            "optimizer": ocp.args.StandardRestore(optimizer_item(abstract)),
            "meta": ocp.args.JsonRestore(),
        }
        if abstract.ema_params is not None:
            items["ema_params"] = ocp.args.StandardRestore(abstract.ema_params)
        found = self._last.restore(step, args=ocp.args.Composite(**items))
        state = TrainState(
            params=found["params"],
            ema_params=found.get("ema_params"),
            **found["optimizer"],
        )
        return state, checked_meta(found["meta"])

    def drop_best_after(self, step: int) -> None:
        """Drops the best of later steps: the run takes another course from here."""
        for later in [found for found in self._found if found > step]:
            del self._found[later]
            reason = f"is of a later step than {step}, saved before fields changed"
            self._aside.append((self._best, later, "left", reason))

    def put_aside(self) -> None:
        """Moves away what cannot be read or no longer counts, each with a line in `notes`."""
        while self._aside:
            self._put_aside(*self._aside.pop())

    def _put_aside(
        self, manager: ocp.CheckpointManager, step: int, suffix: str, reason: str
    ) -> None:
        old = path_of(manager.directory) / str(step)
        new = path_of(f"{manager.directory}_{suffix}") / str(step)
        with group.first_one_first(f"put_aside/{old.parent.name}/{step}"):
            if jax.process_index() == 0:
                while new.exists():
                    new = new.with_name(f"{new.name}_again")
                new.parent.mkdir(exist_ok=True)
                old.rename(new)
        manager.reload()
        self.notes.append(f"warning: {old} {reason}; it is now {new}")

    def best_meta(self) -> Meta | None:
        """The metadata that was saved with the best checkpoint."""
        with writing(self._best):
            self._best.wait_until_finished()
        step = self._best_step()
        return None if step is None else read_meta(self._best, step)

    def wait(self) -> None:
        """Waits until everything begun is on disk.

        Raises:
          NotSaved: something cannot be written.
        """
        for manager in (self._last, self._best):
            with writing(manager):
                manager.wait_until_finished()
        self._whole = self.latest_step

    def last_good(self) -> int | None:
        """The newest step that is on disk, whatever became of the others."""
        with contextlib.suppress(NotSaved):
            self.wait()
        # Orbax lists a step as soon as it is begun.
        self._last.reload()
        return self.latest_step

    def close(self) -> None:
        """Finishes writing, drops what no run needs, and lets go of threads.

        Raises:
          NotSaved: something cannot be written.
        """
        with self._let_go():
            self.wait()
            self._prune()

    def _let_go(self) -> contextlib.ExitStack:
        """Lets go of threads on exit, where an error becomes a NotSaved."""
        stack = contextlib.ExitStack()
        stack.callback(setattr, threading, "excepthook", self._hook)
        for manager in (self._last, self._best):
            stack.enter_context(writing(manager))
            stack.callback(manager.close)
        return stack
