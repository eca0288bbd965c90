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
import functools
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
# (cache, tokens [N, 1], positions [N, 1]) -> logits or log-probabilities [N, V], cache
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

    A step of a scan moves three to four times the bytes of the caches (experiments/kernels_gpu).
    """
    if platform() != "gpu" or not model.config.scan_layers:
        return model, params
    config = dataclasses.replace(model.config, scan_layers=False)
    return model.clone(config=config), unroll_layers(params)


def allowed(
    log_probs: jax.Array, forbidden: Sequence[int], eos_id: int, may_end: jax.Array
) -> jax.Array:
    """`-inf` at the tokens that are never generated, and at eos unless the scalar `may_end`."""
    ids = np.arange(log_probs.shape[-1])
    banned = np.isin(ids, forbidden) | ((ids == eos_id) & ~may_end)
    return jnp.where(banned.reshape((1,) * (log_probs.ndim - 1) + (-1,)), -jnp.inf, log_probs)


def expand_to_beams(cache: Cache, beam_size: int, batch_axis: int = 0) -> Cache:
    """Each row `beam_size` times, side by side: axis B becomes N = B·K in every leaf."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, beam_size, axis=batch_axis), cache)


def reorder_beams(cache: Cache, parents: jax.Array, batch_axis: int = 0) -> Cache:
    """Beam k of row b becomes what beam `parents[b, k]` of row b was, in every leaf."""
    rows, beams = parents.shape

    def reorder(leaf):
        before, after = leaf.shape[:batch_axis], leaf.shape[batch_axis + 1 :]
        leaf = leaf.reshape(*before, rows, beams, *after)
        # Within a row only, so that rows sharded over devices stay where they are.
        take = functools.partial(jnp.take, axis=batch_axis, mode="clip")
        leaf = jax.vmap(take, (batch_axis, 0), batch_axis)(leaf, parents)
        return leaf.reshape(*before, rows * beams, *after)

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
    scores. The others run on, and the next most probable ones take the freed places.

    A row stops when no running prefix can still beat the worst finished hypothesis of a full list:
    one of log-probability s < 0, which only falls, comes to s / penalty(maximum length) at most.

    Args:
        step: the model, one token further, for N = B·K rows.
        cache: what `step` starts from, for B rows: it is repeated for the beams here.
        max_lengths: [B], the longest output of each row, eos counted; 0 marks padding.
        max_length: L, the size of the output.
        num_hypotheses: R, the length of the finished list; None means K. A short one stops earlier.
        batch_axis: where the rows are in the leaves of the cache: 0, or 1 under scanned layers.
    """
    keep = beam_size if num_hypotheses is None else num_hypotheses
    penalties = ((5.0 + np.arange(max_length + 1)) / 6.0) ** length_penalty
    penalties = jnp.asarray(penalties.astype(np.float32))
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
        lengths = jnp.where(ended > -jnp.inf, i + 1, 0)
        new = Hypotheses(tokens, lengths, ended, ended / penalties[i + 1])
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), finished, new)
        _, order = lax.top_k(both.scores, keep)  # of equal scores, the older comes first
        taken = jax.vmap(lambda leaf, order: leaf[order])
        finished = jax.tree.map(lambda leaf: taken(leaf, order), both)
        running = jnp.where(ids == eos_id, -jnp.inf, candidates)
        best = jnp.max(running, axis=1)
        done |= failed | (i + 1 >= max_lengths) | (best == -jnp.inf)
        done |= best / largest_penalty <= finished.scores[:, -1]
        running = jnp.where(done[:, None], -jnp.inf, running)
        if beams > 1:
            cache = reorder_beams(cache, parents, batch_axis)
        return i + 1, tokens, running, done, failed, finished, cache

    empty = jnp.where(is_padding[:, None], 0.0, jnp.full((rows, keep), -jnp.inf))
    nothing = jnp.full((rows, keep, max_length), pad_id, jnp.int32)
    start = (
        jnp.int32(0),
        jnp.full((rows, beams, max_length), pad_id, jnp.int32),
        jnp.where((jnp.arange(beams)[None] == 0) & ~is_padding[:, None], 0.0, -jnp.inf),
        is_padding,
        jnp.zeros((rows,), bool),
        Hypotheses(nothing, jnp.zeros((rows, keep), jnp.int32), empty, empty),
        expand_to_beams(cache, beams, batch_axis),
    )
    *_, failed, finished, _ = lax.while_loop(
        lambda carry: (carry[0] < max_length) & ~jnp.all(carry[3]), body, start
    )

    broken = jnp.where(failed[:, None], jnp.nan, 0.0)  # also of what is -inf
    log_probs, scores = finished.log_probs + broken, finished.scores + broken
    return finished._replace(log_probs=log_probs, scores=scores)
