"""Training, from a config to its result."""

import copy
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mhe_jax import data
from mhe_jax.checks import check
from mhe_jax.config import Config
from mhe_jax.data.cache import publish
from mhe_jax.loading import save_json
from mhe_jax.model import make_model
from mhe_jax.training import objective, resume, sharding, summary
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.meter import Meter, NotFinite
from mhe_jax.training.optimizer import make_optimizer, make_schedule
from mhe_jax.training.signals import Signals, Stopped
from mhe_jax.training.state import TrainState, make_initializer
from mhe_jax.training.step import make_eval_step, make_train_step
from mhe_jax.training.tracking import Tracker

TOKENIZER = "tokenizer.model"


def train(config: Config, devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """Train, or go on where the run in `config.workdir` stopped; returns its result.

    A run that is complete gives its result again without training.

    Args:
      config: the experiment.
      devices: to train on; all there are by default.

    Raises:
      InputError: something in the config, the text or the working directory is wrong.
      Stopped: a signal (all is saved) or a loss that is not finite (nothing is) ended the run.
    """
    # 1. What can be wrong is found before anything is written.
    check(config)
    changed = resume.changed_fields(config)
    mesh = sharding.make_mesh(config, devices)
    data.check_sources(config)

    # 2. Text becomes batches, by the tokenizer that the working directory keeps.
    workdir = Path(config.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = data.make_tokenizer(config, workdir / TOKENIZER)
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    batches = data.train_batches(config, tokenizer, **process)
    validation = None
    if config.data.validation:
        rows = sharding.round_up_rows(config.evaluation.batch_size, mesh)
        validation = data.evaluation_batches(
            config, tokenizer, "validation", batch_size=rows, **process
        )

    # 3. The state comes from the newest checkpoint, or from the seed.
    model, optimizer = make_model(config.task, config.model), make_optimizer(config)
    init_params = objective.make_initializer(config.task, model, config.data.sequence_length)
    ema = config.optimizer.ema_decay is not None
    initialize, abstract = make_initializer(init_params, optimizer, mesh, ema)
    checkpoints = Checkpoints(workdir, config.train.keep_checkpoints)
    writes = jax.process_index() == 0
    try:
        start = checkpoints.latest_step or 0
        resume.check_length(config, start)
        if start:
            state, meta = checkpoints.restore(abstract)
        else:
            state, meta = initialize(jax.random.key(config.train.seed)), {}
        if writes:
            save_json(config, workdir / resume.FILE)

        # 4. The steps.
        c = config.train
        with (
            Tracker(
                workdir, c.num_steps, start, tensorboard=c.tensorboard, writes=writes
            ) as tracker,
            Signals() as signals,
        ):
            about = summary.about(config, mesh, abstract.params)
            for line in (about, batches.describe(), *changed):
                tracker.note(line)
            if start:
                tracker.note(f"{start} of {c.num_steps} steps are done")
            loop = _Loop(config, mesh, model, optimizer, abstract, checkpoints, meta)
            try:
                loop.run(state, start, batches, validation, tracker, signals)
            except Stopped as stopped:
                tracker.note(stopped.reason)
                raise
            tracker.draw()
        result = summary.result(config, mesh, abstract.params, meta, checkpoints.best_meta())
        if writes:
            with publish(workdir / summary.FILE) as file:
                file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result
    finally:
        checkpoints.close()


class _Loop:
    """The steps between a state and the last one; `meta` is what the checkpoints know beside it."""

    def __init__(self, config: Config, mesh, model, optimizer, abstract, checkpoints, meta):
        self.config, self.mesh, self.checkpoints, self.meta = config, mesh, checkpoints, meta
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        c = config.optimizer
        self.train_step = make_train_step(
            objective.make_sums(config.task, model, c.label_smoothing),
            optimizer,
            mesh,
            shardings,
            schedule=make_schedule(c, config.train.num_steps),
            accumulate_steps=c.accumulate_steps,
            ema_decay=c.ema_decay,
        )
        evaluated = objective.make_sums(config.task, model)
        self.eval_step = make_eval_step(evaluated, mesh, shardings.params)

    def run(self, state: TrainState, start: int, batches, validation, tracker, signals) -> None:
        """Steps `start + 1` to the last.

        Raises:
          Stopped: see `train`.
        """
        self.tracker, self.signals = tracker, signals
        try:
            # A signal can come before the validation of a step, a crash before its best checkpoint.
            if start and self.meta.get("validated_step") == start:
                self._keep_if_best(state, start)
            elif start and self._validates(start):
                self._validate(state, start, validation)
            self._run(state, start, batches, validation)
        except NotFinite as error:
            self.checkpoints.wait()
            good = self.checkpoints.latest_step
            good = "there is none" if good is None else f"step {good} in {self.config.workdir}"
            raise Stopped(1, f"{error}; nothing was saved, last good checkpoint: {good}") from error

    def _run(self, state: TrainState, start: int, batches, validation) -> None:
        c, last = self.config.train, self.config.train.num_steps
        meter = Meter(self.tracker, c.log_every, self.meta)
        with batches.iterate(start, last) as iterator:
            for step, rows in enumerate(iterator, start + 1):
                state = meter.run(self.train_step, state, self._on_devices(rows), step)
                stop = self.signals.agreed()
                saves = step % c.checkpoint_every == 0 or step == last
                if not (stop or saves or self._validates(step)):
                    continue
                meter.flush()
                if self._validates(step) and not stop:
                    stop = self._validate(state, step, validation)
                meter.idle()
                if stop or saves:
                    self.checkpoints.save(state, step, copy.deepcopy(self.meta))
                if stop:
                    self.checkpoints.wait()
                    name = signal.Signals(stop).name
                    raise Stopped(
                        128 + stop,
                        f"{name}: stopped after step {step}, which is saved; "
                        "the same command goes on from there",
                    )
                if step < last:
                    meter.idle()

    def _validates(self, step: int) -> bool:
        c = self.config
        due = step % c.train.eval_every == 0 or step == c.train.num_steps
        return bool(c.data.validation) and due

    def _validate(self, state: TrainState, step: int, validation) -> int:
        """Score the validation split and keep the parameters if they are the best so far.

        Returns the signal that cut it short, 0 for none.
        """
        params, found = _evaluated(state), []
        with validation.iterate(0, self.config.train.eval_batches) as iterator:
            for rows in iterator:
                found.append(self.eval_step(params, self._on_devices(rows)))
                if stop := self.signals.agreed():
                    return stop
        found = jax.device_get(found)
        totals = {name: sum(float(sums[name]) for sums in found) for name in found[0]}
        numbers = objective.ratios(totals)
        if not math.isfinite(numbers["loss"]):
            raise NotFinite(step, "validation loss")
        self.meta |= {"validated_step": step, "validation": numbers}
        self.tracker.log(step, "validation", numbers)
        self._keep_if_best(state, step)
        return 0

    def _keep_if_best(self, state: TrainState, step: int) -> None:
        best = self.checkpoints.best_loss
        if best is None or self.meta["validation"]["loss"] < best:
            self.checkpoints.save_best(_evaluated(state), step, copy.deepcopy(self.meta))

    def _on_devices(self, rows) -> dict[str, jax.Array]:
        names = objective.batch_names(self.config.task)
        return sharding.global_batch({name: rows[name] for name in names}, self.mesh)


def _evaluated(state: TrainState) -> Any:
    """The parameters that count: the average, where there is one."""
    return state.params if state.ema_params is None else state.ema_params
