"""Beam search over a cache, inside one `lax.while_loop`; with one beam it is greedy.

A hypothesis is y = y_1 .. y_n with y_n = eos and n <= the row's maximum; n counts eos, not bos.

    log_prob(y) = sum_t log p(y_t | y_<t)        float32, by the model's own full softmax
    score(y)    = log_prob(y) / ((5 + n) / 6)^length_penalty

Only hypotheses of this form are returned: at a row's last position eos is the only choice left, and
its probability is counted as everywhere else. Before its last position a row ends only after
`min_length` other tokens: a model may find the empty text the likeliest of all.
A beam that is wide enough to lose no prefix therefore finds exactly the best scores overall.
A row whose maximum is 0 is padding: it is finished from the start, length 0, score 0.

Letters: B rows, K beams, V vocabulary, L the longest output. N = B·K rows go through `step`,
the beams of a row side by side.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mhe_jax.attention.engines.mesh import platform
from mhe_jax.data import BOS, MASK, PAD, UNK
from mhe_jax.model import unroll_layers

# Special tokens that a model reads, but that no search of a trained model may generate.
FORBIDDEN = (PAD, UNK, BOS, MASK)

Cache = Any
# step(cache, tokens [N, 1], positions [N, 1]) -> logits or log-probabilities [N, V], cache
Step = Callable[[Cache, jax.Array, jax.Array], tuple[jax.Array, Cache]]


class Hypotheses(NamedTuple):
    """The best `R` hypotheses of each row, best score first.

    A place that no hypothesis fills has length 0 and score -inf. A row in which the model's output
    was not a number has NaN in `log_probs` and `scores`.
    """

    tokens: jax.Array  # [B, R, L], without bos, with eos, then padding
    lengths: jax.Array  # [B, R], eos counted
    log_probs: jax.Array  # [B, R]
    scores: jax.Array  # [B, R]


def unrolled(model: Any, params: Any) -> tuple[Any, Any]:
    """On a GPU, the same model and parameters with layers that are not scanned.

    Each step of a scan cuts the cache of a layer out of that of all, and puts it back: three to
    four times the bytes of the caches (experiments/kernels_gpu).
    """
    if platform() != "gpu" or not model.config.scan_layers:
        return model, params
    config = dataclasses.replace(model.config, scan_layers=False)
    return model.clone(config=config), unroll_layers(params)


def length_penalties(max_length: int, length_penalty: float) -> np.ndarray:
    """`((5 + n) / 6)^length_penalty` for n = 0 .. max_length, float32 [max_length + 1].

    >>> length_penalties(7, 1.0)[[1, 7]].tolist()
    [1.0, 2.0]
    """
    return (((5.0 + np.arange(max_length + 1)) / 6.0) ** length_penalty).astype(np.float32)


def allowed(
    log_probs: jax.Array, forbidden: Sequence[int], eos_id: int, may_end: jax.Array
) -> jax.Array:
    """`-inf` at the tokens that are never generated, and at eos unless the scalar `may_end`.

    The others keep the model's probability.
    """
    ids = np.arange(log_probs.shape[-1])
    banned = np.isin(ids, forbidden) | ((ids == eos_id) & ~may_end)
    return jnp.where(banned.reshape((1,) * (log_probs.ndim - 1) + (-1,)), -jnp.inf, log_probs)


def expand_to_beams(cache: Cache, beam_size: int, batch_axis: int = 0) -> Cache:
    """Each row `beam_size` times, side by side: axis B becomes N = B·K in every leaf."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, beam_size, axis=batch_axis), cache)


def reorder_beams(cache: Cache, parents: jax.Array, batch_axis: int = 0) -> Cache:
    """Beam k of row b becomes what beam `parents[b, k]` of row b was, in every leaf.

    The gather runs within a row only, so that rows sharded over devices stay where they are.
    """
    rows, beams = parents.shape

    def reorder(leaf):
        before, after = leaf.shape[:batch_axis], leaf.shape[batch_axis + 1 :]
        leaf = leaf.reshape(*before, rows, beams, *after)
        take = jax.vmap(
            lambda row, parent: jnp.take(row, parent, axis=batch_axis, mode="clip"),
            in_axes=(batch_axis, 0),
            out_axes=batch_axis,
        )
        return take(leaf, parents).reshape(*before, rows * beams, *after)

    return jax.tree.map(reorder, cache)


def beam_search(
    step: Step,
    cache: Cache,
    max_lengths: jax.Array,
    *,
    max_length: int,
    beam_size: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    forbidden_ids: Sequence[int],
    length_penalty: float = 0.0,
    min_length: int = 0,
    num_hypotheses: int | None = None,
    batch_axis: int = 0,
) -> Hypotheses:
    """The best hypotheses that a beam finds.

    Each position takes the K most probable continuations of a row's running prefixes. Those that
    end in eos leave the beam for the row's list of finished hypotheses, which keeps the best
    scores. The others run on, and the next most probable ones take the freed places. With one beam
    this is greedy search, the most probable token at each position, whatever the length penalty.

    A row stops when no running prefix can still beat the worst finished hypothesis of a full list.
    A prefix of log-probability s can come to at most s / penalty(its row's maximum length), since s
    is negative, only falls, and is divided by nothing larger: so the stop never changes a result.

    Args:
        step: the model, one token further, for N = B·K rows.
        cache: the cache that `step` starts from, for B rows: it is repeated for the beams here.
        max_lengths: [B], the longest output of each row, eos counted; 0 marks padding.
        max_length: L, the size of the output; no row's maximum is larger.
        num_hypotheses: R, the length of the finished list; None means K. A short one stops earlier.
        batch_axis: where the rows are in the leaves of the cache: 0, or 1 under scanned layers.
    """
    keep = beam_size if num_hypotheses is None else num_hypotheses
    penalties = jnp.asarray(length_penalties(max_length, length_penalty))
    max_lengths = jnp.minimum(max_lengths, max_length).astype(jnp.int32)
    rows, beams = max_lengths.shape[0], beam_size
    is_padding = max_lengths <= 0
    largest_penalty = penalties[jnp.maximum(max_lengths, 0)]

    def body(carry):
        i, tokens, running, done, failed, finished, cache = carry
        last = jnp.where(i == 0, bos_id, tokens[:, :, jnp.maximum(i - 1, 0)])
        logits, cache = step(cache, last.reshape(-1, 1), jnp.full((rows * beams, 1), i, jnp.int32))
        logits = logits.astype(jnp.float32).reshape(rows, beams, -1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        steps = logits - total
        failed |= jnp.any(~jnp.isfinite(total[:, :, 0]) & (running > -jnp.inf), axis=1)
        # A prefix that has ended runs on as ballast: whatever it gives must count for nothing.
        steps = jnp.where((running > -jnp.inf)[:, :, None], steps, -jnp.inf)
        is_eos = jnp.arange(steps.shape[-1])[None, None] == eos_id
        must_end = (i + 1 >= max_lengths)[:, None, None]
        choices = allowed(steps, forbidden_ids, eos_id, i >= min_length)
        steps = jnp.where(must_end, jnp.where(is_eos, steps, -jnp.inf), choices)
        # Per beam first, then over the beams: the same choice as over all K·V, with smaller sorts.
        width = min(beams, steps.shape[-1])
        gains, ids = lax.top_k(steps, width)
        candidates = (running[:, :, None] + gains).reshape(rows, -1)
        candidates, places = lax.top_k(candidates, beams)
        parents = places // width
        ids = jnp.take_along_axis(ids.reshape(rows, -1), places, axis=1).astype(jnp.int32)
        tokens = jnp.take_along_axis(tokens, parents[:, :, None], axis=1)
        tokens = lax.dynamic_update_slice_in_dim(tokens, ids[:, :, None], i, axis=2)

        ended = jnp.where(ids == eos_id, candidates, -jnp.inf)
        finished = _merge(
            finished,
            Hypotheses(
                tokens,
                jnp.where(ended > -jnp.inf, i + 1, 0),
                ended,
                ended / penalties[i + 1],
            ),
        )
        running = jnp.where(ids == eos_id, -jnp.inf, candidates)
        best = jnp.max(running, axis=1)
        done |= failed | (i + 1 >= max_lengths) | (best == -jnp.inf)
        done |= best / largest_penalty <= finished.scores[:, -1]
        running = jnp.where(done[:, None], -jnp.inf, running)
        if beams > 1:
            cache = reorder_beams(cache, parents, batch_axis)
        return i + 1, tokens, running, done, failed, finished, cache

    empty = jnp.where(is_padding[:, None], 0.0, jnp.full((rows, keep), -jnp.inf))
    finished = Hypotheses(
        jnp.full((rows, keep, max_length), pad_id, jnp.int32),
        jnp.zeros((rows, keep), jnp.int32),
        empty,
        empty,
    )
    first = jnp.where((jnp.arange(beams)[None] == 0) & ~is_padding[:, None], 0.0, -jnp.inf)
    carry = lax.while_loop(
        lambda carry: (carry[0] < max_length) & ~jnp.all(carry[3]),
        body,
        (
            jnp.int32(0),
            jnp.full((rows, beams, max_length), pad_id, jnp.int32),
            first,
            is_padding,
            jnp.zeros((rows,), bool),
            finished,
            expand_to_beams(cache, beams, batch_axis),
        ),
    )
    failed, finished = carry[4][:, None], carry[5]
    return Hypotheses(
        finished.tokens,
        finished.lengths,
        jnp.where(failed, jnp.nan, finished.log_probs),
        jnp.where(failed, jnp.nan, finished.scores),
    )


def _merge(kept: Hypotheses, new: Hypotheses) -> Hypotheses:
    """The best of both by score, as many as `kept` has; of equal scores, `kept` comes first."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), kept, new)
    _, order = lax.top_k(both.scores, kept.scores.shape[1])

    def take(leaf):
        return jnp.take_along_axis(leaf, jnp.expand_dims(order, range(2, leaf.ndim)), axis=1)

    return jax.tree.map(take, both)
