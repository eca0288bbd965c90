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
    every_case,
    every_kind,
    normal,
    random_parameters,
)
from kind_references import KINDS

from mhe_jax.attention import Mask
from mhe_jax.shapeshifter.kronecker import KroneckerProjection

LENGTH = S


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


def feed_eagerly(d, cache, x):
    return d.module.apply(d.params | {"cache": cache}, x, mutable=["cache"])


def prefill_and_steps(d):
    cache, parts = d.cache, []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        output, cache = d.feed(cache, d.x[:, start:stop])
        parts.append(output)
        np.testing.assert_array_equal(cache["cache_index"], [stop] * B)
    assert_close(np.concatenate(parts, 1), d.full(d.x, mask=Mask.causal()))


@every_case
def test_prefill_and_steps_are_the_full_pass(case):
    prefill_and_steps(decoder(case))


@pytest.mark.parametrize("case", [Case("mha"), Case("skv"), Case("mhe_mul")], ids=str)
def test_norms_and_the_cache(case):
    """mha caches normed keys; skv and the materialized MHE norm what they read."""
    prefill_and_steps(decoder(case, normalize_qk=True))


@pytest.mark.parametrize(
    "mask", [Mask.local(2, 1), Mask.local(2) & Mask.causal()], ids=["", "causal"]
)
def test_windows_move_with_the_cache(mask):
    d, parts = decoder(Case("mha")), []
    cache, wanted = d.cache, d.full(d.x, mask=Mask.local(2) & Mask.causal())
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        output, cache = d.feed(cache, d.x[:, start:stop], mask)
        parts.append(output)
    assert_close(np.concatenate(parts, 1), wanted)


@pytest.mark.parametrize(
    "mask",
    [
        Mask.lengths(jnp.array([3, 6])),
        Mask.local(2)
        & Mask.lengths(jnp.array([3, 6]))
        & Mask.padding(jnp.arange(LENGTH)[None] > 0),
    ],
    ids=["lengths", "and a window and padding"],
)
@every_kind
def test_one_query_sees_what_it_sees_among_all(case, mask):
    """Its place in the row is a length, beside what the caller says; some have no key left."""
    d = decoder(case)
    wanted = d.full(d.x, mask=mask & Mask.causal())
    _, cache = d.feed(d.cache, d.x[:, :2], mask)
    for t in range(2, LENGTH):
        output, cache = d.feed(cache, d.x[:, t : t + 1], mask)
        assert_close(output[:, 0], wanted[:, t])


@every_kind
def test_the_whole_cache_at_once_and_one_by_one(case):
    d = decoder(case)
    wanted = d.full(d.x, mask=Mask.causal())
    assert_close(d.feed(d.cache, d.x)[0], wanted)
    cache, outputs = d.cache, []
    for t in range(LENGTH):
        output, cache = d.feed(cache, d.x[:, t : t + 1])
        outputs.append(output)
    assert_close(np.concatenate(outputs, 1), wanted)


@every_case
def test_rows_at_places_of_their_own(case):
    """Right-padded prompts of 3 and 7 tokens: later tokens overwrite the padding."""
    rows_at_places_of_their_own(decoder(case))


def rows_at_places_of_their_own(d):
    wanted = d.full(d.x, mask=Mask.causal())
    prompts = d.x.copy()
    prompts[0, 3:] = prompts[1, 5:] = 99  # padding that would be seen
    output, cache = d.feed(d.cache, prompts)
    lengths, rows = np.array([3, 5], np.int32), np.arange(B)
    for b in rows:
        assert_close(output[b, : lengths[b]], wanted[b, : lengths[b]])
    for _ in range(2):
        cache = cache | {"cache_index": lengths}
        output, cache = d.feed(cache, d.x[rows, lengths][:, None])
        assert_close(output[:, 0], wanted[rows, lengths])
        lengths = lengths + 1
        np.testing.assert_array_equal(cache["cache_index"], lengths)


@every_kind
def test_a_mask_of_the_caller_is_kept_in_decoding(case):
    """Left padding, as dense booleans over the whole cache and as a `Mask`."""
    d = decoder(case)
    valid = np.ones((B, LENGTH), bool)
    valid[0, :2] = False
    padding = Mask.padding(jnp.asarray(valid))
    wanted = d.full(d.x, mask=Mask.causal() & padding)
    for mask in (valid[:, None, None], padding):
        _, cache = d.feed(d.cache, d.x[:, :1], mask)
        for t in range(1, 4):
            output, cache = d.feed(cache, d.x[:, t : t + 1], mask)
            assert_close(output[:, 0], wanted[:, t])


@every_kind
def test_causal_said_twice_is_still_the_full_pass(case):
    d = decoder(case)
    wanted = d.full(d.x, mask=Mask.causal())
    _, cache = d.feed(d.cache, d.x[:, :3], Mask.causal())
    output, _ = d.feed(cache, d.x[:, 3:4], Mask.causal())
    assert_close(output, wanted[:, 3:4])


@every_case
def test_numbers_cached_per_token(case):
    """2HD, 2D, 2KD, HD, or for mva D_s + HD + H."""
    cache = decoder(case).cache
    wanted = KINDS[case.kind].cached(case)
    held = sum(a[0, 0].size for name, a in cache.items() if name != "cache_index")
    assert held == wanted
    assert cache["cache_index"].shape == (B,)
    assert all(a.shape[:2] == (B, LENGTH) for n, a in cache.items() if n != "cache_index")
    assert not any(map(np.any, cache.values()))


def test_the_cache_has_the_type_of_the_computation():
    for case in (Case("mha"), Case("mhe_mul"), Case("el")):
        cache = decoder(case, dtype=jnp.bfloat16).cache
        assert {a.dtype for n, a in cache.items() if n != "cache_index"} == {jnp.dtype("bfloat16")}


@every_kind
def test_a_write_past_the_end_raises_where_it_is_known(case):
    d = decoder(case)
    with pytest.raises(ValueError, match=f"8 new tokens do not fit in a cache of {LENGTH}"):
        d.feed(d.cache, np.zeros((B, 8, case.width), np.float32))
    six = d.cache | {"cache_index": np.array([6, 6], np.int32)}
    with pytest.raises(ValueError, match=f"the cache holds {LENGTH} tokens.* 6 got 2 more"):
        feed_eagerly(d, jax.tree.map(jnp.asarray, six), d.x[:, :2])
    one_row = d.cache | {"cache_index": np.array([2, 7], np.int32)}
    with pytest.raises(ValueError, match="7 got 1 more"):
        feed_eagerly(d, jax.tree.map(jnp.asarray, one_row), d.x[:, :1])


@every_case
def test_a_write_past_the_end_poisons_its_row_where_it_is_not_known(case):
    """Row 1 is full: it is NaN, row 0 is right, and nothing that was cached is touched."""
    d = decoder(case)
    _, cache = d.feed(d.cache, d.x)
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


def test_tokens_that_still_fit_are_written_and_their_row_is_poisoned_all_the_same():
    d = decoder(Case("mha"))
    cache = d.cache | {"cache_index": np.array([2, LENGTH - 1], np.int32)}
    output, after = d.feed(cache, d.x[:, :3])
    assert np.isfinite(output[0]).all()
    assert np.isnan(output[1]).all()
    assert np.any(after["cached_key"][1, LENGTH - 1])
    assert not np.any(after["cached_key"][1, : LENGTH - 1])


@every_case
def test_a_cache_filled_once_is_the_cross_pass(case):
    d = decoder(case)
    q, memory = normal(2, B, T, case.width), normal(3, B, S, case.width)
    valid = np.ones((B, S), bool)
    valid[1, 5:] = False
    mask = Mask.padding(jnp.asarray(valid))
    wanted = d.full(q, memory, mask=mask)
    state = d.fill(memory)
    assert "cache_index" not in state["cache"]
    # Read only: the collection need not be mutable, and any number of queries may come.
    assert_close(d.read(state, q, mask), wanted)
    assert_close(d.read(state, q[:, :1], mask), wanted[:, :1])


@every_kind
def test_a_cache_filled_from_keys_and_values(case):
    if case.one_source:
        pytest.skip("makes keys and values of one input")
    d = decoder(case)
    q, k, v = (normal(i, B, n, case.width) for i, n in ((2, T), (3, S), (4, S)))
    assert_close(d.read(d.fill(k, v), q), d.full(q, k, v))


@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_a_cache_filled_from_another_width(kind):
    q, memory = normal(2, B, T, 33), normal(3, B, S, 21)
    full, step = (Case(kind).module(qkv_features=None, decode=on) for on in (False, True))
    params = {"params": random_parameters(full, q, memory)}
    wanted = full.apply(params, q, memory)
    _, state = step.apply(params, memory, method="fill_cache", mutable=["cache"])
    assert_close(step.apply(params | state, q), wanted)


def test_filling_a_cache_that_nothing_reads_is_refused():
    module, x = Case("mhe_mul").module(), normal(3, B, S, 33)
    params = {"params": random_parameters(module, x)}
    with pytest.raises(ValueError, match="fill_cache needs decode=True"):
        module.apply(params, x, method="fill_cache", mutable=["cache"])


def test_filling_a_cache_needs_the_width_of_the_queries():
    fields = {"projection": KroneckerProjection(2), "use_bias": False, "decode": True}
    module, x = Case("mha").module(qkv_features=None, **fields), normal(3, B, S, 33)
    params = module.init(jax.random.key(0), x)
    call = {"method": "fill_cache", "mutable": ["cache"]}
    with pytest.raises(ValueError, match="needs qkv_features .* `out` has only a, b"):
        module.apply({"params": params["params"]}, x, **call)
    module.clone(qkv_features=33).apply({"params": params["params"]}, x, **call)


@every_kind
def test_a_cache_of_self_attention_is_not_filled(case):
    d = decoder(case)
    with pytest.raises(ValueError, match="fill_cache: takes an empty cache"):
        d.module.apply(d.params | {"cache": d.cache}, d.x, method="fill_cache", mutable=["cache"])


@every_kind
def test_keys_of_another_length_are_not_taken_for_self_attention(case):
    """Such as those of cross-attention whose cache was not filled."""
    d = decoder(case)
    with pytest.raises(ValueError, match="decode=True: 1 queries and 2 keys, .* fill_cache"):
        d.module.apply(d.params | {"cache": d.cache}, d.x[:, :1], d.x[:, :2], mutable=["cache"])


@every_kind
def test_beams_are_rows_of_the_cache(case):
    """Reordered rows decode as the tokens that they now stand for."""
    d = decoder(case)
    _, cache = d.feed(d.cache, d.x[:, :3])
    beams = np.array([1, 1])
    for tokens in (d.x[beams], d.x[::-1]):
        rows = beams if np.array_equal(tokens[0], tokens[1]) else np.array([1, 0])
        new = normal(5, B, 1, case.width)
        output, _ = d.feed(jax.tree.map(lambda a, rows=rows: a[rows], cache), new)
        whole = np.concatenate([tokens[:, :3], new, d.x[:, :3]], 1)
        assert_close(output[:, 0], d.full(whole, mask=Mask.causal())[:, 3])


def test_a_batch_that_is_not_the_cache_s_is_refused():
    d = decoder(Case("mhe_mul"))
    with pytest.raises(ValueError, match="does not fit"):
        d.feed(d.cache, np.concatenate([d.x, d.x])[:, :1])
