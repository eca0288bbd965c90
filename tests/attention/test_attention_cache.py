"""Decoding from a cache equals the full pass, for T ≥ 1 tokens a call and rows at places of their
own; sizes; the end of the cache; the fixed cache of cross-attention."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    B,
    Case,
    S,
    T,
    assert_close,
    every_kind,
    normal,
    random_parameters,
)
from kind_references import KINDS

from mhe_jax.attention import Mask

LENGTH = S
LATENTS, PRODUCTS = (Case(kind, **KINDS[kind].cases[0]) for kind in ("mla", "tpa"))


class Decoder(NamedTuple):
    """A kind, compiled once: every function gives numpy arrays."""

    full: Callable  # the output without a cache
    feed: Callable  # (cache, x) to output and cache
    fill: Callable  # keys, and values where they differ, to the state of cross-attention
    read: Callable  # (state, queries) to the output, the state left as it is
    module: nn.Module
    params: dict
    x: np.ndarray  # [B, LENGTH, M]
    cache: dict  # empty


@functools.cache
def decoder(case, **fields):
    full, step = case.module(**fields), case.module(decode=True, **fields)
    x = normal(1, B, LENGTH, case.width)
    params = {"params": random_parameters(full, x)}

    @jax.jit
    def feed(cache, x, mask=None):
        output, state = step.apply(params | {"cache": cache}, x, mask=mask, mutable=["cache"])
        return output, state["cache"]

    @jax.jit
    def apply(*inputs, mask=None):
        return full.apply(params, *inputs, mask=mask)

    @jax.jit
    def create(x):
        return step.apply(params, x, mutable=["cache"])[1]["cache"]

    @jax.jit
    def fill(*memory):
        none, state = step.apply(params, *memory, method="fill_cache", mutable=["cache"])
        assert none is None
        return state

    @jax.jit
    def read(state, q, mask=None):
        return step.apply(params | state, q, mask=mask)

    def fetched(f):
        return lambda *a, **k: jax.device_get(f(*a, **k))

    jitted = map(fetched, (apply, feed, fill, read))
    return Decoder(*jitted, step, params, x, fetched(create)(x))


def prefill_and_steps(d):
    cache, parts = d.cache, []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        output, cache = d.feed(cache, d.x[:, start:stop])
        parts.append(output)
        np.testing.assert_array_equal(cache["cache_index"], [stop] * B)
    assert_close(np.concatenate(parts, 1), d.full(d.x, mask=Mask.causal()))


@every_kind
def test_prefill_and_steps_are_the_full_pass(case):
    prefill_and_steps(decoder(case))


@pytest.mark.parametrize("case", [Case("mha"), Case("skv"), Case("mhe_mul")], ids=str)
def test_norms_and_the_cache(case):
    """mha caches normed keys; skv and the materialized MHE norm what they read."""
    prefill_and_steps(decoder(case, normalize_qk=True))


VALID = np.arange(LENGTH) > np.array([[1], [-1]])
MASKS = {
    "window": Mask.local(2, 1),
    "window & causal": Mask.local(2) & Mask.causal(),
    "dense padding": VALID[:, None, None],
    "lengths": Mask.lengths(jnp.array([3, 6])),
    "all": Mask.local(2) & Mask.lengths(jnp.array([3, 6])) & Mask.padding(VALID),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "case",
    [Case("mha"), Case("mva", "shared"), LATENTS, PRODUCTS, Case("mhe_mul", "folded")],
    ids=str,
)
def test_a_mask_of_the_caller_is_kept_in_decoding(case, name):
    """The place of a query in the row is a length, or an offset, beside what the mask says."""
    d, mask = decoder(case), MASKS[name]
    wanted = d.full(d.x, mask=Mask.causal() & mask)
    first, cache = d.feed(d.cache, d.x[:, :3], mask)
    parts = [first]
    for t in range(3, LENGTH):
        output, cache = d.feed(cache, d.x[:, t : t + 1], mask)
        parts.append(output)
    assert_close(np.concatenate(parts, 1), wanted)


def test_a_causal_offset_of_the_caller_is_kept_in_decoding():
    """It counts from the queries of the call: here it hides each token from itself."""
    d = decoder(Case("mha"))
    first, cache = d.feed(d.cache, d.x[:, :3], Mask.causal(-1))
    second, _ = d.feed(cache, d.x[:, 3:], Mask.causal(2))
    assert_close(np.concatenate([first, second], 1), d.full(d.x, mask=Mask.causal(-1)))


@every_kind
def test_rows_at_places_of_their_own(case):
    rows_at_places_of_their_own(decoder(case))


def rows_at_places_of_their_own(d):
    """Right-padded prompts of 1 and 3 tokens: later tokens overwrite the padding."""
    wanted = d.full(d.x, mask=Mask.causal())
    prompts = d.x[:, :3].copy()
    prompts[0, 1:] = 99  # padding that would be seen
    output, cache = d.feed(d.cache, prompts)
    lengths, rows = np.array([1, 3], np.int32), np.arange(B)
    for b in rows:
        assert_close(output[b, : lengths[b]], wanted[b, : lengths[b]])
    for _ in range(2):
        cache = cache | {"cache_index": lengths}
        output, cache = d.feed(cache, d.x[rows, lengths][:, None])
        assert_close(output[:, 0], wanted[rows, lengths])
        lengths = lengths + 1
        np.testing.assert_array_equal(cache["cache_index"], lengths)


def test_the_cache_has_the_type_of_the_computation():
    for case in (Case("mha"), Case("mhe_mul"), Case("el")):
        cache = decoder(case, dtype=jnp.bfloat16).cache
        assert {a.dtype for n, a in cache.items() if n != "cache_index"} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("case", [Case("mha"), LATENTS], ids=str)
def test_a_write_past_the_end_raises_where_it_is_known(case):
    d = decoder(case)
    assert_close(d.feed(d.cache, d.x)[0], d.full(d.x, mask=Mask.causal()))  # the whole cache
    with pytest.raises(ValueError, match=f"8 new tokens do not fit in a cache of {LENGTH}"):
        d.feed(d.cache, np.zeros((B, 8, case.width), np.float32))
    for places, tokens, message in (
        ([6, 6], 2, f"the cache holds {LENGTH} tokens.* 6 got 2 more"),
        ([2, 7], 1, "7 got 1 more"),
    ):
        full = d.params | {"cache": d.cache | {"cache_index": np.array(places, np.int32)}}
        with pytest.raises(ValueError, match=message):
            d.module.apply(jax.tree.map(jnp.asarray, full), d.x[:, :tokens], mutable=["cache"])


@every_kind
def test_a_write_past_the_end_poisons_its_row_where_it_is_not_known(case):
    """Row 1 is full: it is NaN, row 0 is right, and nothing that was cached is touched."""
    d = decoder(case)
    cache = d.cache
    for start in (0, 3):
        _, cache = d.feed(cache, d.x[:, start : start + 3])
    _, cache = d.feed(cache, d.x[:, 6:])
    cache = cache | {"cache_index": np.array([4, LENGTH], np.int32)}
    # Row 0 gets the token that it had, row 1 one more than it holds.
    new = np.stack([d.x[0, 4:5], normal(5, 1, case.width)])
    output, after = d.feed(cache, new)
    assert_close(output[0, 0], d.full(d.x, mask=Mask.causal())[0, 4])
    assert np.isnan(output[1]).all()
    held = set(cache) - {"cache_index"}
    for name in held:
        np.testing.assert_array_equal(after[name][1], cache[name][1])
        np.testing.assert_array_equal(after[name][0, 5:], cache[name][0, 5:])
        np.testing.assert_allclose(after[name][0], cache[name][0], atol=1e-5)
    again, last = d.feed(after, new)  # and it stays so
    assert np.isfinite(again[0]).all()
    assert np.isnan(again[1]).all()
    for name in held:
        np.testing.assert_array_equal(last[name][1], cache[name][1])


@every_kind
def test_a_cache_filled_once_is_the_cross_pass(case):
    """Read only: the collection need not be mutable, and any number of queries may come."""
    d = decoder(case)
    q, *memory = (normal(i, B, n, case.width) for i, n in ((2, T), (3, S), (4, S)))
    memory = memory[:1] if case.one_source else memory
    mask = Mask.padding(jnp.arange(S)[None] < jnp.array([[S], [5]]))
    state = d.fill(*memory)
    assert "cache_index" not in state["cache"]
    assert_close(d.read(state, q, mask), d.full(q, *memory, mask=mask))


@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_a_cache_filled_from_another_width(kind):
    q, memory = normal(2, B, T, 33), normal(3, B, S, 21)
    full, step = (Case(kind).module(qkv_features=None, decode=on) for on in (False, True))
    params = {"params": random_parameters(full, q, memory)}
    wanted = full.apply(params, q, memory)
    _, state = step.apply(params, memory, method="fill_cache", mutable=["cache"])
    assert_close(step.apply(params | state, q), wanted)


def test_what_fills_no_cache():
    module, x = Case("mhe_mul").module(), normal(3, B, S, 33)
    fill = {"method": "fill_cache", "mutable": ["cache"]}
    params = {"params": random_parameters(module, x)}
    with pytest.raises(ValueError, match="fill_cache needs decode=True"):
        module.apply(params, x, **fill)
    d = decoder(Case("mha"))
    begun = d.params | {"cache": d.cache}
    with pytest.raises(ValueError, match="fill_cache: takes an empty cache"):
        d.module.apply(begun, d.x, **fill)
    # Keys of cross-attention whose cache was not filled.
    with pytest.raises(ValueError, match="decode=True: 1 queries and 2 keys, .* fill_cache"):
        d.module.apply(begun, d.x[:, :1], d.x[:, :2], mutable=["cache"])
    with pytest.raises(ValueError, match="does not fit"):
        d.feed(d.cache, np.concatenate([d.x, d.x])[:, :1])
