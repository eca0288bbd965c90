"""Scores of tiny runs against the same numbers worked out from the model's plain forward pass."""

import dataclasses
import json
import lzma
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention import choices, make_attention
from mhe_jax.config import AttentionByRole, AttentionOverride, InputError, MeshConfig
from mhe_jax.config.fields import load_json
from mhe_jax.data import BOS, EOS
from mhe_jax.evaluation import decoding, evaluate
from mhe_jax.evaluation.run import Run
from mhe_jax.evaluation.translator import Translator
from mhe_jax.tasks import evaluation_batches
from mhe_jax.training.sharding import mesh_at_hand

WIKITEXT = Path(__file__).parents[3] / "shared/data/wikitext-2/test.txt.xz"


def one_device():
    return jax.devices()[:1]


def load(workdir, **changes):
    config = load_json(workdir / "config.json")
    evaluation = dataclasses.replace(config.evaluation, **changes)
    return Run.load(workdir, dataclasses.replace(config, evaluation=evaluation), one_device())


def score(workdir, **changes):
    evaluation = dataclasses.replace(load_json(workdir / "config.json").evaluation, **changes)
    return evaluate(workdir, evaluation, devices=one_device())


def translator_of(run):
    return Translator(run)


def sources(texts):
    return [line.split("\t")[0] for line in (texts / "pairs.tsv").read_text().splitlines()]


def test_translation_result_and_hypotheses(translation_run, texts):
    result = score(translation_run)
    assert json.loads((translation_run / "eval_test.json").read_text()) == result
    assert result["steps"] == [7]
    assert result["sentences"] == 21
    assert result["beam_size"] == 3
    assert result["length_penalty"] == 0.6
    assert result["average_checkpoints"] == 1
    assert result["attention"] == {"mhe_mul": "folded on xla"}
    assert 0 <= result["chrf"] <= 100
    assert "tok:13a" in result["bleu_signature"]
    for rate in ("sentences_per_second", "output_tokens_per_second", "seconds"):
        assert 0 < result[rate] < math.inf
    # The file has the original order: each line is what its source alone gives.
    written = (translation_run / "test.hypotheses.txt").read_text().split("\n")
    assert written.pop() == ""
    translator = translator_of(load(translation_run))
    assert written == [translator.translate([text])[0].text for text in sources(texts)]
    assert len(set(written)) > 10


def test_a_translators_result_has_the_loss_of_the_references(translation_run, texts):
    result, run = score(translation_run, batch_size=4), load(translation_run)
    pairs = [line.split("\t") for line in (texts / "pairs.tsv").read_text().splitlines()]
    ids = [[run.tokenizer.encode(text)[:19] for text in pair] for pair in pairs]
    targets = [[*target, EOS] for _, target in ids]
    log_probs = _log_probs(run, [source for source, _ in ids], targets)
    loss = -log_probs.sum() / sum(map(len, targets))
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert 0 <= result["accuracy"] <= 1


def test_a_result_names_every_choice_of_its_evaluation_and_no_other(run_of):
    cross = AttentionByRole(cross=AttentionOverride(kind="mhe_add", form="shared"))
    workdir = run_of("translation", kind="mhe_add", attention_by_role=cross)
    elsewhere = make_attention("mhe_add", num_heads=2, form="materialized")
    elsewhere.init(jax.random.key(0), jnp.ones((1, 3, 4)))
    assert score(workdir)["attention"] == {"mhe_add": "folded on xla, shared on xla"}
    assert choices() == {}


def test_other_sources_leave_the_splits_files_alone(run_of, texts):
    workdir = run_of("translation")
    assert score(workdir, beam_size=1)["sources"] == ["pairs.tsv"]
    before = {path: path.read_bytes() for path in workdir.iterdir() if path.is_file()}
    lines = (texts / "pairs.tsv").read_text().splitlines()[:3]
    (texts / "mine.tsv").write_text("\n".join(lines) + "\n")
    result = score(workdir, beam_size=1, sources=("mine.tsv",))
    assert (result["split"], result["sources"]) == ("test", ["mine.tsv"])
    assert len((workdir / "mine_tsv.hypotheses.txt").read_text().splitlines()) == 3
    assert json.loads((workdir / "eval_mine_tsv.json").read_text()) == result
    assert {path: path.read_bytes() for path in before} == before


def test_a_source_that_is_called_like_a_split_is_not_the_split(run_of, texts):
    workdir = run_of("lm")
    own = score(workdir)
    (texts / "mine").mkdir()
    (texts / "mine" / "test").write_text("a cat\n")
    found = score(workdir, sources=("mine/test",))
    assert json.loads((workdir / "eval_sources_test.json").read_text()) == found
    assert json.loads((workdir / "eval_test.json").read_text()) == own


@pytest.mark.parametrize(
    ("scan_layers", "beam_size", "platform"),
    [(False, 1, "cpu"), (False, 3, "cpu"), (True, 3, "cpu"), (True, 3, "gpu")],
    ids=str,
)
def test_scores_are_the_models_own(run_of, texts, scan_layers, beam_size, platform, monkeypatch):
    """On a GPU the layers of a scanned model are apart while it decodes."""
    monkeypatch.setattr(decoding, "platform", lambda: platform)
    run = load(run_of("translation", scan_layers=scan_layers), beam_size=beam_size)
    some = sources(texts)[:9]
    found = translator_of(run).translate(some)
    ids = [run.tokenizer.encode(text) for text in some]
    expected = _log_probs(run, ids, [translation.tokens for translation in found])
    for source, translation, log_prob in zip(ids, found, expected, strict=True):
        n = len(translation.tokens)
        assert n <= min(len(source) + 1 + 6, 20)
        assert translation.tokens[-1] == EOS
        text = run.tokenizer.decode(translation.tokens)
        assert translation.text == " ".join(text.splitlines())
        assert translation.score == pytest.approx(log_prob / ((5 + n) / 6) ** 0.6, rel=1e-5)


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


@pytest.mark.parametrize("beam_size", [1, 2])
def test_devices_change_nothing(translation_run, texts, beam_size):
    """Rows over `data` and `fsdp`, parameters over `fsdp` and `tensor`."""
    run = load(translation_run, beam_size=beam_size)
    config = dataclasses.replace(run.config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = Run.load(translation_run, config)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(sharded.params)} == {8}
    assert not sharded.params["embeddings"]["token"].is_fully_replicated
    some = sources(texts)[:7]
    for one, other in zip(
        translator_of(run).translate(some), translator_of(sharded).translate(some), strict=True
    ):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, rel=1e-5)


def test_blank_texts_long_texts_and_line_breaks(translation_run):
    run = load(translation_run, beam_size=1)
    translator = translator_of(run)
    decode = run.tokenizer.decode
    translator.tokenizer = type(
        "Breaking",
        (),
        {
            "encode_batch": run.tokenizer.encode_batch,
            "decode": lambda self, ids: "a\nb\r\nc\u2028d" + decode(ids)[:0],
        },
    )()
    long = "the cat " * 100
    found = translator.translate(["", " \t ", long, "the dog"])
    assert [t.text for t in found] == ["", "", "a b c d", "a b c d"]
    assert [t.truncated for t in found] == [False, False, True, False]
    assert [bool(t.tokens) for t in found] == [False, False, True, True]
    assert translator.translate([]) == []


def test_lm_by_hand(run_of, texts):
    workdir = run_of("lm")
    run = load(workdir)
    result = score(workdir)
    lines = (texts / "lines.txt").read_text().split("\n")[:-1]
    ids = [i for line in lines for i in [*run.tokenizer.encode(line), EOS]]
    labels = np.zeros(-(-len(ids) // 16) * 16, np.int32)
    labels[: len(ids)] = ids
    labels = labels.reshape(-1, 16)
    read = np.concatenate([np.full((len(labels), 1), BOS), labels[:, :-1]], axis=1)
    steps = jax.nn.log_softmax(jax.jit(run.model.apply)({"params": run.params}, read))
    steps = np.take_along_axis(np.asarray(steps, np.float64), labels[:, :, None], axis=-1)
    nats = -float(np.sum(steps[:, :, 0], where=labels != 0))
    words = sum(len(line.split()) + 1 for line in lines)
    assert result["tokens"] == len(ids)
    assert result["words"] == words
    assert result["nats"] == pytest.approx(nats, rel=1e-5)
    assert result["perplexity_per_token"] == pytest.approx(math.exp(nats / len(ids)), rel=1e-5)
    assert result["perplexity_per_word"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert result["loss"] == pytest.approx(nats / len(ids), rel=1e-5)


@pytest.mark.parametrize("task", ["mlm", "lm"])
def test_scores_do_not_depend_on_the_batch(run_of, task):
    workdir = run_of(task)
    few, many = (score(workdir, batch_size=size, split="validation") for size in (3, 64))
    for name in ("loss", "accuracy"):
        assert few[name] == pytest.approx(many[name], rel=1e-5)
    assert few["split"] == "validation"
    assert json.loads((workdir / "eval_validation.json").read_text()) == many


def test_mlm_perplexity_is_that_of_the_loss(run_of):
    workdir = run_of("mlm")
    result = score(workdir)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert 0 <= result["accuracy"] <= 1
    assert result["predicted_tokens"] > 50


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_a_broken_checkpoint_is_no_score(run_of, task):
    workdir = run_of(task, change=lambda params: jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(InputError, match="NaN or infinite: a broken checkpoint"):
        score(workdir)
    assert not (workdir / "eval_test.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "5"}, "no checkpoint '5'; there are"),
        ({"checkpoint": "last"}, "no checkpoint 'last'"),
    ],
)
def test_a_checkpoint_that_is_not_there(translation_run, change, message):
    with pytest.raises(InputError, match=message):
        load(translation_run, **change)


def test_a_tokenizer_that_does_not_fit(run_of):
    workdir = run_of("lm")
    config = load_json(workdir / "config.json")
    model = dataclasses.replace(config.model, vocabulary_size=400)
    with pytest.raises(InputError, match="has 304 pieces, model.vocabulary_size is 400"):
        Run.load(workdir, dataclasses.replace(config, model=model))


def test_devices_that_are_not_there_are_done_without(translation_run, capsys):
    config = load_json(translation_run / "config.json")
    assert dict(mesh_at_hand(config, "evaluating").shape) == {
        "data": 8,
        "fsdp": 1,
        "tensor": 1,
    }
    assert capsys.readouterr().err == ""
    config = dataclasses.replace(config, mesh=MeshConfig(data=64))
    assert dict(mesh_at_hand(config, "evaluating").shape) == {
        "data": 8,
        "fsdp": 1,
        "tensor": 1,
    }
    assert "there are 8 devices" in capsys.readouterr().err


@pytest.mark.skipif(not WIKITEXT.exists(), reason=f"needs the real data: {WIKITEXT.name}")
def test_words_of_wikitext_2_as_evaluated(run_of, tmp_path):
    run = load(run_of("lm"))
    with lzma.open(WIKITEXT) as file:
        tmp_path.joinpath("test.txt").write_bytes(file.read())
    data = dataclasses.replace(run.config.data, directory=str(tmp_path), test=("test.txt",))
    config = dataclasses.replace(run.config, data=data)
    assert evaluation_batches(config, run.tokenizer, "test").num_words == 245_569
