"""Text from a language model: a prompt continued token by token, over the cache.

    p_i = softmax(logits / τ)_i                                    τ: the temperature
    top-k: p_i = 0 but for the k largest
    top-p: p_i = 0 but for the fewest largest whose sum, before any was cut, is at least p
    next token ~ p / Σ p                                           τ = 0: the most probable token

With both, top-k cuts first and top-p counts what it left. Of equal probabilities at the border,
the lower id stays. Of the special tokens only eos is ever generated; it ends a text, after
`evaluation.min_length` tokens at least.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import path_aware_map
from jax import lax

from mhe_jax.config import EvaluationConfig
from mhe_jax.data import BOS, EOS, PAD, Tokenizer
from mhe_jax.evaluation.decoding import FORBIDDEN, allowed, unrolled
from mhe_jax.evaluation.programs import CompiledRun, filled


def filter_logits(
    logits: jax.Array, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> jax.Array:
    """Log-probabilities up to a constant [..., V] of what may be drawn; -inf for the rest."""
    logits = logits.astype(jnp.float32)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_k is None and top_p is None:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranks = lax.broadcasted_iota(jnp.int32, ranked.shape, ranked.ndim - 1)
    if top_k is not None:
        ranked = jnp.where(ranks < top_k, ranked, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ranked = jnp.where((before < top_p) | (ranks == 0), ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)


@dataclass(frozen=True)
class Continuation:
    """The continuation of one prompt."""

    text: str  # the prompt as it was given, and its continuation
    tokens: list[int]  # of the continuation, with eos where it ended
    truncated: bool  # only the end of the prompt was read


def generate(
    run: CompiledRun, evaluation: EvaluationConfig, prompts: Sequence[str], counter: Iterator[int]
) -> list[Continuation]:
    """The continuation of each prompt, in order; an empty prompt begins a new text.

    At most `evaluation.extra_length` tokens are added, and prompt and continuation hold at most
    `data.sequence_length`. If a prompt leaves no position free, only its end is read: bos and this
    end take half of the positions. The draws for a prompt depend only on `evaluation.seed`, its
    number, from `counter`, and the tokens before, not on the batch.
    """
    e, longest, tokenizer = evaluation, run.config.data.sequence_length, run.tokenizer
    read = tokenizer.encode_batch(prompts)
    whole = [len(row) < longest - 1 for row in read]
    kept = max(1, longest // 2 - 1)
    ids = [[BOS, *(row if fits else row[-kept:])] for row, fits in zip(read, whole, strict=True)]
    numbers = [next(counter) for _ in prompts]

    def arrays(batch: list[int], rows: int, length: int) -> Sequence[np.ndarray]:
        tokens = filled([ids[n] for n in batch], rows, length)
        # A row of padding reads bos, and has no position left to write.
        tokens[:, 0] = BOS
        lengths, limits = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        lengths[: len(batch)] = [len(ids[n]) for n in batch]
        limits[: len(batch)] = np.minimum(e.extra_length, longest - lengths[: len(batch)])
        number = np.zeros(rows, np.int32)
        number[: len(batch)] = [numbers[n] for n in batch]
        # As `jax.random.key` reads a seed. Another seed compiles no other program.
        return tokens, lengths, limits, number, np.full(rows, e.seed, np.int64).astype(np.int32)

    found = [Continuation("", [], False)] * len(prompts)
    name = "generate", e.temperature, e.top_k, e.top_p, e.extra_length, e.min_length
    function = functools.partial(_generate, run.model, e, longest)
    sizes = [len(row) for row in ids]
    for n, (out, count, broken) in run.each(name, function, sizes, longest, e.batch_size, arrays):
        run.check_finite(not broken)
        new = out[:count].tolist()
        text = continued(tokenizer, prompts[n], read[n], new)
        found[n] = Continuation(text, new, truncated=not whole[n])
    return found


def continued(tokenizer: Tokenizer, prompt: str, read: list[int], new: list[int]) -> str:
    """A prompt as it is, of tokens `read`, and the text of `new` ones after it."""
    # Decoded together, since a piece may continue a word. What is decoded of the prompt may
    # differ from it, as in lower case: only what follows is taken.
    before, text = tokenizer.decode(read), tokenizer.decode([*read, *new])
    text = text.removeprefix(before) if text.startswith(before) else tokenizer.decode(new)
    if prompt[-1:].isspace() and not before[-1:].isspace():  # the tokenizer drops such spaces
        text = text.removeprefix(" ")
    return prompt + text


def _generate(
    model: Any, e: EvaluationConfig, longest: int, params, tokens, lengths, limits, numbers, seeds
):
    """Prompts [B, P] to new tokens, their counts, and which rows' output is not a number.

    `limits` [B] are the most new tokens; `seeds` [B] are all the same.
    """
    rows, size = tokens.shape[0], max(1, min(e.extra_length, longest))
    model, params = unrolled(model, params)
    variables = {"params": params}
    step = {"method": "decode_step", "mutable": ["cache"]}
    _, cache = model.apply(variables, rows, longest, method="start_cache", mutable=["cache"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits, cache = model.apply(variables | cache, tokens, positions, **step)

    # Rows stand where their prompts end; what they write next replaces the padding.
    def placed(path, leaf):
        return jnp.broadcast_to(lengths, leaf.shape) if path[-1] == "cache_index" else leaf

    cache = path_aware_map(placed, nn.unbox(cache))
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n))(seeds, numbers)

    def choose(logits, i):
        choices = allowed(logits, FORBIDDEN, EOS, i >= e.min_length)
        if e.temperature < np.finfo(np.float32).tiny:  # 0 in float32 arithmetic
            return jnp.argmax(choices, axis=-1)
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        choices = filter_logits(choices, e.temperature, e.top_k, e.top_p)
        return jax.vmap(jax.random.categorical)(step_keys, choices)

    def body(carry):
        i, last, out, counts, broken, done, cache = carry
        chosen = choose(last, i).astype(jnp.int32)
        gain = jnp.take_along_axis(jax.nn.log_softmax(last), chosen[:, None], axis=-1)[:, 0]
        new = jnp.where(done, PAD, chosen)[:, None]
        out = lax.dynamic_update_slice_in_dim(out, new, i, axis=1)
        broken |= ~done & ~jnp.isfinite(gain)
        counts = jnp.where(done, counts, i + 1)
        done |= (chosen == EOS) | (i + 1 >= limits) | broken
        # A row that is done writes on, no further than its last position; nobody reads it.
        position = jnp.minimum(lengths + i, longest - 1)
        logits, cache = model.apply(variables | cache, chosen[:, None], position[:, None], **step)
        return i + 1, logits[:, 0], out, counts, broken, done, cache

    out = jnp.full((rows, size), PAD, jnp.int32)
    counts, broken, done = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool), limits <= 0
    _, _, *found, _, _ = lax.while_loop(
        lambda carry: (carry[0] < size) & ~jnp.all(carry[5]),
        body,
        (jnp.int32(0), last, out, counts, broken, done, cache),
    )
    return found
