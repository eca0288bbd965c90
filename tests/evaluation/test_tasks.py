"""Scores of tiny runs against the same numbers worked out from the model's plain forward pass."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention import choices, make_attention
from mhe_jax.config import InputError, MeshConfig
from mhe_jax.data import BOS, EOS
from mhe_jax.evaluation.run import Run


def pairs_of(texts):
    return [line.split("\t") for line in (texts / "pairs.tsv").read_text().splitlines()]


def _log_probs(run, sources, targets):
    """Of targets with eos, by one full pass without a cache."""
    source, read, labels = (np.zeros((len(sources), 20), np.int32) for _ in range(3))
    for row, (ids, target) in enumerate(zip(sources, targets, strict=True)):
        source[row, : len(ids) + 1] = [*ids, EOS]
        read[row, : len(target)] = [BOS, *target[:-1]]
        labels[row, : len(target)] = target
    logits = jax.jit(run.model.apply)({"params": run.params}, source, read)
    steps = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)
    steps = np.take_along_axis(steps, labels[:, :, None], axis=-1)[:, :, 0]
    return np.sum(steps, axis=1, where=labels != 0)


def test_translation_result_and_hypotheses(load, texts, score):
    run = load("translation")
    result = score(run)
    assert json.loads((run.workdir / "eval_test.json").read_text()) == result
    for name, value in {
        "steps": [7],
        "sentences": 21,
        "beam_size": 3,
        "length_penalty": 0.6,
        "average_checkpoints": 1,
        "attention": {"mhe_mul": "folded on xla"},
        "sources": ["pairs.tsv"],
    }.items():
        assert result[name] == value
    assert 0 <= result["chrf"] <= 100
    assert "tok:13a" in result["bleu_signature"]
    for rate in ("sentences_per_second", "output_tokens_per_second", "seconds"):
        assert 0 < result[rate] < math.inf
    # The file has the original order.
    pairs = pairs_of(texts)
    written = (run.workdir / "test.hypotheses.txt").read_text().split("\n")
    assert written.pop() == ""
    assert written == run.translate([source for source, _ in pairs[::-1]])[::-1]
    assert len(set(written)) > 10
    # The loss is that of the references.
    ids = [[run.tokenizer.encode(text)[:19] for text in pair] for pair in pairs]
    targets = [[*target, EOS] for _, target in ids]
    log_probs = _log_probs(run, [source for source, _ in ids], targets)
    loss = -log_probs.sum() / sum(map(len, targets))
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert 0 <= result["accuracy"] <= 1


def test_a_result_names_the_choices_of_its_evaluation_and_no_other(load, score, tmp_path):
    shutil.copytree(load("lm").workdir, tmp_path / "run")  # nothing of it is compiled
    run = load(tmp_path / "run")
    elsewhere = make_attention("mhe_add", num_heads=2, form="materialized")
    elsewhere.init(jax.random.key(0), jnp.ones((1, 3, 4)))
    assert score(run)["attention"] == {"mhe_mul": "folded on xla"}
    assert choices() == {}


def test_other_sources_leave_the_splits_files_alone(load, texts, score):
    """Also one that is called like a split."""
    run = load("lm")
    score(run)
    before = {path: path.read_bytes() for path in run.workdir.iterdir() if path.is_file()}
    (texts / "mine").mkdir()
    (texts / "mine" / "test").write_text("a cat\n")
    result = score(run, sources=("mine/test",))
    assert (result["split"], result["sources"]) == ("test", ["mine/test"])
    assert json.loads((run.workdir / "eval_sources_test.json").read_text()) == result
    assert {path: path.read_bytes() for path in before} == before
    translator = load("translation")
    (texts / "mine.tsv").write_text("a cat\ta dog\n" * 3)
    assert score(translator, beam_size=1, sources=("mine.tsv",))["sources"] == ["mine.tsv"]
    assert len((translator.workdir / "mine_tsv.hypotheses.txt").read_text().splitlines()) == 3


@pytest.mark.parametrize(("scan_layers", "beam_size"), [(False, 1), (True, 3)])
def test_scores_are_the_models_own(load, run_of, texts, scan_layers, beam_size):
    workdir = run_of("translation", scan_layers=True) if scan_layers else run_of("translation")
    run = load(workdir, beam_size=beam_size)
    some = [source for source, _ in pairs_of(texts)[:8]]
    found = run.translate(some, details=True)
    ids = [run.tokenizer.encode(text) for text in some]
    expected = _log_probs(run, ids, [translation.tokens for translation in found])
    for source, translation, log_prob in zip(ids, found, expected, strict=True):
        n = len(translation.tokens)
        assert n <= min(len(source) + 1 + 6, 20)
        assert translation.tokens[-1] == EOS
        text = run.tokenizer.decode(translation.tokens)
        assert translation.text == " ".join(text.splitlines())
        assert translation.score == pytest.approx(log_prob / ((5 + n) / 6) ** 0.6, rel=1e-5)


def test_devices_change_nothing(load, texts):
    """Rows over `data` and `fsdp`, parameters over `fsdp` and `tensor`."""
    run = load("translation")
    config = dataclasses.replace(run.config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = Run.load(run.workdir, config)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(sharded.params)} == {8}
    assert not sharded.params["embeddings"]["token"].is_fully_replicated
    some = [source for source, _ in pairs_of(texts)[:7]]
    one, other = (of.translate(some, details=True) for of in (run, sharded))
    assert [x.tokens for x in one] == [x.tokens for x in other]
    assert [x.score for x in one] == pytest.approx([x.score for x in other], rel=1e-5)


def test_blank_texts_long_texts_and_line_breaks(load, monkeypatch):
    run = load("translation", beam_size=1)
    monkeypatch.setattr(type(run.tokenizer), "decode", lambda self, ids: "a\nb\r\nc\u2028d")
    found = run.translate(["", " \t ", "the cat " * 100, "the dog"], details=True)
    assert [t.text for t in found] == ["", "", "a b c d", "a b c d"]
    assert [t.truncated for t in found] == [False, False, True, False]
    assert [bool(t.tokens) for t in found] == [False, False, True, True]


@pytest.mark.parametrize("task", ["mlm", "lm"])
def test_scores_do_not_depend_on_the_batch(load, task, score):
    run = load(task)
    few, many = (score(run, batch_size=size, split="validation") for size in (3, 64))
    for name in ("loss", "accuracy"):
        assert few[name] == pytest.approx(many[name], rel=1e-5)
    assert few["split"] == "validation"
    assert json.loads((run.workdir / "eval_validation.json").read_text()) == many
    if task == "mlm":
        assert few["perplexity"] == pytest.approx(math.exp(few["loss"]))
        assert 0 <= few["accuracy"] <= 1
        assert few["predicted_tokens"] > 50


@pytest.mark.parametrize("task", ["lm", "sst2"])
def test_a_broken_checkpoint_is_no_score(load, run_of, labelled_run, task, score):
    """Nor predictions of a split without labels, which has no loss."""
    make = labelled_run if task == "sst2" else run_of
    run = load(make(task, "not a number"))
    with pytest.raises(InputError, match="NaN or infinite"):
        score(run)
    assert not [*run.workdir.glob("*test*")]
