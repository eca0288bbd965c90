"""Operations of a train step, counted from the shapes of its config."""

from mhe_jax.attention.cost import forward_flops
from mhe_jax.config import LABELLED, Config, Role
from mhe_jax.data.examples import num_predictions
from mhe_jax.model.layers import attention

FORMULA = (
    "FLOPs of a step = 3 · forward (backward is twice it); forward = T·B·L·(attention + 4·M·F) "
    "+ head, with attention of `mhe_jax.attention.cost.forward_flops` for each sublayer (in the "
    "cheapest form of its kind, (T + 1)/2 keys where causal), and head 2·M·V for each target token "
    "or 2·M² + 2·M·V for each masked token; embeddings and the heads of other tasks, next to "
    "nothing, are left out, and Kronecker products count as the matrices that they stand for"
)


def step_flops(config: Config, rows: int) -> float:
    """`FORMULA` for `rows` rows of data.sequence_length tokens (translation: on each side)."""
    m, T = config.model, config.data.sequence_length
    mlp, logits = 4 * m.features * m.mlp_features, 2 * m.features * m.vocabulary_size
    causal = attention_flops(config, "decoder", (T + 1) // 2) + mlp
    if config.task == "lm":
        return 3.0 * rows * T * (m.num_layers * causal + logits)
    encoder = m.num_layers * (attention_flops(config, "encoder", T) + mlp)
    if config.task in (*LABELLED, "shuffle_random"):
        return 3.0 * rows * T * encoder
    if config.task == "mlm":
        head = num_predictions(T, config.data.mask_rate) * (2 * m.features**2 + logits)
        return 3.0 * rows * (T * encoder + head)
    decoder_layers = m.num_decoder_layers or m.num_layers
    decoder = decoder_layers * (causal + attention_flops(config, "cross", T))
    return 3.0 * rows * T * (encoder + decoder + logits)


def attention_flops(config: Config, role: Role, keys: int) -> int:
    """Of one sublayer, forward, for each token."""
    return forward_flops(attention(config.model, role), config.model.features, keys)
