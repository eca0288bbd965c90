"""Checkpoints by Orbax: written beside the training, whole or not at all.

    WORKDIR/checkpoints/STEP        params, ema_params (where there is an average), optimizer (its
                                    state, the step, the key), meta; the last `keep_checkpoints`
    WORKDIR/checkpoints_best/STEP   params (the average where there is one), meta; of the step with
                                    the best validation (`scored.criterion`): what evaluation
                                    needs

A best checkpoint outlives the last N, and a crash in any write leaves complete older ones. What
cannot be read moves to `checkpoints_unreadable`, beside, where nothing looks. Every array comes
back laid over the mesh of the day, whatever mesh wrote it.
"""

import contextlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.data import AnyTokenizer
from mhe_jax.training import group
from mhe_jax.training.scored import criterion
from mhe_jax.training.state import TrainState

Meta = dict[str, Any]


class NotSaved(OSError):
    """A checkpoint could not be written; the message says which and why."""


class Checkpoints:
    """The checkpoints of one run.

    `meta` is JSON: whatever the caller wants back; for `save_best` it must have `validation` with a
    `loss`, and maybe a `score`.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        logging.getLogger("absl").addFilter(_no_traceback)
        try:
            self._last = _manager(
                workdir, "checkpoints", max_to_keep=keep, cleanup_tmp_directories=True
            )
            self._best = _manager(workdir, "checkpoints_best", cleanup_tmp_directories=True)
        except OSError as error:
            raise InputError(f"{workdir}: {reason_of(error)}") from error
        self._hook = threading.excepthook
        threading.excepthook = self._uncaught
        self.notes: list[str] = []  # what people must know
        self._found: dict[int, float] = {}
        self._unreadable: list[tuple[ocp.CheckpointManager, int, str]] = []
        for step in self._best.all_steps():
            worth, reason = _try(lambda step=step: _worth(self._best, step))
            if worth is None:
                self._unreadable.append((self._best, step, reason))
            else:
                self._found[step] = worth

    def _uncaught(self, uncaught: threading.ExceptHookArgs) -> None:
        # What a thread of Orbax dies of comes to us too, by `wait` or the next `save`.
        if not type(uncaught.thread).__module__.startswith("orbax."):
            self._hook(uncaught)

    @property
    def latest_step(self) -> int | None:
        """The newest step there is, None where there is none."""
        return self._last.latest_step()

    @property
    def best_criterion(self) -> float | None:
        """The lowest `scored.criterion` of those that are kept."""
        return min(self._found.values(), default=None)

    def save(self, state: TrainState, step: int, meta: Meta) -> None:
        """Begin to write `state`, which is at `step`; one that is there already is left alone.

        Raises:
          NotSaved: this one, or one begun before, cannot be written.
        """
        if self.latest_step == step:
            return
        # A best checkpoint of an earlier step must be there before this makes it the past. One of
        # the same step may be on its way: a run that resumes from here would notice, see the loop.
        with _writing(self._best):
            if step not in self._best.all_steps():
                self._best.wait_until_finished()
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(_optimizer_item(state)),
            "meta": ocp.args.JsonSave(meta),
        }
        if state.ema_params is not None:
            items["ema_params"] = ocp.args.StandardSave(state.ema_params)
        _save(self._last, step, items)

    def save_best(self, params: Any, step: int, meta: Meta) -> None:
        """Begin to write `params` as the best there are; those before go when they are there.

        Raises:
          NotSaved: this one, or one begun before, cannot be written.
        """
        with _writing(self._best):
            self._best.wait_until_finished()
            self._prune()
            # A step of this number can be left from a run that was killed before its own
            # checkpoint.
            if step in self._best.all_steps():
                self._best.delete(step)
        items = {"params": ocp.args.StandardSave(params), "meta": ocp.args.JsonSave(meta)}
        _save(self._best, step, items)
        self._found[step] = criterion(meta["validation"])

    def _prune(self) -> None:
        kept = {self._best_step()} | {step for of, step, _ in self._unreadable if of is self._best}
        for step in self._best.all_steps():
            if step not in kept:
                self._best.delete(step)
        self._found = {step: found for step, found in self._found.items() if step in kept}

    def _best_step(self) -> int | None:
        there = [(found, step) for step, found in self._found.items()]
        return min(there, default=(0.0, None))[1]

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The newest state that can be read, laid out as the shapes and shardings of `abstract`.

        Newer ones that cannot be read are for `put_aside`.

        Raises:
          InputError: there is none.
        """
        failed: list[tuple[int, str]] = []
        for step in sorted(self._last.all_steps(), reverse=True):
            found, reason = _try(lambda step=step: self._restore(step, abstract))
            if group.all_of_them(found is not None):
                self._unreadable += [(self._last, *each) for each in failed]
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
            "optimizer": ocp.args.StandardRestore(_optimizer_item(abstract)),
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
        return state, _checked(found["meta"])

    def put_aside(self) -> None:
        """Moves what cannot be read out of the way, each with a line in `notes`."""
        while self._unreadable:
            self._put_aside(*self._unreadable.pop())

    def _put_aside(self, manager: ocp.CheckpointManager, step: int, reason: str) -> None:
        old = Path(manager.directory) / str(step)
        new = Path(f"{manager.directory}_unreadable") / str(step)
        with group.first_one_first(f"put_aside/{old.parent.name}/{step}"):
            if jax.process_index() == 0:
                while new.exists():
                    new = new.with_name(f"{new.name}_again")
                new.parent.mkdir(exist_ok=True)
                old.rename(new)
        manager.reload()
        self.notes.append(f"warning: {old} cannot be read ({reason}); it is now {new}")

    def best_meta(self) -> Meta | None:
        """What was saved with the best checkpoint."""
        with _writing(self._best):
            self._best.wait_until_finished()
        step = self._best_step()
        return None if step is None else _meta(self._best, step)

    def wait(self) -> None:
        """Until everything begun is on disk.

        Raises:
          NotSaved: something cannot be written.
        """
        for manager in (self._last, self._best):
            with _writing(manager):
                manager.wait_until_finished()

    def last_good(self) -> int | None:
        """The newest step that is on disk, whatever became of the others."""
        with contextlib.suppress(NotSaved):
            self.wait()
        # Orbax lists a step as soon as it is begun.
        self._last.reload()
        return self.latest_step

    def close(self) -> None:
        """Finish writing, drop what is not the best, and let go of threads.

        Raises:
          NotSaved: something cannot be written.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, threading, "excepthook", self._hook)
            for manager in (self._last, self._best):
                stack.enter_context(_writing(manager))
                stack.callback(manager.close)
            self._best.wait_until_finished()
            self._prune()


def check_tokenizer(meta: Meta, tokenizer: AnyTokenizer) -> None:
    """Raises InputError where `meta` is of a run with another tokenizer; older ones do not say."""
    if meta.get("tokenizer", tokenizer.key) != tokenizer.key:
        raise InputError(f"{tokenizer.name}: is not the tokenizer that the checkpoint is of")


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

    Raises:
      InputError: no such checkpoint; the message names those there are.
    """
    last = _manager(workdir, "checkpoints", create=False)
    best = _manager(workdir, "checkpoints_best", create=False)
    try:
        steps, best_step = sorted(last.all_steps()), _best_of(best)
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
            raise InputError(f"{workdir} has no {wanted}; there are: {there}")
        total = None
        for manager, step in chosen:
            if tokenizer is not None:
                meta, reason = _try(lambda of=manager, step=step: _meta(of, step))
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


def _restore_evaluated(manager: ocp.CheckpointManager, step: int, abstract_params: Any) -> Any:
    def restore() -> Any:
        items = manager.item_metadata(step)
        name = "ema_params" if items.get("ema_params") is not None else "params"
        args = {name: ocp.args.StandardRestore(abstract_params)}
        return manager.restore(step, args=ocp.args.Composite(**args))[name]

    params, reason = _try(restore)
    if params is None:
        raise InputError(f"{manager.directory}/{step}: cannot be read: {reason}")
    return params


def _try(read: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives and "", or None and why it cannot be had."""
    if not isinstance(sys.unraisablehook, _NotOfOrbax):
        sys.unraisablehook = _NotOfOrbax(sys.unraisablehook)
    try:
        return read(), ""
    except Exception as error:  # each library on the way has its own
        return None, reason_of(error)


class _NotOfOrbax:
    """Of many reads at once the first that fails ends the loop of the others: each would say so."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        of_orbax = inspect.iscoroutine(unraisable.object)  # nobody else here has any
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def reason_of(error: BaseException) -> str:
    """The operating system's words where they are in it, else its first words."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        if match := re.search(r": ([^:]+) \[os_error_code=", str(found)):  # tensorstore's way
            return match[1]
        found = found.__cause__ or found.__context__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words if len(words) <= 200 else words[:200] + ' ...'}"


def _no_traceback(record: logging.LogRecord) -> bool:
    """Drops what Orbax logs of an error that it raises as well."""
    return not (record.exc_info and "orbax" in record.pathname)


@contextlib.contextmanager
def _writing(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Whatever is raised inside, often long after its cause, becomes a NotSaved."""
    try:
        yield
    except NotSaved:
        raise
    except Exception as error:
        raise NotSaved(f"cannot write {manager.directory}: {reason_of(error)}") from error


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {"opt_state": state.opt_state, "step": state.step, "key": state.key}


def _manager(workdir: str | Path, name: str, **options: Any) -> ocp.CheckpointManager:
    arrays = ("params", "ema_params", "optimizer")
    path = Path(workdir).absolute() / name
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, not a directory")
    return ocp.CheckpointManager(
        path,
        item_handlers={
            **{item: ocp.StandardCheckpointHandler() for item in arrays},
            "meta": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=name
            ),
            **options,
        ),
    )


def _save(manager: ocp.CheckpointManager, step: int, items: dict[str, Any]) -> None:
    # `force` skips Orbax's rule that steps only grow, which says no without a word.
    with _writing(manager):
        if not manager.save(step, args=ocp.args.Composite(**items), force=True):
            raise RuntimeError(f"Orbax did not save step {step} in {manager.directory}")


def _meta(manager: ocp.CheckpointManager, step: int) -> Meta:
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    return _checked(manager.restore(step, args=args)["meta"])


def _checked(meta: Any) -> Meta:
    if not isinstance(meta, dict):
        raise ValueError("meta is no JSON object")
    return meta


def _worth(manager: ocp.CheckpointManager, step: int) -> float:
    return float(criterion(_meta(manager, step)["validation"]))


def _best_of(manager: ocp.CheckpointManager) -> int | None:
    found = []
    for step in manager.all_steps():
        worth, reason = _try(lambda step=step: _worth(manager, step))
        if worth is None:
            raise InputError(f"{manager.directory}/{step}: cannot be read: {reason}")
        found.append((worth, step))
    return min(found, default=(0.0, None))[1]
