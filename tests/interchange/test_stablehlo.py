"""Serialized functions of a run: what they give is what the run's own model gives."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_runs import tiny_config

from mhe_jax.config import InputError
from mhe_jax.interchange import export, stablehlo
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors

ATTENTION = "model.attention."


def rows_of(rows, length, padded=True):
    """Ids [rows, length], in the first of which there are 2 of padding at the end."""
    ids = np.random.default_rng(0).integers(5, 300, (rows, length)).astype(np.int32)
    if padded:
        ids[0, -2:] = 0
    return ids


def exported(run, out):
    """The functions of a run by their names, with its parameters, and the result."""
    result = export(run, out, "stablehlo")
    params, _ = read_tensors(out / WEIGHTS)
    found = {}
    for name in result["functions"]:
        function = jax.export.deserialize((out / f"{name}.stablehlo").read_bytes())
        assert function.platforms == ("cpu", "cuda", "tpu") == tuple(result["platforms"])
        found[name] = lambda *args, function=function: function.call(params, *args)
    return found, result


def check_example(out, capsys, start="from pathlib", text=None):
    """The code of a card or page runs, and prints numbers."""
    text = text or (out / "README.md").read_text()
    (example,) = re.findall(rf"```python\n({start}.*?)```", text, re.DOTALL)
    exec(example.replace("DIRECTORY", str(out)), {})
    assert "[" in capsys.readouterr().out


def same(found, expected):
    """Equal up to rounding, which goes with the terms of a sum and not with what they leave."""
    size = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * size, rtol=0)
    assert np.abs(np.asarray(expected)).max() > 0.1


@pytest.mark.parametrize(
    ("task", "kind", "form"),
    [("mlm", "mva", "materialized"), ("classification", "mhe_add", "folded")],
)
def test_encoders(run_of, load, tmp_path, capsys, task, kind, form):
    fields = {"model.num_token_types": 2} if task == "mlm" else {"model.scan_layers": True}
    run = run_of(task, **{f"{ATTENTION}kind": kind, **fields})
    functions, result = exported(run, tmp_path / "out")
    assert result["form"] == {"encoder": f"{kind} {form}"}
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
    check_example(tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("kind", "form", "fields"),
    [
        ("mhe_mul", "folded", {}),
        ("mla", "absorbed", {"model.positions": "rotary", f"{ATTENTION}rotary_features": 2}),
        ("mlra", "absorbed", {"model.positions": "rotary", f"{ATTENTION}rotary_features": 2}),
        ("ghla", "", {f"{ATTENTION}num_groups": 2}),
        ("mha", "", {"model.kronecker.mlp": 2, "model.kronecker.embedding": 2}),
        ("tpa", "factored", {"model.positions": "rotary"}),
    ],
)
def test_language_models(run_of, load, tmp_path, capsys, kind, form, fields):
    """Of prompts of several lengths: each goes on where it ends, and no step sees the padding."""
    run = run_of("lm", **{f"{ATTENTION}kind": kind, **fields})
    functions, result = exported(run, tmp_path / "out")
    assert result["form"] == {"decoder": f"{kind} {form}".strip()}
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
    if kind == "mhe_mul":
        check_example(tmp_path / "out", capsys)


def test_translation(run_of, load, tmp_path, capsys):
    run = run_of("translation", **{f"{ATTENTION}kind": "mqa", "model.scan_layers": True})
    functions, result = exported(run, tmp_path / "out")
    assert set(result["form"]) == {"encoder", "decoder", "cross"}
    loaded, sources, targets = load(run), rows_of(3, 7), rows_of(3, 5, padded=False)
    expected = jax.jit(loaded.model.apply)({"params": loaded.params}, sources, targets)
    cache = functions["start"](sources)
    for t in range(5):
        place = np.full((3, 1), t, np.int32)
        logits, cache = functions["step"](cache, targets[:, t : t + 1], place)
        same(logits, expected[:, t : t + 1])
    check_example(tmp_path / "out", capsys)


def test_the_example_of_the_docs(run_of, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    export(run_of("classification"), "served/sst2", "stablehlo")
    check_example(tmp_path, capsys, text=text)


def test_hashed_words_have_no_home(texts, tmp_path):
    """Refused before anything of the run is read but its config."""
    config = tiny_config("mlm", texts, tmp_path, **{"model.hashing": "md_proj"})
    with pytest.raises(InputError, match=r"model\.hashing is 'md_proj'"):
        stablehlo.write(SimpleNamespace(config=config), tmp_path)
