"""Rules for what is trained on, and for how a run is scored."""

import itertools
from functools import partial
from pathlib import PurePath

from mhe_jax.config import FACTS, Config
from mhe_jax.config.fields import only, require
from mhe_jax.config.files import TABLES, file_format
from mhe_jax.config.places import RUNS, check_scheme, scheme_of


def check_data(config: Config, trains: bool) -> None:
    """Checks places, sources, lengths and what goes with the task; an imported run has no text."""
    need, may = partial(require, config), partial(only, config)
    data, facts = config.data, config.facts
    length, steps, task = data.sequence_length, config.train.profile_steps, f"task {config.task}"
    check_scheme("workdir", config.workdir, RUNS)
    need("workdir", config.workdir, "takes a directory, or gs://bucket/name")
    local = len(steps) == 2 and steps[0] <= steps[1] and not scheme_of(config.workdir)
    may("train.profile_steps", local, "takes a first and a last step, and a local workdir")
    most = config.model.max_length
    need("data.sequence_length", length <= most, f"at most model.max_length={most}")
    rows = getattr(data, facts.rows)
    whole = rows % config.optimizer.accumulate_steps == 0
    need("optimizer.accumulate_steps", whole, f"must divide data.{facts.rows}={rows}")
    need("data.train", data.train or not trains, "takes the text to train on")
    scratch = config.train.init_from is None
    may("data.tokenizer", scratch, "must be None: train.init_from has a tokenizer")
    some = facts.content == "text" or not trains
    may("train.eval_batches", some, "must be None: the first batches are no fair sample")
    may("data.dataset", facts.labelled, f"must be own: {task} has no labels")
    may("optimizer.label_smoothing", facts.label_smoothing, f"not for {task}")
    may("data.train_weights", not facts.labelled, f"not for {task}")
    if not facts.labelled:
        pair = facts.content == "pair"
        need("data.fields", pair or len(data.fields) == 1, f"{task} takes one")
        takes = "one source or two parallel files" if pair else "one source"
        takes = f"takes {takes}; several of data.train need data.train_weights"
        splits = [("train", names) for names, _ in training_sources(config)]
        for split, names in (*splits, ("validation", data.validation), ("test", data.test)):
            need(f"data.{split}", len(names) <= 1 + pair, takes)
    if facts.questions:
        around = 3 if config.model.hashing is None else 4
        room = length - data.question_length - around
        allowed = f"at most data.sequence_length - data.question_length - {around} = {room}"
        need("data.window_stride", data.window_stride <= room, allowed)
    several = not data.packing and facts.content != "text"
    may("data.length_buckets", several, "not where all rows have one length")
    buckets = data.length_buckets
    grow = all(a < b for a, b in itertools.pairwise(buckets)) and length in buckets[-1:]
    last = f"takes growing lengths, the last data.sequence_length={length}"
    may("data.length_buckets", grow, last)


def training_sources(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """The names of each training source, one or two parallel files, and its weight."""
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
    need, may = partial(require, config), partial(only, config)
    data, facts = config.data, config.facts
    evaluation, name, length = config.evaluation, config.evaluation.checkpoint, data.sequence_length
    sampled = config.task == "translation" and data.validation
    which = f"task translation with data.validation only, not {config.task}"
    may("train.eval_translate", sampled, which)
    known = name in ("best", "last") or (name.isascii() and name.isdigit())
    need("evaluation.checkpoint", known, "takes best, last or a step number")
    which = ", ".join(task for task, of in FACTS.items() if of.stride)
    may("evaluation.stride", facts.stride, f"{which} only")
    inside = (evaluation.stride or 1) <= length
    need("evaluation.stride", inside, f"at most data.sequence_length={length}")
    # Where positions in the texts matter, a misspelt word would move them.
    free = facts.labelled and not facts.questions and data.dataset not in ("wic", "wsc")
    noise = f"not for task {config.task} of data.dataset {data.dataset}"
    may("evaluation.spelling_noise", free, noise)
    for field in ("top_k", "top_p"):
        drawn = evaluation.temperature > 0
        may(f"evaluation.{field}", drawn, "needs evaluation.temperature above 0")
    kept = config.train.keep_checkpoints
    takes = f"needs evaluation.checkpoint last, and at most train.keep_checkpoints={kept}"
    several = name == "last" and evaluation.average_checkpoints <= kept
    may("evaluation.average_checkpoints", several, takes)
