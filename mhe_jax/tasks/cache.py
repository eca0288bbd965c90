"""The numbers that a decoder keeps while it generates, counted from a config."""

from mhe_jax.attention import cost
from mhe_jax.config import Config, Role
from mhe_jax.model.layers import attention_module


def sublayers(config: Config) -> dict[Role, int]:
    """How many sublayers of attention the model has in each role."""
    m = config.model
    count = {"encoder": m.num_layers, "decoder": m.decoder_layers, "cross": m.decoder_layers}
    return {role: count[role] for role in config.facts.roles}


def cached_numbers(config: Config) -> int:
    """Cached numbers of a token in all decoder layers, and in translation of a source token too.

    Σ_sublayers `mhe_jax.attention.cost.cached_numbers`; 0 without a decoder.
    """
    m = config.model
    return sum(
        count * cost.cached_numbers(attention_module(m, role), m.features)
        for role, count in sublayers(config).items()
        if role != "encoder"
    )
