"""Transformers for each task, every attention sublayer of a kind that the config names.

`make_model(task, config)` gives a Linen module; all take token ids and return float32 logits:

    mlm              MaskedLanguageModel   (tokens [B, T], masked_positions [B, P]) -> [B, P, V]
    shuffle_random   ShuffleRandomClassifier  (tokens [B, T]) -> [B, T, 3]
    lm               LanguageModel         (tokens [B, T]) -> [B, T, V]
    translation      EncoderDecoder        (sources [B, S], targets [B, T]) -> [B, T, V]
    classification   Classifier            (tokens, token_types, marks [B, T]) -> [B, C]
    regression       Regressor             (tokens, token_types, marks [B, T]) -> [B], numbers
    multiple_choice  ChoiceScorer          (tokens, token_types, marks [B, C, T]) -> [B, C]
    span             SpanFinder            (tokens, token_types, marks [B, T]) -> [B, 2, T]

Of hashed words without a table tokens are types, and come with signatures [..., T, 16], by name.

`lm` and `translation` decode over a cache: `start_cache`, then `decode_step` with T ≥ 1 tokens a
call.

Logical axis names. Parameters: embed, mlp, vocabulary, positions, token_types, norm, layers, and
those of attention (heads, kv_heads, head_features). Activations: batch, length, activation_embed,
activation_mlp, activation_vocabulary, activation_heads.
"""

import flax.linen as nn

from mhe_jax.config import ModelConfig, Task
from mhe_jax.model.encoder import MaskedLanguageModel, ShuffleRandomClassifier
from mhe_jax.model.encoder_decoder import EncoderDecoder
from mhe_jax.model.heads import ChoiceScorer, Classifier, Regressor, SpanFinder
from mhe_jax.model.language_model import LanguageModel
from mhe_jax.model.stack import count_parameters, stack_layers, unroll_layers

MODELS = {
    "mlm": MaskedLanguageModel,
    "shuffle_random": ShuffleRandomClassifier,
    "lm": LanguageModel,
    "translation": EncoderDecoder,
    "classification": Classifier,
    "regression": Regressor,
    "multiple_choice": ChoiceScorer,
    "span": SpanFinder,
}

__all__ = [
    "MODELS",
    "ChoiceScorer",
    "Classifier",
    "EncoderDecoder",
    "LanguageModel",
    "MaskedLanguageModel",
    "Regressor",
    "ShuffleRandomClassifier",
    "SpanFinder",
    "count_parameters",
    "make_model",
    "stack_layers",
    "unroll_layers",
]


def make_model(task: Task, config: ModelConfig) -> nn.Module:
    """The model that learns `task`.

    >>> make_model("lm", ModelConfig()).__class__.__name__
    'LanguageModel'
    """
    return MODELS[task](config)
