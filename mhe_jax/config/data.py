"""Where text comes from, and how it becomes batches."""

from dataclasses import dataclass
from typing import Literal

from mhe_jax.config.values import Count, Positive, Rate

# The special tokens: the first ids of every vocabulary.
PAD, UNK, BOS, EOS, MASK = range(5)
NUM_SPECIAL = 5

# Data sets of labelled examples, see `tasks/labelled/table.py`; `own` is any other.
Glue = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
SuperGlue = Literal["boolq", "cb", "copa", "multirc", "superglue_rte", "wic", "wsc"]
PublishedDataset = Literal[Glue, SuperGlue, "squad", "squad_v2"]
Dataset = Literal["own", PublishedDataset]


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes batches.

    A split is one source, or for translation two parallel text files. A source is a text file, a
    `.tsv`, `.csv` or `.jsonl` file, each also as `.gz` or `.xz`, a `.parquet` file, all files of a
    directory or pattern, any of them in a bucket, or `tfds:NAME/CONFIG:SPLIT`. A split of
    labelled examples is one or more tables, read one after the other.
    """

    # Where relative paths below start.
    directory: str = "."
    # Training source: one, or two parallel text files; several with `train_weights`.
    train: tuple[str, ...] = ()
    # A weight for each of several training sources: the share of rows drawn from it.
    train_weights: tuple[Positive, ...] = ()
    # Read only the first examples of each split, for a quick look; None reads all.
    max_examples: Count | None = None
    # Validation source; chooses the best checkpoint.
    validation: tuple[str, ...] = ()
    # Test source; read by eval.py only.
    test: tuple[str, ...] = ()
    # Text fields in JSONL, Parquet or TFDS: one, or source and target, or those of `own` examples.
    # Dots lead to nested ones: `translation.en`.
    fields: tuple[str, ...] = ("text",)
    # A sentencepiece model, or a `tokenizer.json`, whose pieces are renumbered, special tokens
    # first; None trains a model on `train`.
    tokenizer: str | None = None
    # Pieces of the sentencepiece model that a run with LSH trains.
    lsh_pieces: Count = 8000
    # For tokens, and copies of files in buckets; None: $MHE_JAX_CACHE or ~/.cache/mhe_jax.
    cache_directory: str | None = None
    # Tokens in a row; longer sentences of translation do not train, and labelled examples are cut.
    sequence_length: Count = 128
    # Pack several examples (lines, or pairs) into each training row; none sees another.
    packing: bool = False
    # Rows in a global batch of all tasks but translation.
    batch_size: Count = 32
    # Padded source plus target tokens in a global batch of translation.
    tokens_per_batch: Count = 4096
    # Padded lengths of batches of pairs and labelled examples; the last is sequence_length.
    length_buckets: tuple[Count, ...] = ()
    # Rows of a translation batch are a multiple of this, and this is one of
    # mesh.data * mesh.fsdp * optimizer.accumulate_steps.
    row_multiple: Count = 8
    # Share of the tokens that MLM predicts; 80 % of them masked, 10 % random, 10 % kept.
    mask_rate: Rate = 0.15
    # Share of the words that `shuffle_random` moves, and of the others that it replaces.
    corruption_rate: Rate = 0.1
    # Data set of labelled examples; `own` has the texts in `fields`, the label in `label_field`.
    dataset: Dataset = "own"
    # Column or field of the label of `own` examples.
    label_field: str = "label"
    # Names of the labels, in order; () takes those of the data set, or of `own` training examples.
    labels: tuple[str, ...] = ()
    # Tokens from one window over a long text to the next (task span).
    window_stride: Count = 128
    # A question is cut to this many tokens (task span).
    question_length: Count = 64
