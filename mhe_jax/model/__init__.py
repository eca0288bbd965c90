"""Transformers whose attention sublayers are of the kinds that the config names.

Each is a Linen module that takes a `ModelConfig`; all take token ids and return float32 logits:

    MaskedLanguageModel      (tokens [B, T], masked_positions [B, P]) -> [B, P, V]
    ShuffleRandomClassifier  (tokens [B, T]) -> [B, T, 3]
    LanguageModel            (tokens [B, T]) -> [B, T, V]
    EncoderDecoder           (sources [B, S], targets [B, T]) -> [B, T, V]
    Classifier               (tokens, token_types, marks [B, T]) -> [B, C]
    Regressor                (tokens, token_types, marks [B, T]) -> [B], [B, C, T] -> [B, C]
    SpanFinder               (tokens, token_types, marks [B, T]) -> [B, 2, T]

For hashed words without a table, tokens are types, and signatures [..., T, 16] are passed by name.

`LanguageModel` and `EncoderDecoder` decode over a cache: `start_cache`, then `decode_step` with
T ≥ 1 tokens per call.
Logical axis names are those of `training.sharding.RULES`.
"""

from mhe_jax.model.decoder import EncoderDecoder, LanguageModel
from mhe_jax.model.encoder import (
    Classifier,
    MaskedLanguageModel,
    Regressor,
    ShuffleRandomClassifier,
    SpanFinder,
)
from mhe_jax.model.stack import count_parameters, stack_layers, unroll_layers

__all__ = [
    "Classifier",
    "EncoderDecoder",
    "LanguageModel",
    "MaskedLanguageModel",
    "Regressor",
    "ShuffleRandomClassifier",
    "SpanFinder",
    "count_parameters",
    "stack_layers",
    "unroll_layers",
]
