"""Training, from a config to its result."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, set_field, to_dict
from mhe_jax.config.files import RESULT, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer, EvaluationBatches, TrainBatches
from mhe_jax.model.layers import check_attention
from mhe_jax.training import from_run, group, resume, sharding, summary
from mhe_jax.training.checkpoint.faults import NotSaved, reason_of
from mhe_jax.training.checkpoint.manager import Checkpoints, check_path
from mhe_jax.training.checkpoint.reading import Meta, check_tokenizer
from mhe_jax.training.group import Signals, Stopped
from mhe_jax.training.lock import check_shared, locked
from mhe_jax.training.meter import Meter, NotFinite, peak_of
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of
from mhe_jax.training.step import make_eval_step, train_step_of
from mhe_jax.training.stepper import Measure, Stepper
from mhe_jax.training.tracking import Tracker, check_writers, make_writers

MakeMeasure = Callable[[Config, Mesh, AnyTokenizer, nn.Module], Measure]


def train(
    config: Config,
    devices: Sequence[Any] | None = None,
    *,
    sample: MakeMeasure | None = None,
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
    with recording():
        return _train(tasks.resolve(config), devices, sample)


def _train(
    config: Config, devices: Sequence[Any] | None, sample: MakeMeasure | None
) -> dict[str, Any]:
    # 1. What can be wrong is found before anything is written.
    elsewhere = {"workdir", "data.directory", "data.cache_directory"}  # text may lie elsewhere
    fields = leaves(to_dict(config))
    group.check_alike("config", {name: fields[name] for name in fields.keys() - elsewhere})
    with group.fine_in_all():
        workdir = path_of(config.workdir)
        changed = resume.changed_fields(config)
        resume.check_files(config, workdir)
        mesh = sharding.make_mesh(config, devices)
        if not resume.holds_run(workdir):
            from_run.check_init_from(config)
        tasks.check_sources(config)
        check_writers(config.train, workdir)
        if config.train.eval_translate and sample is None:
            raise InputError("train.eval_translate: needs train(config, sample=TranslatedSample)")
        check_path(workdir)
    writes = jax.process_index() == 0
    with locked(workdir) if writes else contextlib.nullcontext():
        if resume.changed_fields(config) != changed:
            raise InputError(f"{workdir}: another process has just begun a run here")
        with group.fine_in_all():
            check_shared(workdir)
        try:
            return _train_alone(config, workdir, mesh, changed, sample)
        finally:
            if writes:
                resume.drop_draft(workdir)


def _train_alone(
    config: Config,
    workdir: Path,
    mesh: Mesh,
    changed: list[str],
    sample: MakeMeasure | None,
) -> dict[str, Any]:
    # 2. Text becomes batches, by the tokenizer that the working directory keeps.
    tokenizer = group.first_one_first(lambda: _tokenizer(config, workdir))
    batches, validation = _batches(config, mesh, tokenizer)
    texts = {"text": batches.text}
    if validation is not None:
        texts["validation_text"] = validation.text
    group.check_alike("text", {f"the text of {resume.TEXTS[n][0]}": x for n, x in texts.items()})

    # 3. The state comes from the newest checkpoint, or from the seed.
    task, c, writes = tasks.of(config), config.train, jax.process_index() == 0
    model, optimizer = task.model(config.model), make_optimizer(config)
    initialize, abstract = initializer_of(config, model, optimizer, mesh)
    measure = sample(config, mesh, tokenizer, model) if sample and c.eval_translate else None
    checkpoints = Checkpoints(workdir, c.keep_checkpoints)
    try:
        done = checkpoints.latest_step
        if done is not None:
            resume.check_length(workdir, done, c.num_steps, changed)
            state, meta = checkpoints.restore(abstract)
            check_tokenizer(meta, tokenizer)
            resume.check_text(workdir, meta, texts)
        else:
            given = c.init_from and from_run.read_start(config, mesh)
            state, meta = initialize(jax.random.key(c.seed)), {}
            state = from_run.start_from(given, state) if given else state
        start = int(state.step)
        meta |= {"tokenizer": tokenizer.key, **texts}
        resume.note_changes(config.optimizer, c.num_steps, meta, start)
        if writes:
            resume.begin(config, workdir)

        # 4. The steps.
        shardings = sharding.shardings_of(abstract)
        train_step = train_step_of(config, model, optimizer, mesh, shardings)
        eval_step = make_eval_step(task.sums(model, outputs=True), mesh, shardings.params)
        writers = make_writers(c, workdir, start, to_dict(config)) if writes else ()
        with Tracker(workdir, c.num_steps, start, writers=writers, writes=writes) as tracker:
            about = summary.about(config, mesh, abstract.params)
            for line in (about, batches.describe(), *changed, *checkpoints.notes):
                tracker.note(line)
            if start:
                tracker.note(f"{start} of {c.num_steps} steps are done")
            signals = Signals()
            meter = _meter(config, mesh, tracker, meta)
            computing = (c, task, mesh, train_step, eval_step, measure)
            stepper = Stepper(*computing, checkpoints, meta, tracker, meter, signals)
            try:
                with signals:
                    stepper.run(state, start, batches, validation)
                    checkpoints.wait()
                tracker.upload()
            except (NotFinite, OSError) as error:
                tracker.note(reason := _reason(error, checkpoints, workdir))
                raise Stopped(1, reason) from error
            except Stopped as stopped:
                tracker.note(stopped.reason)
                raise
        result = summary.result(config, mesh, abstract.params, meta, checkpoints.best_meta())
        if writes:
            write_whole(workdir / RESULT, json.dumps(result, indent=2) + "\n")
        return result
    finally:
        # A write that failed has been reported by now.
        with contextlib.suppress(NotSaved):
            checkpoints.close()


def _tokenizer(config: Config, workdir: Path) -> AnyTokenizer:
    # Where it lies is for process 0 to say, which alone holds the lock.
    if jax.process_index() == 0:
        resume.drop_draft(workdir)
    return tasks.make_tokenizer(config, resume.own_tokenizer(workdir))


def _batches(
    config: Config, mesh: Mesh, tokenizer: AnyTokenizer
) -> tuple[TrainBatches, EvaluationBatches | None]:
    share, shares = sharding.share_of_rows(mesh)
    process = {"process_index": share, "process_count": shares}
    rows = sharding.round_up_rows(config.evaluation.batch_size, mesh)
    with group.fine_in_all():
        batches = tasks.train_batches(config, tokenizer, **process)
        if not config.data.validation:
            return batches, None
        return batches, tasks.evaluation_batches(
            config, tokenizer, "validation", batch_size=rows, **process
        )


def _meter(config: Config, mesh: Mesh, tracker: Tracker, meta: Meta) -> Meter:
    task, c = tasks.of(config), config.train

    def flops(shapes: dict[str, tuple[int, ...]]) -> float:
        *rows, length = shapes[task.inputs[0]]
        of_length = set_field(config, "data.sequence_length", length)
        return task.step_flops(of_length, math.prod(rows))

    how = {"skip": c.skip_nonfinite, "flops": flops, "peak": peak_of(mesh)}
    return Meter(tracker, c.log_every, c.num_steps, meta, **how)


def _reason(error: Exception, checkpoints: Checkpoints, workdir: Path) -> str:
    """Why the run stops, and what it can resume from."""
    good = checkpoints.last_good()
    good = "none" if good is None else f"step {good} in {workdir}"
    if isinstance(error, NotFinite):
        what = f"{error}; nothing was saved,"
    else:
        what = f"{error if isinstance(error, NotSaved) else reason_of(error)};"
    return f"{what} last good checkpoint: {good}"
