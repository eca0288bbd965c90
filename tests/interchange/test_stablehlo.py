"""Serialized functions of a run: what they give is what the run's own model gives."""

import importlib.util
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.interchange import export, stablehlo
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors

pytest.importorskip("flatbuffers", reason="needs the extra `export`")
pytest.importorskip("safetensors", reason="needs the extra `export`")


def rows_of(rows, length, padded=True):
    """Ids [rows, length], in the first of which there are 2 of padding at the end."""
    ids = np.random.default_rng(0).integers(5, 300, (rows, length)).astype(np.int32)
    if padded:
        ids[0, -2:] = 0
    return ids


def exported(run, out):
    """The functions of a run by their names, with its parameters."""
    result = export(run, out, "stablehlo")
    params, _ = read_tensors(out / WEIGHTS)
    found = {}
    for name in result["functions"]:
        function = jax.export.deserialize((out / f"{name}.stablehlo").read_bytes())
        assert function.platforms == ("cpu", "cuda", "tpu") == tuple(result["platforms"])
        found[name] = lambda *args, function=function: function.call(params, *args)
    return found, result


def same(found, expected):
    """Equal up to rounding, which goes with the terms of a sum and not with what they leave."""
    size = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * size, rtol=0)
    assert np.abs(np.asarray(expected)).max() > 0.1


GTA = {"model.attention.num_kv_heads": 2, "model.attention.qkv_features": 16}


@pytest.mark.parametrize(
    ("task", "kind", "form"),
    [
        ("mlm", "mva", "mva materialized"),
        ("classification", "mhe_add", "mhe_add folded"),
        ("classification", "gqa", "gqa"),
        ("classification", "mla", "mla materialized"),
    ],
)
def test_encoders(run_of, load, tmp_path, task, kind, form):
    fields = {"model.attention.num_kv_heads": 2} if kind == "gqa" else {}
    fields |= {"model.num_token_types": 2} if task == "mlm" else {"model.scan_layers": True}
    run = run_of(task, **{"model.attention.kind": kind, **fields})
    functions, result = exported(run, tmp_path / "out")
    assert result["form"] == {"encoder": form}
    loaded = load(run)
    compiled = jax.jit(loaded.model.apply, static_argnames="method")
    for tokens in (rows_of(3, 7), rows_of(2, 20)):
        ones = np.zeros_like(tokens)
        ones[:, 1:] = 1
        types = (ones,) if task == "mlm" else ()

        def apply(*args, **named):
            return compiled({"params": loaded.params}, *args, **named)

        same(functions["encode"](tokens, *types), apply(tokens, *types, method="encode"))
        rest = (ones,) if task == "classification" else types
        first = np.array([[1, 3]] * len(tokens), np.int32) if task == "mlm" else ones
        same(functions["predict"](tokens, first, *rest), apply(tokens, first, *rest))
    with pytest.raises(ValueError, match="refining shapes"):  # t <= model.max_length
        functions["encode"](rows_of(2, 21), *(np.ones((2, 21), np.int32) for _ in types))


@pytest.mark.parametrize(
    ("kind", "fields", "form"),
    [
        ("mhe_mul", {}, "folded"),
        ("mhe_add", {"model.positions": "rotary"}, "materialized"),
        ("mhe_add", {"model.attention.normalize_qk": True}, "materialized"),
        ("mfa", {"model.attention.reuse_keys": True}, ""),
        ("gta", GTA | {"model.positions": "rotary"}, ""),
        (
            "mla",
            {"model.positions": "rotary", "model.attention.rotary_features": 2},
            "absorbed",
        ),
        ("mla", {"model.attention.latent_groups": 2}, "absorbed"),
        ("tpa", {"model.positions": "rotary"}, "factored"),
        (
            "tpa",
            # A LayerNorm over few features would enlarge rounding.
            {"model.attention.normalize_qk": True, "model.attention.qkv_features": 64},
            "materialized",
        ),
    ],
)
def test_language_models(run_of, load, tmp_path, kind, fields, form):
    run = run_of("lm", **{"model.attention.kind": kind, **fields})
    functions, result = exported(run, tmp_path / "out")
    assert result["form"] == {"decoder": f"{kind} {form}".strip()}
    loaded, tokens = load(run), rows_of(3, 9, padded=False)
    expected = jax.jit(loaded.model.apply)({"params": loaded.params}, tokens)
    places = np.broadcast_to(np.arange(9, dtype=np.int32), tokens.shape)
    logits, cache = functions["start"](tokens[:, :6], places[:, :6])
    same(logits, expected[:, :6])
    for t in range(6, 9):
        logits, cache = functions["step"](cache, tokens[:, t : t + 1], places[:, t : t + 1])
        same(logits, expected[:, t : t + 1])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_prompts_of_several_lengths(run_of, load, tmp_path, positions):
    """Each row goes on where its prompt ends: no step sees the padding behind it."""
    run = run_of("lm", **{"model.positions": positions})
    functions, _ = exported(run, tmp_path / "out")
    loaded, tokens = load(run), rows_of(3, 9, padded=False)
    expected = np.asarray(jax.jit(loaded.model.apply)({"params": loaded.params}, tokens))
    ends, rows = np.array([2, 6, 3]), np.arange(3)
    places = np.broadcast_to(np.arange(6, dtype=np.int32), (3, 6))
    prompts = np.where(places < ends[:, None], tokens[:, :6], 0)
    logits, cache = functions["start"](prompts, places)
    same(np.asarray(logits)[rows, ends - 1], expected[rows, ends - 1])
    for t in range(3):
        place = (ends + t).astype(np.int32)[:, None]
        logits, cache = functions["step"](cache, np.take_along_axis(tokens, place, 1), place)
        same(np.asarray(logits)[:, 0], expected[rows, ends + t])


@pytest.mark.parametrize("kind", ["mqa", pytest.param("mva", marks=pytest.mark.rest), "mla"])
def test_translation(run_of, load, tmp_path, kind):
    run = run_of("translation", **{"model.attention.kind": kind, "model.scan_layers": True})
    functions, result = exported(run, tmp_path / "out")
    assert set(result["form"]) == {"encoder", "decoder", "cross"}
    loaded, sources, targets = load(run), rows_of(3, 7), rows_of(3, 5, padded=False)
    expected = jax.jit(loaded.model.apply)({"params": loaded.params}, sources, targets)
    cache = functions["start"](sources)
    for t in range(5):
        place = np.full((3, 1), t, np.int32)
        logits, cache = functions["step"](cache, targets[:, t : t + 1], place)
        same(logits, expected[:, t : t + 1])


@pytest.mark.parametrize(("task", "types"), [("mlm", 1), ("mlm", 2), ("lm", 1), ("translation", 1)])
def test_the_example_of_the_card(run_of, tmp_path, capsys, task, types):
    fields = {"model.attention.kind": "mhe_mul", "model.num_token_types": types}
    export(run_of(task, **fields), tmp_path / "out", "stablehlo")
    names = ("encode", "predict") if task == "mlm" else ("start", "step")
    files = {"README.md", "config.json", "tokenizer.model", WEIGHTS}
    files |= {f"{name}.stablehlo" for name in names}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Attention is computed as `mhe_mul folded` (" in card
    assert "by the engine `xla`" in card
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(example.replace("DIRECTORY", str(tmp_path / "out")), {})
    assert "[" in capsys.readouterr().out


def test_the_example_of_the_docs(run_of, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from pathlib.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    export(run_of("classification"), "served/sst2", "stablehlo")
    exec(example, {})
    assert capsys.readouterr().out.startswith("[[")


def test_hashed_words_have_no_home(run_of, tmp_path):
    """Refused before anything of the run is read but its config."""
    config = load_json(run_of("mlm") / "config.json")
    config = set_field(config, "model.hashing", "md_proj")
    with pytest.raises(
        InputError, match=r"model\.hashing is 'md_proj': .* cannot be exported to stablehlo$"
    ):
        stablehlo.check(config)


def test_without_its_library_it_says_what_to_install(run_of, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    without = lambda name, *rest: None if name == "flatbuffers" else found(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(InputError, match=r"^stablehlo needs flatbuffers: .*\[export\]"):
        export(run_of("lm"), tmp_path / "out", "stablehlo")
    assert not list(tmp_path.iterdir())
