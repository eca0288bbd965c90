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
    evaluation_batches,
    train_batches,
)
from mhe_jax.data.index import file_path
from mhe_jax.data.loader import BatchIterator
from mhe_jax.data.sources import Source, open_source, open_split, open_train
from mhe_jax.data.tasks import resolve
from mhe_jax.data.tokenizer import (
    BOS,
    EOS,
    MASK,
    NUM_SPECIAL,
    PAD,
    UNK,
    Tokenizer,
    train_tokenizer,
)

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "NUM_SPECIAL",
    "PAD",
    "UNK",
    "BatchIterator",
    "Batches",
    "EvaluationBatches",
    "Source",
    "Tokenizer",
    "TrainBatches",
    "check_sources",
    "evaluation_batches",
    "make_tokenizer",
    "open_source",
    "open_split",
    "open_train",
    "resolve",
    "train_batches",
    "train_tokenizer",
]

TOKENIZER = "tokenizer.model"  # of a run, in its workdir


def check_sources(config: Config, splits: tuple[str, ...] = ("train", "validation")) -> None:
    """Opens and checks all of the splits that are set, and the tokenizer that is given.

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
    if _tokenizer_file(config) is not None:
        _given_tokenizer(config)


def make_tokenizer(config: Config, path: str | Path) -> Tokenizer:
    """The tokenizer of a run, kept at `path`.

    What is at `path` already is used (a run that resumes keeps its tokenizer); else the model that
    `data.tokenizer` names, that of the run `train.init_from`, or one trained on `data.train`, is
    published there. All processes of a run may do this at the same time: they publish the same
    bytes.

    Raises:
      InputError: it does not have `model.vocabulary_size` pieces, or cannot.
    """
    path = Path(path)
    if path.exists():
        tokenizer = Tokenizer.load(path)
        tokenizer.check_vocabulary(config.model.vocabulary_size)
        return tokenizer
    if _tokenizer_file(config) is not None:
        tokenizer = _given_tokenizer(config)
    else:
        labelled = config.task in LABELLED
        source = tasks.text_of(config) if labelled else open_train(config)
        tokenizer = train_tokenizer(source, config.model.vocabulary_size)
    tokenizer.save(path)
    return Tokenizer(tokenizer.model, str(path))


def _tokenizer_file(config: Config) -> Path | None:
    if config.train.init_from is not None:
        return Path(config.train.init_from) / TOKENIZER
    if config.data.tokenizer is not None:
        return file_path(config.data.directory, config.data.tokenizer)
    return None


def _given_tokenizer(config: Config) -> Tokenizer:
    tokenizer = Tokenizer.load(_tokenizer_file(config) or "")
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    return tokenizer
