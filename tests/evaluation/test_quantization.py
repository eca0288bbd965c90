"""Matrices as int8: how near, how small, what runs with them, and what is refused."""

import dataclasses
import functools
import json
import shutil
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from random_parameters import random_parameters

import mhe_jax
from mhe_jax.config import AttentionConfig, Config, InputError, MeshConfig, ModelConfig
from mhe_jax.config.fields import save_json, set_field
from mhe_jax.config.model import KINDS
from mhe_jax.data import BOS, EOS
from mhe_jax.evaluation import decoding
from mhe_jax.evaluation.decoding import FORBIDDEN
from mhe_jax.evaluation.quantization import is_int8, quantized
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import export
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.tasks import TASKS

pytest.importorskip("qwix", reason="needs qwix: the extra `quantize`")
# qwix names what flax has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:'VariableState' was removed")

T = 7
TOKENS = np.array([[2, 7, 40, 300, 5, 5, 9], [9, 303, 17, 6, 8, 1, 20]], np.int32)
FIELDS = {"gqa": {"num_kv_heads": 2}, "gta": {"num_kv_heads": 2}}
# Matrices that a kind does not apply as a projection.
FLOAT = {"mlra": ("key", "value"), "ghla": ("decoder",)}


@functools.cache
def made(kind, **fields):
    """A language model with random parameters, its config, and the same in int8."""
    attention = AttentionConfig(kind=kind, num_heads=4, **FIELDS.get(kind, {}))
    layers = 2 if fields.get("scan_layers") else 1
    sizes = {"vocabulary_size": 304, "features": 32, "mlp_features": 40, "num_layers": layers}
    model = ModelConfig(attention=attention, max_length=12, dropout_rate=0.0, **sizes, **fields)
    config = set_field(Config(task="lm", model=model), "data.sequence_length", T)
    model = TASKS["lm"].model(model)
    params = random_parameters(TASKS["lm"].initializer(model, T), size=0.8)
    return model, params, *quantized(config, model, params)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def half_steps(path, kernel):
    """For each number of a matrix: 127 steps reach the largest that goes to the same output."""
    name = path[-2] if path[-1] == "kernel" else path[-1]
    inputs = {"out": (0, 1), "token": (1,)}.get(name, (0,))
    return np.broadcast_to(np.abs(kernel).max(inputs, keepdims=True) / 254, kernel.shape)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_near(kind, scan_layers):
    """Matrices are rounded by half a step at most, and the model computes with just those."""
    model, params, int8, rounded = made(kind, scan_layers=scan_layers)
    before, after = (flatten_dict(unroll_layers(tree)) for tree in (params, rounded))
    matrices = [path for path in before if path[-1] in ("kernel", "token")]
    chosen = [path for path in matrices if is_int8(after[path])]
    assert {path[-2] for path in matrices if path not in chosen} == {*FLOAT.get(kind, ())}
    small, large = (bytes_of([tree[path] for path in chosen]) for tree in (after, before))
    assert small <= 0.3 * large
    near, steps = dict(before), {path: half_steps(path, before[path]) for path in chosen}
    for path in chosen:
        near[path] = after[path].array.qvalue * after[path].array.scale
        rounding = 1 + 1e-4  # of float32: of 127 steps, in half a step
        assert (np.abs(near[path] - before[path]) <= rounding * steps[path]).all()

    def logits(flat):
        tree = unflatten_dict(flat)
        return model.apply({"params": stack_layers(tree) if scan_layers else tree}, TOKENS)

    found = int8.apply({"params": rounded}, TOKENS)
    np.testing.assert_allclose(found, logits(near), atol=2e-4, rtol=1e-4)
    # To first order their sum moves by no more than its slopes times these steps.
    slopes = jax.grad(lambda flat: logits(flat).sum())(before)
    bound = sum(np.sum(np.abs(slopes[path]) * steps[path]) for path in chosen)
    assert 0 < abs(float(logits(before).sum() - found.sum())) < bound


@pytest.mark.covering(1)
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_nothing(kind, scan_layers):
    """A prefill of three tokens, then one, then three."""
    *_, model, params = made(kind, scan_layers=scan_layers)
    parts = [np.arange(0, 3), np.arange(3, 4), np.arange(4, 7)]

    @jax.jit
    def over_cache(params):
        variables, found = {"params": params}, []
        _, cache = model.apply(variables, 2, T, method="start_cache", mutable=["cache"])
        for part in parts:
            given = TOKENS[:, part], np.tile(part, (2, 1))
            step = {"method": "decode_step", "mutable": ["cache"]}
            logits, cache = model.apply(variables | cache, *given, **step)
            found.append(logits)
        return jnp.concatenate(found, 1)

    found, whole = over_cache(params), model.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(found, whole, atol=2e-4, rtol=1e-4)
    assert (found.argmax(-1) == whole.argmax(-1)).all()


@pytest.mark.parametrize(("scan_layers", "tie_embeddings"), [(False, False), (True, True)])
def test_bfloat16(scan_layers, tie_embeddings):
    """Logits are float32, and near those of float32 by the rounding of bfloat16."""
    fields = {"scan_layers": scan_layers, "tie_embeddings": tie_embeddings}
    _, _, model, params = made("mva", dtype="bfloat16", **fields)
    _, _, same, precise = made("mva", **fields)
    found = model.apply({"params": params}, TOKENS)
    expected = same.apply({"params": precise}, TOKENS)
    assert found.dtype == expected.dtype == jnp.float32
    assert jnp.linalg.norm(found - expected) < 0.03 * jnp.linalg.norm(expected)
    assert len(np.unique(found)) > 0.9 * found.size  # not rounded to bfloat16
    start = {"method": "start_cache", "mutable": ["cache"]}
    _, cache = jax.eval_shape(lambda: model.apply({"params": params}, 2, T, **start))
    kept = flatten_dict(cache["cache"]).items()
    kept = {leaf.dtype.name for path, leaf in kept if path[-1].startswith("cached_")}
    assert kept == {"bfloat16"}


@pytest.mark.parametrize(("scan_layers", "platform"), [(False, "cpu"), (True, "gpu")])
def test_greedy_text_is_the_argmax_of_the_full_pass(
    run_of, load, scan_layers, platform, monkeypatch
):
    """On a GPU the layers of a scanned model are apart while it decodes."""
    monkeypatch.setattr(decoding, "platform", lambda: platform)
    workdir = run_of("lm", scan_layers=True) if scan_layers else run_of("lm")
    run = load(workdir, quantize="int8", extra_length=6)
    prompts = ["the cat", "a small dog runs"]
    for prompt, found in zip(prompts, run.generate(prompts, details=True), strict=True):
        read = [BOS, *run.tokenizer.encode(prompt)]
        rows = np.array([[*read, *found.tokens]])
        logits = np.array(run.model.apply({"params": run.params}, rows)[0, len(read) - 1 : -1])
        logits[:, list(FORBIDDEN)] = logits[0, EOS] = -np.inf
        assert found.tokens == logits.argmax(-1).tolist() != []


def test_beams_score_as_the_full_pass(load):
    run = load("translation", quantize="int8", beam_size=3, length_penalty=0.0)
    texts = ["the cat sleeps", "a small dog"]
    for text, found in zip(texts, run.translate(texts, details=True), strict=True):
        source = np.array([[*run.tokenizer.encode(text), EOS]])
        target = np.array([[BOS, *found.tokens[:-1]]])
        logits = run.model.apply({"params": run.params}, source, target)
        steps = jnp.take_along_axis(jax.nn.log_softmax(logits)[0], np.c_[found.tokens], axis=1)
        assert found.score == pytest.approx(float(steps.sum()), abs=1e-4)


def test_devices_change_nothing(load):
    run = load("translation", quantize="int8")
    config = dataclasses.replace(run.config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = Run.load(run.workdir, config)
    up = sharded.params["encoder"]["layer_0"]["mlp"]["up"]["kernel"].array.qvalue
    assert up.dtype == jnp.int8
    assert not up.is_fully_replicated
    texts = ["the cat sleeps", "a small dog"]
    one, other = (of.translate(texts, details=True) for of in (run, sharded))
    assert [x.tokens for x in one] == [x.tokens for x in other]


def test_encoders(load, labelled_run):
    for method, run in (("encode", "mlm"), ("predict", labelled_run("sst2"))):
        before, after = (load(run, quantize=how) for how in (None, "int8"))
        found, expected = (getattr(of, method)(["the small cat"]) for of in (after, before))
        if method == "predict":
            found, expected = ([*x[0].probabilities.values()] for x in (found, expected))
        assert not np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, atol=0.1)


def test_scores_have_a_file_of_their_own(load, score):
    run = load("lm")
    plain, int8 = score(run), score(run, quantize="int8")
    kept = {name: run.workdir / f"eval_{name}.json" for name in ("test", "test_int8")}
    assert {name: json.loads(path.read_text()) for name, path in kept.items()} == {
        "test": plain,
        "test_int8": int8,
    }
    assert (plain["quantize"], int8["quantize"]) == (None, "int8")
    assert plain["parameters"] == int8["parameters"]
    assert plain["loss"] != int8["loss"]
    assert int8["loss"] == pytest.approx(plain["loss"], abs=0.05)


def test_exports_have_the_parameters_as_trained(load, tmp_path):
    run = load("lm")
    shutil.copytree(run.workdir, tmp_path / "run")
    save_json(set_field(run.config, "evaluation.quantize", "int8"), tmp_path / "run/config.json")
    export(run.workdir, tmp_path / "float", "safetensors")
    export(tmp_path / "run", tmp_path / "int8", "safetensors")
    one, other = (load(tmp_path / name, quantize=None).params for name in ("float", "int8"))
    chex.assert_trees_all_equal(one, other)


def test_without_qwix(load, monkeypatch):
    run = load("lm")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(InputError, match=r"needs qwix.*\[quantize\]") as found:
        mhe_jax.load(run.workdir, quantize="int8", checkpoint="last")
    assert "\n" not in str(found.value)
