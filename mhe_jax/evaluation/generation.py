"""Text from a language model: a prompt continued token by token, over the cache.

    p_i = softmax(logits / τ)_i                                    τ: the temperature
    top-k: p_i = 0 but for the k largest
    top-p: p_i = 0 but for the fewest largest whose sum, before any was cut, is at least p
    next token ~ p / Σ p                                           τ = 0: the most probable token

With both, top-k cuts first and top-p counts what it left. Of equal probabilities at the border,
the lower id stays. Of the special tokens only eos is ever generated; it ends a text, after
`evaluation.min_length` tokens at least.
"""

from collections.abc import Sequence
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
from mhe_jax.evaluation.programs import CompiledRun, padded_length

SHORTEST = 8
# A temperature below this is 0 in float32 arithmetic: then the most probable token is taken.
COLDEST = float(np.finfo(np.float32).tiny)


def filter_logits(
    logits: jax.Array, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> jax.Array:
    """Log-probabilities up to a constant [..., V] of tokens that may be drawn; -inf for the rest.

    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> [round(p, 3) for p in jax.nn.softmax(filter_logits(logits, 1.0, top_p=0.6)).tolist()]
    [0.625, 0.375, 0.0]
    """
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
    back = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(ranked, back, axis=-1)


@dataclass(frozen=True)
class Continuation:
    """The continuation of one prompt."""

    text: str  # the prompt as it was given, and its continuation
    tokens: list[int]  # of the continuation, with eos where it ended
    truncated: bool  # only the end of the prompt was read


class Generator:
    """Continues prompts with the model of a run; `evaluation` says how tokens are chosen.

    Prompts are prefilled in one call, padded to a power of two; then all rows of a batch step
    together until each has ended, by eos or by its length: at most `evaluation.extra_length` tokens
    are added, and prompt and continuation hold at most `data.sequence_length`, since training has
    seen none longer. If a prompt leaves no position free, only its end is read: bos and this end
    take half of the positions, and the continuation may take the others.

    The draws for prompt number n, counted over all calls, depend only on `evaluation.seed`, n and
    the tokens before, not on the batch.
    """

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig):
        assert isinstance(run.tokenizer, Tokenizer)
        self.run, self.evaluation = run, evaluation
        self.tokenizer = run.tokenizer
        self.model: Any = run.model
        self.longest = run.config.data.sequence_length
        self.num_prompts = 0
        e = self.evaluation
        self._name = "generate", e.temperature, e.top_k, e.top_p, e.extra_length, e.min_length

    def generate(self, prompts: Sequence[str]) -> list[Continuation]:
        """The continuation of each prompt, in order; an empty prompt begins a new text."""
        found: list[Continuation] = []
        rows = self.run.rows(len(prompts), self.evaluation.batch_size)
        for start in range(0, len(prompts), rows):
            found += self._batch(prompts[start : start + rows], rows)
        return found

    def _batch(self, prompts: Sequence[str], rows: int) -> list[Continuation]:
        # bos takes a position; if a prompt leaves none, half are for the continuation.
        most = self.longest - 1
        read = self.tokenizer.encode_batch(prompts)
        ids = [[BOS, *row] for row in read]
        whole = [len(row) <= most for row in ids]
        kept = max(1, self.longest // 2 - 1)
        ids = [
            row if fits else [BOS, *row[1:][-kept:]] for row, fits in zip(ids, whole, strict=True)
        ]
        length = padded_length(max(map(len, ids)), SHORTEST, self.longest)
        tokens = np.full((rows, length), PAD, np.int32)
        # A row of padding reads bos, and has no position left to write.
        tokens[:, 0] = BOS
        lengths, limits = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        numbers = np.zeros(rows, np.int32)
        # As `jax.random.key` reads a seed. Another seed compiles no other program.
        seeds = np.full(rows, self.evaluation.seed, np.int64).astype(np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            limits[row] = min(self.evaluation.extra_length, self.longest - len(prompt))
            numbers[row] = self.num_prompts + row
        self.num_prompts += len(prompts)
        given = tokens, lengths, limits, numbers, seeds
        program = self.run.program(self._name, self._generate, *given)
        out, counts, broken = jax.device_get(program())
        self.run.check_finite(not broken[: len(prompts)].any())
        return [
            self._continuation(prompt, read[row], whole[row], out[row, : counts[row]].tolist())
            for row, prompt in enumerate(prompts)
        ]

    def _continuation(
        self, prompt: str, read: list[int], whole: bool, new: list[int]
    ) -> Continuation:
        # Decoded together, since a piece may continue a word. What is decoded of the prompt may
        # differ from it, as in lower case: only what follows is taken.
        before, text = self.tokenizer.decode(read), self.tokenizer.decode([*read, *new])
        text = text.removeprefix(before) if text.startswith(before) else self.tokenizer.decode(new)
        if prompt[-1:].isspace() and not before[-1:].isspace():  # the tokenizer drops such spaces
            text = text.removeprefix(" ")
        return Continuation(prompt + text, new, truncated=not whole)

    def _generate(self, params, tokens, lengths, limits, numbers, seeds):
        """Prompts [B, P] to new tokens, their counts, and which rows' output is not a number.

        `lengths` and `numbers` [B] are those of the prompts, `limits` [B] the most new tokens, and
        `seeds` [B] are all the same.
        """
        e, rows = self.evaluation, tokens.shape[0]
        model, params = unrolled(self.model, params)
        size = max(1, min(e.extra_length, self.longest))
        variables = {"params": params}
        step = {"method": "decode_step", "mutable": ["cache"]}
        _, cache = model.apply(
            variables, rows, self.longest, method="start_cache", mutable=["cache"]
        )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits, cache = model.apply(variables | cache, tokens, positions, **step)
        # Rows stand where their prompts end; what they write next replaces the padding.
        cache = path_aware_map(
            lambda path, leaf: (
                jnp.broadcast_to(lengths, leaf.shape) if path[-1] == "cache_index" else leaf
            ),
            nn.unbox(cache),
        )
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n))(seeds, numbers)

        def choose(logits, i):
            choices = allowed(logits, FORBIDDEN, EOS, i >= e.min_length)
            if e.temperature < COLDEST:
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
            position = jnp.minimum(lengths + i, self.longest - 1)
            logits, cache = model.apply(
                variables | cache, chosen[:, None], position[:, None], **step
            )
            return i + 1, logits[:, 0], out, counts, broken, done, cache

        start = (
            jnp.int32(0),
            last,
            jnp.full((rows, size), PAD, jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, bool),
            limits <= 0,
            cache,
        )
        _, _, out, counts, broken, _, _ = lax.while_loop(
            lambda carry: (carry[0] < size) & ~jnp.all(carry[5]), body, start
        )
        return out, counts, broken
