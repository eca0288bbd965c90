"""Rotary positions: the turn itself, and every kind that turns its queries and keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from attention_cases import (
    BATTERY,
    CASES,
    MHE,
    B,
    Case,
    H,
    T,
    assert_close,
    mask_for,
    normal,
    random_parameters,
)
from kind_references import KINDS
from test_attention_cache import decoder, prefill_and_steps, rows_at_places_of_their_own
from test_attention_sharding import check_sharded_is_single, module_of

from mhe_jax.attention import Rotary, engines, make_attention
from mhe_jax.attention.rotary import rotate
from mhe_jax.config import FIELDS_OF_KINDS

# Eleven pairs of features, and thirteen where scores are wider; seven in half of a head of gta.
D = 22
ROTATED = [
    dataclasses.replace(
        case,
        head_features=2 * case.head_features,
        score_features=case.score_features and 2 * case.score_features,
        rotated=True,
    )
    for case in CASES
    if case in BATTERY or (case.grouped and case.kind not in MHE)
    if case.form in (None, "materialized") or case.kind not in MHE
]
every_rotated = pytest.mark.parametrize("case", ROTATED, ids=str)
every_pairs = pytest.mark.parametrize("pairs", ["half", "interleaved"])
POSITIONS = np.array([[0, 1, 2, 3, 4], [2, 3, 17, 18, 5]], np.int32)


def of(pairs="half", base=10.0, scaling=1.5):
    return Rotary(base, pairs, scaling)


KV_HEADS = {kind: {"num_kv_heads": 1} for kind in FIELDS_OF_KINDS["num_kv_heads"]}


# The turn.


@every_pairs
def test_a_turn_is_its_equation(pairs):
    x = normal(1, B, T, H, D)
    got = rotate(x, POSITIONS, Rotary(base=500.0, pairs=pairs, scaling=4.0))
    for b in range(B):
        for h in range(H):
            row = np.asarray(x[b, :, h], np.float64)
            wanted, _ = reference.rotated(row, None, POSITIONS[b], 500.0, pairs, 4.0)
            np.testing.assert_allclose(got[b, :, h], wanted, atol=2e-6)


def test_a_turn_is_computed_in_float32():
    """At position 1001, which bfloat16 does not have."""
    x, positions = jnp.asarray(normal(1, 1, 1, H, D), jnp.bfloat16), jnp.array([[1001]])
    got = rotate(x, positions, Rotary())
    assert got.dtype == jnp.bfloat16
    wanted = rotate(x.astype(jnp.float32), positions, Rotary()).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got, wanted)


# The kinds.


@functools.cache
def run(case, **fields):
    """(params, x, mask, positions) to output and gradients of (params, x)."""
    module, cotangent = case.module(**fields), normal(9, B, T, case.width)

    def loss(params, x, mask, positions):
        output = module.apply({"params": params}, x, mask=mask, positions=positions)
        return (output * cotangent).sum(), output

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def ready(case, **fields):
    x = normal(1, B, T, case.width)
    params = random_parameters(case.module(**fields), x)
    return params, x


ENGINES = ["xla", "blocked"]


@every_rotated
@every_pairs
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.covering(1)
def test_every_kind(case, pairs, engine):
    """Output and every gradient against the float64 reference, with a norm where there may be."""
    if engine == "blocked" and case.form in engines.OF_FORMS:
        engine = "auto"  # such forms have engines of their own
    fields = {"rotary": of(pairs), "normalize_qk": case.may_normalize, "engine": engine}
    params, x = ready(case, **fields)
    mask, dense = mask_for(case, "causal & padding", T, T)
    (of_params, of_x), output = run(case, **fields)(params, x, mask, POSITIONS)
    how = {"rotary": (10.0, pairs, 1.5), "positions": POSITIONS}
    cotangent = normal(9, B, T, case.width)
    wanted_output, pulled = case.output_and_gradients(params, x, x, x, dense, cotangent, **how)
    assert_close(output, wanted_output)
    wanted, *of_three = pulled
    assert_close((of_params, of_x), (wanted, sum(of_three)))


@pytest.mark.parametrize("case", [Case("mha", head_features=D)], ids=str)
def test_positions_count_from_0_where_they_are_not_given(case):
    params, x = ready(case, rotary=of())
    module = case.module(rotary=of())
    from_0 = np.broadcast_to(np.arange(T), (B, T))
    np.testing.assert_array_equal(
        module.apply({"params": params}, x), module.apply({"params": params}, x, positions=from_0)
    )
    # Leading axes are rows.
    more = module.apply({"params": params}, x[:, None], positions=POSITIONS[:, None])
    assert_close(more[:, 0], module.apply({"params": params}, x, positions=POSITIONS))


# One of each sort: keys that are turned before they are cached, or after, or in part.
CACHED = [
    c
    for c in ROTATED
    if not c.grouped and c.kind in ("mha", "mhe_mul", "mva", "gta", "mla", "tpa")
    if c.form != "materialized" or c.kind == "mhe_mul"
]


@pytest.mark.parametrize("case", CACHED, ids=str)
def test_the_cache_counts_positions(case):
    """Prefill, then steps; rows at places of their own; every kind with its own cache."""
    d = decoder(case, rotary=of("interleaved"))
    prefill_and_steps(d)
    rows_at_places_of_their_own(d)
    same = np.broadcast_to(d.x[:, :1], (B, 3, case.width))
    _, cache = d.feed(d.cache, same)
    turned = {f"cached_{d.module.turned}"}  # none where what turns is made of the cache
    for name in cache.keys() - {"cache_index"}:
        apart = np.abs(cache[name][:, 0] - cache[name][:, 1]).max()
        assert apart > 1e-3 if name in turned else apart == 0, name
    numbers = sum(a.size for name, a in cache.items() if name != "cache_index")
    assert numbers == d.x.shape[0] * d.x.shape[1] * KINDS[case.kind].cached(case)


@pytest.mark.parametrize("kind", ["mhe_mul", "mla", "tpa"])
def test_norms_come_before_the_turn_also_from_a_cache(kind):
    """tpa norms the keys that it makes of the cache, and so turns them then."""
    case = Case(kind, head_features=D, more=(("rotary_features", 6),) if kind == "mla" else ())
    prefill_and_steps(decoder(case, rotary=of(), normalize_qk=True))


def test_sharded_is_single():
    check_sharded_is_single(module_of(Case("mla")).clone(rotary=Rotary()))


def test_the_key_embedding_of_mhe_add_matters():
    case = Case("mhe_add", "materialized", head_features=D)
    fixed, turned = case.module(), case.module(rotary=of())
    assert fixed.untrained() == ("key_head_embedding",)
    assert turned.untrained() == ()
    params, x = ready(case)
    (with_turn, _), _ = run(case, rotary=of())(params, x, None, POSITIONS)
    (without, _), _ = run(case)(params, x, None, None)
    size = np.abs(with_turn["query_head_embedding"]).max()
    assert np.abs(with_turn["key_head_embedding"]).min() > 1e-5 * size
    assert np.abs(without["key_head_embedding"]).max() < 1e-5 * size


@pytest.mark.parametrize("kind", ["mha", "gta", "mla"])
@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        # A width of 11, or of half of it where only those turn.
        ({}, {"width": 33}, "even number of features of a head, not (11|5)|11 wide, which is odd"),
        ({}, {"keys": T + 1}, "rotary is for self-attention: there are 5 queries and 6 keys"),
        ({}, {"positions": POSITIONS[:, :4]}, r"shape \(2, 4\): must be \(2, 5\)"),
        ({}, {"positions": POSITIONS[0]}, r"shape \(5,\): must be \(2, 5\)"),
        ({"decode": True}, {"positions": POSITIONS}, "counted by the cache with decode=True"),
        ({"rotary": None}, {"positions": POSITIONS}, "positions are read by rotary alone"),
    ],
    ids=str,
)
@pytest.mark.covering(1)
def test_what_is_refused(kind, fields, call, message):
    given = {"rotary": Rotary()} | fields | KV_HEADS.get(kind, {})
    module = make_attention(kind, num_heads=H, **given)
    x = normal(1, B, T, call.pop("width", H * 12)) if (call := dict(call)) else None
    keys = normal(2, B, call.pop("keys"), H * 12) if "keys" in call else None
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), x, keys, **call)


def test_cross_attention_has_no_positions():
    module = make_attention("mha", num_heads=H, qkv_features=H * D, rotary=Rotary(), decode=True)
    with pytest.raises(ValueError, match="cross-attention, which rotary does not turn"):
        module.init(jax.random.key(0), normal(1, B, T, H * D), method="fill_cache")
