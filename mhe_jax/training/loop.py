"""Training, from a config to its result."""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, shown, to_dict
from mhe_jax.config.files import RESULT, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer, EvaluationBatches, TrainBatches
from mhe_jax.training import sharding, summary
from mhe_jax.training.checkpoint.manager import Checkpoints
from mhe_jax.training.checkpoint.store import NotSaved, check_path, check_tokenizer, reason_of
from mhe_jax.training.cluster import group
from mhe_jax.training.cluster.group import Signals, Stopped
from mhe_jax.training.meter import NotFinite
from mhe_jax.training.metric_writers import check_writers, make_writers
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.run import resume, warm_start
from mhe_jax.training.run.lock import check_shared, locked
from mhe_jax.training.state import initializer_of
from mhe_jax.training.stepper import Measure, Stepper
from mhe_jax.training.tracking import Tracker

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
    with recording():
        return _train(tasks.resolve(config), devices, sample)


def _train(
    config: Config, devices: Sequence[Any] | None, sample: MakeMeasure | None
) -> dict[str, Any]:
    # 1. What can be wrong is found before anything is written.
    _check_alike(config)
    with group.fine_in_all():
        changed = resume.changed_fields(config)
        resume.check_files(config)
        mesh = sharding.make_mesh(config, devices)
        if not resume.holds_run(config):
            warm_start.check_init_from(config)
        tasks.check_sources(config)
        check_writers(config)
        if config.train.eval_translate and sample is None:
            raise InputError("train.eval_translate: needs train(config, sample=TranslatedSample)")
        workdir = path_of(config.workdir)
        check_path(workdir)
    writes = jax.process_index() == 0
    with locked(workdir) if writes else contextlib.nullcontext():
        if resume.changed_fields(config) != changed:
            raise InputError(f"{workdir}: another process has just begun a run here")
        try:
            return _train_alone(config, mesh, changed, sample)
        finally:
            if writes:
                resume.drop_draft(config)


def _check_alike(config: Config) -> None:
    """Raises InputError in all processes if one has other fields; text may lie elsewhere."""
    elsewhere = {"workdir", "data.directory", "data.cache_directory"}
    mine = leaves(to_dict(config))
    first = json.loads(group.of_first("config", json.dumps(mine)))
    with group.fine_in_all():
        for name in sorted(mine.keys() - elsewhere):
            if mine[name] != first.get(name):
                raise InputError(
                    f"{name} is {shown(mine[name])} in process {jax.process_index()}, and not as "
                    "in process 0: give all processes the same command"
                )


def _check_same(split: str, batches: TrainBatches | EvaluationBatches) -> str:
    """The key of a text; InputError in all processes if one reads another than process 0."""
    first = group.of_first(f"text/{split}", batches.text)
    with group.fine_in_all():
        if batches.text != first:
            raise InputError(f"data.{split}: is not the text of process 0: takes the same in all")
    return first


def _train_alone(
    config: Config, mesh: Mesh, changed: list[str], sample: MakeMeasure | None
) -> dict[str, Any]:
    workdir, writes = path_of(config.workdir), jax.process_index() == 0
    share, shares = sharding.share_of_rows(mesh)
    with group.fine_in_all():
        check_shared(workdir)

    # 2. Text becomes batches, by the tokenizer that the working directory keeps.
    with group.first_one_first("tokenizer"):
        # Where it lies is for process 0 to say, which alone holds the lock.
        file = resume.own_tokenizer(config)
        if writes:
            resume.drop_draft(config)
        tokenizer = tasks.make_tokenizer(config, file)
    process = {"process_index": share, "process_count": shares}
    with group.fine_in_all():
        batches = tasks.train_batches(config, tokenizer, **process)
    texts, validation = {"text": _check_same("train", batches)}, None
    if config.data.validation:
        rows = sharding.round_up_rows(config.evaluation.batch_size, mesh)
        with group.fine_in_all():
            validation = tasks.evaluation_batches(
                config, tokenizer, "validation", batch_size=rows, **process
            )
        texts["validation_text"] = _check_same("validation", validation)

    # 3. The state comes from the newest checkpoint, or from the seed.
    model, optimizer = tasks.of(config).model(config.model), make_optimizer(config)
    wanted = sample if config.train.eval_translate else None
    measure = wanted and wanted(config, mesh, tokenizer, model)
    initialize, abstract = initializer_of(config, model, optimizer, mesh)
    checkpoints = Checkpoints(workdir, config.train.keep_checkpoints)
    try:
        done = checkpoints.latest_step
        if done is not None:
            resume.check_length(config, done, changed)
            state, meta = checkpoints.restore(abstract)
            check_tokenizer(meta, tokenizer)
            resume.check_text(config, meta, texts)
        else:
            given = config.train.init_from and warm_start.read_start(config, mesh)
            state, meta = initialize(jax.random.key(config.train.seed)), {}
            state = warm_start.start_from(given, state) if given else state
        start = int(state.step)
        meta |= {"tokenizer": tokenizer.key, **texts}
        resume.note_changes(config, meta, start)
        if writes:
            resume.begin(config, file)

        # 4. The steps.
        num_steps = config.train.num_steps
        writers = make_writers(config, start) if writes else ()
        with Tracker(workdir, num_steps, start, writers=writers, writes=writes) as tracker:
            about = summary.about(config, mesh, abstract.params)
            for line in (about, batches.describe(), *changed, *checkpoints.notes):
                tracker.note(line)
            if start:
                tracker.note(f"{start} of {num_steps} steps are done")
            signals = Signals()
            known = (config, mesh, model, optimizer, abstract, measure)
            stepper = Stepper(*known, checkpoints, meta, tracker, signals)
            try:
                with signals:
                    stepper.run(state, start, batches, validation)
                    checkpoints.wait()
                best = checkpoints.best_meta()
                tracker.upload()
            except (NotFinite, OSError) as error:
                tracker.note(reason := _reason(error, checkpoints, config.workdir))
                raise Stopped(1, reason) from error
            except Stopped as stopped:
                tracker.note(stopped.reason)
                raise
        result = summary.result(config, mesh, abstract.params, meta, best)
        if writes:
            write_whole(workdir / RESULT, json.dumps(result, indent=2) + "\n")
        return result
    finally:
        # A write that failed has been reported by now.
        with contextlib.suppress(NotSaved):
            checkpoints.close()


def _reason(error: Exception, checkpoints: Checkpoints, workdir: str) -> str:
    """Why the run stops, and what it can resume from."""
    good = checkpoints.last_good()
    good = "none" if good is None else f"step {good} in {workdir}"
    if isinstance(error, NotFinite):
        what = f"{error}; nothing was saved,"
    else:
        what = f"{error if isinstance(error, NotSaved) else reason_of(error)};"
    return f"{what} last good checkpoint: {good}"
