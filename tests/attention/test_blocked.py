"""The engine `blocked`: exact for every kind and mask, one dropout mask, memory linear in T."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, Case, S, T, mask_for, normal, on_mesh
from test_kinds import check, gradient

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options, blocked, blocks, xla
from mhe_jax.model.stack import _is_kept

RATE = 0.3
KEY = jax.random.key(5)


@pytest.fixture(params=["cpu", "tpu", "examples", "spread"])
def small(monkeypatch, request):
    """Few queries a block and four a band; as on a CPU, a head a block, and as elsewhere.

    There queries of one example, whole examples, or queries of all where devices are not known.
    """
    monkeypatch.setattr(blocked, "platform", lambda: "cpu" if request.param == "cpu" else "tpu")
    monkeypatch.setattr(blocked, "sees_one_device", lambda: request.param != "spread")
    monkeypatch.setattr(blocked, "BLOCK_SCORES", 300 if request.param == "examples" else 50)
    monkeypatch.setattr(blocked, "CPU_SCORES", 15)
    monkeypatch.setattr(blocks, "BAND", 4)
    gradient.cache_clear()  # its programs are of other sizes


MHA, GROUPED, BIASED = Case("mha"), Case("gqa", heads=6, kv_heads=2), Case("collaborative")


@pytest.mark.parametrize(
    ("small", "case"),
    [("cpu", GROUPED), ("tpu", GROUPED), ("examples", BIASED), ("spread", MHA)],
    indirect=["small"],
    ids=str,
)
def test_every_mask(small, case):
    """Output and gradients against the float64 reference, by one program."""
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    for name in ("[B, H, T, S]", "one row empty", "a head's row empty", "all empty"):
        _, dense = mask_for(case, name, T, S)
        check(case, jnp.asarray(dense), dense, q, k, engine="blocked")


@pytest.mark.parametrize(
    ("small", "name"),
    [
        ("cpu", "all of them"),
        ("tpu", "window & offset"),
        ("examples", "window, offset"),
        ("spread", "length of all"),
        ("tpu", "segments of all"),
    ],
    indirect=["small"],
)
def test_a_mask_in_parts(small, name):
    """Each block has its own part of it, and a band leaves out the keys behind it."""
    mask, dense = mask_for(MHA, name, T, T)
    check(MHA, mask, dense, normal(1, B, T, MHA.width), engine="blocked")


def call(T, S, dtype=jnp.float32, H=4, K=2, D=8, E=6):
    q, k, v = normal(1, B, T, H, D), normal(2, B, S, K, D), normal(3, B, S, K, E)
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def run(engine, mask, options, bias, *qkv):
    return engine.attend(*qkv, bias, mask, options, scale=0.4)[0]


@pytest.mark.usefixtures("small")
@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [(0, 5), (4, 0), (9, 3), (3, 9)], ids=str)
def test_other_lengths_and_a_key_bias(sizes):
    qkv, bias = call(*sizes), normal(4, B, sizes[1], 4)
    cotangent = normal(6, B, sizes[0], 4, 6)

    def computed(engine):
        """The output, its gradients, and how it moves with the inputs."""
        attend = functools.partial(run, engine, Mask.causal(), Options(), bias)

        def all_of_it(*qkv):
            output, pull = jax.vjp(attend, *qkv)
            return output, pull(cotangent), jax.jvp(attend, qkv, qkv)[1]

        return jax.jit(all_of_it)(*qkv)

    (output, pulled, moved), (wanted, wanted_pulled, wanted_moved) = map(computed, (blocked, xla))
    np.testing.assert_allclose(output, wanted, atol=1e-6)
    for a, b in zip(pulled, wanted_pulled, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
    np.testing.assert_allclose(moved, wanted_moved, atol=3e-6)


def test_gradients_of_many_blocks_add_up_in_float32(monkeypatch):
    """In bfloat16 those of 512 blocks of one query would lose most of what each adds."""
    monkeypatch.setattr(blocked, "CPU_SCORES", 1)
    q, k, v = call(512, 8, jnp.bfloat16)
    # All add to the gradients of keys in one direction, as all add to those of values.
    qkv = jnp.abs(q), k, v

    def gradients(engine, *qkv):
        output, pull = jax.vjp(functools.partial(run, engine, Mask(), Options(), None), *qkv)
        return pull(jnp.ones_like(output))

    wide = [x.astype(jnp.float32) for x in qkv]
    found, wanted = (
        jax.jit(functools.partial(gradients, engine))(*given)
        for engine, given in ((blocked, qkv), (xla, wide))
    )
    for got, want in zip(found[1:], wanted[1:], strict=True):
        error = np.abs(got.astype(jnp.float32) - want).max()
        assert error < 0.01 * np.abs(want).max()


@pytest.mark.usefixtures("small")
@pytest.mark.covering(1)
@pytest.mark.parametrize("broadcast", [True, "batch", False])
def test_dropout_has_one_mask_in_both_passes(broadcast):
    """With values of the identity the output is the weights, whose mask the gradients must have."""
    (q, k, _), eye = call(9, 7, K=4), jnp.eye(7)
    v = jnp.broadcast_to(eye[None, :, None], (B, 7, 4, 7))
    options = Options(dropout_rate=RATE, dropout_rng=KEY, broadcast_dropout=broadcast)
    attend = functools.partial(blocked.attend, key_bias=None, mask=Mask(), options=options)
    cotangent = normal(6, B, 9, 4, 7)

    @jax.jit
    def ours(*qkv):
        (weights, total), pull = jax.vjp(lambda *qkv: attend(*qkv, scale=0.4), *qkv)
        return weights, total, pull((cotangent, jnp.zeros_like(total)))

    weights, total, gradients = jax.device_get(ours(q, k, v))
    np.testing.assert_allclose(total[..., 0], weights.sum(-1), rtol=1e-5)
    kept = weights > 0
    assert abs(kept.mean() - (1 - RATE)) < 0.15
    shared = {True: (2,), "batch": (0, 2), False: ()}[broadcast]
    for axis in (0, 2):
        alike = bool((kept == np.take(kept, [0], axis)).all())
        assert alike == (axis in shared)
    assert len({kept[:, t].tobytes() for t in range(9)}) > 5  # a mask for each query
    # Bands, which leave keys out, draw no other.
    near = Mask.local(2) & Mask.causal()
    found, _ = jax.jit(functools.partial(attend, mask=near, scale=0.4))(q, k, v)
    np.testing.assert_array_equal(found > 0, kept & near.to_dense(9, 7).swapaxes(1, 2))

    def plain(q, k, v):
        exact = jax.nn.softmax(0.4 * jnp.einsum("bthd,bshd->bths", q, k))
        return jnp.einsum("bths,bshe->bthe", exact * kept / (1 - RATE), v)

    @jax.jit
    def exactly(*qkv):
        output, pull = jax.vjp(plain, *qkv)
        return output, pull(cotangent)

    wanted, wanted_gradients = exactly(q, k, v)
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_memory_is_linear_in_the_length(monkeypatch):
    """Temporaries and outputs with gradients, dropout on, as of a scanned layer."""
    monkeypatch.setattr(blocked, "CPU_SCORES", 4 * 1024 * 8)
    options = Options(dropout_rate=RATE, dropout_rng=KEY)
    core = functools.partial(run, blocked, Mask(), options, None)
    core = jax.checkpoint(core, policy=_is_kept)

    def both(cotangent, *qkv):
        output, pull = jax.vjp(core, *qkv)
        return output, pull(cotangent)

    found = []
    for length in (1024, 4096):
        shape = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)
        memory = jax.jit(both).lower(*[shape] * 4).compile().memory_analysis()
        found.append(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    assert found[1] < 4.5 * found[0]
    assert found[1] < 4 * 4096 * 4096 * 4 / 10  # of scores


def test_a_shard_map_over_some_axes_is_not_split_again():
    """The rules name axes that are the caller's there."""
    # Two examples for each device, which could be split once more.
    qkv = [jnp.tile(x, (2, 1, 1, 1)) for x in call(6, 7)]
    attend = functools.partial(run, blocked, Mask(), Options(), None)
    wanted = attend(*qkv)
    rows = jax.sharding.PartitionSpec("data")
    with on_mesh(2, 2):
        split = jax.shard_map(
            attend, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
        )
        np.testing.assert_allclose(jax.jit(split)(*qkv), wanted, atol=1e-6)


@pytest.mark.parametrize(("of_head", "of_all", "wanted"), [(7, 52, "xla"), (6, 48, "blocked")])
def test_auto_takes_it_for_many_scores(monkeypatch, of_head, of_all, wanted):
    """Of a head, whatever the batch, on a CPU and a TPU; of a device on a GPU."""
    given = *call(2, 3), None, Mask(), Options()  # B = 2, H = 4: 48 scores, 6 a head
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(blocked, "STORED_OF_HEAD", {platform: of_head})
        monkeypatch.setattr(blocked, "platform", lambda: platform)  # noqa: B023 called in this turn
        assert engines.attend(*given)[2] == wanted
    monkeypatch.setattr(blocked, "platform", lambda: "gpu")
    monkeypatch.setattr(blocked, "STORED", of_all)
    assert engines.attend(*given)[2] == wanted

    # Of 48 scores, 12 of a device.
    with on_mesh(2, 2):
        monkeypatch.setattr(blocked, "STORED", of_all // 4)
        assert (blocked.passed_by(*given) is None) == (wanted == "blocked")


def test_dropout_does_not_depend_on_devices(monkeypatch):
    """Each device has its own examples and heads, of one mask, whatever its blocks."""
    monkeypatch.setattr(blocked, "platform", lambda: "tpu")
    monkeypatch.setattr(blocked, "BLOCK_SCORES", 60)
    q, k, _ = call(6, 7, K=4)
    v = jnp.broadcast_to(jnp.eye(7)[None, :, None], (B, 7, 4, 7))

    options = Options(dropout_rate=RATE, dropout_rng=KEY, broadcast_dropout=False)
    mask = Mask.array(jnp.asarray(normal(8, B, 4, 6, 7) > -1))
    attend = jax.jit(functools.partial(run, blocked, mask, options, None))
    wanted = attend(q, k, v)
    with on_mesh(2, 2):
        jax.clear_caches()
        np.testing.assert_allclose(attend(q, k, v), wanted, atol=1e-6)
    masks = np.asarray(wanted > 0)
    assert len({masks[b, :, h].tobytes() for b in range(B) for h in range(4)}) == 4 * B
