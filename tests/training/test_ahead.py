"""Compiling for devices that are not there; programs themselves are read in test_hlo.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from labelled_files import write

from mhe_jax import tasks
from mhe_jax.analysis import ahead
from mhe_jax.attention.engines import mesh
from mhe_jax.config.fields import save_json
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.training import sharding

ROOT = Path(__file__).parents[2]


@pytest.mark.libtpu
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "slices"), [("v5e:4x4", 1), ("v5e:4x4", 2), ("v6e:4x4", 1), ("v5p:2x4x4", 1)]
)
@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1)])
def test_any_mesh_is_laid_over_a_torus(tiny, name, slices, fsdp, tensor):
    devices = ahead.describe_devices(name, slices)
    sizes = {"mesh.data": -1, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
    config = tiny(**sizes, **{"data.batch_size": 64})
    grid = sharding.make_mesh(config, devices).devices
    assert grid.shape == (len(devices) // fsdp // tensor, fsdp, tensor)
    assert {device.id for device in grid.flat} == {device.id for device in devices}


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.",
            41 * 2**29,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (512.00M) exceeds available HBM (15.75G).",
            2**29,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M", None),
        ("INTERNAL: hbm", None),
    ],
)
def test_what_is_needed_stands_in_the_complaint(message, needed):
    assert ahead.needed_bytes(message) == needed


def assert_shapes(config):
    """Those of the largest batch of a few, and of those of a size the longest."""
    tokenizer = tasks.make_tokenizer(config, Path(config.workdir + ".model"))
    batches = tasks.train_batches(config, tokenizer)
    mesh = sharding.make_mesh(config, jax.devices()[: config.mesh.data * config.mesh.fsdp])
    abstract = ahead.abstract_batch(config, mesh)
    found = (batches.batch(step) for step in range(12))
    real = max(found, key=lambda b: (b["labels"].size, b["labels"].shape[-1]))
    for name, leaf in abstract.items():
        assert (leaf.shape, leaf.dtype) == (real[name].shape, real[name].dtype), name
        assert leaf.sharding.spec == sharding.BATCH
    return abstract


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["mlm", "lm", "translation"])
def test_batches_have_the_shapes_of_training(tiny, task, packing):
    config = tiny(task, **{"mesh.data": 2, "mesh.fsdp": 4})
    if packing:
        config = tiny(task, **{"data.packing": True, "data.length_buckets": (), "mesh.data": 1})
    assert any("segments" in name for name in assert_shapes(config)) == packing


@pytest.mark.parametrize("dataset", ["sst2", "stsb", "copa", "squad"])
def test_batches_of_labelled_tasks(tiny, tmp_path, dataset):
    first, *_ = write(dataset, tmp_path)
    fields = {
        "data.dataset": dataset,
        "data.directory": str(tmp_path),
        "data.train": (first,),
        "data.length_buckets": (96,),
        "data.sequence_length": 96,
        "data.window_stride": 16,
        "model.max_length": 128,
        "mesh.data": 1,
    }
    assert_shapes(tiny(TABLE[dataset].task, **fields))


@pytest.mark.parametrize(
    ("task", "most", "unit"), [("mlm", 0, 2), ("mlm", 1, 2), ("lm", 23, 2), ("translation", 6, 8)]
)
@pytest.mark.parametrize("bend", [0, 100])
def test_the_search_finds_the_largest_batch(tiny, monkeypatch, capsys, task, most, unit, bend):
    """`most` units fit; `bend` bytes come with the first three and do not grow any more."""
    config = tiny(task, **{"mesh.data": 2})
    state, hbm = {"parameters": 5, "optimizer": 10, "averaged_parameters": 0}, 1000
    tried = []

    def compile_step(config, devices):
        rows, length = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
        assert rows % unit == 0
        tried.append(units := rows // unit)
        of_unit = (hbm - 15 - bend) / (most + 0.5)
        total = int(15 + bend * min(units, 3) / 3 + units * of_unit)
        return {
            "batch": {"rows": rows, "length": length, "rows_per_chip": rows // 2},
            "fits": total <= hbm,
            "bytes_per_chip": {**state, "total": total},
            "hbm_bytes": hbm,
            "compile_seconds": 0.0,
        }

    monkeypatch.setattr(ahead, "compile_step", compile_step)
    found = ahead.search_batch(config, [None, None])
    assert found["fits"] == (most > 0)
    assert found["batch"]["rows"] == max(most, 1) * unit
    assert [t["rows"] for t in found["tries"]] == [units * unit for units in tried]
    assert len(tried) == len(set(tried)) <= 10
    assert capsys.readouterr().err.count("\n") == len(tried)


def test_a_call_is_compiled_for_the_mesh_and_not_for_the_host():
    assert mesh.platform() == jax.default_backend()
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), abstract_device=device)):
        assert mesh.platform() == "tpu"


COMPILE = """
import dataclasses, json, sys
from mhe_jax.config import MeshConfig
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.analysis import ahead

devices = ahead.describe_devices("v5e:2x4")
for case in json.load(sys.stdin):
    config = load_json(sys.argv[1])
    for field, value in case.items():
        config = set_field(config, field, value)
    mesh = ahead.sharding.make_mesh(config, devices)
    state, *_ = ahead.lower(config, mesh)
    trained = {
        "/".join(ahead.sharding.path_parts(path)): leaf.size
        for path, leaf in ahead.jax.tree_util.tree_leaves_with_path(state.params)
    }
    print(json.dumps(ahead.compile_step(config, devices) | {"trained": trained}))
"""
SMALL = {
    "model.vocabulary_size": 512,
    "model.features": 128,
    "model.mlp_features": 256,
    "model.num_layers": 2,
    "model.scan_layers": True,
    "model.norm_position": "post",
    "model.dropout_rate": 0.0,
    "model.max_length": 128,
    "data.sequence_length": 128,
    "data.batch_size": 256,
}
# Bytes of the output of a layer on one device of eight.
ACTIVATION = 256 // 8 * 128 * 128 * 2


def alone(command, stdin="", **environment):
    """A process whose compiler has no flags of the test suite."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


def collectives(tiny, tmp_path, *cases):
    path = tmp_path / "config.json"
    save_json(tiny(**SMALL), path)
    done = alone(["-c", COMPILE, str(path)], json.dumps(cases))
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_data(found):
    """Every gradient is added up once, in float32, and a few numbers beside it."""
    # Of mhe_add the gradient of key embeddings is 0 everywhere. Of mhe_mul the folded form knows
    # queries' and keys' embeddings by their product alone, whose gradient is added up once.
    spared = sum(n for name, n in found["trained"].items() if name.endswith("key_head_embedding"))
    gradient = 4 * (found["parameters"]["total"] - spared)
    assert set(found["collectives"]) == {"all-reduce"}
    assert 0 <= found["collectives"]["all-reduce"]["bytes"] - gradient <= 4 * 64
    assert found["collectives"]["all-reduce"]["largest"] < ACTIVATION


def check_fsdp(found, gathered_times):
    sent = {kind: c["bytes"] for kind, c in found["collectives"].items()}
    parameters = 4 * found["parameters"]["total"]
    gathered = sent.pop("all-gather") + sent.pop("collective-permute", 0)
    assert parameters / 2 < gathered <= gathered_times * parameters
    assert sum(sent.values()) <= parameters + 4 * 64
    assert set(sent) == {"all-reduce", "reduce-scatter"}
    for collective in found["collectives"].values():
        assert collective["largest"] < ACTIVATION


DATA = {"mesh.data": 8, "model.dtype": "float32"}
FSDP = {"mesh.data": 1, "mesh.fsdp": 8, "model.dtype": "bfloat16"}


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "kind",
    ["mhe_add", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mha", "mhe_mul"))],
)
def test_collectives(tiny, tmp_path, kind):
    of_kind = {"model.attention.kind": kind}
    cases = [DATA | of_kind, FSDP | of_kind]
    if kind != "mhe_add":
        cases.append(FSDP | of_kind | {"model.remat": True})
    data_parallel, fsdp, *remat = collectives(tiny, tmp_path, *cases)
    check_data(data_parallel)
    check_fsdp(fsdp, 2)
    for found in remat:
        check_fsdp(found, 3)
    if kind == "mhe_add":
        assert fsdp["attention"] == {"mhe_add": "shared on pallas"}


def small_config(tmp_path) -> Path:
    config = tmp_path / "small.py"
    config.write_text(
        "from mhe_jax.config import *\n"
        "def get_config():\n"
        "    attention = AttentionConfig(kind='mhe_add', num_heads=2)\n"
        "    model = ModelConfig(vocabulary_size=256, features=128, mlp_features=128,\n"
        "        num_layers=2, max_length=64, attention=attention, dropout_rate=0.0)\n"
        "    data = DataConfig(train=('no.txt',), sequence_length=64, batch_size=8)\n"
        "    return Config(task='lm', model=model, data=data)\n"
    )
    return config


@pytest.mark.libtpu
def test_what_does_not_fit_is_an_answer(tmp_path):
    target = ["--compile_only", "--topology", "v5e:2x2", "--data.batch_size", str(2**20)]
    plain = ["--model.attention.kind", "mha", "--model.attention.num_heads", "8"]
    done = alone(["train.py", str(small_config(tmp_path)), *target, *plain])
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["fits"]
    # The scores of one layer are 2^18 rows of a device, 8 heads, 64 by 64 numbers of 4 bytes.
    assert found["bytes_per_chip"]["total"] > 2**18 * 8 * 64 * 64 * 4 > found["hbm_bytes"]
    assert found["collectives"] is found["estimated_cycles"] is None
    assert "does not fit" in done.stderr


@pytest.mark.libtpu
def test_train_py_compiles_and_leaves_nothing(tmp_path):
    """Neither text nor tokenizer is there, and no working directory afterwards."""
    config = small_config(tmp_path)
    before = set(tmp_path.iterdir())
    target = ["--compile_only", "--topology", "v5e:2x2", "--workdir", str(tmp_path / "run")]
    plain = ["--model.attention.engine", "xla"]
    cache = tmp_path / "cache"
    done = alone(["train.py", str(config), *target, *plain], MHE_JAX_CACHE=str(cache))
    assert {*tmp_path.iterdir()} - {cache} == before
    assert {path.name for path in cache.glob("*")} <= {"programs"}  # what XLA compiled
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fits"]
    assert found["attention"] == {"mhe_add": "shared on xla"}
    assert (found["num_devices"], found["mesh"]) == (4, {"data": 4, "fsdp": 1, "tensor": 1})
    assert found["batch"] == {"rows": 8, "length": 64, "rows_per_chip": 2, "tokens": 512}
    assert found["hbm_bytes"] == int(15.75 * 2**30)
    own = found["bytes_per_chip"]
    parameters = 4 * found["parameters"]["total"]
    assert own["parameters"] == parameters
    assert 0 < own["optimizer"] - 2 * parameters < 64
    assert own["total"] == sum(size for name, size in own.items() if name != "total")
    assert found["flops_per_chip"] == found["flops"] / 4
    assert found["estimated_cycles"] > 0
    for word in ("temporaries", "all-reduce", "FLOPs", "estimated cycles", "fits"):
        assert word in done.stderr


@pytest.mark.libtpu
@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("kind", "rate", "runs_as"),
    [
        ("mha", "0", "splash"),
        ("mha", "0.1", "blocked"),
        ("mhe_add", "0.1", "shared on pallas"),
    ],
)
def test_engines_of_bert_base(topology, kind, rate, runs_as):
    """Splash attention draws no dropout: with it heads with scores of their own run in blocks."""
    field = "--model.attention."
    # What does not choose an engine is small.
    command = ["train.py", "configs/bert_base.py", "--compile_only", "--topology", topology]
    command += ["--model.num_layers", "1", "--data.batch_size", "4"]
    command += ["--model.vocabulary_size", "512", "--model.mlp_features", "64"]
    command += [f"{field}kind", kind, f"{field}dropout_rate", rate]
    found = json.loads(alone(command).stdout.splitlines()[-1])
    assert found["attention"] == {kind: runs_as}
    assert found["fits"]
