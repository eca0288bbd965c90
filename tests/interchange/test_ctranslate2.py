"""Runs of ours in CTranslate2: the same probabilities, and the same translations by the search."""

import re
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import KINDS, save_run, tiny_config

from mhe_jax.config import InputError
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.interchange import export

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the extra `export`")

ATTENTION = "model.attention."
# K of kinds of 4 heads, where it is not 4.
FEW = {"gqa": 2, "gta": 2} | dict.fromkeys(("sha", "mqa", "mhe_add", "mhe_mul"), 1)
LLAMA = {
    "model.positions": "rotary",
    "model.norm": "rms",
    "model.mlp": "gated",
    "model.activation": "silu",
}
TURNED = {"model.positions": "rotary", "model.rotary_scaling": 4.0, "model.rotary_base": 500.0}
POST, WIDE = {"model.norm_position": "post"}, {f"{ATTENTION}qkv_features": 32}


def of_kind(kind):
    fields = {f"{ATTENTION}{name}": value for name, value in KINDS[kind].items()}
    return {f"{ATTENTION}kind": kind, **fields}


def pairs_of(texts, tokenizer):
    lines = [line.split("\t") for line in (texts / "pairs.tsv").read_text().splitlines()]
    return [pair for pair in lines if all(len(tokenizer.encode(text)) < 16 for text in pair)]


def pieces_of(tokenizer, texts):
    return [tokenizer.pieces(tokenizer.encode(text)) for text in texts]


def check_log_probs(task, run, out, texts, load):
    """Of every token of some texts, far from flat, to 1e-4."""
    loaded = load(run)
    pairs = pairs_of(texts, loaded.tokenizer)
    assert len(pairs) > 9
    if task == "translation":
        ours = loaded.log_probs([tuple(pair) for pair in pairs])
        sides = [pieces_of(loaded.tokenizer, side) for side in zip(*pairs, strict=True)]
        theirs = ctranslate2.Translator(str(out)).score_batch(*sides)
    else:
        ours = loaded.log_probs([source for source, _ in pairs])
        theirs = ctranslate2.Generator(str(out)).score_batch([["<s>", *s.pieces] for s in ours])
    for scored, result in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(result.log_probs, scored.log_probs, atol=1e-4, rtol=0)
    assert min(scored.log_probs.min() for scored in ours) < -9


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_every_kind(run_of, load, texts, tmp_path, task, kind):
    """With as few key and value heads as the kind allows, in cross-attention too."""
    run, out = run_of(task, **of_kind(kind)), tmp_path / "out"
    result = export(run, out, "ctranslate2")
    roles = ("decoder",) if task == "lm" else ("encoder", "decoder", "cross")
    assert result["key_heads"] == dict.fromkeys(roles, FEW.get(kind, 4))
    check_log_probs(task, run, out, texts, load)


KRONECKER = {
    "model.kronecker.attention": 2,
    "model.kronecker.mlp": 2,
    "model.kronecker.embedding": 2,
}
UNTIED = {"model.tie_embeddings": False, "model.layer_norm_epsilon": 0.01}
BIASED = {"model.output_bias": True, f"{ATTENTION}use_bias": True, "model.scan_layers": True}
MORE = [
    ("lm", "mqa", POST | KRONECKER | {"model.vocabulary_multiple": 64, "model.activation": "relu"}),
    ("lm", "gqa", LLAMA | {"model.mlp_bias": False}),
    ("lm", "mha", TURNED | {"model.rotary_pairs": "interleaved", f"{ATTENTION}qkv_features": 32}),
    ("translation", "mha", POST | UNTIED | KRONECKER | {"model.positions": "sinusoidal"}),
    ("translation", "mhe_add", POST | BIASED | {f"{ATTENTION}num_groups": 2}),
    ("translation", "mva", {f"{ATTENTION}score_features": 9, f"{ATTENTION}num_groups": 2}),
    ("lm", "mha", {f"{ATTENTION}score_features": 8}),
    ("lm", "mva", {f"{ATTENTION}use_key_bias": False}),
    ("lm", "mhe_add", {f"{ATTENTION}score_groups": 2, f"{ATTENTION}use_bias": True}),
    (
        "translation",
        "mhe_mul",
        {"model.attention_by_role.cross.kind": "mha", f"{ATTENTION}qkv_features": 20},
    ),
]


@pytest.mark.parametrize(("task", "kind", "fields"), MORE, ids=str)
def test_every_other_part_of_a_model(run_of, load, texts, tmp_path, task, kind, fields):
    run, out = run_of(task, **of_kind(kind) | fields), tmp_path / "out"
    export(run, out, "ctranslate2")
    check_log_probs(task, run, out, texts, load)


def end_soon(params):
    """Special tokens have no probability, and eos has more with every position."""
    table = params["embeddings"]
    never = np.array([PAD, UNK, BOS, MASK])
    table["vocabulary_bias"][never] = -50.0
    eos = table["token"][EOS] / np.linalg.norm(table["token"][EOS])
    steps = 0.8 * np.arange(len(table["position"]))[:, None]
    table["position"] += (steps * eos[None]).astype(np.float32)


def test_a_search_finds_the_same(load, texts, tmp_path):
    """With beam 5 and no length penalty, as no sentence is cut off."""
    fields = of_kind("mqa") | {
        "model.output_bias": True,
        "model.max_length": 40,
        "evaluation.beam_size": 5,
        "evaluation.extra_length": 24,
    }
    run = save_run(tiny_config("translation", texts, tmp_path / "run", **fields), change=end_soon)
    out = tmp_path / "out"
    export(run, out, "ctranslate2")
    loaded = load(run)
    lines = [source for source, _ in pairs_of(texts, loaded.tokenizer)]
    assert len(lines) > 9
    for least in (0, 1):  # 1 is the usual one of both
        ours = loaded.translate(lines, details=True, min_length=least)
        theirs = ctranslate2.Translator(str(out)).translate_batch(
            pieces_of(loaded.tokenizer, lines),
            beam_size=5,
            length_penalty=0,
            min_decoding_length=least,
            max_decoding_length=40,
            return_scores=True,
        )
        for one, other in zip(ours, theirs, strict=True):
            assert loaded.tokenizer.pieces(one.tokens[:-1]) == other.hypotheses[0]
            if not least:  # there, what may not come gives its probability to what may
                np.testing.assert_allclose(other.scores[0], one.score, atol=1e-4, rtol=0)
    assert len({tuple(one.tokens) for one in ours}) > 5


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_example_of_the_card(run_of, tmp_path, capsys, task):
    export(run_of(task), tmp_path / "out", "ctranslate2")
    card = (tmp_path / "out" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    search = '"beam_size": 3, "length_penalty": 0.0' in example  # as the run's
    assert search == (task == "translation")
    exec(example.replace("DIRECTORY", str(tmp_path / "out")), {})
    assert capsys.readouterr().out


def test_the_example_of_the_docs(run_of, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(import ctranslate2.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    export(run_of("translation", **{"model.max_length": 128}), "served/multi30k", "ctranslate2")
    exec(example, {})
    assert capsys.readouterr().out.startswith("[")


@pytest.mark.parametrize(
    ("task", "fields", "named"),
    [
        ("mlm", {}, "task is 'mlm'"),
        ("lm", {f"{ATTENTION}normalize_qk": True}, "normalize_qk"),
        ("lm", LLAMA | {f"{ATTENTION}kind": "mla", f"{ATTENTION}rotary_features": 2}, "mla"),
        ("lm", TURNED | {f"{ATTENTION}kind": "mhe_mul"}, r"model\.attention\.kind is 'mhe_mul'"),
        ("lm", {"model.absent_tokens": (UNK, MASK)}, r"model\.absent_tokens is \(1, 4\)"),
        ("translation", {"model.num_token_types": 2}, r"model\.num_token_types is 2"),
        ("translation", {"model.attention_by_role.cross.num_heads": 2}, "are 2 and 4"),
        ("lm", TURNED | of_kind("gta") | WIDE, r"model\.attention\.kind is 'gta'"),
        ("translation", {"model.attention_by_role.cross.kind": "mfa"}, "mfa"),
    ],
)
def test_what_has_no_home(run_of, tmp_path, task, fields, named):
    with pytest.raises(InputError, match=named) as error:
        export(run_of(task, **fields), tmp_path / "out", "ctranslate2")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
