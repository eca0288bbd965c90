"""Softmax attention in plain XLA, in blocks of queries that the backward pass computes again.

Memory is linear in T: the scores of one block stand in it, at most `BLOCK_SCORES` numbers or those
of one query, and nothing of size T·S is left to the gradient, dropout's mask included.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines import xla
from mhe_jax.attention.engines.blocks import KEPT, bands
from mhe_jax.attention.mask import Mask

# Scores of all examples and heads in a block.
BLOCK_SCORES = 2**22


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why this engine cannot do the call, or None."""
    if options.sow is not None:
        return "keeps no attention weights to sow"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`."""
    B, T, H, _ = query.shape
    S, dtype = key.shape[1], key.dtype
    if 0 in (B, T, S):
        return xla.attend(query, key, value, key_bias, mask, options, scale=scale)
    # Wide outside of the loop, so that their gradients add up in float32 over the blocks.
    wide = jnp.promote_types(dtype, jnp.float32)
    memory = key.astype(wide), value.astype(wide), key_bias

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(query, start, memory):
        key, value, bias = memory
        part = mask.block(start, query.shape[1], key.shape[1])
        given = options
        if options.dropout_rate > 0:
            given = dataclasses.replace(
                options, dropout_rng=jax.random.fold_in(options.dropout_rng, start)
            )
        key, value = key.astype(dtype), value.astype(dtype)
        # A policy of the layer around it must not save the blocks' masks.
        return xla.attend(query, key, value, bias, part, given, scale=scale, name="of a block")

    def band(first, stop, keys):
        """The queries [first, stop), which see no key after `keys`."""
        seen = jax.tree.map(lambda x: x[:, :keys], memory)
        size = min(stop - first, max(1, BLOCK_SCORES // (B * H * keys)))
        turns, rest = divmod(stop - first, size)
        last = stop - rest
        blocks = query[:, first:last].reshape(B, turns, size, H, -1).swapaxes(0, 1)
        starts = first + size * jnp.arange(turns)
        found = jax.lax.map(lambda of: block(*of, seen), (blocks, starts))
        parts = [jax.tree.map(_in_a_row, found)]
        if rest:
            parts.append(block(query[:, last:stop], last, seen))
        return parts

    parts = [part for each in bands(T, S, mask) for part in band(*each)]
    output = jnp.concatenate([output for output, _ in parts], 1)
    if options.dropout_rate > 0:
        total = jnp.concatenate([total for _, total in parts], 1)
    else:
        total = mask.row_has_key(T, S, dtype)
    return checkpoint_name(output, KEPT), total


def _in_a_row(x):
    """[turns, B, t, ...] to [B, turns · t, ...]."""
    turns, B, t = x.shape[:3]
    return x.swapaxes(0, 1).reshape(B, turns * t, *x.shape[3:])
