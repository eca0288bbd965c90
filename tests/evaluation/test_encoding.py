"""`run.encode`: vectors of texts are the encoder's own output, whatever stands beside them."""

from functools import partial

import jax
import numpy as np
import pytest

from mhe_jax import InputError

TEXTS = ["the cat", "old naïve", "", "the cat " * 30]
HASHED = {"hashing": "md_pool", "norm_position": "pre", "num_token_types": 2}


@pytest.fixture
def run(load, run_of, labelled_run):
    """A run of each sort: with special tokens, of a translator, of hashed words, with a head."""

    def of(name):
        if name == "shuffle_random":
            return load(run_of(name, **HASHED))
        return load(labelled_run("squad")) if name == "span" else load(name)

    return of


@pytest.mark.parametrize(
    "name",
    [
        *("mlm", "translation"),
        *(pytest.param(name, marks=pytest.mark.rest) for name in ("span", "shuffle_random")),
    ],
)
def test_it_is_the_output_of_the_encoder(run, name):
    """A row of one text, without padding, by hand; of a long text the beginning is read."""
    one = run(name)
    begin = [] if name == "translation" else [2]
    config = one.config
    longest = config.model.max_length if name == "translation" else config.data.sequence_length
    each = one.encode(TEXTS, pooling=None)
    mean, first = one.encode(TEXTS), one.encode(TEXTS, pooling="first")
    encode = jax.jit(partial(one.model.apply, method="encode"))
    assert mean.shape == first.shape == (len(TEXTS), one.config.model.features)
    assert mean.dtype == first.dtype == np.float32
    for number, text in enumerate(TEXTS):
        ids = [*begin, *one.tokenizer.encode_batch([text])[0]][: longest - 1]
        inputs = one.tokenizer.inputs(np.array([[*ids, 3]]))
        tokens = inputs.pop("tokens")
        expected = encode({"params": one.params}, tokens, **inputs)[0]
        assert each[number].shape == expected.shape
        np.testing.assert_allclose(each[number], expected, atol=2e-6)
        np.testing.assert_allclose(mean[number], expected.mean(axis=0), atol=2e-6)
        np.testing.assert_allclose(first[number], expected[0], atol=2e-6)
    others = np.abs(mean[:, None] - mean).max(axis=-1) + np.eye(len(TEXTS))
    assert others.min() > 1e-3
    assert (one.encode([]).shape, one.encode([], pooling=None)) == ((0, mean.shape[1]), [])
    backwards = one.encode(TEXTS[::-1], batch_size=2)
    np.testing.assert_allclose(mean, backwards[::-1], atol=2e-6)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run: run("mlm").encode([("a", "b")]), r"texts\[0\]"),
        (lambda run: run("mlm").encode(["a"], "max"), "pooling is 'max'"),
        (lambda run: run("mlm").encode(["a"], beam_size=3), "beam_size"),
        (lambda run: run("lm").encode(["a"]), "is a run of task lm"),
    ],
)
def test_bad_input(run, call, says):
    with pytest.raises(InputError, match=says):
        call(run)
