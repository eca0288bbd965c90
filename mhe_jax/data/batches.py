"""What all batches have in common, and which batches an experiment has.

    global batch = f(seed, step)        process p of P holds its rows pR/P to (p + 1)R/P of R

Nothing else decides what a batch holds, so a run resumes from its step alone, with any number of
processes, and all processes see the same shape at the same step. Their parts one after the other
are the batch of one process, so that dropout, which goes by the place of a row, is the same too.
"""

from mhe_jax.config import Config, InputError
from mhe_jax.data.examples import Row
from mhe_jax.data.loader import BatchIterator
from mhe_jax.data.tokenizer import Tokenizer


class Batches:
    """Batches by number: `batch(step)`, or prefetched in order by `iterate(start_step)`."""

    def __init__(self, process_index: int = 0, process_count: int = 1):
        if not 0 <= process_index < process_count:
            raise ValueError(f"process {process_index} of {process_count}")
        self.process_index, self.process_count = process_index, process_count

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for the log: how much there is, and in which shapes."""
        raise NotImplementedError

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> BatchIterator:
        """Batches from `start_step` on, a few ahead of time in threads; close it when done."""
        return BatchIterator(self.batch, start_step, stop_step)

    def _own_rows(self, rows: int) -> slice:
        """The rows of a global batch that this process holds; `rows` must divide evenly."""
        if rows % self.process_count:
            raise InputError(
                f"a batch of {rows} rows cannot be split over {self.process_count} processes"
            )
        own = rows // self.process_count
        return slice(self.process_index * own, (self.process_index + 1) * own)


class TrainBatches(Batches):
    """Endless. `steps_per_epoch` batches see all the text once; it need not be whole."""

    steps_per_epoch: float


class EvaluationBatches(Batches):
    """Finite: the whole split once, in the same order and with the same masks every time.

    The last rows of the last batch are padding with weight 0 where the split gives no more.
    `num_words` counts what stands between blanks in all that is predicted, and one end for each
    line: the denominator of a perplexity per word.
    """

    num_words: int

    def __len__(self) -> int:
        raise NotImplementedError

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> BatchIterator:
        """Batches from `start_step` on, to the end of the split or to before `stop_step`."""
        stop = len(self) if stop_step is None else min(stop_step, len(self))
        return BatchIterator(self.batch, start_step, stop)

    def __iter__(self) -> BatchIterator:
        return self.iterate()

    def _check(self, step: int) -> None:
        if not 0 <= step < len(self):
            raise IndexError(f"batch {step} of {len(self)}")


def train_batches(
    config: Config, tokenizer: Tokenizer, *, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """The batches that an experiment trains on.

    Raises:
      InputError: something is wrong with `data.train`, or the tokenizer does not fit the model.
    """
    from mhe_jax.data import blocks, pairs

    tokenizer.check_vocabulary(config.model.vocabulary_size)
    make = pairs.TrainPairs if config.task == "translation" else blocks.TrainBlocks
    return make(config, tokenizer, process_index, process_count)


def evaluation_batches(
    config: Config,
    tokenizer: Tokenizer,
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
    from mhe_jax.data import blocks, pairs

    tokenizer.check_vocabulary(config.model.vocabulary_size)
    make = pairs.EvaluationPairs if config.task == "translation" else blocks.EvaluationBlocks
    rows = config.evaluation.batch_size if batch_size is None else batch_size
    return make(config, tokenizer, split, rows, process_index, process_count)
