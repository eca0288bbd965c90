"""The steps of a run: train, validate, save, keep the best, stop where a signal says so."""

import contextlib
import dataclasses
import math
import signal
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax.attention import choices
from mhe_jax.config import TrainConfig
from mhe_jax.data import EvaluationBatches, TrainBatches
from mhe_jax.tasks.task import Batch, Task
from mhe_jax.training import sharding, summary
from mhe_jax.training.checkpoint import Checkpoints, Meta
from mhe_jax.training.group import Signals, Stopped
from mhe_jax.training.meter import Meter, NotFinite
from mhe_jax.training.state import TrainState
from mhe_jax.training.tracking import Tracker

# Metrics of parameters, besides those of the validation batches.
Measure = Callable[[Any], dict[str, Any]]


@dataclasses.dataclass
class Stepper:
    """The steps between a state and the last one; `meta` is what checkpoints also hold."""

    train: TrainConfig
    task: Task
    mesh: Mesh
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Batch], dict[str, jax.Array]]
    measure: Measure | None
    checkpoints: Checkpoints
    meta: Meta
    tracker: Tracker
    meter: Meter
    signals: Signals

    def run(
        self,
        state: TrainState,
        start: int,
        batches: TrainBatches,
        validation: EvaluationBatches | None,
    ) -> None:
        """Steps `start + 1` to the last, unless Stopped, NotFinite or NotSaved ends them."""
        c, last, meter = self.train, self.train.num_steps, self.meter

        def validates(step: int) -> bool:
            return validation is not None and (step % c.eval_every == 0 or step == last)

        # A signal can come before the validation of a step.
        if start and validates(start) and self.meta.get("validated_step") != start:
            stop = self._validate(state, start, validation)
            self._save(state, start, due=True, stop=stop)
        meter.idle()
        first_traced, last_traced = c.profile_steps or (0, 0)
        with (
            batches.iterate(start, last) as rows,
            contextlib.closing(sharding.feed(rows, self._on_devices)) as fed,
            contextlib.ExitStack() as traced,
        ):
            for step, batch in enumerate(fed, start + 1):
                if step == max(first_traced, start + 1) <= last_traced:
                    traced.enter_context(jax.profiler.trace(self.tracker.workdir / "profile"))
                state = meter.run(self.train_step, state, batch, step)
                if step == last_traced:
                    jax.block_until_ready(state)
                    traced.close()
                if step == start + 1:
                    self.meta["attention"] = choices()
                    self.tracker.note(f"attention: {summary.runs_as(choices())}")
                stop = self.signals.agreed()
                saves = step % c.checkpoint_every == 0 or step == last
                if not (stop or saves or validates(step)):
                    continue
                meter.flush()
                if validates(step) and not stop:
                    stop = self._validate(state, step, validation)
                meter.idle()
                self._save(state, step, due=saves, stop=stop)
                if step < last:
                    meter.idle()

    def _save(self, state: TrainState, step: int, *, due: bool, stop: int) -> None:
        """Saves a step whose turn it is, that is the best so far, or after which a signal stops."""
        if due or stop or self.checkpoints.is_best(step, self.meta):
            self.tracker.upload()
            self.checkpoints.save(state, step, self.meta)
        if stop:
            self.checkpoints.wait()
            raise Stopped(
                128 + stop,
                f"{signal.Signals(stop).name}: stopped after step {step}, which is saved; "
                "the same command goes on from there",
            )

    def _validate(self, state: TrainState, step: int, validation: Any) -> int:
        """Scores the validation split; returns the signal that cut it short, 0 for none."""
        self.tracker.doing("validating")
        # The parameters that count: the average, where there is one.
        params = state.params if state.ema_params is None else state.ema_params
        found = []
        with validation.iterate(0, self.train.eval_batches) as iterator:
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

    def _on_devices(self, rows) -> Batch:
        return sharding.global_batch(self.task.read(rows), self.mesh)
