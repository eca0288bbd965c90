"""`run.log_probs` against the loss of the task's own evaluation, and a forward pass by hand."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhe_jax
from mhe_jax import InputError
from mhe_jax.data import EOS
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation.scoring import Scorer
from mhe_jax.tasks import TASKS, evaluation_batches
from mhe_jax.tasks.sums import total

TEXTS = ["the cat", "a small dog runs", "old", "", "the big bird sleeps", "naïve"]
PAIRS = [("the cat", "a dog"), ("old", "the big bird sleeps"), ("", ""), ("a dog", "naïve")]
LONG = "the cat sleeps and a small dog runs " * 6


@pytest.fixture(scope="module")
def lm(run_of):
    return mhe_jax.load(run_of("lm"), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def translating(translation_run):
    return mhe_jax.load(translation_run, devices=jax.devices()[:1])


def test_each_token_by_hand(lm):
    apply = jax.jit(lm.model.apply)
    for text, found in zip(TEXTS, lm.log_probs(TEXTS), strict=True):
        tokens = [*lm.tokenizer.encode(text), 3]
        logits = apply({"params": lm.params}, jnp.array([[2, *tokens[:-1]]]))[0]
        expected = np.asarray(jax.nn.log_softmax(logits))[range(len(tokens)), tokens]
        assert found.tokens == tokens
        np.testing.assert_allclose(found.log_probs, expected, rtol=1e-6, atol=2e-6)
        assert found.total == pytest.approx(expected.sum(), abs=1e-5)
        assert found.log_probs.dtype == np.float32
    assert lm.log_probs(["the cat"])[0].pieces[-1] == "</s>"
    assert "".join(lm.log_probs(["the cat"])[0].pieces[:-1]) == "\u2581the\u2581cat"


def test_each_token_of_a_target_by_hand(translating):
    apply = jax.jit(translating.model.apply)
    for (source, target), found in zip(PAIRS, translating.log_probs(PAIRS), strict=True):
        encode = translating.tokenizer.encode
        tokens = [*encode(target), 3]
        sources, targets = jnp.array([[*encode(source), 3]]), jnp.array([[2, *tokens[:-1]]])
        logits = apply({"params": translating.params}, sources, targets)[0]
        expected = np.asarray(jax.nn.log_softmax(logits))[range(len(tokens)), tokens]
        assert found.tokens == tokens
        np.testing.assert_allclose(found.log_probs, expected, rtol=1e-6, atol=2e-6)


def test_sides_that_just_fit(translating):
    encode, most = translating.tokenizer.encode, translating.config.model.max_length
    text = next(text for n in range(most, 0, -1) if len(encode(text := "x" * n)) == most - 1)
    for found in translating.log_probs([(text, text), ("a", text)]):
        assert len(found.tokens) == most


@pytest.mark.parametrize("stride", [None, 5])
@pytest.mark.parametrize("text", [LONG, "the cat"])
def test_the_mean_is_the_loss_of_a_file_of_one_line(lm, tmp_path, text, stride):
    (tmp_path / "one.txt").write_text(f"{text}\n")
    evaluation = dataclasses.replace(
        lm.evaluation, sources=(str(tmp_path / "one.txt"),), stride=stride
    )
    result = evaluate(lm.workdir, evaluation, devices=jax.devices()[:1])
    (found,) = lm.log_probs([text], stride=stride)
    assert result["tokens"] == len(found.tokens)
    assert -found.total == pytest.approx(result["nats"], rel=1e-5)
    assert -found.log_probs.mean() == pytest.approx(result["loss"], rel=1e-5)


def test_windows_see_more(lm):
    blocks, windows = lm.log_probs([LONG])[0], lm.log_probs([LONG], stride=3)[0]
    assert blocks.tokens == windows.tokens
    np.testing.assert_allclose(blocks.log_probs[:16], windows.log_probs[:16], rtol=1e-6, atol=2e-6)
    assert np.abs(blocks.log_probs - windows.log_probs)[16:].max() > 0.01


def test_the_mean_over_pairs_is_the_validation_loss(translating, tmp_path):
    pairs = [(source, target) for source, target in PAIRS * 3 if source]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    data = dataclasses.replace(translating.config.data, directory=str(tmp_path))
    config = dataclasses.replace(translating.config, data=data)
    batches = evaluation_batches(config, translating.tokenizer, "validation")
    task = TASKS["translation"]
    sums = task.sums(translating.model)
    found = total([sums(translating.params, task.read(batch), None) for batch in batches])
    scored = translating.log_probs(pairs)
    assert sum(len(one.tokens) for one in scored) == found["count"]
    assert -sum(one.total for one in scored) == pytest.approx(found["nats"], rel=1e-5)


def test_a_search_scores_its_hypotheses_alike(translating):
    """The tokens themselves, since another split of the same text is another hypothesis."""
    sources = ["the cat", "a small dog runs", "old"]
    found = translating.translate(sources, details=True, length_penalty=0, extra_length=3)
    scorer = Scorer(translating, translating.evaluation)
    encoded = [[*translating.tokenizer.encode(source), 3] for source in sources]
    scored = scorer.score([[s, one.tokens] for s, one in zip(encoded, found, strict=True)])
    assert [one.total for one in scored] == pytest.approx([one.score for one in found], abs=1e-4)


def test_one_by_one_is_all_together(lm, translating):
    for run, items in ((lm, [*TEXTS, LONG]), (translating, PAIRS)):
        together = run.log_probs(items)
        for item, one in zip(items, together, strict=True):
            np.testing.assert_allclose(
                run.log_probs([item])[0].log_probs, one.log_probs, rtol=1e-6, atol=2e-6
            )
        for one, two in zip(together, run.log_probs(items, batch_size=2), strict=True):
            np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-6, atol=2e-6)
        assert run.log_probs([]) == []


def test_an_endless_iterator(lm):
    found = lm.log_probs(itertools.cycle(TEXTS), batch_size=2)
    tokens = [next(found).tokens for _ in range(12)]
    assert tokens == [one.tokens for one in lm.log_probs(TEXTS)] * 2


def test_the_same_shapes_compile_nothing_again(lm, compiled):
    compiled.clear()
    lm.log_probs(["a", "the cat", "old"], batch_size=4)
    before = len(compiled)
    lm.log_probs(["old", "the dog", "a cat", "b"], batch_size=4)
    assert len(compiled) == before


@pytest.mark.parametrize(
    ("of_pairs", "items", "says"),
    [
        (True, "ab", "texts is not a pair"),
        (False, [("a", "b")], r"texts\[0\] is of type tuple: takes a str"),
        (True, ["ab"], r"texts\[0\] is not a pair: takes \(source, target\)"),
        (True, [("a", "b", "c")], r"texts\[0\] is not a pair: takes \(source, target\)"),
        (True, [("a", "b"), ("a", 3)], r"texts\[1\] is of type int: takes a str"),
        (True, [("a", LONG)], r"texts\[0\] has \d+ tokens with eos: takes at most model.max_len"),
        (True, [(LONG, "a")], r"texts\[0\] has \d+ tokens with eos: takes at most model.max_len"),
    ],
)
def test_bad_items(lm, translating, compiled, of_pairs, items, says):
    compiled.clear()
    with pytest.raises(InputError, match=says):
        (translating if of_pairs else lm).log_probs(items)
    assert compiled == []


def test_other_tasks_and_settings(lm, translating, run_of):
    with pytest.raises(InputError, match="is a run of task mlm: only lm, translation give log_pr"):
        mhe_jax.load(run_of("mlm"), devices=jax.devices()[:1]).log_probs(["a"])
    with pytest.raises(InputError, match="evaluation.stride is 3: lm only, not translation"):
        translating.log_probs(PAIRS, stride=3)
    with pytest.raises(InputError, match="evaluation.stride is 17: at most data.sequence_length"):
        lm.log_probs(TEXTS, stride=17)


def not_a_number(params):
    return jax.tree.map(lambda x: x * jnp.nan, params)


def endless(params):
    """What is infinite is the log-probability of eos alone."""
    params["embeddings"]["vocabulary_bias"][EOS] = -np.inf
    return params


@pytest.mark.parametrize("change", [not_a_number, endless])
def test_a_broken_checkpoint(run_of, change):
    workdir = run_of("lm", change, output_bias=True)
    with pytest.raises(InputError, match="NaN or infinite: a broken checkpoint"):
        mhe_jax.load(workdir, devices=jax.devices()[:1]).log_probs(["a"])
