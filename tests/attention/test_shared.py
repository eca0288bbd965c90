"""The shared-scores engine against float64: blocks, spreads within the bound and beyond, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import f64, kept_by_words, normal, on_mesh, parts

from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, attend, blocks, shared
from mhe_jax.attention.engines.shared import xla

B, T, S, G, R, D, E = 2, 37, 41, 2, 3, 11, 13
H = G * R
MASKS = parts(T, S) | {"all empty": Mask.array(np.zeros((B, 1, T, S)))}
# As one array: numbers that differ alone go through one program.
BEHIND = np.arange(S)[None] < np.array([S - 9, S])[:, None]
DENSE = {
    "none": Mask.array(np.ones((B, 1, T, S))),
    "causal": Mask.array(np.tile(np.tri(T, S), (B, 1, 1, 1))),
    "padding": Mask.array(np.tile(BEHIND[:, None, None], (1, 1, T, 1))),
    "all of them": Mask.array(np.array(MASKS["all of them"].to_dense(T, S))),
}


def arrays(heads=G, spread=3.0, queries=T, keys=S):
    q, k = normal(1, B, queries, G, D), normal(2, B, keys, G, D)
    bias = normal(3, B, keys, H)
    bias *= spread / (np.ptp(bias, axis=1).max() or 1.0)
    return q, k, normal(4, B, keys, heads, E), bias


def wanted_of(given, cotangent, allowed=True, kept=1.0):
    """Output and gradients in float64 of softmax over `q·k/√D + b`, head by head; not factored."""
    q, k, v, b, cotangent = (np.asarray(x, np.float64) for x in (*given, cotangent))
    if isinstance(allowed, Mask):
        allowed = allowed.to_dense(q.shape[1], k.shape[1])
        allowed = True if allowed is None else np.asarray(allowed)
    R, scale = b.shape[2] // q.shape[2], 1 / np.sqrt(q.shape[3])
    logits = (np.einsum("btgd,bsgd->bgts", q, k) * scale).repeat(R, 1)
    logits = np.where(allowed, logits + b.swapaxes(1, 2)[:, :, None], -np.inf)
    high = logits.max(-1, keepdims=True)
    e = np.exp(logits - np.where(np.isinf(high), 0, high))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1)
    values = v.repeat(b.shape[2] // v.shape[2], 2)
    dv = np.einsum("bhts,bthe->bshe", p * kept, cotangent)
    dv = dv.reshape(*v.shape[:3], -1, v.shape[3]).sum(3)
    dp = np.einsum("bthe,bshe->bhts", cotangent, values) * kept
    dl = p * (dp - (p * dp).sum(-1, keepdims=True))
    ds = dl.reshape(dl.shape[0], q.shape[2], R, *dl.shape[2:]).sum(2) * scale
    dq, dk = np.einsum("bgts,bsgd->btgd", ds, k), np.einsum("bgts,btgd->bsgd", ds, q)
    return np.einsum("bhts,bshe->bthe", p * kept, values), dq, dk, dv, dl.sum(2).swapaxes(1, 2)


def run(mask, *given, options=None):
    """Output and gradients of q, k, v and the key bias; the last of `given` is the cotangent."""
    *given, cotangent = given
    if options is None:
        sizes = blocks.BLOCK, blocks.GPU_BLOCK, blocks.BAND
        return _run((*sizes, blocks.platform, xla.takes_one_product), mask, cotangent, *given)

    @jax.jit
    def output_and_gradients(cotangent, *given):
        return _output_and_gradients(mask, options, cotangent, *given)

    return output_and_gradients(cotangent, *given)


@functools.partial(jax.jit, static_argnums=0)
def _run(settings, mask, cotangent, *given):
    return _output_and_gradients(mask, Options(), cotangent, *given)


def _output_and_gradients(mask, options, cotangent, *given):
    output, pull = jax.vjp(lambda *a: xla.attend(*a, mask, options, scale=D**-0.5)[0], *given)
    return output, pull(cotangent)


def errors(mask, given, cotangent, kept=1.0, **more):
    """Largest error of each array, relative to its own largest number in float64."""
    output, gradients = run(mask, *given, cotangent, **more)
    got = [np.asarray(x, np.float64) for x in (output, *gradients)]
    assert all(np.isfinite(x).all() for x in got)
    return [
        np.abs(g - w).max() / (np.abs(w).max() or 1.0)
        for g, w in zip(got, wanted_of(given, cotangent, mask, kept), strict=True)
    ]


@pytest.fixture(params=["many blocks", "one block", "one product"])
def way(request, monkeypatch):
    """Of the factored softmax; the last is that of a GPU, where it is for bfloat16 alone."""
    if request.param != "one block":
        for name in ("BLOCK", "GPU_BLOCK", "BAND"):
            monkeypatch.setattr(blocks, name, 16)
    if request.param == "one product":
        monkeypatch.setattr(blocks, "platform", lambda: "gpu")
        monkeypatch.setattr(xla, "takes_one_product", without_dropout)


def without_dropout(query, options):
    return options.dropout_rate == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("way", "name", "heads"),
    [
        ("many blocks", "window & causal", G),
        ("many blocks", "all of them", H),
        ("one block", "all empty", H),
        ("one product", "window & causal", H),
        ("one product", "all of them", G),
    ],
    indirect=["way"],
)
def test_output_and_gradients(name, heads):
    assert max(errors(MASKS[name], arrays(heads), normal(9, B, T, H, E))) < 1e-5


def fits(given, mask=None):
    q, k, v, b = map(jnp.asarray, given)
    static, seen = blocks.Static(1.0, 1.0, None), blocks.Seen(mask or Mask())
    v = v[:, :, jnp.arange(H) // (H // v.shape[2])]
    values = shared.values_of(q[:, :, 0], v, b, seen)
    return shared.fits(static, q[:, :, 0], v, values, b, seen)


@jax.jit
def plain(cotangent, q, k, v, b, allowed, kept=1.0):
    """The same softmax as it is usually written, in the type of q: output and gradients."""

    def attend(q, k, v, b):
        logits = jnp.einsum("btgd,bsgd->bgts", q / jnp.sqrt(q.shape[3]).astype(q.dtype), k)
        logits = logits.repeat(R, 1) + b.swapaxes(1, 2)[:, :, None]
        p = jax.nn.softmax(jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)) * allowed * kept
        return jnp.einsum(
            "bhts,bshe->bthe", p.astype(q.dtype), v.repeat(b.shape[2] // v.shape[2], 2)
        )

    output, pull = jax.vjp(attend, q, k, v, b)
    return output, *pull(cotangent)


@pytest.mark.covering(1)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["none", "causal", "all of them"])
@pytest.mark.parametrize("spread", [61.0, 1e3, 1e4])
def test_spreads_beyond_the_bound(name, spread):
    """Twice the error of the usual softmax, but for the rounding of numbers of the inputs' size."""
    mask, given, cotangent = DENSE[name], arrays(H, spread=spread), normal(9, B, T, H, E)
    assert not bool(fits(given))
    wanted = wanted_of(given, cotangent, mask)
    usual = plain(cotangent, *given, np.asarray(mask.allowed))
    output, gradients = run(mask, *given, cotangent)
    for got, other, want in zip((output, *gradients), usual, wanted, strict=True):
        of_other = np.abs(np.float64(other) - want).max()
        rounding = 2e-6 * max(1.0, np.abs(want).max())
        assert np.abs(np.float64(got) - want).max() <= 2 * of_other + rounding


# Largest values and cotangents whose gradients float32 holds, and smallest that it does not flush.
MAGNITUDES = [(1.0, 1.0), (1e-30, 1.0), (1e10, 1e5), (1e30, 1e-3), (1e-3, 1e30), (1e25, 1e-30)]


@pytest.mark.covering(1)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["none", "causal", "all of them"])
@pytest.mark.parametrize("spread", [0.0, 57.0, 200.0])
@pytest.mark.parametrize(("of_values", "of_cotangent"), MAGNITUDES)
def test_values_and_cotangents_of_any_size(name, spread, of_values, of_cotangent):
    q, k, v, b = arrays(H, spread=spread)
    assert bool(fits((q, k, v, b))) == (spread < 60)
    given = q, k, v * np.float32(of_values), b
    cotangent = normal(9, B, T, H, E) * np.float32(of_cotangent)
    assert max(errors(DENSE[name], given, cotangent)) < (1e-5 if spread < 60 else 1e-4)


def test_sizes_that_differ_by_head_and_feature():
    """Each is right to its own largest number: 1e12 of one does not hide 1e-12 of another."""
    q, k, v, b = arrays(H, spread=50.0)
    sizes = (10.0 ** np.linspace(-12, 12, H * E)).reshape(H, E).astype(np.float32)
    assert bool(fits((q, k, v * sizes, b)))
    cotangent = normal(9, B, T, H, E) / sizes
    wanted, *_, of_values, _ = wanted_of((q, k, v * sizes, b), cotangent)
    output, gradients = run(DENSE["none"], q, k, v * sizes, b, cotangent)
    for got, want in ((output, wanted), (gradients[2], of_values)):
        error = np.abs(np.float64(got) - want).max((0, 1)) / np.abs(want).max((0, 1))
        assert error.max() < 1e-5


@pytest.mark.parametrize("heads", [G, H], ids=["shared values", "own values"])
def test_values_of_keys_count_as_spread(heads):
    """A key of value 1e-20 beside others, and of a small weight, is not flushed to 0."""
    q, k, v, b = arrays(heads, spread=40.0)
    v[:, 0] *= 1e-20
    b[:, 0] = b.min(1) - 1
    assert bool(fits((q, k, v, b))) is False
    assert max(errors(DENSE["none"], (q, k, v, b), normal(9, B, T, H, E))) < 1e-5
    output, _ = run(DENSE["causal"], q, k, v, b, normal(9, B, T, H, E))
    np.testing.assert_allclose(output[:, 0], v[:, 0].repeat(H // heads, 1), rtol=1e-6)
    v[:, 0] = 0  # is not small, but none
    assert bool(fits((q, k, v, b)))
    assert max(errors(DENSE["none"], (q, k, v, b), normal(9, B, T, H, E))) < 1e-5


def test_a_value_that_its_feature_hides_is_not_lost():
    """2^-30 in a segment beside one of 2^120, where another feature keeps both keys as large."""
    q, k, v, b = arrays(H)
    of_keys = np.arange(S)[None] > 3
    v[..., 0] = 2.0**40
    v[:, 4:, :, 1:] = 2.0**120
    v[:, :4, :, 1:] = 2.0**-30
    mask = Mask.array(np.broadcast_to((np.arange(T)[:, None] > 9) == of_keys, (B, 1, T, S)))
    assert not bool(fits((q, k, v, b), mask))
    output, _ = run(mask, q, k, v, b, normal(9, B, T, H, E))
    np.testing.assert_allclose(output[:, :10, :, 1:], 2.0**-30, rtol=1e-5)


def test_a_key_that_nobody_sees_may_be_of_any_size():
    """Its value, score and bias do not touch the others."""
    q, k, v, b = arrays(spread=50.0)
    k[0, -9:] *= 1e3
    b[0, -9:] += 1e3
    v *= 1e-20
    v[0, -9:] = 1e38
    assert max(errors(DENSE["padding"], (q, k, v, b), normal(9, B, T, H, E))) < 1e-5


def of_saturated_rows(attend, dtype, spread, heads):
    """The largest dq of queries that give all weight to one key, and of the others.

    The true gradient of the first is 0, and that of an ordinary softmax too.
    """
    saturated = np.arange(T) % 2 == 0
    q, k, v, b = arrays(heads, spread=spread)
    q[:, saturated] *= 1e6
    given = [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(b)]
    cotangent = jnp.asarray(normal(9, B, T, H, E), dtype)
    wanted = wanted_of(given, cotangent)[1]
    assert np.abs(wanted[:, saturated]).max() < 1e-9

    def of_queries(cotangent, *given):
        return jax.vjp(lambda *a: attend(*a, Mask(), Options(), scale=D**-0.5)[0], *given)[1](
            cotangent
        )[0]

    def run(f, *call):
        # A CPU would leave roundings out, as no device with bfloat16 products does.
        compiled = jax.jit(f).lower(*call).compile({"xla_allow_excess_precision": False})
        return compiled(*call)

    mine, ordinary = run(of_queries, cotangent, *given), run(plain, cotangent, *given, True)[1]
    found = [np.float64(dq) for dq in (mine, ordinary)]
    errors_of_all = [np.abs(dq - wanted).max() for dq in found]
    assert errors_of_all[0] <= 2 * errors_of_all[1]
    return np.abs(found[0][:, saturated]).max(), np.abs(wanted).max()


@pytest.mark.covering(1)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("heads", [G, H], ids=["shared values", "own values"])
@pytest.mark.parametrize("spread", [3.0, 50.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_saturated_queries_have_no_gradient(dtype, spread, heads):
    """But for sums of float32 that cancel, whatever the type."""
    mine, others = of_saturated_rows(xla.attend, dtype, spread, heads)
    assert mine <= np.finfo(np.float32).eps * others


def test_a_query_of_one_key_has_no_gradient():
    """Exactly, as in an ordinary softmax."""
    given = [jnp.asarray(x, jnp.bfloat16) for x in arrays()[:3]] + [jnp.asarray(arrays()[3])]
    _, gradients = run(Mask.causal(), *given, jnp.asarray(normal(9, B, T, H, E), jnp.bfloat16))
    np.testing.assert_array_equal(gradients[0][:, 0], 0)


@pytest.mark.parametrize(
    ("bias", "fit"), [(60.0, True), (60.01, False), (np.nan, False), (np.inf, False)]
)
def test_where_the_bound_lies(bias, fit):
    """At 60, over keys that some query sees; False for what is not a number."""
    given = arrays(spread=0.0)
    given[2][...] = 3.0
    given[3][1, 5, 2] = bias
    assert bool(fits(given)) is fit
    unseen = np.ones((B, S), bool)
    unseen[1, 5] = False
    assert bool(fits(given, Mask.padding(jnp.asarray(unseen))))


def test_scores_are_scaled_after_their_difference():
    """Scaled before, scores of 10^10 may differ from their own maximum by a rounding of 100."""
    sizes = 2.0**33 + 1024 * np.arange(20.0)
    key = np.stack([0 * sizes, sizes], 1)[..., None, None]
    value = np.broadcast_to(np.eye(2)[None, :, None], (20, 2, 1, 2))
    given = np.ones((20, 1, 1, 1)), key, value, np.zeros((20, 2, 1))
    attend = functools.partial(xla.attend, mask=Mask(), options=Options(), scale=0.3)
    weights, _ = jax.jit(attend)(*(jnp.asarray(x, jnp.float32) for x in given))
    np.testing.assert_array_equal(weights[:, 0, 0], np.tile([0.0, 1.0], (20, 1)))


def test_one_key():
    given = arrays(spread=0, queries=5, keys=1)
    output, gradients = run(Mask(), *given, normal(9, B, 5, H, E))
    assert all(np.isfinite(x).all() for x in gradients)
    np.testing.assert_allclose(output, np.repeat(given[2], R, 2).repeat(5, 1), rtol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spread", [3.0, 1e3])
@pytest.mark.parametrize("broadcast", [True, "batch"])
def test_dropout(broadcast, spread):
    """Output and gradients by the mask that the words give."""
    rate, key = 0.3, jax.random.key(7)
    options = Options(dropout_rate=rate, dropout_rng=key, broadcast_dropout=broadcast)
    rows = 1 if broadcast == "batch" else B
    kept = kept_by_words(key, rate, rows, T, S)[:, None] / (1 - rate)
    given, cotangent = arrays(spread=spread), normal(9, B, T, H, E)
    worst = errors(Mask(), given, cotangent, kept=kept, options=options)
    if spread > shared.MAX_SPREAD:  # gradients of saturated scores are sums that cancel
        worst = worst[0], worst[3]
    assert max(worst) < 1e-5


def test_who_takes_a_call_on_a_gpu(monkeypatch):
    """One product would leave dropout out."""
    q = jnp.zeros((1, 2, 3), jnp.bfloat16)
    assert not xla.takes_one_product(q, Options())
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    assert xla.takes_one_product(q, Options())
    assert not xla.takes_one_product(q, Options(dropout_rate=0.3))
    assert not xla.takes_one_product(q.astype(jnp.float32), Options())


@pytest.mark.parametrize(
    ("dtype", "mask", "options"),
    [
        ("float16", Mask(), Options()),
        ("float32", Mask.array(np.ones((1, H, T, S))), Options()),
        ("float32", Mask(), Options(sow=print)),
        ("float32", Mask(), Options(dropout_rate=0.1, broadcast_dropout=False)),
    ],
    ids=str,
)
def test_calls_that_differ_from_head_to_head(dtype, mask, options):
    given = [jnp.asarray(x, dtype) for x in arrays()]
    with pytest.raises(ValueError, match="cannot share scores"):
        attend(*given, mask, options, form="shared")


def test_groups_that_a_mesh_does_not_divide():
    """Two groups of four heads on four devices stay whole, though the heads could be split."""
    q, k, v, _ = arrays()
    given = q, k, v, normal(3, B, S, 4 * G)
    attend = functools.partial(xla.attend, mask=Mask(), options=Options(), scale=D**-0.5)
    wanted, _ = attend(*given)
    with on_mesh(1, 4):
        got, _ = jax.jit(attend)(*given)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_memory():
    """mhe_add at H=12, D=64, 2048 tokens, with its gradient: no temporary of size H·T·S."""
    length = 2048
    shapes = [(1, length, 1, 64)] * 3 + [(1, length, 12), (1, length, 12, 64)]
    *given, cotangent = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)

    def both(cotangent, *given):
        attend = functools.partial(xla.attend, mask=Mask(), options=Options(), scale=64**-0.5)
        return jax.vjp(lambda *a: attend(*a)[0], *given)[1](cotangent)

    program = jax.jit(both).lower(cotangent, *given).compile()
    assert program.memory_analysis().temp_size_in_bytes < 12 * length * length * 4 / 2


@pytest.mark.parametrize(("mask", "heads"), [("none", G), ("lengths", H)])
def test_one_query_needs_no_columns_of_all_keys(monkeypatch, mask, heads):
    """Output and gradients are those of the first of two queries, whatever the spread."""
    q, k, v, b = map(jnp.asarray, arrays(heads, spread=200.0, queries=1))
    mask = {"none": Mask(), "lengths": Mask.lengths(jnp.array([0, 9]))}[mask]
    cotangent = jnp.asarray(normal(7, B, 1, H, E))

    def run(q, k, v, b):
        output, total, _ = attend(q, k, v, b, mask, Options(), form="shared")
        return output[:, :1], jnp.broadcast_to(total, (B, q.shape[1], 1, 1))[:, :1]

    def all_of(q):
        output, pull, total = jax.vjp(run, q, k, v, b, has_aux=True)
        of_q, *others = pull(cotangent)
        return output, total, of_q[:, :1], *others

    expected = jax.jit(lambda q: all_of(q))(q.repeat(2, 1))
    monkeypatch.delattr(shared, "values_of")
    found = jax.jit(lambda q: all_of(q))(q)
    for x, z in zip(found, expected, strict=True):
        assert x.dtype == z.dtype
        np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-5)


def test_denominators_of_one_product_are_finer_than_its_type():
    """Queries of 0, so that every E is 1, and values of 1: the bias has no gradient.

    What is left is how exactly bfloat16 holds the weights, and gradients of denominators.
    """
    static, seen = blocks.Static(1.0, 1.0, None), blocks.Seen(Mask())
    forward, gradient = (jax.jit(functools.partial(f, static)) for f in xla.ONE_PRODUCT[:2])
    q, k, v = (jnp.ones(x, jnp.bfloat16) for x in ((B, T, D), (B, S, D), (B, S, R, E)))
    powers = np.random.default_rng(4).integers(-5, 1, (B, S, R)) * np.log(2)
    for b in (normal(3, B, S, R), powers):
        b = jnp.asarray(b, jnp.float32)
        values = shared.values_of(q, v, b, seen)
        output, (_, found) = kept = forward(0 * q, k, values, b, seen)
        w = np.exp(f64(b))
        wanted = (w / w.max(1, keepdims=True)).sum(1)[:, None]
        np.testing.assert_allclose(f64(found), np.broadcast_to(wanted, found.shape), rtol=1e-5)
    # Of weights that are powers of two all cancels: a third part of bfloat16 is under the rounding
    # of float32, a second is not.
    cotangent = jnp.asarray(normal(5, B, T, R * E).reshape(output.shape), jnp.float32)
    *_, db = gradient(0 * q, k, v, values, b, seen, kept[1], cotangent)
    size = np.abs(f64(cotangent)).sum((1, 3))[:, None] * w / w.sum(1, keepdims=True)
    assert (np.abs(f64(db)) < 2.0**-26 * size).all()
