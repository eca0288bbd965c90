"""Training, from a config to its result."""

import contextlib
import json
import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.attention import choices, recording
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, save_json, set_field, to_dict
from mhe_jax.config.files import CONFIG, RESULT, TOKENIZER, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer
from mhe_jax.model.layers import check_attention
from mhe_jax.tasks.task import Batch
from mhe_jax.training import from_run, group, meter, resume, sharding, tracking
from mhe_jax.training.checkpoint import Checkpoints, check_path, check_tokenizer
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import TrainState, initializer_of
from mhe_jax.training.step import make_eval_step, train_step_of

# Of an experiment: metrics of parameters, besides those of the validation batches.
MakeMeasure = Callable[[Config, Mesh, AnyTokenizer, nn.Module], Callable[[Any], dict[str, Any]]]


def train(
    config: Config, devices: Sequence[Any] | None = None, *, sample: MakeMeasure | None = None
) -> dict[str, Any]:
    """Trains, or resumes where the run in `config.workdir` stopped; returns its result.

    A complete run returns its result again without training.

    Args:
      config: the experiment.
      devices: to train on; all there are by default.
      sample: makes the measure of `train.eval_translate`: `evaluation.TranslatedSample`.

    Raises:
      InputError: something in the config, the text or the working directory is wrong.
      Stopped: a signal (all is saved), a loss that is not finite or a disk that does not take a
        checkpoint (the last good one stays) ended the run.
    """
    check(config)
    check_attention(config)
    config = tasks.resolve(config)
    # What can be wrong is found before anything is written. Text may lie elsewhere.
    elsewhere = {"workdir", "data.directory", "data.cache_directory"}
    fields = leaves(to_dict(config))
    group.check_alike({name: fields[name] for name in fields.keys() - elsewhere})
    with group.fine_in_all():
        workdir = path_of(config.workdir)
        changed = resume.changed_fields(config)
        resume.check_files(config, workdir)
        mesh = sharding.make_mesh(config, devices)
        if not resume.holds_run(workdir):
            from_run.check_init_from(config)
        tasks.check_sources(config)
        tracking.check_writers(config.train, workdir)
        if config.train.eval_translate and sample is None:
            raise InputError("train.eval_translate: needs train(config, sample=TranslatedSample)")
        check_path(workdir)
    with recording(), contextlib.ExitStack() as held:
        with group.fine_in_all():
            if jax.process_index() == 0:
                held.enter_context(resume.locked(workdir))
        with group.fine_in_all():
            resume.check_shared(workdir)
        return _train(config, workdir, mesh, changed, sample, held)


def _train(
    config: Config,
    workdir: Path,
    mesh: Mesh,
    changed: list[str],
    sample: MakeMeasure | None,
    held: contextlib.ExitStack,
) -> dict[str, Any]:
    task, c, writes = tasks.of(config), config.train, jax.process_index() == 0

    # 1. Text becomes batches, by the tokenizer that the working directory keeps.
    tokenizer = group.first_one_first(lambda: tasks.make_tokenizer(config, workdir / TOKENIZER))
    share, shares = sharding.share_of_rows(mesh)
    process = {"process_index": share, "process_count": shares}
    rows, validation = sharding.round_up_rows(config.evaluation.batch_size, mesh), None
    with group.fine_in_all():
        batches = tasks.train_batches(config, tokenizer, **process)
        texts = {"text": batches.text}
        if config.data.validation:
            validation = tasks.evaluation_batches(
                config, tokenizer, "validation", batch_size=rows, **process
            )
            texts["validation_text"] = validation.text
    group.check_alike({f"the text of {resume.TEXTS[n]}": text for n, text in texts.items()})

    # 2. The state comes from the newest checkpoint, or from the seed.
    model, optimizer = task.model(config.model), make_optimizer(config)
    initialize, abstract = initializer_of(config, model, optimizer, mesh)
    measure = sample(config, mesh, tokenizer, model) if sample and c.eval_translate else None
    checkpoints = Checkpoints(workdir, c.keep_checkpoints)
    held.callback(checkpoints.close)
    done = checkpoints.latest_step
    if done is not None:
        resume.check_length(workdir, done, c.num_steps, changed)
        state, meta = checkpoints.restore(abstract)
        check_tokenizer(meta, tokenizer)
        resume.check_text(workdir, meta, texts)
    else:
        state, meta = initialize(jax.random.key(c.seed)), {}
        if c.init_from:
            state = from_run.start_from(c.init_from, config, state, mesh)
    start = int(state.step)
    meta |= {"tokenizer": tokenizer.key, **texts}
    resume.note_changes(config, meta, start)
    if writes:
        save_json(config, workdir / CONFIG)  # it holds a run from here on

    # 3. What a step is, and who watches it.
    shardings = sharding.shardings_of(abstract)
    train_step = train_step_of(config, model, optimizer, mesh, shardings)
    rules = sharding.RULES_BY_LENGTH[config.mesh.length]
    eval_step = make_eval_step(task.sums(model, outputs=True), mesh, shardings.params, rules)
    writers = tracking.make_writers(c, workdir, start, to_dict(config)) if writes else ()
    tracker = tracking.Tracker(workdir, c.num_steps, start, writers=writers, writes=writes)
    signals = group.Signals()

    def flops(shapes: dict[str, tuple[int, ...]]) -> float:
        *rows, length = shapes[task.inputs[0]]
        of_length = set_field(config, "data.sequence_length", length)
        return task.step_flops(of_length, math.prod(rows))

    how = {"skip": c.skip_nonfinite, "flops": flops, "peak": meter.peak_of(mesh)}
    timed = meter.Meter(tracker, c.log_every, c.num_steps, meta, **how)

    def on_devices(rows: dict[str, Any]) -> Batch:
        return sharding.global_batch(task.read(rows), mesh)

    def validates(step: int) -> bool:
        return validation is not None and (step % c.eval_every == 0 or step == c.num_steps)

    def validate(state: TrainState, step: int) -> int:
        """Scores the validation split; returns the signal that cut it short, 0 for none."""
        assert validation is not None
        # The parameters that count: the average, where there is one.
        params = state.params if state.ema_params is None else state.ema_params
        found = []
        with validation.iterate(0, c.eval_batches) as iterator:
            for rows in iterator:
                found.append(eval_step(params, on_devices(rows)))
                if stop := signals.agreed():
                    return stop
        metrics = task.measure(jax.device_get(found), validation)
        if not math.isfinite(metrics["loss"]):
            raise meter.NotFinite(step, "validation loss")
        if measure is not None:
            metrics |= measure(params)
        meta.update(validated_step=step, validation=metrics)
        tracker.log(step, "validation", metrics)
        return 0

    def save(state: TrainState, step: int, *, due: bool, stop: int) -> None:
        """Saves a step whose turn it is, that is the best so far, or after which a signal stops."""
        if due or stop or checkpoints.is_best(step, meta):
            tracker.upload()
            checkpoints.save(state, step, meta)
        if stop:
            checkpoints.wait()
            stopped = f"{signal.Signals(stop).name}: stopped after step {step}, which is saved"
            raise group.Stopped(128 + stop, f"{stopped}; the same command goes on from there")

    def take_steps(state: TrainState) -> None:
        # A signal can come before the validation of a step.
        if start and validates(start) and meta.get("validated_step") != start:
            save(state, start, due=True, stop=validate(state, start))
        timed.idle()
        first_traced, last_traced = c.profile_steps or (0, 0)
        with (
            batches.iterate(start, c.num_steps) as rows,
            contextlib.closing(sharding.feed(rows, on_devices)) as fed,
            contextlib.ExitStack() as traced,
        ):
            for step, batch in enumerate(fed, start + 1):
                if step == start + 1:
                    tracker.note("compiling the train step: this can take minutes")
                if step == max(first_traced, start + 1) <= last_traced:
                    traced.enter_context(jax.profiler.trace(workdir / "profile"))
                state = timed.run(train_step, state, batch, step)
                if step == last_traced:
                    jax.block_until_ready(state)
                    traced.close()
                if step == start + 1:
                    meta["attention"] = choices()
                    tracker.note(f"computes {meter.in_words(choices())} (docs/kinds.md)")
                stop = signals.agreed()
                due = step % c.checkpoint_every == 0 or step == c.num_steps
                if not (stop or due or validates(step)):
                    continue
                timed.flush()
                if validates(step) and not stop:
                    stop = validate(state, step)
                timed.idle()
                save(state, step, due=due, stop=stop)
                if step < c.num_steps:
                    timed.idle()
        checkpoints.wait()

    # 4. The steps.
    with tracker:
        for line in meter.first_lines(config, mesh, state.params):
            tracker.note(line)
        resumes = [f"{start} of {c.num_steps} steps are done"] if start else []
        text = f"reads {batches.describe()}"
        for line in (text, *changed, *checkpoints.notes, *resumes):
            tracker.note(line)
        try:
            with signals:
                take_steps(state)
            tracker.upload()
        except (meter.NotFinite, OSError) as error:
            good = checkpoints.last_good()
            good = "none" if good is None else f"step {good} in {workdir}"
            tracker.note(reason := f"{error}; last good checkpoint: {good}")
            raise group.Stopped(1, reason) from error
        except group.Stopped as stopped:
            tracker.note(stopped.reason)
            raise

    # 5. The result.
    result = meter.result(config, mesh, abstract.params, meta, checkpoints.best_meta())
    if writes:
        write_whole(workdir / RESULT, json.dumps(result, indent=2) + "\n")
    return result
