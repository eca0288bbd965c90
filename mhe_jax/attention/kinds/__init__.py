"""The registry of attention kinds: each kind is a file here and a line in `KINDS`."""

from mhe_jax.attention.kinds.collaborative import CollaborativeAttention
from mhe_jax.attention.kinds.el import ELAttention
from mhe_jax.attention.kinds.gqa import GroupedQueryAttention
from mhe_jax.attention.kinds.gta import GroupedTiedAttention
from mhe_jax.attention.kinds.mfa import MultiMatrixFactorizationAttention
from mhe_jax.attention.kinds.mha import MultiHeadAttention
from mhe_jax.attention.kinds.mhe_add import MHEAddAttention
from mhe_jax.attention.kinds.mhe_mul import MHEMulAttention
from mhe_jax.attention.kinds.mla import MultiHeadLatentAttention
from mhe_jax.attention.kinds.mqa import MultiQueryAttention
from mhe_jax.attention.kinds.mva import MultiValueAttention
from mhe_jax.attention.kinds.sha import SingleHeadAttention
from mhe_jax.attention.kinds.skv import SharedKeyValueAttention
from mhe_jax.attention.kinds.tpa import TensorProductAttention
from mhe_jax.attention.module import Attention

KINDS: dict[str, type[Attention]] = {
    module.kind: module
    for module in (
        MultiHeadAttention,
        SingleHeadAttention,
        MultiQueryAttention,
        GroupedQueryAttention,
        SharedKeyValueAttention,
        ELAttention,
        MHEAddAttention,
        MHEMulAttention,
        MultiValueAttention,
        CollaborativeAttention,
        MultiMatrixFactorizationAttention,
        GroupedTiedAttention,
        MultiHeadLatentAttention,
        TensorProductAttention,
    )
}
