"""Softmax attention in plain XLA, in blocks that the backward pass computes again.

    E = exp(scale q·k + b - m)    output = (E v) / Σ E

m is the maximum over the keys that a query sees. Memory is linear in T: it holds the scores of one
block, and nothing of size T·S is kept for the gradient, not even the dropout mask.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines import xla
from mhe_jax.attention.engines.blocks import (
    KEPT,
    Seen,
    bands,
    divisor,
    is_kept,
    why_not,
    words_of,
)
from mhe_jax.attention.engines.mesh import (
    has_heads,
    over_heads,
    parts_of_call,
    platform,
    sees_one_device,
)
from mhe_jax.attention.mask import Mask

# Scores in a block, of all its examples and heads.
BLOCK_SCORES = 2**22
CPU_SCORES = 2**20
# Fewer scores are stored: those of a head (measured on a CPU; on a TPU from its compiler, see
# experiments/fit); on a GPU, where it took 1.3 to 4.0 times as long, those of a device.
STORED_OF_HEAD = {"cpu": 2**16, "tpu": 2**18}
STORED = 2**30


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why this engine cannot do the call, or None."""
    return why_not(mask, options, "sowing")


def passed_by(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why `auto` takes another engine for a call that this one can do, or None."""
    (B, T, H, _), S = query.shape, key.shape[1]
    of_head, bound = T * S, STORED_OF_HEAD.get(platform())
    if bound is not None:
        return "is slower for small scores" if of_head < bound else None
    scores = B * H * T * S // parts_of_call(B, H, T, S)
    return f"is slower where {scores:,} scores can be stored" if scores < STORED else None


def attend(query, key, value, key_bias, mask: Mask, options, *, scale: float):
    """See `engines.attend`."""
    (B, T, H, _), S = query.shape, key.shape[1]
    if 0 in (B, T, S):
        return xla.attend(query, key, value, key_bias, mask, options, scale=scale)
    words = None
    if options.dropout_rate > 0:
        # Of each query and key, so that what is kept depends neither on blocks nor on devices.
        rows = {True: (B, 1), "batch": (1, 1), False: (B, H)}[options.broadcast_dropout]
        of_queries, of_keys = words_of(options, rows, T, S)
        words = of_queries[..., None], of_keys[..., None, :]
    run = functools.partial(_local, options=options, scale=scale)
    output, total = over_heads(run, query, key, value, key_bias, Seen(mask, words))
    if options.dropout_rate == 0:
        total = mask.row_has_key(T, S, query.dtype)
    return checkpoint_name(output, KEPT), total


def _local(query, key, value, key_bias, parts, *, options, scale):
    """Output [B, T, H, E] and weight sum [B, T, H, 1] on one device."""
    (B, T, H, _), (_, S, K, _) = query.shape, key.shape
    G, dtype, wide = H // K, key.dtype, np.promote_types(key.dtype, jnp.float32)
    examples, heads, size = _block(B, T, S, K, G)
    turns = B // examples, K // heads

    def by_turns(x):
        """[B, K, ..] to [turns, examples, heads, ..]."""
        x = x.reshape(turns[0], examples, turns[1], heads, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(-1, examples, heads, *x.shape[4:])

    query = query * jnp.asarray(scale, dtype)
    arrays = {
        "query": query.reshape(B, T, K, G, -1).transpose(0, 2, 3, 1, 4),
        # Widened outside the loops, so that their gradients add up in float32 over the blocks.
        "key": key.astype(wide).swapaxes(1, 2),
        "value": value.astype(wide).swapaxes(1, 2),
    }
    if key_bias is not None:
        arrays["bias"] = key_bias.astype(wide).reshape(B, S, K, G).transpose(0, 2, 3, 1)

    def turn(given):
        i, own = given
        first = i // turns[1] * examples, i % turns[1] * heads * G
        counts = examples, heads * G

        def cut(x):
            for axis in range(1 + has_heads(x)):
                if x.shape[axis] > 1:
                    x = jax.lax.dynamic_slice_in_dim(x, first[axis], counts[axis], axis)
            return x

        mask, words = jax.tree.map(cut, parts)
        return _all_queries(**own, mask=mask, words=words, options=options, size=size, dtype=dtype)

    def together(x):
        """[turns, examples, heads, T, E] to [B, T, H, E]."""
        x = x.reshape(*turns, examples, heads * G, T, -1)
        return x.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, H, -1)

    own = jax.tree.map(by_turns, arrays)
    return jax.tree.map(together, jax.lax.map(turn, (jnp.arange(turns[0] * turns[1]), own)))


def _block(B: int, T: int, S: int, K: int, G: int) -> tuple[int, int, int]:
    """Examples, key heads and queries of a block.

    On a CPU what its caches hold; elsewhere all heads of whole examples, or some queries of one: of
    all examples where XLA may spread them over devices that the call does not know of.
    """
    if platform() == "cpu":
        heads = divisor(K, CPU_SCORES // (G * T * S))
        examples = divisor(B, CPU_SCORES // (K * G * T * S)) if heads == K else 1
        return examples, heads, max(1, CPU_SCORES // (examples * heads * G * S))
    # All heads of an example at once, since they share the dropout mask.
    examples = divisor(B, BLOCK_SCORES // (K * G * T * S)) if sees_one_device() else B
    size = max(1, BLOCK_SCORES // (examples * K * G * S))
    # A power of two fills a TPU's tiles.
    return examples, K, 1 << (size - 1).bit_length()


def _all_queries(query, key, value, *, bias=None, mask, words, options, size, dtype):
    """One turn: query [B, K, G, T, D], key and value [B, K, S, ·], bias [B, K, G, S].

    Output [B, K·G, T, E], and the weight sum of each query.
    """
    (B, K, G, T, _), S = query.shape, key.shape[2]

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def block(query, start, first_key, memory):
        key, value, bias = memory
        t, s = query.shape[3], key.shape[2]
        rows = query.reshape(B, K, G * t, -1)
        precision = {"precision": options.precision, "preferred_element_type": key.dtype}
        logits = jnp.einsum("bknd,bksd->bkns", rows, key.astype(dtype), **precision)
        logits = logits.reshape(B, K * G, t, s)
        if bias is not None:
            logits += bias.reshape(B, K * G, 1, s)
        allowed = mask.block(start, t, first_key + s, first_key).to_dense(t, s)
        if allowed is not None:
            logits = jnp.where(allowed, logits, -jnp.inf)
        highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        e = jnp.exp(logits - jnp.where(highest == -jnp.inf, 0, highest))
        total = e.sum(-1, keepdims=True)
        # 0 where the query sees no key.
        inverse = 1 / jnp.where(total > 0, total, 1)
        if words is not None:
            keep, of_keys = 1 - options.dropout_rate, words[1][..., first_key : first_key + s]
            of_queries = jax.lax.dynamic_slice_in_dim(words[0], start, t, 2)
            e = jnp.where(is_kept(of_queries, of_keys, keep), e / keep, 0)
            total = e.sum(-1, keepdims=True)
        rows = e.astype(dtype).reshape(B, K, G * t, s)
        output = jnp.einsum("bkns,bkse->bkne", rows, value.astype(dtype), **precision)
        output = output.reshape(B, K * G, t, -1) * inverse
        return output.astype(dtype), (total * inverse).astype(dtype)

    def in_a_row(x):
        """[turns, B, H, t, E] to [B, H, turns · t, E]."""
        return jnp.moveaxis(x, 0, 2).reshape(B, K * G, -1, x.shape[-1])

    def band(first, stop, first_key, keys):
        """The queries [first, stop), which see only the keys [first_key, keys)."""
        seen = jax.tree.map(lambda x: x[:, :, first_key:keys], (key, value))
        seen = *seen, None if bias is None else bias[..., first_key:keys]
        step = min(stop - first, size)
        turns, rest = divmod(stop - first, step)
        if turns == 1:
            found = [block(query[:, :, :, first : first + step], first, first_key, seen)]
        else:
            blocks = query[:, :, :, first : stop - rest].reshape(B, K, G, turns, step, -1)
            starts = first + step * jnp.arange(turns)
            blocks = jnp.moveaxis(blocks, 3, 0), starts
            parts = jax.lax.map(lambda of: block(*of, first_key, seen), blocks)
            found = [jax.tree.map(in_a_row, parts)]
        if rest:
            found.append(block(query[:, :, :, stop - rest : stop], stop - rest, first_key, seen))
        return found

    found = [part for each in bands(T, S, mask) for part in band(*each)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, 2), *found)
