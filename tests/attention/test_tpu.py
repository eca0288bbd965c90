"""The kernels for a TPU: interpreted here, and compiled for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_shared
from attention_cases import kept_by_words, kernels_for_tpus, on_mesh, parts

from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, is_saved, shared, splash
from mhe_jax.attention.engines import blocks as of_engines
from mhe_jax.attention.engines.shared import kernels, tpu

B, T, S, D, E, R = 2, 5, 7, 11, 13, 3
KEY, RATE = jax.random.key(5), 0.3
NAMES = "output", "query", "key", "value", "key bias"


def inputs(groups=1, values=None, lengths=(T, S), spread=2.0, heads=R, dtype=jnp.float32, width=E):
    """query, key, value, key bias, and a cotangent of the output."""
    rng = np.random.default_rng(sum(lengths) + groups)
    H, (T, S) = groups * heads, lengths
    of_values = B, S, values or groups, width
    shapes = (B, T, groups, D), (B, S, groups, D), of_values, (B, T, H, width)
    query, key, value, cotangent = (rng.normal(size=shape) for shape in shapes)
    key_bias = rng.uniform(0, 1, (B, S, H))
    # Both ends of the range are there.
    key_bias[:, :1], key_bias[:, 1:2] = 1, 0
    arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
    return *arrays, jnp.asarray(spread * key_bias, jnp.float32), jnp.asarray(cotangent, dtype)


@functools.partial(jax.jit, static_argnames=("blocks", "rate", "broadcast"))
def run(query, key, value, key_bias, cotangent, mask, blocks=None, rate=0.0, broadcast=True):
    """Output and gradients by the interpreted kernels; the sum of the weights."""
    options = Options(rate, KEY, broadcast_dropout=broadcast)

    def attend(*args):
        return tpu.attend(*args, mask, options, scale=D**-0.5, blocks=blocks, interpret=True)

    with jax.default_matmul_precision("highest"):
        output, pull, kept = jax.vjp(attend, query, key, value, key_bias, has_aux=True)
        return (output, *pull(cotangent)), kept


def check(given, mask=None, blocks=None, tolerance=1e-5, left=1.0, **dropout):
    mask = Mask() if mask is None else mask
    got, kept = run(*given, mask, blocks, **dropout)
    wanted = test_shared.wanted_of(given[:4], given[4], mask, left)
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        x = np.asarray(x, np.float64)
        # Gradients that cancel to 0 are as exact as what cancels.
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * max(1, abs(y).max()), err_msg=name
        )
    return got, kept


@pytest.mark.parametrize(("groups", "own_values"), [(1, True), (2, False)])
def test_prime_sizes(groups, own_values):
    _, kept = check(inputs(groups, groups * R if own_values else None))
    assert kept.shape == (1, 1, 1, 1)
    assert kept == 1


def test_saturated_queries_have_no_gradient():
    """But for sums of float32 that cancel: those of all heads and features at once."""
    attend = functools.partial(tpu.attend, interpret=True)
    mine, others = test_shared.of_saturated_rows(attend, jnp.bfloat16, 3.0, 2)
    assert mine <= 16 * np.finfo(np.float32).eps * others


def test_calls_of_nothing():
    for lengths in ((0, S), (T, 0)):
        query, key, value, key_bias, cotangent = inputs(lengths=lengths, spread=0.0)
        attend = functools.partial(
            tpu.attend, mask=Mask(), options=Options(), scale=0.5, interpret=True
        )
        (output, _), pull = jax.vjp(attend, query, key, value, key_bias)
        np.testing.assert_array_equal(output, np.zeros(cotangent.shape))


@pytest.mark.parametrize(
    ("name", "lengths", "blocks"),
    [
        ("offset of all", (29, 43), (8, 16)),
        ("window, offset", (29, 61), (8, 16, 32)),  # blocks of their own forward
        ("nothing of one", (29, 43), (8, 16)),
        ("length of all", (29, 43), (8, 16)),
        ("segments of all", (29, 43), (8, 16)),
        ("one mark of queries", (29, 43), (8, 16)),
        ("one mark of keys", (29, 43), (8, 16)),
        ("all of them", (29, 43), (8, 16)),
        ("causal", (9, 43), (8, 8)),
        ("causal", (43, 9), (16, 8)),
    ],
)
def test_masks(name, lengths, blocks):
    """A row without a key has output and gradients of 0."""
    mask = parts(*lengths)[name]
    _, kept = check(inputs(2, lengths=lengths), mask, blocks)
    wanted = mask.row_has_key(*lengths, jnp.float32)
    np.testing.assert_array_equal(kept, wanted)


def test_gradients_of_many_queries(monkeypatch):
    """Those of queries that do not stay on the chip together go one part after the other."""
    monkeypatch.setattr(kernels, "QUERIES_BYTES", 16 * 4 * tpu.LANES)
    jax.clear_caches()
    check(inputs(lengths=(45, 43)), parts(45, 43)["window & offset"], (8, 16))


@pytest.mark.parametrize("name", ["causal", "window", "offset", "length of all"])
def test_gradients_of_many_keys(name, monkeypatch):
    """Those of keys that are too many go band by band, with the queries that may see them."""
    monkeypatch.setattr(tpu, "BAND", 16)
    jax.clear_caches()
    check(inputs(2, lengths=(45, 43)), parts(45, 43)[name], (8, 8))


@pytest.mark.parametrize("order", [1, -1])
def test_scores_far_apart(order):
    """Where the maximum moves with each block of keys, up or down, by more than float32 holds."""
    query, key, *rest = inputs(lengths=(29, 43))
    query = query.at[..., 0].set(40.0)
    key = key.at[..., 0].set(order * jnp.arange(43.0)[:, None])
    # A score of 500 has a rounding error of 3e-5.
    check((query, key, *rest), blocks=(8, 8), tolerance=3e-4)


def test_spread_of_the_key_bias(monkeypatch):
    """Beyond the bound the call goes head by head, forward and backward."""
    went = []
    both = {"head_by_head", "head_by_head_gradient"}
    for name in both:
        plain = getattr(shared, name)

        def spied(*args, name=name, plain=plain):
            jax.debug.callback(lambda: went.append(name))
            return plain(*args)

        monkeypatch.setattr(shared, name, spied)
    jax.clear_caches()
    # The rounding error of a logit of 1000 is 6e-5.
    for spread, tolerance, wanted in (
        (57, 1e-5, set()),
        (1e3, 1e-4, both),
    ):
        check(inputs(spread=spread, lengths=(29, 43)), blocks=(8, 16), tolerance=tolerance)
        jax.effects_barrier()
        assert set(went) == wanted


@pytest.mark.parametrize(("width", "name"), [(E, "offset"), (tpu.LANES, "lengths")])
def test_groups_of_heads(width, name, monkeypatch):
    """Heads that do not fit into one group go in several, the last one filled up.

    Those as wide as a tile are laid side by side in another way.
    """
    monkeypatch.setattr(tpu, "GROUP_WIDTH", 2 * width)
    given = inputs(2, 10, lengths=(9, 19), heads=5, width=width)
    jax.clear_caches()
    check(given, parts(9, 19)[name], (8, 16))


@pytest.mark.parametrize("name", ["splash", "pallas"])
def test_a_scanned_layer_saves_what_the_kernel_gives(name):
    """The backward pass runs one kernel, and not that of the forward pass again."""
    engine, options = {"splash": splash, "pallas": tpu}[name], Options()

    def layer(x, _):
        bias = jnp.zeros(x.shape[:3]) if engine is tpu else None
        return engine.attend(x, x, x, bias, Mask.causal(), options, scale=0.4)[0], None

    def kernels(policy):
        scanned = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        run = jax.jit(jax.grad(lambda x: jax.lax.scan(scanned, x, None, length=3)[0].sum()))
        traced = run.trace(jnp.ones((2, 128, 1, 8)))
        return traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call")

    assert (kernels(is_saved), kernels(None)) == (2, 3)


@pytest.mark.parametrize(
    ("broadcast", "spread"), [(True, 1.0), ("batch", 1.0), (True, 1e3)], ids=str
)
def test_dropout(broadcast, spread):
    """One mask for all heads and in both passes, within the bound of spreads and beyond."""
    rows, tolerance = 1 if broadcast == "batch" else B, 1e-4 if spread > 60 else 1e-5
    left = kept_by_words(KEY, RATE, rows, 21, 43)[:, None] / (1 - RATE)
    given = inputs(lengths=(21, 43), spread=spread)
    _, kept = check(given, None, (8, 16), tolerance, left=left, rate=RATE, broadcast=broadcast)
    ones = given[0], given[1], jnp.ones_like(given[2]), given[3]
    sums = test_shared.wanted_of(ones, given[4], True, left)[0]
    # XLA flushes what is below float32's normal numbers.
    tiny = np.finfo(np.float32).tiny
    np.testing.assert_allclose(kept, sums[..., :1], rtol=tolerance, atol=tiny)


def test_dropout_keeps_its_share():
    """Of 10⁶ weights, within four standard errors, as of pairs of queries or keys."""
    kept, keep = kept_by_words(KEY, RATE, 1, 1000, 1000)[0], 1 - RATE
    for found, wanted in (
        (kept, keep),
        (kept[1:] & kept[:-1], keep**2),
        (kept[:, 1:] & kept[:, :-1], keep**2),
        # Queries and keys have words of their own.
        (kept & kept.T, keep**2),
        # What two rows and two columns share would show in a mask that only adds words up.
        (kept[1:, 1:] & kept[1:, :-1] & kept[:-1, 1:] & kept[:-1, :-1], keep**4),
    ):
        error = (wanted * (1 - wanted) / found.size) ** 0.5
        assert abs(found.mean() - wanted) < 4 * error * (1 if found is kept else 2)
    for share in (kept.mean(1), kept.mean(0)):
        assert np.abs(share - keep).max() < 5 * (keep * RATE / 1000) ** 0.5


def test_dropout_does_not_depend_on_devices():
    query, key, _, key_bias, _ = (jnp.tile(x[:1], (4, 1, 1, 1)[: x.ndim]) for x in inputs())
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None], (4, S, 1, S))
    options = Options(dropout_rate=RATE, dropout_rng=KEY)

    def kept():
        def run(*given):
            return tpu.attend(*given, Mask(), options, scale=1.0, blocks=(8, 16), interpret=True)

        return jax.jit(run)(query, key, value, key_bias)[0] > 0

    wanted = np.broadcast_to(kept_by_words(KEY, RATE, 4, T, S)[:, :, None], (4, T, R, S))
    for axes in ((1, 3), (2, 2)):
        with on_mesh(*axes):
            np.testing.assert_array_equal(kept(), wanted)


def test_bfloat16():
    given = inputs(2, lengths=(29, 43), dtype=jnp.bfloat16)
    (output, *gradients), _ = check(given, Mask.causal(), (16, 16), tolerance=0.02)
    assert output.dtype == jnp.bfloat16
    assert [x.dtype for x in gradients] == [x.dtype for x in given[:4]]


def test_denominators_are_wider_than_bfloat16():
    """With values of 1 the output is 1, to within the rounding of w."""
    query, key, value, key_bias, cotangent = inputs(2, lengths=(29, 43), dtype=jnp.bfloat16)
    first, second = of_engines.parts(key_bias, 2)
    assert (first == first.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert (first + second == key_bias).all()
    given = query, key, jnp.ones_like(value), key_bias, cotangent
    (output, *_), _ = run(*given, Mask.causal(), (16, 16))
    np.testing.assert_allclose(output.astype(jnp.float32), 1, atol=2**-8)


@pytest.mark.parametrize(
    "call",
    [
        "pallas v5e:2x2 one float32 1024 1 1 12 64 64",
        "pallas v5e:2x4 mesh bfloat16 200 1 1 6 24 24",
        "pallas v5p:2x2x1 one bfloat16 200 1 1 6 24 24",
        "pallas v6e:2x2 one bfloat16 200 1 1 6 24 24",
        "pallas v5e:2x2 lengths bfloat16 1024 1 1 12 64 64",
        "pallas v5e:2x2 whole bfloat16 2048 1 1 12 64 64",
        "pallas v6e:2x2 whole bfloat16 1024 1 1 6 128 128",
        "splash v5e:2x2 one bfloat16 2048 12 12 12 64 64",
        "splash v5e:2x2 one float32 1024 4 1 4 256 256",
        "splash v5e:2x2 one bfloat16 700 2 2 2 1021 1024",
        "splash v5e:2x2 mesh bfloat16 200 6 2 6 24 40",
        "splash v5p:2x2x1 mesh bfloat16 1024 8 4 8 128 128",
        "splash v6e:2x2 one bfloat16 2048 2 2 2 400 512",
    ],
)
@pytest.mark.libtpu
def test_compiles_ahead_of_time(call):
    """The forward and the backward kernel compile for chips that are not here."""
    assert kernels_for_tpus(*call.split(maxsplit=1)) == 2
