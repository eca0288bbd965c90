"""Examples that share a row: the losses and gradients that each has alone, for every kind and form.

The rows are unpacked ones put together by `examples.pack`, so both sides have the same masks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention import Rotary
from mhe_jax.data import EOS
from mhe_jax.data.examples import lm_row, mlm_row, pack, stack, translation_row
from mhe_jax.model.embeddings import positions_within
from mhe_jax.model.layers import attention_module
from mhe_jax.tasks import TASKS

NAMES = ("mlm", "lm", "translation")
# Of today's models: heads of an even width for rotary positions, and all else that they have.
TODAY = {"features": 16, "norm": "rms", "mlp": "gated", "mlp_bias": False, "activation": "silu"}
ROTARY = {"positions": "rotary"} | TODAY
FORMS = {
    "mha": {},
    "mhe_add": {"form": "shared"},
    "mhe_mul": {"form": "folded"},
    "tpa": {"form": "materialized"},
    "mha, rotary": ROTARY,
    "mva, rotary": ROTARY,
}
T, RATE, V = 9, 0.3, 26
MOST = 4  # predictions in a row of mlm
# Lengths of sources (or texts) and of targets, in rows: one full, one with padding at its end.
ROWS = (((3, 1), (2, 4), (1, 1)), ((4, 2), (1, 3)))


def example(task, number, lengths):
    """Example `number`, padded to T."""
    generator = np.random.default_rng([number, 5])
    source, target = (generator.integers(5, V, n) for n in lengths)
    if task == "lm":
        return lm_row(source, T)
    if task == "translation":
        return translation_row([*source, EOS], [*target, EOS], T)
    return mlm_row(source, T, V, RATE, generator)


def batches(task):
    """The same examples packed, and each in a row of its own; both of five rows."""
    numbers = iter(range(9))
    rows = [[example(task, next(numbers), lengths) for lengths in row] for row in ROWS]
    alone = [row for members in rows for row in members]
    packed = [pack(members, T, MOST) for members in rows]
    empty = {name: np.zeros_like(x) for name, x in packed[0].items()}
    return stack([*packed, empty, empty, empty]), stack([pack([row], T, MOST) for row in alone])


def losses(tiny, task, kind, form=None, **changes):
    """`(params, batch) -> loss and gradients`, and parameters."""
    config = tiny.config(kind, {"form": form}, num_layers=1, **changes)
    sums = TASKS[task].sums(TASKS[task].model(config), label_smoothing=0.1)
    run = jax.value_and_grad(lambda params, batch: sums(params, batch, None)["loss"])
    return tiny.jit(run), tiny.params(task, config)


def close(one, other):
    """To 1e-5 of the largest number of each leaf, or of a hundredth of the largest of all."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 0.01 * largest))


@pytest.mark.covering(1)
@pytest.mark.parametrize("task", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_packed_is_unpacked(tiny, task, form):
    """The same losses and gradients; and a segment that changes changes no other's."""
    run, params = losses(tiny, task, form.partition(",")[0], **FORMS[form])
    packed, alone = batches(task)
    assert packed["weights"].sum() == alone["weights"].sum() >= 5
    loss, gradients = run(params, packed)
    loss_alone, gradients_alone = run(params, alone)
    np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
    close(gradients, gradients_alone)

    # Without its own loss, what stands in the middle segment of the first row does not matter.
    changed = {name: x.copy() for name, x in packed.items()}
    of_labels = packed[TASKS[task].segments[-1]]
    if task == "mlm":
        of_labels = np.take_along_axis(of_labels, packed["positions"], 1)
    changed["weights"][0, of_labels[0] == 2] = 0
    before = run(params, changed)
    assert abs(loss - before[0]) > 0.1
    sides = [name for name in TASKS[task].inputs if name != "positions"]
    for side, segments in zip(sides, TASKS[task].segments, strict=True):
        middle = packed[segments][0] == 2
        changed[side][0, middle] = (changed[side][0, middle] + 7) % (V - 5) + 5
    after = run(params, changed)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-6)
    close(after[1], before[1])


@pytest.mark.parametrize("task", NAMES)
def test_one_segment_is_none(tiny, task):
    """A row of one example has the same loss whether its segments are given or not."""
    config = tiny.config("mhe_mul", num_layers=1)
    sums = TASKS[task].sums(TASKS[task].model(config))
    _, alone = batches(task)
    plain = {name: x for name, x in alone.items() if name not in TASKS[task].segments}
    params = tiny.params(task, config)
    one, other = (
        tiny.jit(lambda p, b: sums(p, b, None)["loss"])(params, batch) for batch in (alone, plain)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("side", ["source_segments", "target_segments"])
def test_segments_of_one_side_are_refused(tiny, side):
    model, tokens = TASKS["translation"].model(tiny.config(num_layers=1)), jnp.ones((1, 2), int)
    with pytest.raises(ValueError, match="source_segments and target_segments"):
        jax.eval_shape(lambda ids: model.init(jax.random.key(0), ids, ids, **{side: ids}), tokens)


def test_positions_begin_anew():
    segments = jnp.array([[1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    assert positions_within(segments).tolist() == [[0, 1, 0, 0, 1, 2, 0, 1], list(range(8))]


# Rotary positions


def config_of(tiny, kind="mha", **changes):
    return tiny.config(kind, **ROTARY | changes)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_self_attention_is_rotated_as_the_config_says(tiny, role):
    fields = {"rotary_base": 50.0, "rotary_pairs": "interleaved", "rotary_scaling": 3.0}
    got = attention_module(config_of(tiny, **fields), role).rotary
    assert got == (None if role == "cross" else Rotary(50.0, "interleaved", 3.0))
    assert attention_module(tiny.config(), role).rotary is None


@pytest.mark.covering(1)
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("task", ["mlm", "lm", "translation"])
def test_rotary_positions_are_those_of_attention(tiny, task, scan_layers):
    """No table of positions; another base changes the logits."""
    config = config_of(tiny, scan_layers=scan_layers)
    params = tiny.params(task, config)
    assert set(params["embeddings"]) == {"token"} | ({"norm"} & set(params["embeddings"]))
    other = config_of(tiny, scan_layers=scan_layers, rotary_base=50.0)
    logits = (tiny.logits(task, one, params) for one in (config, other))
    assert np.abs(np.subtract(*logits)).max() > 1e-4
