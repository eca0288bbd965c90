"""What a model costs, counted from its config: operations for each token, and cached numbers."""

from mhe_jax.attention import cost
from mhe_jax.config import Config, Role
from mhe_jax.data.examples import num_predictions
from mhe_jax.model.layers import attention_module

FORMULA = (
    "FLOPs of a step = 3 · forward (backward is twice it); forward = T·B·L·(attention + 4·M·F, or "
    "6·M·F of gated MLPs) + head, with attention of `mhe_jax.attention.cost.forward_flops` "
    "for each sublayer (in the cheapest form of its kind, (T + 1)/2 keys where causal), and head "
    "2·M·V for each target token or 2·M² + 2·M·V for each masked token; embeddings and the heads "
    "of other tasks, next to nothing, are left out, and Kronecker products count as the matrices "
    "that they stand for"
)


def sublayers(config: Config) -> dict[Role, int]:
    """How many sublayers of attention the model has in each role."""
    m = config.model
    count = {"encoder": m.num_layers, "decoder": m.decoder_layers, "cross": m.decoder_layers}
    return {role: count[role] for role in config.facts.roles}


def step_flops(config: Config, rows: int) -> float:
    """`FORMULA` for `rows` rows of data.sequence_length tokens (pairs: on each side)."""
    m, T, counts = config.model, config.data.sequence_length, sublayers(config)
    keys = {"encoder": T, "decoder": (T + 1) // 2, "cross": T}
    mlp = 2 * (3 if m.mlp == "gated" else 2) * m.features * m.mlp_features
    token, head = 0, 0
    for role, count in counts.items():
        module = attention_module(m, role)
        attention = cost.forward_flops(module, m.features, keys[role])
        token += count * (attention + (mlp if role != "cross" else 0))
    logits = 2 * m.features * m.vocabulary_size
    if config.task == "mlm":
        head = num_predictions(T, config.data.mask_rate) * (2 * m.features**2 + logits)
    elif config.facts.vocabulary:
        head = T * logits
    return 3.0 * rows * (T * token + head)


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
