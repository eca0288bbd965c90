"""Decoding from a cache equals the full pass, for T ≥ 1 tokens a call and rows at places of their
own; sizes; the end of the cache; the fixed cache of cross-attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    B,
    Case,
    D,
    H,
    S,
    T,
    assert_close,
    every_case,
    every_kind,
    normal,
    random_parameters,
)

from mhe_jax.attention import Mask

LENGTH = S


def empty_cache(module, params, x):
    return module.apply(params, x, mutable=["cache"])[1]["cache"]


def ready(case, **fields):
    """Module that decodes, one that does not, parameters, inputs [B, LENGTH, M], empty cache."""
    full, step = case.module(**fields), case.module(decode=True, **fields)
    x = normal(1, B, LENGTH, case.width)
    params = {"params": random_parameters(full, x)}
    return full, step, params, x, empty_cache(step, params, x)


def feed(step, params, cache, x, **more):
    output, state = step.apply(params | {"cache": cache}, x, mutable=["cache"], **more)
    return output, state["cache"]


@every_case
@pytest.mark.parametrize("normalize_qk", [False, True])
def test_prefill_and_steps_are_the_full_pass(case, normalize_qk):
    if normalize_qk and case.form == "folded":
        pytest.skip("folded refuses normalize_qk, see test_attention_errors")
    full, step, params, x, cache = ready(case, normalize_qk=normalize_qk)
    wanted = full.apply(params, x, mask=Mask.causal())
    run = jax.jit(lambda cache, x: feed(step, params, cache, x))
    parts = []
    for start, stop in ((0, 3), (3, 4), (4, 6), (6, 7)):
        output, cache = (run if stop - start == 1 else lambda c, x: feed(step, params, c, x))(
            cache, x[:, start:stop]
        )
        parts.append(output)
        np.testing.assert_array_equal(cache["cache_index"], [stop] * B)
    assert_close(jnp.concatenate(parts, 1), wanted)


@every_kind
def test_the_whole_cache_at_once_and_one_by_one(case):
    full, step, params, x, cache = ready(case)
    wanted = full.apply(params, x, mask=Mask.causal())
    assert_close(feed(step, params, cache, x)[0], wanted)
    outputs = []
    for t in range(LENGTH):
        output, cache = feed(step, params, cache, x[:, t : t + 1])
        outputs.append(output)
    assert_close(jnp.concatenate(outputs, 1), wanted)


@every_case
def test_rows_at_places_of_their_own(case):
    """Right-padded prompts of 3 and 5 tokens: later tokens overwrite the padding."""
    full, step, params, x, cache = ready(case)
    lengths = np.array([3, 5])
    prompts = x[:, :5].at[0, 3:].set(99.0)  # padding that would be seen
    output, cache = feed(step, params, cache, prompts)
    wanted = full.apply(params, x, mask=Mask.causal())
    assert_close(output[0, :3], wanted[0, :3])
    assert_close(output[1, :5], wanted[1, :5])
    cache = cache | {"cache_index": jnp.asarray(lengths, jnp.int32)}
    for more in (1, 1):
        places = lengths[:, None] + np.arange(more)
        output, cache = feed(step, params, cache, x[np.arange(B)[:, None], places])
        assert_close(output, wanted[np.arange(B)[:, None], places])
        lengths = lengths + more
        np.testing.assert_array_equal(cache["cache_index"], lengths)


@every_kind
def test_a_mask_of_the_caller_is_kept_in_decoding(case):
    """Left padding, as dense booleans over the whole cache and as a `Mask`."""
    full, step, params, x, cache = ready(case)
    valid = jnp.ones((B, LENGTH), bool).at[0, :2].set(False)
    wanted = full.apply(params, x, mask=Mask.causal() & Mask.padding(valid))
    for mask in (valid[:, None, None], Mask.padding(valid)):
        first, state = feed(step, params, cache, x[:, :4], mask=mask)
        second, _ = feed(step, params, state, x[:, 4:], mask=mask)
        assert_close(jnp.concatenate([first, second], 1), wanted)


@pytest.mark.xfail(
    strict=True,
    reason="base.py: Mask.causal() without an offset means place 0, so a step sees key 0 only; "
    "Flax's make_causal_mask of the step allows all that is cached",
)
@every_kind
def test_causal_said_twice_is_still_the_full_pass(case):
    full, step, params, x, cache = ready(case)
    wanted = full.apply(params, x, mask=Mask.causal())
    _, cache = feed(step, params, cache, x[:, :3], mask=Mask.causal())
    output, _ = feed(step, params, cache, x[:, 3:4], mask=Mask.causal())
    assert_close(output, wanted[:, 3:4])


@every_case
def test_numbers_cached_per_token(case):
    """papers.md 4: 2HD, 2D, 2KD or HD."""
    _, _, _, _, cache = ready(case)
    wanted = {
        "mha": 2 * H * D,
        "sha": 2 * D,
        "mqa": 2 * D,
        "gqa": 2 * (case.kv_heads or 0) * D,
        "skv": H * D,
        "el": H * D,
        "mhe_add": 2 * D,
        "mhe_mul": 2 * D,
    }[case.kind]
    held = sum(a[0, 0].size for name, a in cache.items() if name != "cache_index")
    assert held == wanted
    assert cache["cache_index"].shape == (B,)
    assert all(a.shape[:2] == (B, LENGTH) for n, a in cache.items() if n != "cache_index")
    assert not any(map(np.any, cache.values()))


def test_the_cache_has_the_type_of_the_computation():
    for case in (Case("mha"), Case("mhe_mul"), Case("el")):
        module = case.module(decode=True, dtype=jnp.bfloat16)
        x = normal(1, B, T, case.width)
        cache = empty_cache(module, {"params": random_parameters(module, x)}, x)
        assert {a.dtype for n, a in cache.items() if n != "cache_index"} == {jnp.dtype("bfloat16")}


@every_kind
def test_a_write_past_the_end_raises_where_it_is_known(case):
    _, step, params, x, cache = ready(case)
    with pytest.raises(ValueError, match=f"8 new tokens do not fit in a cache of {LENGTH}"):
        jax.eval_shape(lambda x: feed(step, params, cache, x), jnp.zeros((B, 8, case.width)))
    _, cache = feed(step, params, cache, x[:, :6])
    with pytest.raises(ValueError, match=f"the cache holds {LENGTH} tokens.* 6 got 2 more"):
        feed(step, params, cache, x[:, :2])
    one_row = cache | {"cache_index": jnp.array([2, 7], jnp.int32)}
    with pytest.raises(ValueError, match="7 got 1 more"):
        feed(step, params, one_row, x[:, :1])


@every_case
def test_a_write_past_the_end_poisons_its_row_where_it_is_not_known(case):
    """Row 1 is full: it is NaN, row 0 is right, and nothing that was cached is touched."""
    full, step, params, x, cache = ready(case)
    _, cache = feed(step, params, cache, x)
    cache = cache | {"cache_index": jnp.array([4, LENGTH], jnp.int32)}
    run = jax.jit(lambda cache, x: feed(step, params, cache, x))
    new = normal(5, B, 1, case.width)
    output, after = run(cache, new)
    wanted = full.apply(params, jnp.concatenate([x[:, :4], new], 1), mask=Mask.causal())
    assert_close(output[0], wanted[0, 4:])
    assert np.isnan(output[1]).all()
    for name in cache:
        if name != "cache_index":
            np.testing.assert_array_equal(after[name][1], cache[name][1])
            np.testing.assert_array_equal(after[name][0, :4], cache[name][0, :4])
            np.testing.assert_array_equal(after[name][0, 5:], cache[name][0, 5:])
    again, last = run(after, new)  # and it stays so
    assert np.isfinite(again[0]).all()
    assert np.isnan(again[1]).all()
    for name in set(cache) - {"cache_index"}:
        np.testing.assert_array_equal(last[name][1], cache[name][1])


@every_case
def test_a_cache_filled_once_is_the_cross_pass(case):
    full, step, params, _, _ = ready(case)
    q, memory = normal(2, B, T, case.width), normal(3, B, S, case.width)
    valid = jnp.ones((B, S), bool).at[1, 5:].set(False)
    wanted = full.apply(params, q, memory, mask=Mask.padding(valid))
    none, state = step.apply(params, memory, method="fill_cache", mutable=["cache"])
    assert none is None
    assert "cache_index" not in state["cache"]
    # Read only: the collection need not be mutable, and any number of queries may come.
    for part in (q, q[:, :1], q[:, 1:4]):
        output = step.apply(params | state, part, mask=Mask.padding(valid))
        if part.shape == q.shape:
            assert_close(output, wanted)
    assert_close(output, wanted[:, 1:4])


@every_kind
def test_a_cache_filled_from_keys_and_values(case):
    if case.one_source:
        pytest.skip("makes keys and values of one input")
    full, step, params, _, _ = ready(case)
    q, k, v = (normal(i, B, n, case.width) for i, n in ((2, T), (3, S), (4, S)))
    _, state = step.apply(params, k, v, method="fill_cache", mutable=["cache"])
    assert_close(step.apply(params | state, q), full.apply(params, q, k, v))


@pytest.mark.xfail(
    strict=True,
    reason="base.py: fill_cache takes D from the width of the memory; without qkv_features a "
    "memory of another width than the queries' does not fit the parameters",
)
@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_a_cache_filled_from_another_width(kind):
    fields = {"qkv_features": None}
    q, memory = normal(2, B, T, 33), normal(3, B, S, 21)
    full, step = Case(kind).module(**fields), Case(kind).module(decode=True, **fields)
    params = {"params": random_parameters(full, q, memory)}
    wanted = full.apply(params, q, memory)
    _, state = step.apply(params, memory, method="fill_cache", mutable=["cache"])
    assert_close(step.apply(params | state, q), wanted)


@every_kind
def test_cross_attention_does_not_decode_from_an_unfilled_cache(case):
    _, step, params, x, cache = ready(case)
    for variables in (params, params | {"cache": cache}):
        with pytest.raises(ValueError, match="fill_cache"):
            step.apply(variables, x, normal(3, B, S, case.width), mutable=["cache"])


@every_kind
def test_beams_are_rows_of_the_cache(case):
    """Reordered rows decode as the tokens that they now stand for."""
    full, step, params, x, cache = ready(case)
    _, cache = feed(step, params, cache, x[:, :4])
    beams = np.array([1, 0, 1, 1])
    cache = jax.tree.map(lambda a: a[beams], cache)
    new = normal(5, 4, 1, case.width)
    output, _ = feed(step, params, cache, new)
    tokens = jnp.concatenate([x[beams, :4], new], 1)
    assert_close(output, full.apply(params, tokens, mask=Mask.causal())[:, 4:])


def test_a_batch_that_is_not_the_cache_s_is_refused():
    _, step, params, x, cache = ready(Case("mhe_mul"))
    with pytest.raises(ValueError, match="does not fit"):
        feed(step, params, cache, jnp.concatenate([x, x])[:, :1])
