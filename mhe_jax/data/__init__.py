"""From files and data sets to batches: sources, tokens, examples, batches.

    sources = open_train(config)                what counts as a source stands in `sources.py`
    tokenizer = load_tokenizer(config, path)    what a run has kept
    row = examples.lm_row(ids, length)          arrays of a row stand in `examples.py`
    batches.batch(step)                         a pure function of (seed, step), see `batches.py`

Which sources, rows and batches an experiment has is for its task to say: `mhe_jax.tasks`.
"""

from pathlib import Path

from mhe_jax.config import Config
from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNK
from mhe_jax.data.batches import (
    Batches,
    EvaluationBatches,
    TrainBatches,
)
from mhe_jax.data.index import file_path
from mhe_jax.data.loader import BatchIterator
from mhe_jax.data.opening import open_source, open_split, open_train
from mhe_jax.data.sources import Source
from mhe_jax.data.tokenizer import Pieces, Tokenizer, train_tokenizer
from mhe_jax.data.words import AnyTokenizer, HashedWords

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "NUM_SPECIAL",
    "PAD",
    "UNK",
    "AnyTokenizer",
    "BatchIterator",
    "Batches",
    "EvaluationBatches",
    "HashedWords",
    "Source",
    "Tokenizer",
    "TrainBatches",
    "load_tokenizer",
    "open_source",
    "open_split",
    "open_train",
    "read_tokenizer",
    "tokenizer_file",
    "train_tokenizer",
]

TOKENIZER = "tokenizer.model"  # of a run, in its workdir


def load_tokenizer(config: Config, path: str | Path) -> AnyTokenizer:
    """The tokenizer that a run has kept at `path`.

    Raises:
      InputError: it is not there, or does not have `model.vocabulary_size` pieces.
    """
    if config.model.hashing is not None:
        return HashedWords(config.model, Pieces.load(path) if config.model.has_pieces else None)
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    return tokenizer


def tokenizer_file(config: Config) -> Path | None:
    """The model that a new run is told to take; None where it trains its own or needs none."""
    if not config.model.has_pieces:
        return None
    if config.train.init_from is not None:
        return Path(config.train.init_from) / TOKENIZER
    if config.data.tokenizer is not None:
        return file_path(config.data.directory, config.data.tokenizer)
    return None


def read_tokenizer(config: Config, path: Path) -> Pieces:
    """The model that a new run is told to take.

    Raises:
      InputError: it cannot be read, or does not have `model.vocabulary_size` pieces.
    """
    if config.model.hashing is not None:
        return Pieces.load(path)
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    return tokenizer
