"""From files and data sets to batches, in three steps.

    read      text = open_split(config, "validation")       readers.py, text.py
    tokens    tokens_of(text, tokenizer, cache)             tokens.py, made once
    rows      blocks(...), packed(...), bucketed(...)       rows.py, pairs.py, packing.py

    batches.batch(step)     a pure function of (seed, step), see `batches.py`

The task of an experiment decides its sources, rows and batches: `mhe_jax.tasks`.
"""

from pathlib import Path

from mhe_jax.config import Config
from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNK
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.places import path_of, source_path
from mhe_jax.data.batches import Batches, EvaluationBatches, TrainBatches
from mhe_jax.data.text import Text, open_source, open_split, open_train
from mhe_jax.data.tokenizer import Pieces, Tokenizer, train_tokenizer
from mhe_jax.data.tokenizer_json import JsonTokenizer, open_tokenizer
from mhe_jax.data.words import AnyTokenizer, HashedWords

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "NUM_SPECIAL",
    "PAD",
    "UNK",
    "AnyTokenizer",
    "Batches",
    "EvaluationBatches",
    "HashedWords",
    "JsonTokenizer",
    "Text",
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


def load_tokenizer(config: Config, path: str | Path) -> AnyTokenizer:
    """The tokenizer of a run; `read_tokenizer` reads its pieces, if it has any, from `path`."""
    pieces = read_tokenizer(config, path) if config.model.has_pieces else None
    return pieces if isinstance(pieces, Tokenizer) else HashedWords(config.model, pieces)


def tokenizer_file(config: Config) -> Path | None:
    """The file of pieces that a new run starts with; None if it trains its own or has none."""
    if not config.model.has_pieces:
        return None
    if config.train.init_from is not None:
        return path_of(config.train.init_from) / TOKENIZER
    if config.data.tokenizer is not None:
        return source_path(config.data.directory, config.data.tokenizer)
    return None


def read_tokenizer(config: Config, path: str | Path) -> Pieces:
    """Reads the pieces that `config` needs: a tokenizer, or the features of hashed words.

    Raises:
      InputError: they cannot be read, or a tokenizer does not have `model.vocabulary_size` pieces.
    """
    if config.model.hashing is not None:
        return Pieces.load(path)
    tokenizer = open_tokenizer(path)
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    return tokenizer
