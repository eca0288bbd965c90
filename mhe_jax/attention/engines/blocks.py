"""Common parts of engines: scores of one group in blocks of queries, under a mask and dropout.

Rows N are examples times groups: q [N, T, D], k [N, S, D].
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.engines.mesh import platform
from mhe_jax.attention.mask import Mask

# Queries in a block, and on a GPU, which small blocks leave partly idle; queries in a band, which
# leaves out the keys after it, and the most bands.
BLOCK = 512
GPU_BLOCK = 2048
BAND = 256
MAX_BANDS = 8
# Queries that a CPU takes at once, so that its working set stays in its cache.
CPU_QUERIES = 512
# Columns of the keys for a bias: this many numbers of bfloat16 hold one of float32.
BIAS_PARTS = 3
# Name of what a forward pass keeps for its gradient, for policies of `jax.checkpoint`.
KEPT = "kept"


def why_not(mask: Mask, options, lacks: str, *cases: tuple[Any, str]) -> str | None:
    """The reason of the first of the cases, and of what an engine `lacks`, that holds; or None."""
    features = {
        "dropout": (options.dropout_rate > 0, "draws no dropout mask (attention dropout is not 0)"),
        "sowing": (options.sow is not None, "keeps no attention weights to sow"),
        "precision": (options.precision is not None, "has no precision setting"),
        "dense": (mask.allowed is not None, "takes a mask in parts only, not a dense array"),
    }
    cases = *cases, *(features[name] for name in lacks.split())
    return next((reason for holds, reason in cases if holds), None)


def round_up(size: int, step: int) -> int:
    """The least multiple of `step` that is not less than `size`."""
    return -(-size // step) * step


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`, at least 1."""
    return max(n for n in range(1, max(1, min(most, number)) + 1) if number % n == 0)


def even(length: int, most: int, step: int) -> int:
    """The size of blocks, at most `most`, that leaves the least padding for their number."""
    return round_up(-(-length // -(-length // most)), step)


def pad(x, *sizes):
    """x [N, ...] with its next axes padded with zeros at the end, up to these sizes."""
    after = [0, *(size - n for n, size in zip(x.shape[1:], sizes, strict=False))]
    return jnp.pad(x, [(0, n) for n in after] + [(0, 0)] * (x.ndim - len(after)))


class Static(NamedTuple):
    """The static part of a call."""

    scale: float
    keep: float  # share of the weights that dropout keeps
    precision: Any


class Seen(NamedTuple):
    """Which keys a query sees, and the words of `is_kept`: int32 [N or 1, T] and [N or 1, S]."""

    mask: Mask
    words: tuple[jax.Array, jax.Array] | None = None

    def block(self, start, size: int, keys: int, first_key: int = 0) -> "Seen":
        """Of `size` queries from `start` on, and the keys [first_key, keys)."""
        mask, words = self.mask.block(start, size, keys, first_key), self.words
        if words is not None:
            # Of engines whose heads may differ, [B, H, T, 1] and [B, H, 1, S].
            of_queries, of_keys = words
            axis = max(1, of_queries.ndim - 2)
            cut = jax.lax.dynamic_slice_in_dim(of_queries, start, size, axis)
            words = cut, of_keys[..., first_key:keys]
        return Seen(mask, words)


class Block(NamedTuple):
    """`size` queries from `start` on, and the keys [first_key, keys)."""

    start: Any
    size: int
    keys: int
    first_key: int = 0

    def cut(self, x):
        """Its queries of x [N, T, ...]."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=1)

    def put(self, x, part):
        """x [N, T, ...] with the block's queries replaced by `part`."""
        return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), self.start, axis=1)

    def of_keys(self, x):
        """The block's keys of x [N, S, ...]."""
        return x[:, self.first_key : self.keys]

    def add(self, x, part):
        """x [N, S, ...] with `part` added over the block's keys."""
        total = self.of_keys(x) + part.astype(x.dtype)
        whole = total.shape[1] == x.shape[1]
        return total if whole else x.at[:, self.first_key : self.keys].set(total)


def bands(T: int, S: int, mask: Mask) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, first key, keys): queries [start, stop) see only keys [first key, keys)."""
    before, after = mask.static_bounds()
    band = T if before is None and after is None else max(BAND, -(-T // MAX_BANDS))
    for start in range(0, T, band):
        stop = min(start + band, T)
        keys = S if after is None else min(stop + after, S)
        first = 0 if before is None else max(start - before, 0)
        # A band without a key gets one that its queries do not see.
        yield start, stop, min(first, keys - 1), keys


def over_blocks(q, k, seen: Seen, step: Callable[[Block, Any], Any], carry: Any):
    """`carry = step(block, carry)` for all queries, with the keys that their band sees."""
    on_gpu = platform() == "gpu"
    for start, stop, first, keys in bands(q.shape[1], k.shape[1], seen.mask):
        size = min(GPU_BLOCK if on_gpu else BLOCK, stop - start)
        turns = (stop - start) // size

        def turn(i, carry, start=start, size=size, keys=keys, first=first):
            return step(Block(start + i * size, size, keys, first), carry)

        if turns == 1 or on_gpu:
            # Outside the loop XLA need not write zeros first, nor add to them.
            carry = turn(0, carry)
        if turns > 1:
            carry = jax.lax.fori_loop(int(on_gpu), turns, turn, carry)
        rest = stop - start - turns * size
        if rest:
            carry = step(Block(stop - rest, rest, keys, first), carry)
    return carry


def with_bias_columns(query, key, value, key_bias):
    """Query, key and value whose scores include the key bias, by columns of the keys."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    columns = jnp.stack(parts(key_bias.astype(jnp.float32), BIAS_PARTS), -1).astype(key.dtype)
    ones = jnp.ones((*query.shape[:-1], BIAS_PARTS), query.dtype)
    return jnp.concatenate([query, ones], -1), jnp.concatenate([key, columns], -1), value


def parts(x, number: int) -> list[jax.Array]:
    """Numbers that add up to x; bfloat16 holds all but the last."""
    found = []
    for _ in range(number - 1):
        # Not a cast there and back, which XLA may remove.
        found.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - found[-1]
    return [*found, x]


def product(static: Static, letters: str, a, b):
    """A product that adds up in float32 or wider."""
    # By NumPy, here and elsewhere: JAX's own refuses where its types are strict.
    wide = np.promote_types(np.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.einsum(letters, a, b, precision=static.precision, preferred_element_type=wide)


def exponential(logits, seen: Seen, block: Block, scale: float = 1.0):
    """`exp(scale (logits - m))`, m the maximum over the keys that a query sees; 0 at other keys.

    The difference first: a compiler may round `scale · logits` in two ways, over 1 apart.
    """
    allowed = seen.mask.block(*block).to_dense(block.size, block.keys - block.first_key)
    if allowed is not None:
        logits = jnp.where(allowed[:, 0], logits, -jnp.inf)
    # Finite where the query sees no key, so that all its keys give 0.
    least = jnp.finfo(logits.dtype).min
    highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=least))
    return jnp.exp(scale * (logits - highest))


def words_of(options, rows: tuple[int, ...], queries: int, keys: int):
    """Words of `is_kept` for queries [*rows, T] and keys [*rows, S]."""
    words = jax.random.bits(options.dropout_rng, (*rows, queries + keys), jnp.uint32)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    return words[..., :queries], words[..., queries:]


def is_kept(of_queries, of_keys, keep: float):
    """Whether dropout keeps a weight: random words of its query and key, mixed as in hashing."""
    x = of_queries ^ of_keys
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = x ^ jax.lax.shift_right_logical(x, np.int32(shift))
        if factor is not None:
            x = x * np.uint32(factor).astype(np.int32)
    return x < np.int32(round(keep * 2**32) - 2**31)


def dropout(static: Static, x, seen: Seen, block: Block):
    """x [N, t, s] where dropout keeps it, divided by the share that is kept."""
    if seen.words is None:
        return x
    of_queries, of_keys = seen.words
    words = block.cut(of_queries)[:, :, None], block.of_keys(of_keys)[:, None]
    return jnp.where(is_kept(*words, static.keep), x / jnp.asarray(static.keep, x.dtype), 0)


def by_rows(run: Callable, queries: int, *trees: Any):
    """`run(*trees)`, on a CPU a few rows at a time; leaves have N rows, or one for all."""
    rows = max(x.shape[0] for x in jax.tree.leaves(trees))
    at_once = divisor(rows, CPU_QUERIES // queries)
    if at_once == rows:
        return run(*trees)

    def in_turns(*trees):
        leaves, structure = jax.tree.flatten(trees)
        each = [x.shape[0] == rows for x in leaves]
        cut = [x.reshape(-1, at_once, *x.shape[1:]) for x, e in zip(leaves, each, strict=True) if e]

        def turn(own):
            own = iter(own)
            part = [next(own) if e else x for x, e in zip(leaves, each, strict=True)]
            return run(*jax.tree.unflatten(structure, part))

        parts = jax.lax.map(turn, cut)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)

    return jax.lax.platform_dependent(*trees, cpu=in_turns, default=run)
