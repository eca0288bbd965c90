"""`run.encode`: vectors of texts are the encoder's own output, whatever stands beside them."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhe_jax
from mhe_jax import InputError

TEXTS = ["the cat", "a small dog runs", "old", "the", "the big bird sleeps", "", "naïve"]
TASKS = ["mlm", "translation", "shuffle_random", "sst2", "span"]


@pytest.fixture(scope="module")
def run(run_of, translation_run, labelled_run):
    """A run of each sort: with special tokens, of a translator, of hashed words, with a head."""
    workdirs = {
        "mlm": lambda: run_of("mlm"),
        "translation": lambda: translation_run,
        "shuffle_random": lambda: run_of(
            "shuffle_random", hashing="md_pool", norm_position="pre", num_token_types=2
        ),
        "sst2": lambda: labelled_run("sst2"),
        "span": lambda: labelled_run(
            "squad", sequence_length=64, window_stride=20, question_length=20
        ),
        "lm": lambda: run_of("lm"),
    }
    made = {}

    def of(name):
        if name not in made:
            made[name] = mhe_jax.load(workdirs[name](), devices=jax.devices()[:1])
        return made[name]

    return of


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.rest) if x in ("sst2", "shuffle_random") else x
        for x in TASKS
    ],
)
def test_it_is_the_output_of_the_encoder(run, name):
    """A row of one text, without padding, by hand."""
    one = run(name)
    begin = [] if name == "translation" else [2]
    each = one.encode(TEXTS, pooling=None)
    mean, first = one.encode(TEXTS), one.encode(TEXTS, pooling="first")
    encode = jax.jit(partial(one.model.apply, method="encode"))
    assert mean.shape == first.shape == (len(TEXTS), one.config.model.features)
    assert mean.dtype == first.dtype == np.float32
    for number, text in enumerate(TEXTS):
        ids = np.array([[*begin, *one.tokenizer.encode_batch([text])[0], 3]])
        inputs = one.tokenizer.inputs(ids)
        tokens = inputs.pop("tokens")
        expected = encode({"params": one.params}, tokens, **inputs)[0]
        assert each[number].shape == expected.shape
        np.testing.assert_allclose(each[number], expected, atol=2e-6)
        np.testing.assert_allclose(mean[number], expected.mean(axis=0), atol=2e-6)
        np.testing.assert_allclose(first[number], expected[0], atol=2e-6)
    others = np.abs(mean[:, None] - mean).max(axis=-1) + np.eye(len(TEXTS))
    assert others.min() > 1e-3


@pytest.mark.parametrize("name", TASKS)
def test_padding_changes_nothing(run, name):
    one = run(name)
    together = one.encode(TEXTS)
    alone = np.concatenate([one.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    backwards = one.encode(TEXTS[::-1], batch_size=2)
    np.testing.assert_allclose(together, backwards[::-1], atol=2e-6)


def test_of_a_long_text_the_beginning_is_read(run):
    for name, longest in [("mlm", 16), ("translation", 20)]:
        (found,) = run(name).encode(["the cat " * 30], pooling=None)
        assert len(found) == longest
    (found,) = run("translation").encode(["the cat " * 30], pooling=None)
    tokens = jnp.array([[*run("translation").tokenizer.encode("the cat " * 30)[:19], 3]])
    variables = {"params": run("translation").params}
    expected = run("translation").model.apply(variables, tokens, method="encode")[0]
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_an_endless_iterator(run):
    one = run("mlm")
    found = one.encode(itertools.cycle(TEXTS), batch_size=2)
    some = np.stack(list(itertools.islice(found, 14)))
    np.testing.assert_allclose(some, one.encode(TEXTS * 2), atol=2e-6)
    tokens = one.encode(iter(TEXTS), pooling=None)
    assert next(tokens).shape == (len(one.tokenizer.encode(TEXTS[0])) + 2, 16)


def test_no_texts(run):
    assert run("mlm").encode([]).shape == (0, 16)
    assert run("mlm").encode([], pooling=None) == []


def test_the_same_shapes_compile_nothing_again(run, compiled):
    compiled.clear()
    run("mlm").encode(["a", "the cat", "old"], batch_size=4)
    before = len(compiled)
    run("mlm").encode(["old", "the dog", "a cat", "b"], batch_size=4)
    run("mlm").encode(iter(["old", "the dog", "a cat", "b"]), batch_size=4)
    assert len(compiled) == before


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run: run("mlm").encode(b"a"), "not bytes"),
        (lambda run: run("mlm").encode([("a", "b")]), r"texts\[0\] is of type tuple: takes a str"),
        (lambda run: run("mlm").encode(["a"], "max"), "pooling is 'max': takes mean, first or Non"),
        (lambda run: run("mlm").encode(["a"], pooling=3), "pooling is 3: takes mean, first or No"),
        (lambda run: run("mlm").encode(["a"], beam_size=3), "encode has no setting beam_size: ta"),
        (lambda run: run("lm").encode(["a"]), "is a run of task lm: only mlm, translation, .* enc"),
    ],
)
def test_bad_input(run, compiled, call, says):
    run("lm"), run("mlm")
    compiled.clear()
    with pytest.raises(InputError, match=says):
        call(run)
    assert compiled == []


def test_a_broken_checkpoint(run_of):
    workdir = run_of("mlm", lambda params: jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(InputError, match="NaN or infinite: a broken checkpoint"):
        mhe_jax.load(workdir, devices=jax.devices()[:1]).encode(["a"])
