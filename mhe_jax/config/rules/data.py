"""Rules for what is trained on."""

import math
from collections.abc import Sequence
from pathlib import PurePath

from mhe_jax.config import (
    Config,
    InputError,
)
from mhe_jax.config.files import TABLES, file_format
from mhe_jax.config.places import RUNS, SOURCES, check_scheme
from mhe_jax.config.rules.ranges import refuse


def check_data(config: Config, trains: bool) -> None:
    """Checks sources, lengths and what goes with the task; an imported run has no text."""
    data, task, facts = config.data, config.task, config.facts
    check_scheme("data.directory", data.directory, SOURCES)
    check_scheme("data.tokenizer", data.tokenizer or "", SOURCES)
    check_scheme("data.cache_directory", data.cache_directory or "", ())
    check_scheme("train.init_from", config.train.init_from or "", RUNS)
    for split in ("train", "validation", "test"):
        for name in getattr(data, split):
            check_scheme(f"data.{split}", name, SOURCES)
    if data.sequence_length > config.model.max_length:
        raise refuse(
            "data.sequence_length",
            data.sequence_length,
            f"at most model.max_length={config.model.max_length}",
        )
    # A row has bos and a token, or packed an item's token and eos; cut into parts of nearly equal
    # length, none of them is a lone token.
    least = 4 if data.packing else 2
    if facts.content == "text" and data.sequence_length < least:
        packed = " with data.packing" if data.packing else ""
        takes = f"task {task} takes {least} or more{packed}"
        raise refuse("data.sequence_length", data.sequence_length, takes)
    rows = facts.rows
    if getattr(data, rows) % config.optimizer.accumulate_steps:
        raise refuse(
            "optimizer.accumulate_steps",
            config.optimizer.accumulate_steps,
            f"must divide data.{rows}={getattr(data, rows)}",
        )
    if trains and not data.train:
        raise InputError("data.train is not set: takes the text to train on")
    if config.train.init_from is not None and data.tokenizer is not None:
        none = "must be None: the tokenizer of train.init_from is used"
        raise refuse("data.tokenizer", data.tokenizer, none)
    batches = config.train.eval_batches
    if trains and batches is not None and facts.content == "pair":
        none = "must be None: the first batches of a translation split have its shortest pairs"
        raise refuse("train.eval_batches", batches, none)
    _check_labelled(config)
    for sources, _ in training_sources(config):
        _check_source(config, "train", sources)
    for split in ("validation", "test"):
        _check_source(config, split, getattr(data, split))
    buckets = data.length_buckets
    if not buckets:
        return
    if data.packing:
        one_length = "not with data.packing, whose rows have one length"
        raise refuse("data.length_buckets", buckets, one_length)
    if facts.content == "text":
        one_length = f"not for task {task}, whose rows have one length"
        raise refuse("data.length_buckets", buckets, one_length)
    if buckets[0] < 1 or any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
        raise refuse("data.length_buckets", buckets, "takes lengths above 0, in increasing order")
    if buckets[-1] != data.sequence_length:
        raise refuse(
            "data.length_buckets",
            buckets,
            f"the last must be data.sequence_length={data.sequence_length}",
        )


def _check_labelled(config: Config) -> None:
    data, task, facts = config.data, config.task, config.facts
    if not facts.labelled:
        if data.dataset != "own":
            raise refuse("data.dataset", data.dataset, f"must be own: task {task} has no labels")
        return
    for field in ("packing", "train_weights"):
        if getattr(data, field):
            raise refuse(f"data.{field}", getattr(data, field), f"not for task {task}")
    if config.train.eval_batches is not None:
        none = "must be None: official scores need all batches"
        raise refuse("train.eval_batches", config.train.eval_batches, none)
    if config.optimizer.label_smoothing and not facts.label_smoothing:
        smoothing = config.optimizer.label_smoothing
        raise refuse("optimizer.label_smoothing", smoothing, f"not for task {task}")
    if facts.questions:
        around = 3 if config.model.hashing is None else 4
        room = data.sequence_length - data.question_length - around
        if data.window_stride > room:
            raise refuse(
                "data.window_stride",
                data.window_stride,
                f"at most data.sequence_length - data.question_length - {around} = {room}",
            )
    elif data.sequence_length < 8:
        raise refuse("data.sequence_length", data.sequence_length, f"task {task} takes 8 or more")


def training_sources(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """The names of each training source, one or two parallel files, and its weight.

    Raises:
      InputError: `data.train_weights` has another number of weights, or one that is not above 0.
    """
    data = config.data
    if not data.train_weights:
        return [(data.train, 1.0)]
    for weight in data.train_weights:
        if not 0 < weight < math.inf:
            raise refuse("data.train_weights", data.train_weights, "takes finite numbers above 0")
    if not sum(data.train_weights) < math.inf:
        raise refuse("data.train_weights", data.train_weights, "their sum is not finite")
    sources, names = [], list(data.train)
    each = len(names) == len(data.train_weights)
    while names:
        alone = config.facts.content != "pair" or _is_whole(names[0])
        alone |= each and not PurePath(names[0]).suffix  # a directory, of whatever files
        sources.append(tuple(names[: 1 if alone else 2]))
        names = names[len(sources[-1]) :]
    if len(sources) != len(data.train_weights):
        raise refuse(
            "data.train_weights",
            data.train_weights,
            f"takes one for each source of data.train, which has {len(sources)}",
        )
    return list(zip(sources, data.train_weights, strict=True))


def _is_whole(name: str) -> bool:
    """Whether a source of pairs is complete by itself, and not one of two parallel files."""
    return file_format(PurePath(name)) in TABLES or name.startswith(("tfds:", "demo:"))


def _check_source(config: Config, split: str, sources: Sequence[str]) -> None:
    data, name = config.data, f"data.{split}"
    if not sources or config.facts.labelled:
        return
    if config.facts.content == "text":
        if len(sources) > 1:
            raise refuse(
                name,
                sources,
                f"takes one source; task {config.task} has no second text"
                + ("; several need data.train_weights" if split == "train" else ""),
            )
        if len(data.fields) != 1:
            raise refuse("data.fields", data.fields, f"task {config.task} takes one")
        return
    if len(sources) > 2:
        several = "; more need data.train_weights" if split == "train" else ""
        raise refuse(name, sources, f"takes one source or two parallel files{several}")
