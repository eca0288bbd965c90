"""What is kept, what comes back, and what is said when it is not there."""

import asyncio
import gc
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mhe_jax.config import InputError
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints, checksums, restore_params, writing
from mhe_jax.training.checkpoint.store import attempt, quiet_orbax
from mhe_jax.training.state import TrainState

OPTIMIZER = optax.adamw(0.1)


def mesh_of(count):
    return jax.make_mesh(
        (count, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:count]
    )


def state_of(value, ema=False, count=4):
    """A state whose numbers are `value`, and `value + 0.5` in the average."""
    across = NamedSharding(mesh_of(count), PartitionSpec("data"))
    params = {"a": jax.device_put(jnp.full((8, 3), value, jnp.float32), across)}
    state = TrainState.create(params, OPTIMIZER, jax.random.key(7), ema)
    if ema:
        state = state.replace(ema_params=jax.tree.map(lambda p: p + 0.5, params))
    whole = sharding.replicated(mesh_of(count))
    return jax.tree.map(
        lambda x: x if x.ndim == 2 and x.dtype == jnp.float32 else jax.device_put(x, whole), state
    )


def abstract_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def meta(loss):
    return {"validation": {"loss": loss}, "note": "x"}


@pytest.fixture
def run(tmp_path):
    """Five checkpoints of which three are kept; the best is of step 2."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, loss in enumerate((5.0, 1.0, 3.0, 2.0, 4.0), 1):
        state = state_of(float(step))
        if checkpoints.best_criterion is None or (loss,) < checkpoints.best_criterion:
            checkpoints.save_best(state.params, step, meta(loss))
        checkpoints.save(state, step, meta(loss))
    checkpoints.close()
    return tmp_path


def steps_on_disk(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_last_and_best_are_kept(run):
    assert steps_on_disk(run / "checkpoints") == [3, 4, 5]
    assert steps_on_disk(run / "checkpoints_best") == [2]
    checkpoints = Checkpoints(run, keep=3)
    assert (checkpoints.latest_step, checkpoints.best_criterion) == (5, (1.0,))
    assert checkpoints.best_meta() == meta(1.0)
    checkpoints.close()


def test_a_start_that_is_interrupted_lets_go_and_deletes_nothing(run, monkeypatch):
    """Ctrl-C while the best checkpoint is read."""
    hook = threading.excepthook
    before = set(threading.enumerate())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(run)
    assert threading.excepthook is hook
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # an idle pool of threads ends soon after its owner has let it go
        assert not thread.is_alive(), thread.name
    assert steps_on_disk(run / "checkpoints") == [3, 4, 5]
    assert steps_on_disk(run / "checkpoints_best") == [2]


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_state_comes_back_on_another_mesh(tmp_path, ema, devices):
    old = state_of(3.0, ema).replace(step=sharding_of(jnp.asarray(9, jnp.int32)))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(old, 9, {"tokens": 12.5})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    target = abstract_of(state_of(0.0, ema, devices))
    state, found = checkpoints.restore(target)
    checkpoints.close()
    assert found == {"tokens": 12.5}
    assert jax.tree.structure(state) == jax.tree.structure(old)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(old))
    assert jax.tree.all(jax.tree.map(lambda x, t: x.sharding == t.sharding, state, target))


def sharding_of(x):
    return jax.device_put(x, sharding.replicated(mesh_of(4)))


def test_saving_a_step_twice_leaves_it_alone(run):
    checkpoints = Checkpoints(run, keep=3)
    checkpoints.save(state_of(99.0), 5, meta(0.0))
    checkpoints.close()
    params, _ = restore_params(run, "last", abstract_of(state_of(0.0)).params)
    assert params["a"][0, 0] == 5.0


def test_best_of_a_smaller_step_replaces_one_left_by_a_killed_run(run):
    checkpoints = Checkpoints(run, keep=3)
    checkpoints.save_best(state_of(1.0).params, 1, meta(0.5))
    checkpoints.save_best(state_of(10.0).params, 1, meta(0.25))
    checkpoints.close()
    assert steps_on_disk(run / "checkpoints_best") == [1]
    params, steps = restore_params(run, "best", abstract_of(state_of(0.0)).params)
    assert (params["a"][0, 0], steps) == (10.0, [1])


@pytest.fixture
def slow_best(monkeypatch):
    """A best checkpoint takes its time before it counts."""
    seal = checksums.Seal.__call__

    def slowly(self):
        if self.step.parent.name == "checkpoints_best":
            time.sleep(0.5)
        seal(self)

    monkeypatch.setattr(checksums.Seal, "__call__", slowly)


def test_a_best_checkpoint_is_there_before_a_later_one_begins(tmp_path, slow_best):
    """A run that goes on from step 2 would not know that step 1 was the best."""
    best, checkpoints = tmp_path / "checkpoints_best", Checkpoints(tmp_path, keep=2)
    checkpoints.save_best(state_of(1.0).params, 1, meta(1.0))
    checkpoints.save(state_of(1.0), 1, meta(1.0))
    assert steps_on_disk(best) == []  # of the same step: that run notices, and no step waits
    checkpoints.save(state_of(2.0), 2, meta(2.0))
    assert steps_on_disk(best) == [1]
    checkpoints.close()


def test_the_best_before_goes_when_the_next_is_there(tmp_path, slow_best):
    best, checkpoints = tmp_path / "checkpoints_best", Checkpoints(tmp_path)
    checkpoints.save_best(state_of(1.0).params, 1, meta(3.0))
    checkpoints.save_best(state_of(2.0).params, 2, meta(2.0))
    assert steps_on_disk(best) == [1]
    checkpoints.save_best(state_of(3.0).params, 3, meta(1.0))
    assert steps_on_disk(best) == [2]
    assert checkpoints.best_meta() == meta(1.0)
    assert steps_on_disk(best) == [2, 3]
    checkpoints.close()
    assert steps_on_disk(best) == [3]


def test_the_best_up_to_the_last_checkpoint_stays_for_a_run_that_goes_on_from_there(tmp_path):
    """Step 3 is better than step 1, but the run goes on from step 2 with other fields."""
    best, checkpoints = tmp_path / "checkpoints_best", Checkpoints(tmp_path)
    checkpoints.save_best(state_of(1.0).params, 1, meta(3.0))
    checkpoints.save(state_of(2.0), 2, meta(3.0))
    checkpoints.wait()
    for step, loss in ((3, 2.0), (4, 1.0)):
        checkpoints.save_best(state_of(float(step)).params, step, meta(loss))
    checkpoints.close()  # before a checkpoint of step 4, as if its loss were not finite
    assert steps_on_disk(best) == [1, 4]
    _, steps = restore_params(tmp_path, "best", abstract_of(state_of(0.0)).params)
    assert steps == [4]
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.best_criterion == (1.0,)
    checkpoints.drop_best_after(checkpoints.latest_step)
    checkpoints.put_aside()
    assert checkpoints.best_criterion == (3.0,)
    assert checkpoints.best_meta() == meta(3.0)
    checkpoints.close()
    assert steps_on_disk(best) == [1]


def test_one_best_is_left_once_a_checkpoint_holds_its_step(tmp_path):
    best, checkpoints = tmp_path / "checkpoints_best", Checkpoints(tmp_path)
    checkpoints.save_best(state_of(1.0).params, 1, meta(3.0))
    checkpoints.save(state_of(2.0), 2, meta(3.0))
    checkpoints.save_best(state_of(3.0).params, 3, meta(2.0))
    checkpoints.save(state_of(3.0), 3, meta(2.0))
    checkpoints.close()
    assert steps_on_disk(best) == [3]


@pytest.mark.parametrize(
    ("which", "average", "value", "steps"),
    [
        ("best", 1, 2.0, [2]),
        ("last", 1, 5.0, [5]),
        ("4", 1, 4.0, [4]),
        ("2", 1, 2.0, [2]),
        ("last", 2, 4.5, [4, 5]),
        ("last", 3, 4.0, [3, 4, 5]),
    ],
)
def test_parameters_for_evaluation(run, which, average, value, steps):
    target = abstract_of(state_of(0.0, count=2)).params
    params, found = restore_params(run, which, target, average)
    assert found == steps
    np.testing.assert_array_equal(params["a"], np.full((8, 3), value))
    assert params["a"].sharding == target["a"].sharding


def test_average_of_a_run_is_preferred(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(state_of(1.0, ema=True), 1, {})
    checkpoints.save(state_of(2.0, ema=True), 2, {})
    checkpoints.close()
    target = abstract_of(state_of(0.0)).params
    assert restore_params(tmp_path, "last", target)[0]["a"][0, 0] == 2.5
    assert restore_params(tmp_path, "last", target, 2)[0]["a"][0, 0] == 2.0


@pytest.mark.parametrize(
    ("which", "average", "message"),
    [
        ("1", 1, "no checkpoint '1'; there are: 3, 4, 5; best: 2"),
        ("last", 4, "no 4 checkpoints; there are: 3, 4, 5; best: 2"),
        ("best", 2, "needs|with evaluation.checkpoint=last"),
        ("newest", 1, "allowed are best, last, or a step"),
    ],
)
def test_what_is_not_there_is_one_line(run, which, average, message):
    with pytest.raises(InputError, match=message) as error:
        restore_params(run, which, abstract_of(state_of(0.0)).params, average)
    assert "\n" not in str(error.value)


def test_empty_directory(tmp_path):
    with pytest.raises(InputError, match="there are: none"):
        restore_params(tmp_path, "best", abstract_of(state_of(0.0)).params)
    assert not list(tmp_path.iterdir())


def test_without_a_best_one_the_last_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state_of(1.0), 1, {})
    checkpoints.close()
    with pytest.raises(InputError, match="no checkpoint 'best'; there are: 1; take 'last'"):
        restore_params(tmp_path, "best", abstract_of(state_of(0.0)).params)


def test_half_a_checkpoint_is_not_one(run):
    """As kill -9 leaves it: a directory under its temporary name."""
    whole = run / "checkpoints" / "5"
    shutil.copytree(whole, run / "checkpoints" / "6.orbax-checkpoint-tmp")
    target = abstract_of(state_of(0.0)).params
    assert restore_params(run, "last", target)[1] == [5]
    checkpoints = Checkpoints(run, keep=3)
    assert checkpoints.latest_step == 5
    checkpoints.save(state_of(6.0), 6, meta(1.5))
    checkpoints.close()
    assert steps_on_disk(run / "checkpoints") == [4, 5, 6]


def test_training_on_while_it_is_written_does_not_change_what_is_written(tmp_path):
    """The state is donated to the next step as soon as `save` returns."""
    spread = NamedSharding(mesh_of(1), PartitionSpec())
    big = jax.device_put(jnp.arange(4e6, dtype=jnp.float32).reshape(2000, 2000), spread)
    state = TrainState.create({"a": big}, optax.sgd(0.1), jax.random.key(0), False)
    state, target = jax.device_put(state, spread), None
    target = abstract_of(state)
    advance = jax.jit(
        lambda s: s.replace(params=jax.tree.map(lambda p: p + 1, s.params)), donate_argnums=0
    )
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(2):
        checkpoints.save_best(state.params, step, meta(1.0))
        checkpoints.save(state, step, {})
        for _ in range(5):
            state = advance(state)
    checkpoints.close()
    for step in (0, 1):
        params, _ = restore_params(tmp_path, str(step), target.params)
        assert params["a"][0, 0] == 5.0 * step
        assert params["a"][-1, -1] == 4e6 - 1 + 5.0 * step
    assert restore_params(tmp_path, "best", target.params)[0]["a"][0, 0] in (0.0, 5.0)


@pytest.mark.parametrize("gathered", [False, True])
def test_reads_that_fail_together_say_so_once(caplog, gathered):
    """Orbax reads all arrays at once, and leaves its loop when the first cannot be read."""

    async def fail(after):
        await asyncio.sleep(after)
        raise ValueError("the first")

    async def together():
        tasks = [asyncio.ensure_future(fail(after)) for after in (0, 60)]
        if gathered:  # and nobody asks for the outcome
            asyncio.gather(*tasks)
        await asyncio.wait(tasks, return_when="FIRST_EXCEPTION")
        raise ValueError("one of both")

    def read():
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(together())
        finally:
            loop.close()

    quiet_orbax()
    found, reason = attempt(read)
    gc.collect()
    assert (found, reason) == (None, "ValueError: one of both")
    assert caplog.records == []
