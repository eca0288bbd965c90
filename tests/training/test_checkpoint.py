"""What is kept, what comes back, and what is said when it is not there or not as it was written."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mhe_jax.config import InputError
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints, restore_params
from mhe_jax.training.checkpoint.steps import CHECKSUMS as NAME
from mhe_jax.training.state import TrainState

TOKENIZER: Any = SimpleNamespace(key="k", name="n")  # so that `meta` is read
LOSSES = (5.0, 1.0, 3.0, 2.0, 4.0)


def state_of(value, count=4, ema=True):
    """A state whose numbers are drawn from `value`; the average is half more."""
    mesh = jax.make_mesh(
        (count, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:count]
    )
    draw = np.random.default_rng(value)
    params = {"a": draw.normal(size=(8, 3)), "b": {"c": draw.normal(size=13)}}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = TrainState.create(params, optax.adamw(0.1), jax.random.key(value), ema)
    if ema:
        state = state.replace(ema_params=jax.tree.map(lambda x: x + 0.5, params))
    state = state.replace(step=jnp.asarray(value, jnp.int32))
    across, whole = NamedSharding(mesh, PartitionSpec("data")), sharding.replicated(mesh)
    return jax.tree.map(lambda x: jax.device_put(x, across if x.shape == (8, 3) else whole), state)


def abstract_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one, other)))


def meta(step, loss):
    return {"validated_step": step, "validation": {"loss": loss}, "note": "ü"}


def steps_on_disk(run, name="checkpoints"):
    return sorted(int(path.name) for path in (run / name).iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Five checkpoints of which the last two are kept, and the second, which is the best."""
    run = tmp_path_factory.mktemp("whole")
    checkpoints = Checkpoints(run, keep=2)
    for step, loss in enumerate(LOSSES, 1):
        checkpoints.save(state_of(step), step, meta(step, loss))
    assert checkpoints.best_meta() == meta(2, 1.0)
    checkpoints.close()
    return run


@pytest.fixture
def run(whole, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture(scope="module")
def target():
    return abstract_of(state_of(0))


def test_the_last_and_the_best_are_kept_also_by_who_goes_on(run):
    assert steps_on_disk(run) == [2, 4, 5]
    checkpoints = Checkpoints(run, keep=1)
    assert (checkpoints.latest_step, checkpoints.best_step) == (5, 2)
    assert not checkpoints.is_best(6, meta(6, 1.0))  # of equal ones the first stays
    assert not checkpoints.is_best(6, meta(5, 0.5))  # of another step
    checkpoints.save(state_of(6), 6, meta(6, 1.0))
    checkpoints.wait()
    assert steps_on_disk(run) == [2, 6]
    assert checkpoints.is_best(7, meta(7, 0.5))
    checkpoints.save(state_of(7), 7, meta(7, 0.5))
    checkpoints.save(state_of(8), 8, meta(7, 0.5))
    checkpoints.close()
    assert steps_on_disk(run) == [7, 8]


def reopened(run, target):
    checkpoints = Checkpoints(run, keep=2)
    state, found = checkpoints.restore(target)
    checkpoints.close()
    return state, found, checkpoints


def test_a_validation_that_comes_later_is_added_to_its_step(run, target):
    checkpoints = Checkpoints(run, keep=2)
    checkpoints.save(state_of(99), 5, meta(4, 0.1))
    assert checkpoints.best_step == 2
    checkpoints.save(state_of(99), 5, meta(5, 0.5))
    assert checkpoints.best_meta() == meta(5, 0.5)
    checkpoints.close()
    state, found, checkpoints = reopened(run, target)
    assert_equal(state, state_of(5))
    assert (found, checkpoints.best_step) == (meta(5, 0.5), 5)
    assert restore_params(run, "best", target.params)[1] == [5]
    flip(run / "checkpoints/5/validation")
    with pytest.raises(InputError, match="/5/validation: "):
        restore_params(run, "best", target.params)


def test_what_fails_while_a_validation_is_added_loses_no_checkpoint(run, target, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(run, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", fail)
        patch.setattr(Path, "replace", fail)
        with pytest.raises((OSError, InputError), match="No space left on device"):
            checkpoints.save(state_of(5), 5, meta(5, 0.5))
    checkpoints.close()
    state, found, checkpoints = reopened(run, target)
    assert_equal(state, state_of(5))
    assert (found, checkpoints.best_step) == (meta(5, LOSSES[-1]), 2)


def test_only_what_is_restored_is_read_whole(run, target):
    for step in (2, 4):
        flip(arrays(run / "checkpoints" / str(step)))
    state, _, checkpoints = reopened(run, target)
    assert_equal(state, state_of(5))
    assert (checkpoints.notes, checkpoints.best_step) == ([], 2)
    assert steps_on_disk(run) == [2, 4, 5]


@pytest.mark.parametrize(("devices", "ema"), [(1, True), (2, False), (8, True)])
def test_a_state_comes_back_on_another_mesh(tmp_path, devices, ema):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(9, ema=ema), 9, {"tokens": 12.5})
    checkpoints.close()
    target = abstract_of(state_of(0, devices, ema))
    checkpoints = Checkpoints(tmp_path)
    state, found = checkpoints.restore(target)
    checkpoints.close()
    assert found == {"tokens": 12.5}
    assert jax.tree.structure(state) == jax.tree.structure(target)
    assert_equal(state, state_of(9, ema=ema))
    assert jax.tree.all(jax.tree.map(lambda x, t: x.sharding == t.sharding, state, target))


@pytest.mark.parametrize(
    ("which", "average", "steps"),
    [
        ("best", 1, [2]),
        ("last", 1, [5]),
        ("4", 1, [4]),
        ("last", 3, [2, 4, 5]),
    ],
)
def test_parameters_for_evaluation_are_the_averaged_ones(whole, which, average, steps):
    target = abstract_of(state_of(0, count=2)).params
    params, found = restore_params(whole, which, target, average, TOKENIZER)
    assert found == steps
    wanted = jax.tree.map(
        lambda *x: np.mean(x, axis=0), *(jax.device_get(state_of(n).ema_params) for n in steps)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), params, wanted)
    assert params["a"].sharding == target["a"].sharding


@pytest.mark.parametrize(
    ("which", "average", "says"),
    [
        ("1", 1, "checkpoint '1'"),
        ("last", 4, "4 checkpoints 'last'"),
        ("best", 2, "2 checkpoints 'best'"),
        ("newest", 1, "checkpoint 'newest'"),
    ],
)
def test_what_is_not_there_is_one_line(whole, target, which, average, says):
    with pytest.raises(InputError, match=f"has no {says}; there are: 2, 4, 5; ") as told:
        restore_params(whole, which, target.params, average)
    assert "\n" not in str(told.value)


def test_without_a_validation_the_last_is_the_best(tmp_path, target):
    with pytest.raises(InputError, match="there are: none; "):
        restore_params(tmp_path, "best", target.params)
    assert not list(tmp_path.iterdir())
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 3):
        checkpoints.save(state_of(step), step, {})
    checkpoints.close()
    assert restore_params(tmp_path, "best", target.params)[1] == [3]


def test_half_a_checkpoint_is_not_one(run, target):
    """As kill -9 leaves it: a directory under its temporary name."""
    half = run / "checkpoints" / "6.orbax-checkpoint-tmp"
    shutil.copytree(run / "checkpoints" / "5", half)
    assert restore_params(run, "last", target.params)[1] == [5]
    checkpoints = Checkpoints(run, keep=2)
    assert checkpoints.latest_step == 5
    checkpoints.save(state_of(6), 6, meta(6, 1.5))
    checkpoints.close()
    assert steps_on_disk(run) == [2, 5, 6]
    assert not half.exists()
    assert_equal(restore_params(run, "last", target.params)[0], state_of(6).ema_params)


def test_training_on_while_it_is_written_does_not_change_what_is_written(tmp_path):
    """The state is donated to the next step as soon as `save` returns."""
    big = jnp.arange(4e6, dtype=jnp.float32).reshape(2000, 2000)
    state = TrainState.create({"a": big}, optax.sgd(0.1), jax.random.key(0), False)
    state = jax.device_put(state, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    target = abstract_of(state)
    advance = jax.jit(
        lambda s: s.replace(params=jax.tree.map(lambda p: p + 1, s.params)), donate_argnums=0
    )
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(2):
        checkpoints.save(state, step, {})
        for _ in range(5):
            state = advance(state)
    checkpoints.close()
    for step in (0, 1):
        params, _ = restore_params(tmp_path, str(step), target.params)
        assert (params["a"][0, 0], params["a"][-1, -1]) == (5 * step, 4e6 - 1 + 5 * step)


def test_what_the_caller_does_with_its_metadata_later_changes_none_that_are_saved(tmp_path):
    checkpoints, given = Checkpoints(tmp_path), meta(1, 1.0)
    checkpoints.save(state_of(1), 1, given)
    given["validation"]["loss"] = 9.0
    assert checkpoints.best_meta() == meta(1, 1.0)
    checkpoints.wait()
    _, found = checkpoints.restore(abstract_of(state_of(0)))
    assert found == meta(1, 1.0)
    found["validation"]["loss"] = 9.0
    assert checkpoints.best_meta() == meta(1, 1.0)
    checkpoints.close()


def arrays(step):
    files = (step / "ema_params" / "ocdbt.process_0" / "d").iterdir()
    return max(files, key=lambda path: path.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"0")


def empty_files(step):
    """As a disk that lost its last writes leaves them."""
    for path in step.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


# What is done, and which file is named.
HARMS = {
    "a flipped bit": (lambda step: flip(arrays(step)), "ema_params/ocdbt.process_0/d/"),
    "one byte more": (lambda step: lengthen(arrays(step)), "ema_params/ocdbt.process_0/d/"),
    "a file less": (lambda step: (step / "ema_params/_METADATA").unlink(), "ema_params/_METADATA"),
    "an item less": (lambda step: shutil.rmtree(step / "ema_params"), "ema_params"),
    "meta": (lambda step: flip(step / "meta" / "metadata"), "meta/metadata"),
    "the list": (lambda step: flip(step / NAME), NAME),
    "no list": (lambda step: (step / NAME).unlink(), NAME),
    "all empty": (empty_files, NAME),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_is_never_loaded_and_named(whole, run, target, harm):
    harm, names = HARMS[harm]
    for step in (2, 4, 5):
        harm(run / "checkpoints" / str(step))
    for which, step in (("last", 5), ("best", 2)):
        with pytest.raises(InputError) as told:
            restore_params(run, which, target.params, tokenizer=TOKENIZER)
        where = re.escape(f"{run}/checkpoints/{step}/{names}")
        # A best one is sought in all steps.
        assert re.match(where, str(told.value)) or which == "best"
        assert "\n" not in str(told.value)
    shutil.rmtree(run / "checkpoints/2")
    shutil.copytree(whole / "checkpoints/2", run / "checkpoints/2")
    state, _, checkpoints = reopened(run, target)
    assert_equal(state, state_of(2))
    assert checkpoints.best_step == 2
    assert steps_on_disk(run) == [2]
    assert steps_on_disk(run, "checkpoints_unreadable") == [4, 5]
    for note, step in zip(checkpoints.notes, (5, 4), strict=True):
        assert note.startswith(f"warning: {run}/checkpoints/{step}/{names}")


def test_without_any_readable_checkpoint_nothing_is_touched(run):
    for step in (2, 4, 5):
        flip(arrays(run / "checkpoints" / str(step)))
    with pytest.raises(
        InputError, match="no checkpoint can be read: .*/5/.*; .*/4/.*; .*/2/"
    ) as told:
        Checkpoints(run)
    assert "\n" not in str(told.value)
    assert steps_on_disk(run) == [2, 4, 5]


def test_every_file_of_every_item_has_a_checksum(whole):
    crc32c = google_crc32c.value
    assert crc32c(b"123456789") == 0xE3069283
    step = whole / "checkpoints" / "2"
    first, *lines = (step / NAME).read_text().splitlines()
    assert int(first, 16) == crc32c("".join(f"{line}\n" for line in lines).encode())
    found = {name: sums for *sums, name in (line.split(" ", 2) for line in lines)}
    files = {str(path.relative_to(step)): path for path in step.glob("*/**/*") if path.is_file()}
    assert found.keys() == files.keys() > {"meta/metadata", "optimizer/manifest.ocdbt"}
    for name, (crc, size) in found.items():
        data = files[name].read_bytes()
        assert (int(crc, 16), int(size)) == (crc32c(data), len(data))


@pytest.mark.parametrize("name", ["a[b]", "a*", "what?"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(whole, target, tmp_path, name):
    with pytest.raises(InputError, match="^workdir=.*: takes a path without"):
        Checkpoints(tmp_path / name)
    assert not list(tmp_path.iterdir())
    shutil.copytree(whole, tmp_path / name)  # a run that was moved there is read
    assert restore_params(tmp_path / name, "last", target.params)[1] == [5]
