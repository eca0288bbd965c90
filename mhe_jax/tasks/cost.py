"""What a model costs, counted from its config: operations for each token, and cached numbers."""

from mhe_jax.attention import cost
from mhe_jax.config import Config, ModelConfig, Role
from mhe_jax.model.layers import attention_module

FORMULA = (
    "FLOPs of a step = 3 · forward (backward is twice it); forward = T·B·L·(attention + 4·M·F, or "
    "6·M·F of gated MLPs) + head, with attention of `mhe_jax.attention.cost.forward_flops` "
    "for each sublayer (in the cheapest form of its kind, (T + 1)/2 keys where causal), and head "
    "2·M·V for each target token or 2·M² + 2·M·V for each masked token; embeddings and the heads "
    "of other tasks, next to nothing, are left out, and Kronecker products count as the matrices "
    "that they stand for"
)


def encoder_flops(config: Config) -> int:
    layer = attention_flops(config, "encoder", config.data.sequence_length)
    return config.model.num_layers * (layer + mlp_flops(config.model))


def decoder_layer_flops(config: Config) -> int:
    causal = attention_flops(config, "decoder", (config.data.sequence_length + 1) // 2)
    return causal + mlp_flops(config.model)


def logits_flops(model: ModelConfig) -> int:
    return 2 * model.features * model.vocabulary_size


def mlp_flops(model: ModelConfig) -> int:
    matrices = 3 if model.mlp == "gated" else 2
    return 2 * matrices * model.features * model.mlp_features


def attention_flops(config: Config, role: Role, keys: int) -> int:
    return cost.forward_flops(attention_module(config.model, role), config.model.features, keys)


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
