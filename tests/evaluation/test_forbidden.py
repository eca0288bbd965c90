"""Tokens that are never generated keep their probability: what is left does not sum to one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.evaluation.decoding import beam_search, greedy_search

PAD, EOS, BOS, LENGTH = 0, 1, 2, 3
# The most probable are those that are forbidden; then 4, and eos after all others.
LOGITS = jnp.array([5.0, -3.0, 4.0, 1.0, 2.0])


@pytest.mark.parametrize("search", [greedy_search, beam_search])
def test_bos_and_padding_are_forbidden_and_probable(search):
    def step(cache, tokens, positions):
        return jnp.broadcast_to(LOGITS, (tokens.shape[0], 5)), cache

    options = {"max_length": LENGTH, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD}
    if search is beam_search:
        options |= {"beam_size": 1}
    found = search(step, {}, jnp.array([LENGTH]), **options)
    assert found.tokens[0, 0].tolist() == [4, 4, EOS]
    log_p = np.asarray(jax.nn.log_softmax(LOGITS))
    np.testing.assert_allclose(found.log_probs[0, 0], 2 * log_p[4] + log_p[EOS], rtol=1e-5)
