"""Whole train steps on every mesh of eight devices: the numbers of one, and nothing left whole."""

import functools
import itertools
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from mhe_jax.attention import KINDS
from mhe_jax.config import FIELDS_OF_KINDS, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import METRICS
from mhe_jax.tasks import TASKS
from mhe_jax.training import loop, sharding, tracking
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import make_initializer
from mhe_jax.training.step import make_train_step

pytestmark = pytest.mark.whole_run

MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(sizes) == 8]
QUICK = [("mha", (2, 2, 2)), ("mhe_add", (1, 2, 4)), ("mhe_mul", (2, 4, 1))]
THREE = [(8, 1, 1), (1, 8, 1), (2, 2, 2)]
LONG = [
    (kind, sizes)
    for kind in KINDS
    for sizes in (MESHES if kind in ("mha", "mhe_add", "mhe_mul") else THREE)
    if (kind, sizes) not in QUICK
]
GROUPED = FIELDS_OF_KINDS["num_kv_heads"]
STEPS = 5
# What every kind splits over `tensor`; one projection for all heads stays whole.
OVER_TENSOR = re.compile(r"token$|mlp/\w+/kernel$|out/kernel$|head_embedding")


@pytest.fixture
def experiment(tiny):
    """`experiment(kind, sizes)`: a config whose every size divides by eight."""

    def make(kind, sizes=(1, 1, 1), /, task="mlm", **changes):
        config = tiny(
            task,
            **{
                "model.vocabulary_size": 304,
                "model.dropout_rate": 0.1,
                "model.attention.kind": kind,
                "model.attention.num_heads": 8,
                "model.attention.dropout_rate": 0.1,
                **({"model.attention.num_kv_heads": 4} if kind in GROUPED else {}),
                **({"model.attention.query_rank": 16} if kind == "mfa" else {}),
                **changes,
            },
        )
        for axis, size in zip(sharding.AXES, sizes, strict=True):
            config = set_field(config, f"mesh.{axis}", size)
        return config

    return make


class Run:
    """State and step of an experiment, on as many devices as its mesh has."""

    def __init__(self, config):
        mesh = config.mesh
        count = mesh.data * mesh.fsdp * mesh.tensor
        self.config = config
        self.mesh = sharding.make_mesh(config, jax.devices()[:count])
        model, optimizer = TASKS[config.task].model(config.model), make_optimizer(config)
        init = TASKS[config.task].initializer(model, config.data.sequence_length)
        initialize, self.abstract = make_initializer(init, optimizer, self.mesh, ema=False)
        self.state = initialize(jax.random.key(0))
        self.step = make_train_step(
            TASKS[config.task].sums(model, config.optimizer.label_smoothing),
            optimizer,
            self.mesh,
            jax.tree.map(lambda leaf: leaf.sharding, self.abstract),
            rules=sharding.RULES_BY_LENGTH[mesh.length],
        )

    def batch(self, seed=0):
        rng = np.random.default_rng(seed)
        length, predicted = self.config.data.sequence_length, 3
        tokens = rng.integers(5, 300, (8, length)).astype(np.int32)
        tokens[:, length - 2 :] = 0
        rows = {
            "tokens": tokens,
            "positions": rng.integers(0, length, (8, predicted)).astype(np.int32),
            "labels": rng.integers(5, 300, (8, predicted)).astype(np.int32),
            "weights": (rng.random((8, predicted)) < 0.8).astype(np.float32),
        }
        return sharding.global_batch(rows, self.mesh)

    def numbers(self):
        """Losses and gradient norms of the first steps."""
        found = []
        for seed in range(STEPS):
            self.state, metrics = self.step(self.state, self.batch(seed))
            found.append((float(metrics["loss"]), float(metrics["gradient_norm"])))
        return np.array(found)


@pytest.fixture(scope="module")
def of_one_device():
    """The numbers of one device, of each kind once."""
    return functools.cache(lambda config: Run(config).numbers())


def assert_like_one_device(config, alone, of_one_device):
    run = Run(config)
    np.testing.assert_allclose(run.numbers(), of_one_device(alone), rtol=1e-5)
    # Nothing has lost its place on the way, and nothing big was left whole.
    for (path, leaf), of in zip(
        jax.tree_util.tree_leaves_with_path(run.state), jax.tree.leaves(run.abstract), strict=True
    ):
        assert leaf.sharding == of.sharding, path
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.params):
        name = "/".join(sharding.path_parts(path))
        axes = set(jax.tree.leaves(tuple(leaf.sharding.spec)))
        if leaf.ndim > 1 and "head_embedding" not in name:
            assert "fsdp" in axes, name
        if OVER_TENSOR.search(name) or (leaf.ndim == 3 and name.endswith("query/kernel")):
            assert "tensor" in axes, name


@pytest.mark.parametrize(("kind", "sizes"), QUICK)
def test_losses_and_gradients_are_those_of_one_device(experiment, of_one_device, kind, sizes):
    assert_like_one_device(experiment(kind, sizes), experiment(kind), of_one_device)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), LONG)
def test_all_kinds_on_all_meshes(experiment, of_one_device, kind, sizes):
    assert_like_one_device(experiment(kind, sizes), experiment(kind), of_one_device)


def constraints(run):
    """The sharding constraints in the lowered step."""
    text = run.step.lower(run.abstract, run.batch()).as_text()
    return [line for line in text.splitlines() if "sdy.sharding_constraint" in line]


def test_split_lengths_change_where_things_lie_but_no_number(experiment, of_one_device):
    split = Run(experiment("mhe_mul", (2, 1, 4), **{"mesh.length": "tensor"}))
    whole = Run(experiment("mhe_mul", (2, 1, 4)))
    between = '[{"data", "fsdp"}, {"tensor"}, {}]'
    assert any(between in line for line in constraints(split))
    assert constraints(whole)
    assert not any(between in line for line in constraints(whole))
    # Heads and MLP keep their axis.
    for rest in ('[{"data", "fsdp"}, {}, {"tensor"}', '[{"data", "fsdp"}, {}, {"tensor"}]'):
        assert any(rest in line for line in constraints(split))
    np.testing.assert_allclose(split.numbers(), of_one_device(experiment("mhe_mul")), rtol=1e-5)


@pytest.mark.parametrize("kind", ["mhe_mul", "mva"])
def test_rows_may_be_split_everywhere(experiment, of_one_device, kind):
    """Heads and MLP leave their axis to the length; with dropout, too, no number changes."""
    engine = {"model.attention.engine": "blocked"} if kind == "mhe_mul" else {}
    split = Run(experiment(kind, (2, 1, 4), **{"mesh.length": "everywhere"}, **engine))
    lines = constraints(split)
    assert any('[{"data", "fsdp"}, {"tensor"}, {}]' in line for line in lines)
    assert not any('{}, {"tensor"}' in line for line in lines)
    assert "all_gather" in split.step.lower(split.abstract, split.batch()).as_text()
    numbers = of_one_device(experiment(kind, **engine))
    np.testing.assert_allclose(split.numbers(), numbers, rtol=1e-5)


class Device:
    """What a mesh asks of a device."""

    platform, device_kind = "cpu", "cpu"

    def __init__(self, number, slice_index, process_index):
        self.id, self.slice_index, self.process_index = number, slice_index, process_index


def devices_of(slices, processes, each):
    """`each` devices in a process, processes in a slice one after the other."""
    count = processes * each
    return [Device(i, i * slices // count, i // each) for i in range(count)]


@pytest.mark.parametrize(
    ("sizes", "between"),
    [((4, 2, 2), {"data"}), ((2, 4, 2), {"data"}), ((1, 8, 2), {"fsdp"})],
)
def test_slices_lie_along_data_first(experiment, sizes, between):
    grid = sharding.make_mesh(experiment("mha", sizes), devices_of(2, 4, 4)).devices
    assert grid.shape == sizes
    index = np.vectorize(lambda device: device.slice_index)(grid)
    crossed = {axis for i, axis in enumerate(sharding.AXES) if (np.diff(index, axis=i) != 0).any()}
    assert crossed == between


def test_tensor_does_not_go_between_slices(experiment):
    config = experiment("mha", (1, 1, 8))
    with pytest.raises(InputError, match="mesh.data=1 · mesh.fsdp=1 must be a multiple of the 2"):
        sharding.make_mesh(config, devices_of(2, 2, 4))


def test_shares_of_rows(experiment):
    def shares(sizes, processes, each):
        devices = devices_of(1, processes, each)
        mesh = sharding.make_mesh(experiment("mha", sizes), devices)
        return [sharding.share_of_rows(mesh, p) for p in range(processes)]

    assert shares((4, 2, 1), 4, 2) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert shares((2, 1, 4), 4, 2) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert shares((1, 1, 8), 4, 2) == [(0, 1)] * 4


def test_rows_that_processes_share_in_part_are_refused(experiment):
    config = experiment("mha", (4, 1, 2), **{"model.attention.num_heads": 8})
    devices = [Device(i, 0, i // 4) for i in (0, 1, 2, 4, 3, 5, 6, 7)]
    with pytest.raises(InputError, match="mesh.tensor=2 cuts across the 2 processes"):
        sharding.share_of_rows(sharding.make_mesh(config, devices), 0)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.rest)])
def test_a_run_goes_on_with_half_or_double_the_devices(experiment, tmp_path, count):
    changes = {"train.log_every": 1, "train.checkpoint_every": 3, "data.validation": ()}

    def train(workdir, devices, steps):
        changed = changes | {"workdir": str(workdir), "train.num_steps": steps}
        config = experiment("mhe_mul", (-1, 2, 1), **changed)
        loop.train(config, jax.devices()[:devices])
        lines = tracking.read(Path(workdir) / METRICS)
        return [line["loss"] for line in lines][3:]

    train(tmp_path / "begun", 4, 3)
    shutil.copytree(tmp_path / "begun", tmp_path / "other")
    whole = train(tmp_path / "begun", 4, 8)
    other = train(tmp_path / "other", count, 8)
    assert len(whole) == len(other) == 5
    assert other[0] == pytest.approx(whole[0], rel=1e-6)
    assert other[1:] == pytest.approx(whole[1:], rel=1e-5)
