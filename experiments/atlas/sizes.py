"""Sizes of whole models in closed form, and the shapes that give a model a wanted size.

Of language models and translation with tied embeddings and norms before each sublayer, which is
what configs/wikitext2_lm.py, configs/llama_lm.py and configs/multi30k.py have.
"""

import functools
from typing import Any

from mhe_jax.attention import cost
from mhe_jax.config import Config
from mhe_jax.config.fields import set_field
from mhe_jax.model.layers import attention_module
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cost import sublayers

# Layers more that are tried.
MORE = range(1, 13)
# Widths of MLPs are multiples of it.
MULTIPLE = 8

Fields = dict[str, Any]


def changed(config: Config, fields: Fields) -> Config:
    return functools.reduce(lambda c, field: set_field(c, *field), fields.items(), config)


def of_attention(config: Config) -> int:
    """Parameters of all attention sublayers."""
    m = config.model
    counts = sublayers(config).items()
    return sum(n * cost.parameters(attention_module(m, role), m.features) for role, n in counts)


def parameters(config: Config) -> int:
    """V·M + P·M + Σ_sublayers (A + N) + Σ_MLPs (W + N) + N of the norm after each stack.

    A are those of an attention sublayer, P the rows of learned positions. A LayerNorm has N = 2M,
    an RMSNorm M. An MLP has W = 2MF (plain) or 3MF (gated), and with biases F + M or 2F + M more.
    """
    m = config.model
    M, F = m.features, m.mlp_features
    norm, inner = 2 * M if m.norm == "layer" else M, 2 if m.mlp == "gated" else 1
    mlp = (inner + 1) * M * F + (inner * F + M if m.mlp_bias else 0)
    total = m.vocabulary_size * M + (m.max_length * M if m.positions == "learned" else 0)
    total += of_attention(config)
    for role, count in sublayers(config).items():
        total += count * norm
        if role != "cross":
            total += count * (mlp + norm) + norm
    return total


def flops(config: Config) -> float:
    """Of training, for each token of a row that is full (`mhe_jax.tasks.cost.FORMULA`)."""
    return TASKS[config.task].step_flops(config, 1) / config.data.sequence_length


def wider(config: Config, wanted: int) -> Fields:
    """The MLP's width that brings the model nearest to `wanted` parameters."""
    one, two = (parameters(changed(config, {"model.mlp_features": F})) for F in (1, 2))
    eights = round((1 + (wanted - one) / (two - one)) / MULTIPLE)
    return {"model.mlp_features": MULTIPLE * eights}


def deeper(config: Config, wanted: int) -> Fields:
    """The depth, at least a layer more, nearest to `wanted` parameters; then the MLP's width.

    Layers are added to encoder and decoder in turn, the encoder first.
    """

    def more(count: int) -> Fields:
        m = config.model
        if "encoder" not in config.facts.roles:
            return {"model.num_layers": m.num_layers + count}
        of_decoder = m.decoder_layers + count // 2
        return {
            "model.num_layers": m.num_layers + (count + 1) // 2,
            "model.num_decoder_layers": of_decoder,
        }

    def distance(count: int) -> int:
        return abs(parameters(changed(config, more(count))) - wanted)

    fields = more(min(MORE, key=distance))
    return fields | wider(changed(config, fields), wanted)
