"""The common part of the tasks on running text: rows of one shape, cut from a source."""

from mhe_jax.config import Config
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Tokenizer, TrainBatches, examples
from mhe_jax.data.blocks import EvaluationBlocks, RowMaker, TrainBlocks
from mhe_jax.data.examples import Row
from mhe_jax.data.mixture import MixedRows
from mhe_jax.data.opening import open_train
from mhe_jax.data.packed import PackedText
from mhe_jax.tasks.task import Task


class TextTask(Task):
    """A task on running text; `maker` of a subclass says how tokens become a row."""

    inputs = ("tokens",)
    segments = ("segments",)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """How the tokens of a text become a row."""
        raise NotImplementedError

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Rows of running text, or rows packed with several items each."""
        maker, sources = self.maker(config, tokenizer), open_train(config)
        process = (process_index, process_count)
        if config.data.packing:
            assert isinstance(tokenizer, Tokenizer)
            parts = [PackedText(config, tokenizer, s, maker, *process) for s, _ in sources]
        else:
            parts = [TrainBlocks(config, tokenizer, s, maker, *process) for s, _ in sources]
        weights = [weight for _, weight in sources]
        return parts[0] if len(parts) == 1 else MixedRows(parts, weights, config.train.seed)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """The split cut into rows without gap or overlap."""
        maker = self.maker(config, tokenizer)
        return EvaluationBlocks(config, tokenizer, split, batch_size, maker, *process)

    def empty_row(self, config: Config) -> Row:
        """Tokens, labels and weights, all of the length of a row."""
        return examples.lm_row([], config.data.sequence_length)
