"""A run with rotary positions: trained on packed rows and a mesh, scored, searched over a cache."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mhe_jax
from mhe_jax.config.fields import set_field
from mhe_jax.data import BOS, EOS
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation.decoding import FORBIDDEN
from mhe_jax.training.loop import train

pytestmark = pytest.mark.whole_run

ROTARY = {
    "model.positions": "rotary",
    "model.rotary_pairs": "interleaved",
    "model.rotary_base": 50.0,
    "model.norm": "rms",
    "model.mlp": "gated",
    "model.num_layers": 2,
    "optimizer.learning_rate": 1e-2,
    "train.num_steps": 12,
    "train.eval_every": 6,
}
LINES = ["one", "a man", "dog", ""]


@pytest.fixture
def rotary(tiny):
    """`rotary(task, kind)`: the config of a run with rotary positions."""

    def make(task, kind, **changes):
        config = tiny(task, **{"model.attention.kind": kind, **ROTARY, **changes})
        return set_field(config, "data.test", config.data.validation)

    return make


def loaded(config):
    return mhe_jax.load(config.workdir, devices=jax.devices()[:1])


@pytest.mark.parametrize("kind", ["mhe_add", pytest.param("skv", marks=pytest.mark.rest)])
def test_a_language_model_is_scored_and_goes_on(rotary, kind):
    """Token by token over the cache as by the whole text, at positions from 0 in each."""
    config = rotary("lm", kind, **{"data.packing": True})
    result = train(config, jax.devices()[:1])
    assert result["best_validation_loss"] < 5.5  # of 300 pieces, log 300 = 5.7
    run = loaded(config)
    scored = evaluate(config.workdir, run.evaluation, devices=jax.devices()[:1])
    assert scored["loss"] == pytest.approx(
        evaluate(config.workdir, dataclasses.replace(run.evaluation, split="validation"),
                 devices=jax.devices()[:1])["loss"]
    )  # fmt: skip

    @functools.cache
    def following(tokens):
        row = np.zeros((1, 16), np.int32)
        row[0, : len(tokens)] = tokens
        return np.array(run.model.apply({"params": run.params}, row)[0, len(tokens) - 1])

    found = run.generate(LINES, extra_length=5, temperature=0.0, details=True)
    for text, continuation in zip(LINES, found, strict=True):
        tokens, new = (BOS, *run.tokenizer.encode(text)), []
        for _ in range(min(5, 16 - len(tokens))):
            allowed = following((*tokens, *new)).copy()
            allowed[list(FORBIDDEN)] = -np.inf
            new.append(int(allowed.argmax()))
            if new[-1] == EOS:
                break
        assert continuation.tokens == new
    for text, one in zip(LINES, run.log_probs(LINES), strict=True):
        tokens = (BOS, *run.tokenizer.encode(text), EOS)
        for place, log_prob in enumerate(one.log_probs):
            expected = jax.nn.log_softmax(following(tokens[: place + 1]))[tokens[place + 1]]
            assert log_prob == pytest.approx(float(expected), abs=1e-4)


def test_a_translator_searches_over_its_cache(rotary):
    config = rotary("translation", "mhe_mul", **{"data.length_buckets": ()})
    train(config, jax.devices()[:1])
    run = loaded(config)
    texts = LINES[:3]
    translated = run.translate(texts, beam_size=1, extra_length=4, details=True)
    for text, found in zip(texts, translated, strict=True):
        source = [*run.tokenizer.encode(text), EOS]
        target = [BOS, *found.tokens[:-1]]
        rows = (np.array([ids]) for ids in (source, target))
        logits = np.array(run.model.apply({"params": run.params}, *rows)[0])
        logits[:, list(FORBIDDEN)] = -np.inf
        # The last is eos, which the length may have forced.
        assert logits.argmax(-1)[:-1].tolist() == found.tokens[:-1]
    together = run.translate(texts, beam_size=3, extra_length=4)
    assert together == [run.translate([text], beam_size=3, extra_length=4)[0] for text in texts]
