"""Parameters by name: bit for bit those of the run, whatever reads them."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from tiny_runs import tiny_config

from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, save_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import FORMATS, export
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors, write_tensors
from mhe_jax.training.loop import train
from mhe_jax.training.state import TrainState

KINDS = {
    "mha": {},
    "mhe_add": {"model.attention.score_groups": 2},
    "gqa": {"model.attention.num_kv_heads": 2},
    "mla": {"model.attention.latent_groups": 2, "model.attention.query_rank": 6},
}


def same(one, other):
    one, other = flatten_dict(one), flatten_dict(other)
    assert sorted(one) == sorted(other)
    for path, array in one.items():
        assert array.dtype == other[path].dtype == np.float32
        np.testing.assert_array_equal(array, other[path], err_msg=str(path))


@pytest.mark.covering(1)
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["translation", "lm", "classification", "mlm"])
def test_the_export_is_a_run_with_the_same_parameters(run_of, load, tmp_path, task, kind, scanned):
    fields = {"model.attention.kind": kind, "model.scan_layers": scanned, **KINDS[kind]}
    run, out = run_of(task, orbax=True, **fields), tmp_path / "out"
    result = export(run, out, "safetensors")
    assert result["steps"] == [7]
    first, then = load(run), load(out)
    same(first.params, then.params)
    assert then.steps == [7]
    assert then.tokenizer.model == first.tokenizer.model
    assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(first.params))
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", WEIGHTS, "tokenizer.model",
    }  # fmt: skip
    tensors, _ = read_tensors(out / WEIGHTS)
    assert not any("layers" in name for name in tensors)


@pytest.mark.parametrize("scanned", [False, True])
def test_on_a_mesh_and_with_the_other_layout(run_of, load, tmp_path, scanned):
    """Each device gets its part, of layers as the config has them, not as they were trained."""
    run, out = run_of("translation", **{"model.scan_layers": scanned}), tmp_path / "out"
    export(run, out, "safetensors")
    config = set_field(load_json(out / "config.json"), "model.scan_layers", not scanned)
    for name, size in (("data", 2), ("fsdp", 2), ("tensor", 2)):
        config = set_field(config, f"mesh.{name}", size)
    save_json(config, out / "config.json")
    loaded = load(out, jax.devices())
    kernel = flatten_dict(loaded.params, sep=".")["embeddings.token"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 4
    change = unroll_layers if scanned else stack_layers
    same(change(load(run).params), loaded.params)


def test_of_a_mesh_and_of_several_checkpoints(run_of, load, tmp_path):
    """The export of parameters that lie on eight devices, the mean of two checkpoints."""
    mesh = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2}
    run = run_of("lm", new=True, orbax=True, **mesh)
    best = load(run).params
    checkpoints = Checkpoints(run, keep=2)
    for step, factor in ((8, 2.0), (9, 4.0)):
        state = TrainState.create(
            jax.tree.map(lambda x, f=factor: f * x, best), optax.sgd(0.1), jax.random.key(0), False
        )
        checkpoints.save(state, step, {"tokenizer": load(run).tokenizer.key})
    checkpoints.wait()
    checkpoints.close()
    out = tmp_path / "out"
    result = export(run, out, "safetensors", checkpoint="last", average_checkpoints=2)
    assert result["steps"] == [8, 9]
    then = load(out)
    assert then.steps == [8, 9]
    same(jax.tree.map(lambda x: 3 * x, best), then.params)


@pytest.mark.whole_run
def test_eval_and_init_from_take_it(run_of, texts, tmp_path):
    fields = {"model.attention.kind": "mhe_mul", "model.num_layers": 1}
    encoder, out = run_of("mlm", new=True, **fields), tmp_path / "out"
    export(encoder, out, "safetensors")
    config = load_json(encoder / "config.json")
    before, after = (evaluate(place, config.evaluation) for place in (encoder, out))
    assert before["loss"] == after["loss"]
    assert json.loads((out / "eval_test.json").read_text())["steps"] == [7]

    fields |= {"train.init_from": str(out), "optimizer.learning_rate": 1e-30, "train.num_steps": 1}
    tuned = tiny_config("classification", texts, tmp_path / "tuned", **fields)
    train(tuned, jax.devices()[:1])
    found = Run.load(tmp_path / "tuned", load_json(tmp_path / "tuned" / "config.json"))
    params = unflatten_dict(read_tensors(out / WEIGHTS)[0], sep=".")
    for part in ("encoder", "embeddings"):
        same(params[part], found.params[part])


# The card


@pytest.fixture(scope="module")
def scored(run_of, texts):
    """A run with a score on other texts."""
    fields = {"model.attention.kind": "mhe_mul", "data.train": (str(texts / "lines.txt"),)}
    run = run_of("lm", new=True, **fields)
    config = set_field(load_json(run / "config.json"), "train.init_from", str(texts / "mul"))
    save_json(config, run / "config.json")
    (texts / "two words.txt").write_text("a dog runs\n" * 9)
    other = (str(texts / "two words.txt"),)
    evaluate(run, dataclasses.replace(config.evaluation, sources=other, stride=3))
    (run / "eval_other.json").write_text("[")  # no result
    older = {"steps": [1], "perplexity_per_word": 12345.0}  # of another checkpoint
    (run / "eval_older.json").write_text(json.dumps(older))
    return run


@pytest.mark.parametrize("to", FORMATS)
def test_the_card(scored, texts, tmp_path, to):
    """It has the score; no file but the config of a run names a place of the exporter."""
    run, out = scored, tmp_path / "out"
    export(run, out, to)
    files = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if to in ("safetensors", "stablehlo"):
        del files["config.json"]
    places = [str(p).encode() for p in (texts.parent, sys.prefix, Path(__file__).parents[2])]
    assert [name for name in files if any(place in files[name] for place in places)] == []
    (result,) = (json.loads(path.read_text()) for path in run.glob("eval_[!o]*.json"))
    card = files["README.md"].decode()
    assert f"perplexity_per_word {result['perplexity_per_word']:.4f}"[:-2] in card
    assert "12345" not in card


# What is read again


NAME = "decoder.layer_1.mlp.up.kernel"
FAULTS = {
    "has no tensor": lambda x: {},
    "asks for": lambda x: {NAME: x.T},
    r"decoder\.layer_2": lambda x: {NAME: x, "decoder.layer_2.mlp.up.kernel": x},
    "NaN": lambda x: {NAME: np.where(np.arange(28) == 3, np.nan, x).astype(np.float32)},
    "float16": lambda x: {NAME: x.astype(np.float16)},
}


@pytest.fixture(scope="module")
def exported(run_of, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "lm"
    export(run_of("lm"), out, "safetensors")
    return out


@pytest.fixture
def spoilt(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "out")


@pytest.mark.parametrize("says", FAULTS)
def test_tensors_that_do_not_fit(spoilt, load, says):
    tensors, metadata = read_tensors(spoilt / WEIGHTS)
    tensors |= FAULTS[says](tensors.pop(NAME))
    write_tensors(spoilt / WEIGHTS, tensors, metadata)
    with pytest.raises(InputError, match=f"out/model.safetensors: .*{says}"):
        load(spoilt)


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_file_that_is_cut(spoilt, load, size):
    (spoilt / WEIGHTS).write_bytes((spoilt / WEIGHTS).read_bytes()[:size])
    with pytest.raises(InputError, match="out/model.safetensors: .*") as error:
        load(spoilt)
    assert "\n" not in str(error.value)


def test_a_bit_that_has_flipped(spoilt, load):
    content = bytearray((spoilt / WEIGHTS).read_bytes())
    content[-5000] ^= 1
    (spoilt / WEIGHTS).write_bytes(content)
    with pytest.raises(InputError, match="out/model.safetensors: "):
        load(spoilt)


def test_which_checkpoint(exported):
    config = load_json(exported / "config.json")

    def steps(**fields):
        evaluation = dataclasses.replace(config.evaluation, **fields)
        changed = dataclasses.replace(config, evaluation=evaluation)
        return Run.load(exported, changed, jax.devices()[:1]).steps

    assert steps(checkpoint="last") == steps(checkpoint="7") == [7]
    # The config of the run may ask for a mean, of which the file is not.
    assert steps(checkpoint="last", average_checkpoints=2) == [7]
    with pytest.raises(InputError, match=r"'8'.*of steps .7"):
        steps(checkpoint="8")


def test_of_another_tokenizer(spoilt, load, run_of, texts):
    (texts / "upper.txt").write_text((texts / "lines.txt").read_text().upper())
    other = run_of("lm", **{"data.train": ("upper.txt",)})
    shutil.copyfile(other / "tokenizer.model", spoilt / "tokenizer.model")
    with pytest.raises(InputError, match="tokenizer"):
        load(spoilt)


def test_checkpoints_come_before_it(run_of, exported, load):
    """Of a directory that has both, such as one in which training went on."""
    run = run_of("lm", new=True, orbax=True)
    (run / WEIGHTS).write_bytes((exported / WEIGHTS).read_bytes()[:10])
    assert load(run).steps == [7]
