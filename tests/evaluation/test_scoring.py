"""`run.log_probs` against the loss of the task's own evaluation, and a forward pass by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax import InputError

TEXTS = ["the cat", "", "old naïve"]
PAIRS = [("the cat", "a dog"), ("", ""), ("a dog", "old naïve")]
LONG = "the cat sleeps and a small dog runs " * 6


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_each_token_by_hand(load, task):
    run, items = load(task), TEXTS if task == "lm" else PAIRS
    apply, encode = jax.jit(run.model.apply), run.tokenizer.encode
    together = run.log_probs(items)
    for item, found, other in zip(items, together, run.log_probs(items, batch_size=2), strict=True):
        *source, target = [item] if task == "lm" else item
        tokens = [*encode(target), 3]
        sources = [jnp.array([[*encode(text), 3]]) for text in source]
        logits = apply({"params": run.params}, *sources, jnp.array([[2, *tokens[:-1]]]))[0]
        expected = np.asarray(jax.nn.log_softmax(logits))[range(len(tokens)), tokens]
        assert found.tokens == tokens
        close(found.log_probs, expected)
        close(other.log_probs, expected)
        assert found.total == pytest.approx(expected.sum(), abs=1e-5)
        assert found.log_probs.dtype == np.float32
    assert run.log_probs([]) == []
    pieces = together[0].pieces
    text = {"lm": "\u2581the\u2581cat", "translation": "\u2581a\u2581dog"}[task]
    assert (pieces[-1], "".join(pieces[:-1])) == ("</s>", text)


def test_sides_that_just_fit(load):
    run = load("translation")
    encode, most = run.tokenizer.encode, run.config.model.max_length
    text = next(text for n in range(most, 0, -1) if len(encode(text := "x" * n)) == most - 1)
    assert [len(found.tokens) for found in run.log_probs([(text, text), ("a", text)])] == [most] * 2


@pytest.mark.parametrize("stride", [None, 5])
def test_the_mean_is_the_loss_of_a_file_of_one_line(load, tmp_path, stride, score):
    run = load("lm")
    (tmp_path / "one.txt").write_text(f"{LONG}\n")
    sources = (str(tmp_path / "one.txt"),)
    result = score(run, sources=sources, stride=stride)
    (found,) = run.log_probs([LONG], stride=stride)
    assert result["tokens"] == len(found.tokens)
    assert -found.total == pytest.approx(result["nats"], rel=1e-5)
    assert -found.log_probs.mean() == pytest.approx(result["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "items", "settings", "says"),
    [
        ("translation", "ab", {}, "texts is not a pair"),
        ("lm", [("a", "b")], {}, r"texts\[0\] is of type tuple"),
        ("translation", [("a", "b"), ("a", 3)], {}, r"texts\[1\] is of type int"),
        ("translation", [("a", LONG)], {}, r"texts\[0\] has \d+ tokens .*model.max_length"),
        ("translation", [(LONG, "a")], {}, r"texts\[0\] has \d+ tokens .*model.max_length"),
        ("mlm", ["a"], {}, "is a run of task mlm"),
        ("translation", PAIRS, {"stride": 3}, "evaluation.stride is 3"),
        ("lm", TEXTS, {"stride": 17}, "evaluation.stride is 17"),
    ],
)
def test_bad_items(load, task, items, settings, says):
    with pytest.raises(InputError, match=says):
        load(task).log_probs(items, **settings)
