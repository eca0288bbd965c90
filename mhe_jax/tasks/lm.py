"""Language modelling: a decoder predicts each token from those before it.

tokens [T]  labels [T]  weights [T]      tokens are bos and all labels but the last
"""

import flax.linen as nn

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data import AnyTokenizer, EvaluationBatches, examples
from mhe_jax.data.rows import EvaluationBlocks, RowMaker
from mhe_jax.model import LanguageModel
from mhe_jax.tasks.flops import decoder_layer_flops, logits_flops
from mhe_jax.tasks.metrics import perplexity
from mhe_jax.tasks.running_text import TextTask
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Result, TrainedRun, finite

MAKER = RowMaker(lambda ids, length, _: examples.lm_row(ids, length), begin=0)


class LanguageModeling(TextTask):
    """Task `lm`; a row predicts T tokens, each from bos and those before it in the row."""

    metrics = ("perplexity_per_word", "perplexity_per_token")
    search = "generate"

    def model(self, config: ModelConfig) -> nn.Module:
        return LanguageModel(config)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        return MAKER

    def scored_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """Blocks without overlap, or with `evaluation.stride` sliding windows."""
        stride = config.evaluation.stride
        return self.blocks(config, tokenizer, split, batch_size, *process, stride=stride)

    def step_flops(self, config: Config, rows: int) -> float:
        m = config.model
        token = m.num_layers * decoder_layer_flops(config) + logits_flops(m)
        return 3.0 * rows * config.data.sequence_length * token

    def evaluate(self, run: TrainedRun) -> Result:
        """Perplexity per token, and per word to compare different tokenizers.

        Words are separated by white space in the raw text, and the end of each line counts as one.
        """
        found, batches, seconds = run.outputs()
        assert isinstance(batches, EvaluationBlocks)
        sums, words = finite(run, total(found)), batches.num_words
        metrics = ratios(sums)
        return {
            **run.described(),
            "loss": metrics["loss"],
            "accuracy": metrics["accuracy"],
            "perplexity_per_token": perplexity(sums["nats"], sums["count"]),
            "perplexity_per_word": perplexity(sums["nats"], words),
            "stride": run.evaluation.stride,
            "nats": sums["nats"],
            "tokens": int(sums["count"]),
            "words": words,
            "seconds": seconds,
            "tokens_per_second": sums["tokens"] / seconds,
        }
