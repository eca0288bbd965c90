"""Tokens that are never generated keep their probability: what is left does not sum to one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax import data
from mhe_jax.config.fields import load_json
from mhe_jax.evaluation.decoding import beam_search, greedy_search
from mhe_jax.evaluation.run import Run
from mhe_jax.evaluation.translator import Translator

PAD, EOS, BOS, LENGTH = 0, 1, 2, 3
# The most probable are those that are forbidden; then 4, and eos after all others.
LOGITS = jnp.array([5.0, -3.0, 4.0, 1.0, 2.0])


@pytest.mark.parametrize("search", [greedy_search, beam_search])
def test_bos_and_padding_are_forbidden_and_probable(search):
    def step(cache, tokens, positions):
        return jnp.broadcast_to(LOGITS, (tokens.shape[0], 5)), cache

    options = {"max_length": LENGTH, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD}
    options["forbidden_ids"] = (PAD, BOS)
    if search is beam_search:
        options |= {"beam_size": 1}
    found = search(step, {}, jnp.array([LENGTH]), **options)
    assert found.tokens[0, 0].tolist() == [4, 4, EOS]
    log_p = np.asarray(jax.nn.log_softmax(LOGITS))
    np.testing.assert_allclose(found.log_probs[0, 0], 2 * log_p[4] + log_p[EOS], rtol=1e-5)


class Tempted:
    """A model that finds tokens of no text the most probable."""

    def __init__(self, model):
        self.model, self.cache_batch_axis = model, model.cache_batch_axis

    def apply(self, variables, *inputs, method, mutable):
        output, state = self.model.apply(variables, *inputs, method=method, mutable=mutable)
        if method == "decode_step":
            output = output.at[..., np.array([data.PAD, data.UNK, data.BOS, data.MASK])].add(99.0)
        return output, state


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_translation_has_no_special_token_but_its_end(translation_run, beam_size):
    config = load_json(translation_run / "config.json")
    evaluation = dataclasses.replace(config.evaluation, beam_size=beam_size)
    config = dataclasses.replace(config, evaluation=evaluation)
    run = Run.load(translation_run, config, jax.devices()[:1])
    translator = Translator(dataclasses.replace(run, model=Tempted(run.model)))
    for found in translator.translate(["the cat", "a small dog runs"]):
        assert len(found.tokens) > 1
        assert not {data.PAD, data.UNK, data.BOS, data.MASK} & {*found.tokens}
