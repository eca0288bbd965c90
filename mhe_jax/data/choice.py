"""Which batches an experiment has."""

from mhe_jax.config import LABELLED, Config
from mhe_jax.data import blocks, mixture, packed, pairs
from mhe_jax.data.batches import EvaluationBatches, TrainBatches
from mhe_jax.data.opening import open_train
from mhe_jax.data.tasks import batches
from mhe_jax.data.tokenizer import Tokenizer
from mhe_jax.data.words import AnyTokenizer


def train_batches(
    config: Config, tokenizer: AnyTokenizer, *, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """The batches that an experiment trains on.

    Raises:
      InputError: something is wrong with `data.train`, or the tokenizer does not fit the model.
    """
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    process = (process_index, process_count)
    if config.task in LABELLED:
        return batches.TrainExamples(config, tokenizer, *process)
    sources = open_train(config)
    translation, seed = config.task == "translation", config.train.seed
    weights = [weight for _, weight in sources]
    if not (translation or config.data.packing):
        parts = [blocks.TrainBlocks(config, tokenizer, source, *process) for source, _ in sources]
        return parts[0] if len(parts) == 1 else mixture.MixedRows(parts, weights, seed)
    assert isinstance(tokenizer, Tokenizer)
    if not config.data.packing:
        buckets = pairs.buckets_for(config, tokenizer, [source for source, _ in sources])
        parts = [
            pairs.TrainPairs(config, tokenizer, source, buckets, *process) for source, _ in sources
        ]
        return parts[0] if len(parts) == 1 else mixture.MixedBatches(parts, weights, seed)
    make = packed.PackedPairs if translation else packed.PackedText
    parts = [make(config, tokenizer, source, *process) for source, _ in sources]
    return parts[0] if len(parts) == 1 else mixture.MixedRows(parts, weights, seed)


def evaluation_batches(
    config: Config,
    tokenizer: AnyTokenizer,
    split: str,
    *,
    batch_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> EvaluationBatches:
    """All of `split` (`validation`, `test` or `train`), `batch_size` rows at a time.

    `batch_size` is that of all processes together; None means `evaluation.batch_size`.

    Raises:
      InputError: something is wrong with the split, or the tokenizer does not fit the model.
    """
    tokenizer.check_vocabulary(config.model.vocabulary_size)
    rows = config.evaluation.batch_size if batch_size is None else batch_size
    process = (process_index, process_count)
    if config.task == "translation":
        assert isinstance(tokenizer, Tokenizer)
        return pairs.EvaluationPairs(config, tokenizer, split, rows, *process)
    make = batches.EvaluationExamples if config.task in LABELLED else blocks.EvaluationBlocks
    return make(config, tokenizer, split, rows, *process)
