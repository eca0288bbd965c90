"""Translation: an encoder reads a source, a decoder predicts each token of its target.

source [S]  target [T]  labels [T]  weights [T]      target is bos and all labels but the last
"""

import flax.linen as nn

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.fields import set_field
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Tokenizer, TrainBatches, open_split, pairs
from mhe_jax.data.examples import Row, translation_row
from mhe_jax.data.mixture import MixedBatches, MixedRows
from mhe_jax.data.opening import open_train
from mhe_jax.data.packed import PackedPairs
from mhe_jax.model import EncoderDecoder
from mhe_jax.tasks.flops import attention_flops, decoder_layer_flops, encoder_flops, logits_flops
from mhe_jax.tasks.metrics import check_bleu, translation_scores
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Result, Task, TrainedRun, finite


class Translation(Task):
    """Task `translation`, on pairs of texts."""

    inputs = ("source", "target")
    segments = ("source_segments", "target_segments")
    metrics = ("bleu",)
    search = "translate"

    def model(self, config: ModelConfig) -> nn.Module:
        """(sources [B, S], targets [B, T]) -> logits [B, T, V]."""
        return EncoderDecoder(config, right_padded=True)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Pairs of similar length, or rows packed with several pairs each."""
        assert isinstance(tokenizer, Tokenizer)
        data, seed, process = config.data, config.train.seed, (process_index, process_count)
        sources, weights = zip(*open_train(config), strict=True)
        if data.packing:
            parts = [PackedPairs(data, seed, tokenizer, source, *process) for source in sources]
            return parts[0] if len(parts) == 1 else MixedRows(parts, weights, seed)
        buckets = pairs.buckets_for(data, tokenizer, sources)
        parts = [
            pairs.TrainPairs(data, seed, tokenizer, source, buckets, *process) for source in sources
        ]
        return parts[0] if len(parts) == 1 else MixedBatches(parts, weights, seed)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All pairs in order of length."""
        assert isinstance(tokenizer, Tokenizer)
        source, longest = open_split(config, split), config.model.max_length
        return pairs.EvaluationPairs(config.data, longest, tokenizer, source, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        """A row without text, of the longest bucket."""
        return translation_row([], [], config.data.sequence_length)

    def rows_per_batch(self, config: Config) -> int:
        """Pairs in a batch of the longest bucket."""
        return pairs.rows_of(config.data, config.data.sequence_length)

    def with_rows(self, config: Config, rows: int) -> Config:
        """The config with `rows` pairs in a batch of the longest bucket."""
        tokens = 2 * rows * config.data.sequence_length
        return set_field(config, "data.tokens_per_batch", tokens)

    def row_multiple(self, config: Config) -> int:
        """`data.row_multiple`."""
        return config.data.row_multiple

    def step_flops(self, config: Config, rows: int) -> float:
        """Encoder, decoder with cross-attention, and logits at each token."""
        m, T = config.model, config.data.sequence_length
        layer = decoder_layer_flops(config) + attention_flops(config, "cross", T)
        decoder = m.decoder_layers * layer
        return 3.0 * rows * T * (encoder_flops(config) + decoder + logits_flops(m))

    def evaluate(self, run: TrainedRun) -> Result:
        """BLEU, chrF and exact matches of a split; SPLIT.hypotheses.txt has what was scored.

        Also loss, accuracy and perplexity of the references, as in validation.
        """
        evaluation = run.evaluation
        source = open_split(run.config, evaluation.split)
        texts, references = [], []
        for number in range(len(source)):
            text, reference = source[number]
            texts.append(text)
            references.append(reference)
        check_bleu(evaluation.bleu_tokenizer)
        sums = finite(run, total(run.outputs()[0]))
        translations, cost = run.translations(texts)
        hypotheses = [translation.text for translation in translations]
        run.publish("hypotheses.txt", "".join(f"{hypothesis}\n" for hypothesis in hypotheses))
        seconds = max(cost.decode_seconds, 1e-9)
        return {
            **run.described(),
            **translation_scores(hypotheses, references, evaluation.bleu_tokenizer),
            **ratios(sums),
            "beam_size": evaluation.beam_size,
            "length_penalty": evaluation.length_penalty,
            "min_length": evaluation.min_length,
            "extra_length": evaluation.extra_length,
            "bleu_tokenizer": evaluation.bleu_tokenizer,
            "sentences": len(texts),
            "truncated_sources": sum(translation.truncated for translation in translations),
            "output_tokens": cost.tokens,
            "seconds": cost.decode_seconds,
            "compile_seconds": cost.compile_seconds,
            "sentences_per_second": cost.sentences / seconds,
            "output_tokens_per_second": cost.tokens / seconds,
        }
