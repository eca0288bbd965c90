"""Parameters by name: bit for bit those of the run, whatever reads them."""

import dataclasses
import json
import os
import resource
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
from mhe_jax.config.files import publish_directory
from mhe_jax.data import JsonTokenizer
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import FORMATS, export
from mhe_jax.interchange.huggingface.tokenizer import tokenizer_json
from mhe_jax.interchange.safetensors import write
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors, write_tensors
from mhe_jax.training.loop import train
from mhe_jax.training.state import TrainState

pytest.importorskip("safetensors", reason="needs the extra `export`")

KINDS = {
    "mha": {},
    "mva": {},
    "mhe_add": {"model.attention.score_groups": 2},
    "gqa": {"model.attention.num_kv_heads": 2},
    "mla": {"model.attention.latent_groups": 2, "model.attention.query_rank": 6},
    "tpa": {},
}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_whoever_the_umask_lets_may_read_it(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / WEIGHTS, {"a": np.zeros(3)})
    finally:
        os.umask(before)
    assert (tmp_path / WEIGHTS).stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_disk_that_is_full_is_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # as no more room
    try:
        with (
            pytest.raises(InputError, match=rf"^cannot write {tmp_path}/out: [^\n]+disk full\?$"),
            publish_directory(tmp_path / "out") as directory,
        ):
            write_tensors(directory / WEIGHTS, {"a": np.zeros(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == []


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
    run, out = run_of(task, **fields), tmp_path / "out"
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
    run = run_of("lm", **{"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2})
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


def test_eval_and_init_from_take_it(run_of, texts, tmp_path):
    encoder = run_of("mlm", **{"model.attention.kind": "mhe_mul"})
    out = tmp_path / "out"
    export(encoder, out, "safetensors")
    config = load_json(encoder / "config.json")
    before, after = (evaluate(place, config.evaluation) for place in (encoder, out))
    assert before["loss"] == after["loss"]
    assert json.loads((out / "eval_test.json").read_text())["steps"] == [7]

    tuned = tiny_config(
        "classification",
        texts,
        tmp_path / "tuned",
        **{
            "model.attention.kind": "mhe_mul",
            "train.init_from": str(out),
            "optimizer.learning_rate": 1e-30,
        },
    )
    train(tuned, jax.devices()[:1])
    found = Run.load(tmp_path / "tuned", load_json(tmp_path / "tuned" / "config.json"))
    for part in ("encoder", "embeddings"):
        same(read_params_of(out)[part], found.params[part])


def read_params_of(out):
    return unflatten_dict(read_tensors(out / WEIGHTS)[0], sep=".")


def test_the_card_says_what_the_model_is(run_of, tmp_path):
    run = run_of("lm", **{"model.attention.kind": "mhe_mul"})
    evaluate(run, load_json(run / "config.json").evaluation)
    (run / "eval_other.json").write_text("[")
    export(run, tmp_path / "out", "safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    score = json.loads((run / "eval_test.json").read_text())["perplexity_per_word"]
    for part in (
        "task `lm`, 2 layers of width 24",
        "- `mhe_mul`: `Q_h = X W_q ⊙ (1 + e_q[h])`, and so `K_h`",
        "softmax(Q_h K_hᵀ/√D) V_h",
        f"```\npython eval.py {run.name}\npython -m mhe_jax export {run.name} OUT --to",
        "lines.txt",
        "checkpoint of step 7",
        f"test: perplexity_per_word {score:.4f}"[:-2],
    ):
        assert part in card
    assert "other" not in card


def test_the_card_has_the_command_of_each_score(run_of, tmp_path):
    run = run_of("lm")
    usual = load_json(run / "config.json").evaluation
    for changed in ({"split": "validation"}, {"stride": 3}):
        evaluate(run, dataclasses.replace(usual, **changed))
    export(run, tmp_path / "out", "safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    test, validation = f"{run.name} --stride 3", f"{run.name} --split validation"
    assert f"```\npython eval.py {test}\npython eval.py {validation}\npython -m" in card


def test_the_card_has_the_command_of_other_texts(run_of, texts, tmp_path):
    run = run_of("lm")
    (texts / "two words.txt").write_text("a dog runs\n" * 9)
    usual = load_json(run / "config.json").evaluation
    evaluate(run, dataclasses.replace(usual, sources=("two words.txt",)))
    export(run, tmp_path / "out", "safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"```\npython eval.py {run.name} --sources 'two words.txt'\npython -m" in card


@pytest.mark.parametrize(
    ("task", "changed"),
    [
        ("classification", {"seed": 3, "spelling_noise": 0.1}),
        ("translation", {"extra_length": 2}),
    ],
)
def test_the_card_has_every_setting_of_a_score(run_of, tmp_path, task, changed):
    run = run_of(task)
    usual = load_json(run / "config.json").evaluation
    evaluate(run, dataclasses.replace(usual, **changed))
    export(run, tmp_path / "out", "safetensors")
    flags = "".join(f" --{name} {value}" for name, value in changed.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"```\npython eval.py {run.name}{flags}\npython -m" in card


@pytest.mark.parametrize(
    ("of_run", "of_export", "flags", "then"),
    [
        ({}, {"checkpoint": "best"}, "", ""),
        ({}, {"checkpoint": "7"}, " --checkpoint 7", ""),
        (
            {"checkpoint": "last"},
            {"checkpoint": "last", "average_checkpoints": 2},
            " --average_checkpoints 2",
            "",
        ),
        ({"checkpoint": "3"}, {"checkpoint": "best"}, " --checkpoint best", " --checkpoint last"),
        ({"checkpoint": "7"}, {"checkpoint": "7"}, "", ""),
    ],
)
def test_the_card_has_the_command_of_the_export(exported, tmp_path, of_run, of_export, flags, then):
    """And one that evaluates what there is, whatever the run's own evaluation is of."""
    config = load_json(exported / "config.json")
    loaded, place = Run.load(exported, config, jax.devices()[:1]), tmp_path / "run"
    shutil.copytree(exported, place)
    (tmp_path / "out").mkdir()

    def changed(fields):
        return dataclasses.replace(
            config, evaluation=dataclasses.replace(config.evaluation, **fields)
        )

    save_json(changed(of_run), place / "config.json")
    write(dataclasses.replace(loaded, workdir=place, config=changed(of_export)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"export {place.name} OUT --to safetensors{flags}\n" in card
    assert f"python eval.py DIRECTORY{then} --generate < FILE\n" in card


@pytest.mark.parametrize("to", FORMATS)
def test_no_file_names_a_place_of_the_exporter(run_of, texts, tmp_path, to):
    """Nor of the code; but for the config of a run, which is the run's own."""
    run = run_of("lm", **{"data.train": (str(texts / "lines.txt"),)})
    config = set_field(load_json(run / "config.json"), "train.init_from", str(tmp_path / "mul"))
    save_json(config, run / "config.json")
    (texts / "other.txt").write_text("a dog runs\n" * 9)
    evaluate(run, dataclasses.replace(config.evaluation, sources=(str(texts / "other.txt"),)))
    out = tmp_path / "out"
    export(run, out, to)
    places = [
        str(place).encode() for place in (texts.parent, sys.prefix, Path(__file__).parents[2])
    ]
    files = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if to in ("safetensors", "stablehlo"):
        del files["config.json"]
    assert [name for name in files if any(place in files[name] for place in places)] == []
    card = files["README.md"].decode()
    for part in ("on lines.txt", "with mul", f"eval.py {run.name} --sources other.txt"):
        assert part in card


def test_the_card_says_what_the_run_began_with(run_of, tmp_path):
    run = run_of("lm", **{"model.num_layers": 1})
    export(run, tmp_path / "out", "safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "task `lm`, 1 layer of width 24" in card
    assert "began" not in card
    config = load_json(run / "config.json")
    save_json(set_field(config, "train.init_from", "runs/mul"), run / "config.json")
    export(run, tmp_path / "tuned", "safetensors")
    assert "- began with runs/mul\n" in (tmp_path / "tuned" / "README.md").read_text()


def test_the_card_of_a_model_that_came_in(run_of, tmp_path):
    place = run_of("lm", **{"model.attention.kind": "mhe_mul"})
    run = Run.load(place, load_json(place / "config.json"))
    theirs = json.dumps(tokenizer_json(run.tokenizer, run.config)).encode()
    config = set_field(run.config, "data.train", ())
    run = dataclasses.replace(run, config=config, tokenizer=JsonTokenizer(theirs))
    write(run, tmp_path)
    card = " ".join((tmp_path / "README.md").read_text().split())
    assert "`tokenizer.model` is a `tokenizer.json` of the library `tokenizers`." in card
    assert "sentencepiece" not in card
    assert "trained on" not in card
    assert "python eval.py" not in card.partition("## The model")[2]  # nobody scored it


def test_of_a_run_with_links_to_elsewhere(run_of, tmp_path, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run_of("lm", **{"model.attention.kind": "mhe_mul"}), run)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there").mkdir()
    (run / "tokenizer.model").rename(tmp_path / "there" / "a.model")
    (run / "tokenizer.model").symlink_to(tmp_path / "there" / "a.model")
    export(run, out, "safetensors")
    assert not (out / "tokenizer.model").is_symlink()


NAME = "decoder.layer_1.mlp.up.kernel"


def without(tensors):
    del tensors[NAME]


def with_another_shape(tensors):
    tensors[NAME] = tensors[NAME].T


def with_one_more(tensors):
    tensors["decoder.layer_2.mlp.up.kernel"] = tensors[NAME]


def with_nan(tensors):
    tensors[NAME] = np.where(np.arange(28) == 3, np.nan, tensors[NAME]).astype(np.float32)


def with_another_type(tensors):
    tensors[NAME] = tensors[NAME].astype(np.float16)


FAULTS = {
    without: f"has no tensor {NAME}$",
    with_another_shape: rf"{NAME} has shape \(28, 24\): the config asks for \(24, 28\)$",
    with_one_more: "has a tensor decoder.layer_2.mlp.up.kernel, which the config's model does not",
    with_nan: f"{NAME} holds NaN or infinity$",
    with_another_type: f"{NAME} is float16: takes float32$",
}


@pytest.fixture(scope="module")
def exported(run_of, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "lm"
    export(run_of("lm"), out, "safetensors")
    return out


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_tensors_that_do_not_fit(exported, load, tmp_path, fault):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    tensors, metadata = read_tensors(out / WEIGHTS)
    fault(tensors)
    write_tensors(out / WEIGHTS, tensors, metadata)
    with pytest.raises(InputError, match=f"out/model.safetensors: {FAULTS[fault]}"):
        load(out)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_is_cut(exported, load, tmp_path, size):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / WEIGHTS).write_bytes((exported / WEIGHTS).read_bytes()[:size])
    with pytest.raises(InputError, match="out/model.safetensors: cannot be read: .*") as error:
        load(out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [-1, -5000])
def test_a_bit_that_has_flipped(exported, load, tmp_path, place):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    content = bytearray((exported / WEIGHTS).read_bytes())
    content[place] ^= 1
    (out / WEIGHTS).write_bytes(content)
    with pytest.raises(InputError, match="out/model.safetensors: its numbers have changed"):
        load(out)


def test_which_checkpoint(exported, load):
    config = load_json(exported / "config.json")

    def steps(**fields):
        evaluation = dataclasses.replace(config.evaluation, **fields)
        changed = dataclasses.replace(config, evaluation=evaluation)
        return Run.load(exported, changed, jax.devices()[:1]).steps

    assert steps(checkpoint="last") == steps(checkpoint="7") == [7]
    # The config of the run may ask for a mean, of which the file is not.
    assert steps(checkpoint="last", average_checkpoints=2) == [7]
    with pytest.raises(InputError, match="has no checkpoint '8', only model.safetensors, of steps"):
        steps(checkpoint="8")


def test_of_another_tokenizer(exported, load, run_of, texts, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (texts / "upper.txt").write_text((texts / "lines.txt").read_text().upper())
    other = run_of("lm", **{"data.train": ("upper.txt",)})
    shutil.copyfile(other / "tokenizer.model", out / "tokenizer.model")
    with pytest.raises(InputError, match="is not the tokenizer of the checkpoint"):
        load(out)


def test_checkpoints_come_before_it(run_of, exported, load, tmp_path):
    """Of a directory that has both, such as one in which training went on."""
    run = run_of("lm")
    shutil.copyfile(exported / WEIGHTS, run / WEIGHTS)
    with open(run / WEIGHTS, "r+b") as file:
        file.truncate(10)
    assert load(run).steps == [7]
