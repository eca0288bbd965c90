"""The steps of a run: train, validate, save, keep the best, stop where a signal says so."""

import contextlib
import copy
import dataclasses
import math
import signal
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.attention import choices
from mhe_jax.config import Config
from mhe_jax.config.fields import set_field
from mhe_jax.config.places import path_of
from mhe_jax.training import sharding, summary
from mhe_jax.training.checkpoint import Checkpoints, Meta
from mhe_jax.training.cluster.group import Signals, Stopped
from mhe_jax.training.meter import PEAK, Meter, NotFinite
from mhe_jax.training.state import TrainState
from mhe_jax.training.step import make_eval_step, train_step_of
from mhe_jax.training.tracking import Tracker

# Metrics of parameters, besides those of the validation batches.
Measure = Callable[[Any], dict[str, Any]]


@dataclasses.dataclass
class Stepper:
    """The steps between a state and the last one; `meta` is what checkpoints also hold."""

    config: Config
    mesh: Mesh
    model: nn.Module
    optimizer: optax.GradientTransformation
    abstract: TrainState
    measure: Measure | None
    checkpoints: Checkpoints
    meta: Meta
    tracker: Tracker
    signals: Signals

    def __post_init__(self):
        shardings = sharding.shardings_of(self.abstract)
        self.task = tasks.of(self.config)
        self.train_step = train_step_of(
            self.config, self.model, self.optimizer, self.mesh, shardings
        )
        evaluated = self.task.sums(self.model, outputs=True)
        self.eval_step = make_eval_step(evaluated, self.mesh, shardings.params)

    def run(self, state: TrainState, start: int, batches, validation) -> None:
        """Steps `start + 1` to the last, unless Stopped, NotFinite or NotSaved ends them."""
        # A signal can come before the validation of a step.
        if start and self._validates(start) and self.meta.get("validated_step") != start:
            stop = self._validate(state, start, validation)
            self._save(state, start, stop=stop)
        c, last = self.config.train, self.config.train.num_steps
        meter = self._meter()
        first_traced, last_traced = c.profile_steps or (0, 0)
        with (
            batches.iterate(start, last) as rows,
            contextlib.closing(sharding.feed(rows, self._on_devices)) as fed,
            contextlib.ExitStack() as traced,
        ):
            for step, batch in enumerate(fed, start + 1):
                if step == max(first_traced, start + 1) <= last_traced:
                    place = path_of(self.config.workdir) / "profile"
                    traced.enter_context(jax.profiler.trace(place))
                state = meter.run(self.train_step, state, batch, step)
                if step == last_traced:
                    jax.block_until_ready(state)
                    traced.close()
                if step == start + 1:
                    self.meta["attention"] = choices()
                    self.tracker.note(f"attention: {summary.runs_as(choices())}")
                stop = self.signals.agreed()
                saves = step % c.checkpoint_every == 0 or step == last
                if not (stop or saves or self._validates(step)):
                    continue
                meter.flush()
                if self._validates(step) and not stop:
                    stop = self._validate(state, step, validation)
                meter.idle()
                self._save(state, step, due=saves, stop=stop)
                if step < last:
                    meter.idle()

    def _save(self, state: TrainState, step: int, due: bool = False, stop: int = 0) -> None:
        """Saves a step whose turn it is, that is the best so far, or after which a signal stops."""
        if due or stop or self.checkpoints.is_best(step, self.meta):
            self.tracker.upload()
            self.checkpoints.save(state, step, copy.deepcopy(self.meta))
        if stop:
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
        """Scores the validation split; returns the signal that cut it short, 0 for none."""
        self.tracker.doing("validating")
        # The parameters that count: the average, where there is one.
        params = state.params if state.ema_params is None else state.ema_params
        found = []
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
        return 0

    def _on_devices(self, rows) -> dict[str, jax.Array]:
        return sharding.global_batch(self.task.read(rows), self.mesh)
