"""From files and data sets to batches.

    config = resolve(config)                    # with the labels that the data has
    check_sources(config)                       # all that can be wrong with the input, early
    tokenizer = make_tokenizer(config, path)    # read, or trained on data.train; kept at path
    batches = train_batches(config, tokenizer)  # endless
    with batches.iterate(step) as iterator:     # or batches.batch(step)
        for batch in iterator: ...
    for batch in evaluation_batches(config, tokenizer, "validation"): ...

A global batch is a pure function of (seed, step), see `batches.py`; its arrays stand in
`examples.py`; what counts as a source, in `sources.py`.
"""

from pathlib import Path

from mhe_jax.config import LABELLED, Config
from mhe_jax.data import tasks
from mhe_jax.data.batches import (
    Batches,
    EvaluationBatches,
    TrainBatches,
)
from mhe_jax.data.choice import evaluation_batches, train_batches
from mhe_jax.data.index import file_path
from mhe_jax.data.loader import BatchIterator
from mhe_jax.data.opening import open_source, open_split, open_train
from mhe_jax.data.sources import Source
from mhe_jax.data.tasks import resolve
from mhe_jax.data.tokenizer import (
    BOS,
    EOS,
    MASK,
    NUM_SPECIAL,
    PAD,
    UNK,
    Pieces,
    Tokenizer,
    train_tokenizer,
)
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
    "check_sources",
    "evaluation_batches",
    "load_tokenizer",
    "make_tokenizer",
    "open_source",
    "open_split",
    "open_train",
    "resolve",
    "tokenizer_file",
    "train_batches",
    "train_tokenizer",
]

TOKENIZER = "tokenizer.model"  # of a run, in its workdir


def check_sources(config: Config, splits: tuple[str, ...] = ("train", "validation")) -> None:
    """Opens and checks all of the splits that are set, and the tokenizer given to a new run.

    Raises:
      InputError: one line with file, line and reason.
    """
    for split in splits:
        if split != "train" and not getattr(config.data, split):
            continue
        if config.task in LABELLED:
            tasks.check_split(config, split)
        elif split == "train":
            open_train(config)
        else:
            open_split(config, split)
    if config.task == "shuffle_random":
        tasks.scores.require_sklearn("task shuffle_random needs")
    if tokenizer_file(config) is not None and not (Path(config.workdir) / TOKENIZER).exists():
        _given_tokenizer(config)


def make_tokenizer(config: Config, path: str | Path) -> AnyTokenizer:
    """The tokenizer of a run, kept at `path`; `md_` words need none.

    What is at `path` already is used (a run that resumes keeps its tokenizer); else the model that
    `data.tokenizer` names, that of the run `train.init_from`, or one trained on `data.train`, is
    published there. All processes of a run may do this at the same time: they publish the same
    bytes.

    Raises:
      InputError: it does not have `model.vocabulary_size` pieces, or cannot.
    """
    path = Path(path)
    if path.exists() or not config.model.has_pieces:
        return load_tokenizer(config, path)
    if tokenizer_file(config) is not None:
        tokenizer = _given_tokenizer(config)
    else:
        labelled = config.task in LABELLED
        source = tasks.text_of(config) if labelled else open_train(config)
        lsh = config.model.hashing is not None
        option = "data.lsh_pieces" if lsh else "model.vocabulary_size"
        size = config.data.lsh_pieces if lsh else config.model.vocabulary_size
        tokenizer = train_tokenizer(source, size, option)
    tokenizer.save(path)
    return load_tokenizer(config, path)


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


def _given_tokenizer(config: Config) -> Pieces:
    path = tokenizer_file(config) or ""
    if config.model.hashing is not None:
        return Pieces.load(path)
    tokenizer = Tokenizer.load(path)
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    return tokenizer
