"""Rules for what is trained on, and for how a run is scored."""

import itertools
from functools import partial
from pathlib import PurePath

from mhe_jax.config import FACTS, Config
from mhe_jax.config.fields import require
from mhe_jax.config.files import TABLES, file_format
from mhe_jax.config.places import RUNS, check_scheme, scheme_of


def check_data(config: Config, trains: bool) -> None:
    """Checks places, sources, lengths and what goes with the task; an imported run has no text."""
    need, data, task, facts = partial(require, config), config.data, config.task, config.facts
    length, most, steps = data.sequence_length, config.model.max_length, config.train.profile_steps
    check_scheme("workdir", config.workdir, RUNS)
    need("workdir", config.workdir, "takes a directory, or gs://bucket/name")
    local = len(steps) == 2 and steps[0] <= steps[1] and not scheme_of(config.workdir)
    takes = "takes a first and a last step, and a local workdir"
    need("train.profile_steps", local or not steps, takes)
    need("data.sequence_length", length <= most, f"at most model.max_length={most}")
    whole = getattr(data, facts.rows) % config.optimizer.accumulate_steps == 0
    divides = f"must divide data.{facts.rows}={getattr(data, facts.rows)}"
    need("optimizer.accumulate_steps", whole, divides)
    need("data.train", data.train or not trains, "takes the text to train on")
    scratch = config.train.init_from is None or data.tokenizer is None
    need("data.tokenizer", scratch, "must be None: train.init_from has a tokenizer")
    all_of = not trains or facts.content == "text" or config.train.eval_batches is None
    some = "must be None: the first batches are no fair sample of this task's"
    need("train.eval_batches", all_of, some)
    own = facts.labelled or data.dataset == "own"
    need("data.dataset", own, f"must be own: task {task} has no labels")
    if facts.labelled:
        need("data.train_weights", not data.train_weights, f"not for task {task}")
        smooth = config.optimizer.label_smoothing == 0 or facts.label_smoothing
        need("optimizer.label_smoothing", smooth, f"not for task {task}")
    else:
        _check_sources(config)
    if facts.questions:
        around = 3 if config.model.hashing is None else 4
        room = length - data.question_length - around
        allowed = f"at most data.sequence_length - data.question_length - {around} = {room}"
        need("data.window_stride", data.window_stride <= room, allowed)
    if buckets := data.length_buckets:
        several = not data.packing and facts.content != "text"
        need("data.length_buckets", several, "not where all rows have one length")
        grow = all(a < b for a, b in itertools.pairwise(buckets)) and buckets[-1] == length
        last = f"takes growing lengths, the last data.sequence_length={length}"
        need("data.length_buckets", grow, last)


def _check_sources(config: Config) -> None:
    data, pair = config.data, config.facts.content == "pair"
    one = pair or len(data.fields) == 1
    require(config, "data.fields", one, f"task {config.task} takes one")
    most, takes = (2, "one source or two parallel files") if pair else (1, "one source")
    takes = f"takes {takes}; several of data.train need data.train_weights"
    splits = [("train", names) for names, _ in training_sources(config)]
    for split, names in (*splits, ("validation", data.validation), ("test", data.test)):
        require(config, f"data.{split}", len(names) <= most, takes)


def training_sources(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """The names of each training source, one or two parallel files, and its weight.

    Raises:
      InputError: `data.train_weights` has another number of weights.
    """
    data = config.data
    if not data.train_weights:
        return [(data.train, 1.0)]
    sources, names = [], list(data.train)
    each = len(names) == len(data.train_weights)
    while names:
        # Complete by itself, and not one of two parallel files.
        alone = config.facts.content != "pair" or names[0].startswith(("tfds:", "demo:"))
        alone |= file_format(PurePath(names[0])) in TABLES
        alone |= each and not PurePath(names[0]).suffix  # a directory, of whatever files
        sources.append(tuple(names[: 1 if alone else 2]))
        names = names[len(sources[-1]) :]
    takes = f"takes one for each source of data.train, which has {len(sources)}"
    require(config, "data.train_weights", len(sources) == len(data.train_weights), takes)
    return list(zip(sources, data.train_weights, strict=True))


def check_evaluation(config: Config) -> None:
    """Checks fields against the task, and against one another."""
    need, data, facts = partial(require, config), config.data, config.facts
    evaluation, name = config.evaluation, config.evaluation.checkpoint
    sampled = config.train.eval_translate == 0 or (config.task == "translation" and data.validation)
    which = f"task translation with data.validation only, not {config.task}"
    need("train.eval_translate", sampled, which)
    known = name in ("best", "last") or (name.isascii() and name.isdigit())
    need("evaluation.checkpoint", known, "takes best, last or a step number")
    stride, length = evaluation.stride, data.sequence_length
    which = ", ".join(task for task, of in FACTS.items() if of.stride)
    need("evaluation.stride", facts.stride or stride is None, f"{which} only")
    inside = stride is None or stride <= length
    need("evaluation.stride", inside, f"at most data.sequence_length={length}")
    # Where positions in the texts matter, a misspelt word would move them.
    free = facts.labelled and not facts.questions and data.dataset not in ("wic", "wsc")
    noise = f"not for task {config.task} of data.dataset {data.dataset}"
    need("evaluation.spelling_noise", free or not evaluation.spelling_noise, noise)
    for field in ("top_k", "top_p"):
        drawn = evaluation.temperature > 0 or getattr(evaluation, field) is None
        need(f"evaluation.{field}", drawn, "needs evaluation.temperature above 0")
    mean, kept = evaluation.average_checkpoints, config.train.keep_checkpoints
    takes = f"needs evaluation.checkpoint last, and at most train.keep_checkpoints={kept}"
    holds = mean == 1 or (name == "last" and mean <= kept)
    need("evaluation.average_checkpoints", holds, takes)
