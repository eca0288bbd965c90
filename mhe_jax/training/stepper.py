"""The steps of a run: train, validate, save, keep the best, stop where a signal says so."""

import contextlib
import copy
import math
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config
from mhe_jax.config.fields import set_field
from mhe_jax.config.places import path_of
from mhe_jax.tasks.sums import criterion
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints, Meta
from mhe_jax.training.cluster.signals import Signals, Stopped
from mhe_jax.training.meter import PEAK, Meter, NotFinite
from mhe_jax.training.profile import Profile
from mhe_jax.training.run.lock import Lock
from mhe_jax.training.state import TrainState
from mhe_jax.training.step import make_eval_step, train_step_of
from mhe_jax.training.tracking import Tracker

# Metrics of parameters, besides those of the validation batches.
Measure = Callable[[Any], dict[str, Any]]


class Stepper:
    """The steps between a state and the last one; `meta` is what checkpoints also hold."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: nn.Module,
        optimizer: optax.GradientTransformation,
        abstract: TrainState,
        measure: Measure | None,
        checkpoints: Checkpoints,
        meta: Meta,
        lock: Lock | None,
        tracker: Tracker,
        signals: Signals,
    ):
        self.config, self.mesh, self.checkpoints, self.meta = config, mesh, checkpoints, meta
        self.lock, self.tracker, self.signals = lock, tracker, signals
        self.task, self.measure = tasks.of(config), measure
        shardings = sharding.shardings_of(abstract)
        self.train_step = train_step_of(config, model, optimizer, mesh, shardings)
        evaluated = self.task.sums(model, outputs=True)
        self.eval_step = make_eval_step(evaluated, mesh, shardings.params)

    def run(self, state: TrainState, start: int, batches, validation) -> None:
        """Steps `start + 1` to the last.

        Raises:
          Stopped: a signal came, and all is saved.
          NotFinite: a loss or an update is not finite, and no more may be left out.
          NotSaved: a checkpoint cannot be written.
        """
        # A signal can come before the validation of a step, a crash before its best checkpoint.
        if start and self.meta.get("validated_step") == start:
            self._keep_if_best(state, start)
        elif (
            start and self._validates(start) and (stop := self._validate(state, start, validation))
        ):
            self._stop(stop, start)
        c, last = self.config.train, self.config.train.num_steps
        meter = self._meter()
        profile = Profile(path_of(self.config.workdir), c.profile_steps)
        with (
            batches.iterate(start, last) as rows,
            contextlib.closing(sharding.feed(rows, self._on_devices)) as fed,
            profile,
        ):
            for step, batch in enumerate(fed, start + 1):
                profile.before(step)
                state = meter.run(self.train_step, state, batch, step)
                profile.after(step, state)
                stop = self.signals.agreed()
                saves = step % c.checkpoint_every == 0 or step == last
                if not (stop or saves or self._validates(step)):
                    continue
                meter.flush()
                if self._validates(step) and not stop:
                    stop = self._validate(state, step, validation)
                meter.idle()
                if stop or saves:
                    self._check_lock()
                    self.tracker.upload()
                    self.checkpoints.save(state, step, copy.deepcopy(self.meta))
                if stop:
                    self._stop(stop, step)
                if step < last:
                    meter.idle()

    def _stop(self, stop: int, step: int) -> NoReturn:
        self.checkpoints.wait()
        raise Stopped(
            128 + stop,
            f"{signal.Signals(stop).name}: stopped after step {step}, which is saved; "
            "the same command goes on from there",
        )

    def _meter(self) -> Meter:
        c, device = self.config, self.mesh.devices.flat[0].device_kind

        def flops(shapes: dict[str, tuple[int, ...]]) -> float:
            *rows, length = shapes[self.task.inputs[0]]
            of_length = set_field(c, "data.sequence_length", length)
            return self.task.step_flops(of_length, math.prod(rows))

        peak = PEAK[device] * self.mesh.size if device in PEAK else None
        skip = c.train.skip_nonfinite
        every = min(c.train.log_every, c.train.num_steps)  # a short run has a line too
        return Meter(self.tracker, every, self.meta, skip=skip, flops=flops, peak=peak)

    def _validates(self, step: int) -> bool:
        c = self.config
        due = step % c.train.eval_every == 0 or step == c.train.num_steps
        return bool(c.data.validation) and due

    def _validate(self, state: TrainState, step: int, validation) -> int:
        """Scores the validation split and keeps the parameters if they are the best so far.

        Returns the signal that cut it short, 0 for none.
        """
        self.tracker.doing("validating")
        params, found = _evaluated(state), []
        with validation.iterate(0, self.config.train.eval_batches) as iterator:
            for rows in iterator:
                found.append(self.eval_step(params, self._on_devices(rows)))
                if stop := self.signals.agreed():
                    return stop
        metrics = self.task.measure(jax.device_get(found), validation)
        if not math.isfinite(metrics["loss"]):
            raise NotFinite(step, "validation loss")
        if self.measure is not None:
            metrics |= self.measure(params)
        self.meta |= {"validated_step": step, "validation": metrics}
        self.tracker.log(step, "validation", metrics)
        self._keep_if_best(state, step)
        return 0

    def _keep_if_best(self, state: TrainState, step: int) -> None:
        best = self.checkpoints.best_criterion
        if best is None or criterion(self.meta["validation"]) < best:
            self._check_lock()
            self.checkpoints.save_best(_evaluated(state), step, copy.deepcopy(self.meta))

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    def _on_devices(self, rows) -> dict[str, jax.Array]:
        return sharding.global_batch(self.task.read(rows), self.mesh)


def _evaluated(state: TrainState) -> Any:
    """The parameters that count: the average, where there is one."""
    return state.params if state.ema_params is None else state.ema_params
