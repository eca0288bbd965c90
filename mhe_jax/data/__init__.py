"""From files and data sets to batches, in three steps.

    read      text = open_split(config, "validation")       readers.py, text.py
    tokens    tokens_of(text, tokenizer, cache)             tokens.py, made once
    rows      blocks(...), packed(...), Pairs(...)          rows.py, packing.py

    batches.batch(step)     a pure function of (seed, step), see `batches.py`

The task of an experiment decides its sources, rows and batches: `mhe_jax.tasks`.
"""

# ruff: noqa: F401, what other rooms import

from pathlib import Path

from mhe_jax.config import Config, InputError
from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNK
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.places import path_of, source_path
from mhe_jax.data.batches import EvaluationBatches, TrainBatches
from mhe_jax.data.text import Text, open_source, open_split, open_train
from mhe_jax.data.tokenizer import Pieces, Tokenizer, read_model, train_tokenizer
from mhe_jax.data.tokenizer_json import JsonTokenizer
from mhe_jax.data.words import AnyTokenizer, HashedWords


def load_tokenizer(config: Config, path: str | Path) -> AnyTokenizer:
    """The tokenizer of a run; `read_tokenizer` reads its pieces, if it has any, from `path`."""
    pieces = read_tokenizer(config, path) if config.model.has_pieces else None
    return pieces if isinstance(pieces, Tokenizer) else HashedWords(config.model, pieces)


def tokenizer_file(config: Config) -> Path | None:
    """The file of pieces that a new run starts with; None if it trains its own or has none."""
    has_pieces, start, given = (
        config.model.has_pieces,
        config.train.init_from,
        config.data.tokenizer,
    )
    if has_pieces and start is not None:
        return path_of(start) / TOKENIZER
    return source_path(config.data.directory, given) if has_pieces and given is not None else None


def read_tokenizer(config: Config, path: str | Path) -> Pieces:
    """The pieces that `config` needs: `model.vocabulary_size`, or the features of hashed words."""
    model, size = read_model(path), config.model.vocabulary_size
    if config.model.hashing is not None:
        return Pieces(model, str(path))
    tokenizer = (JsonTokenizer if model[:1] == b"{" else Tokenizer)(model, str(path))
    if tokenizer.vocabulary_size != size:
        raise InputError(
            f"{path}: has {tokenizer.vocabulary_size} pieces, and model.vocabulary_size is {size}"
        )
    return tokenizer
