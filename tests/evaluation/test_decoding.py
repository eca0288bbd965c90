"""Beam search against brute force, greedy search, the full-length run and teacher forcing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.evaluation.decoding import beam_search

FEATURES = 7
ALPHAS = [0.0, 0.6]


class Toy:
    """A model whose next token depends on the row, on every earlier token and on its place.

    The cache holds the row's context and the history of tokens, so that a beam that reads another
    beam's cache gets other probabilities.
    """

    def __init__(self, seed, vocabulary=5, max_length=5, sharpness=2.0, eos_bias=0.0, eos_id=1):
        rng = np.random.default_rng(seed)
        self.vocabulary, self.max_length, self.eos_id = vocabulary, max_length, eos_id
        self.table = rng.normal(size=(vocabulary, max_length, FEATURES)).astype(np.float32)
        self.output = rng.normal(size=(FEATURES, vocabulary)).astype(np.float32) * sharpness
        self.bias = np.zeros((1, vocabulary), np.float32)
        self.bias[0, eos_id] = eos_bias
        self.context_seed = seed + 1

    def cache(self, rows, layers=0):
        rng = np.random.default_rng(self.context_seed)
        cache = {
            "context": rng.normal(size=(rows, FEATURES)).astype(np.float32),
            "history": np.zeros((rows, self.max_length), np.int32),
        }
        if layers:
            cache = {k: np.stack([v] * layers) for k, v in cache.items()}
        return jax.tree.map(jnp.asarray, cache)

    def step(self, cache, tokens, positions):
        one_row = positions[0, 0]
        history = jax.lax.dynamic_update_slice(cache["history"], tokens, (jnp.int32(0), one_row))
        vectors = jnp.asarray(self.table)[history, jnp.arange(self.max_length)[None]]
        seen = (jnp.arange(self.max_length)[None] <= positions)[:, :, None]
        state = jnp.tanh(cache["context"] + jnp.sum(vectors * seen, axis=1))
        return self.logits(cache, state), {**cache, "history": history}

    def logits(self, cache, state):
        return state @ jnp.asarray(self.output) + jnp.asarray(self.bias)

    def scanned_step(self, cache, tokens, positions):
        """The same with a leading axis of layers in the cache; every layer must agree."""
        logits, first = self.step({k: v[0] for k, v in cache.items()}, tokens, positions)
        others, _ = self.step({k: v[1] for k, v in cache.items()}, tokens, positions)
        logits = jnp.where(logits == others, logits, jnp.nan)
        return logits, {k: jnp.stack([v, v]) for k, v in first.items()}

    def log_prob(self, row, tokens, bos_id):
        """Teacher forcing in float64, written apart from `step`."""
        context = np.asarray(self.cache(row + 1)["context"][row], np.float64)
        total, state = 0.0, context
        for t, (before, token) in enumerate(zip([bos_id, *tokens[:-1]], tokens, strict=True)):
            state = state + self.table[before, t].astype(np.float64)
            logits = np.tanh(state) @ self.output.astype(np.float64) + self.bias[0]
            total += logits[token] - np.log(np.sum(np.exp(logits)))
        return total


class ManyToys(Toy):
    """Each row a model of its own, sharp or flat, that likes eos much, little or hardly ever."""

    def cache(self, rows, layers=0):
        rng = np.random.default_rng(self.context_seed)
        output = rng.normal(size=(rows, FEATURES, self.vocabulary)) * rng.uniform(
            0.1, 3.0, size=(rows, 1, 1)
        )
        bias = np.zeros((rows, self.vocabulary))
        bias[:, self.eos_id] = rng.normal(scale=3.0, size=rows)
        mine = {"output": output, "bias": bias}
        return super().cache(rows) | jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), mine)

    def logits(self, cache, state):
        return jnp.einsum("nf,nfv->nv", state, cache["output"]) + cache["bias"]


def search(toy, rows, max_lengths=None, *, layers=0, bos_id=0, pad_id=0, **options):
    """With one beam, unless told otherwise."""
    options = {"max_length": toy.max_length, "beam_size": 1, "forbidden_ids": (), **options}
    if max_lengths is None:
        max_lengths = [options["max_length"]] * rows
    step = toy.scanned_step if layers else toy.step
    options |= {"bos_id": bos_id, "eos_id": toy.eos_id, "pad_id": pad_id}
    call = jax.jit(functools.partial(beam_search, step, batch_axis=min(layers, 1), **options))
    with jax.numpy_rank_promotion("raise"):
        result = call(toy.cache(rows, layers), jnp.asarray(max_lengths, jnp.int32))
    return jax.tree.map(np.asarray, result)


def brute_force(toy, row, length, alpha, bos_id=0, forbidden=(), least=0):
    """Every sequence of `least` tokens or more that ends in eos within `length`, best first."""
    words = [w for w in range(toy.vocabulary) if w != toy.eos_id and w not in forbidden]
    found = []
    for n in range(min(least, length - 1), length):
        for prefix in itertools.product(words, repeat=n):
            tokens = [*prefix, toy.eos_id]
            log_prob = toy.log_prob(row, tokens, bos_id)
            found.append((log_prob / ((5 + n + 1) / 6) ** alpha, log_prob, tokens))
    return sorted(found, key=lambda item: -item[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("sharpness", "eos_bias"), [(2.0, 0.0), (4.0, -4.0), (0.5, 1.0)])
def test_a_beam_that_loses_nothing_equals_brute_force(alpha, sharpness, eos_bias):
    toy = Toy(3, sharpness=sharpness, eos_bias=eos_bias)
    result = search(toy, 2, beam_size=5**4, length_penalty=alpha)
    for row in range(2):
        expected = brute_force(toy, row, 5, alpha)
        assert len(expected) == 341
        scores, log_probs, sequences = zip(*expected, strict=True)
        np.testing.assert_allclose(result.scores[row, :341], scores, rtol=2e-6, atol=1e-5)
        assert np.all(result.scores[row, 341:] == -np.inf)
        assert np.all(result.lengths[row, 341:] == 0)
        best = sequences[0]
        assert result.tokens[row, 0].tolist() == [*best, *[0] * (5 - len(best))]
        assert result.lengths[row, 0] == len(best)
        np.testing.assert_allclose(result.log_probs[row, 0], log_probs[0], rtol=1e-5)
        found = {
            tuple(t[:n].tolist())
            for t, n in zip(result.tokens[row, :341], result.lengths[row, :341], strict=True)
        }
        assert found == {tuple(tokens) for tokens in sequences}


def test_brute_force_with_one_hypothesis_kept_and_forbidden_tokens():
    alpha = 1.0
    toy = Toy(5, vocabulary=6)
    options = {"bos_id": 2, "pad_id": 0, "forbidden_ids": (0, 2)}
    result = search(toy, 3, beam_size=4**4, length_penalty=alpha, num_hypotheses=1, **options)
    for row in range(3):
        score, log_prob, tokens = brute_force(toy, row, 5, alpha, 2, forbidden=(0, 2))[0]
        assert result.tokens[row, 0, : len(tokens)].tolist() == tokens
        np.testing.assert_allclose(result.scores[row, 0], score, rtol=1e-5)
        np.testing.assert_allclose(result.log_probs[row, 0], log_prob, rtol=1e-5)
    assert result.tokens.shape == (3, 1, 5)


@pytest.mark.parametrize(("least", "alpha"), [(0, 1.0), (1, 0.0), (3, 1.0), (9, 0.0)])
def test_outputs_of_a_least_length(least, alpha):
    """Of those, the best; at a row's longest length it ends all the same."""
    toy = Toy(3, sharpness=0.5, eos_bias=4.0)
    options = {"length_penalty": alpha, "min_length": least}
    beam = search(toy, 4, [99, 2, 1, 0], beam_size=5**4, **options)
    lengths = [5, 2, 1, 0]  # no longer than the output
    for row, length in enumerate(lengths[:3]):
        score, log_prob, tokens = brute_force(toy, row, length, alpha, least=least)[0]
        assert beam.tokens[row, 0, : len(tokens)].tolist() == tokens
        np.testing.assert_allclose(beam.scores[row, 0], score, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(beam.log_probs[row, 0], log_prob, rtol=1e-5, atol=1e-5)
    found = search(toy, 4, lengths, **options)
    for row, length in enumerate(lengths):
        assert found.lengths[row, 0] == min(least + 1, length)  # nothing is likelier than eos
        tokens = found.tokens[row, 0, : found.lengths[row, 0]].tolist()
        assert tokens[-1:] == [toy.eos_id] * (length > 0)
        expected = toy.log_prob(row, tokens, 0) if tokens else 0.0
        np.testing.assert_allclose(found.log_probs[row, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}])
def test_what_an_ended_prefix_gives_counts_for_nothing(options):
    """Not a number, and infinities, behind eos: nothing changes."""
    toy = Toy(8, vocabulary=9, max_length=7, eos_bias=1.0)
    step, good = toy.step, search(toy, 6, [7, 5, 0, 7, 3, 7], **options)
    assert len(set(good.lengths[:, 0].tolist())) > 2
    for poison in (jnp.nan, jnp.inf):

        def poisoned(cache, tokens, positions, poison=poison):
            logits, cache = step(cache, tokens, positions)
            ended = jnp.any(cache["history"] == toy.eos_id, axis=1)
            return jnp.where(ended[:, None], poison, logits), cache

        toy.step = poisoned
        for a, b in zip(search(toy, 6, [7, 5, 0, 7, 3, 7], **options), good, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("alpha", "eos_bias"), [(0.0, -2.0), (0.6, 0.0)])
def test_one_beam_takes_the_most_probable_token(alpha, eos_bias):
    """At each position; at the last, the end."""
    toy = Toy(11, vocabulary=7, max_length=6, eos_bias=eos_bias)
    lengths = [6, 3, 0, 1] * 5
    found = search(toy, 20, lengths, length_penalty=alpha)
    for row, length in enumerate(lengths):
        expected, log_prob = [], 0.0
        while len(expected) < length and toy.eos_id not in expected:
            words = range(toy.vocabulary) if len(expected) + 1 < length else [toy.eos_id]
            totals = {word: toy.log_prob(row, [*expected, word], 0) for word in words}
            expected.append(max(totals, key=totals.get))
            log_prob = totals[expected[-1]]
        n = len(expected)
        assert found.lengths[row].tolist() == [n]
        assert found.tokens[row, 0].tolist() == expected + [0] * (6 - n)
        np.testing.assert_allclose(found.log_probs[row, 0], log_prob, rtol=1e-5)
        np.testing.assert_allclose(
            found.scores[row, 0], log_prob / ((5 + n) / 6) ** alpha, rtol=1e-5
        )
    assert len(set(found.lengths[:, 0].tolist())) > 3


# More hypotheses than four beams end in twelve steps: a row stops only once its list is full.
NEVER_FULL = 4 * 12 + 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("keep", [1, 4])
def test_early_stop_changes_nothing(alpha, keep):
    toy = ManyToys(17, vocabulary=7, max_length=12)
    options = {"beam_size": 4, "length_penalty": alpha}
    early = search(toy, 500, num_hypotheses=keep, **options)
    full = search(toy, 500, num_hypotheses=NEVER_FULL, **options)
    for a, b in zip(early, full, strict=True):
        np.testing.assert_array_equal(a, b[:, :keep])
    assert len(set(full.lengths[:, 0].tolist())) > 5


@pytest.mark.parametrize(("keep", "finite"), [(4, True), (NEVER_FULL, False)])
def test_early_stop_does_stop(keep, finite):
    """A model that is not a number from the seventh step on is never asked for it."""
    toy = Toy(0, vocabulary=7, max_length=12, sharpness=0.5, eos_bias=8.0)
    step = toy.step

    def trapped(cache, tokens, positions):
        logits, cache = step(cache, tokens, positions)
        return jnp.where(positions >= 6, jnp.nan, logits), cache

    toy.step = trapped
    result = search(toy, 5, beam_size=4, length_penalty=0.6, num_hypotheses=keep)
    assert np.all(np.isfinite(result.scores)) == finite
    assert np.all(np.isnan(result.scores)) == (not finite)


@pytest.mark.parametrize(("beam_size", "layers"), [(None, 0), (4, 0), (4, 2)], ids=str)
def test_every_score_is_the_models_own_log_probability(beam_size, layers):
    toy = Toy(21, vocabulary=11, max_length=8, eos_bias=-0.5)
    options = {} if beam_size is None else {"beam_size": beam_size}
    options |= {"bos_id": 2, "forbidden_ids": (0, 2), "length_penalty": 0.6, "layers": layers}
    result = search(toy, 12, **options)
    for row in range(12):
        for place in range(beam_size or 1):
            n = result.lengths[row, place]
            tokens = result.tokens[row, place, :n].tolist()
            assert tokens[-1] == toy.eos_id
            assert not {0, 2, toy.eos_id} & set(tokens[:-1])
            assert not np.any(result.tokens[row, place, n:])
            expected = toy.log_prob(row, tokens, 2)
            np.testing.assert_allclose(result.log_probs[row, place], expected, rtol=1e-5)
            np.testing.assert_allclose(
                result.scores[row, place], expected / ((5 + n) / 6) ** 0.6, rtol=1e-5
            )
        assert np.all(np.diff(result.scores[row]) <= 0)


def test_rows_do_not_see_each_other():
    toy = Toy(8, vocabulary=9, max_length=10, eos_bias=0.5)
    lengths = np.asarray([10, 4, 0, 7, 1, 10])
    together = search(toy, 6, lengths, beam_size=3, length_penalty=1.0)
    options = {"max_length": 10, "beam_size": 3, "length_penalty": 1.0, "forbidden_ids": ()}
    ids = {"bos_id": 0, "eos_id": 1, "pad_id": 0}
    alone = jax.jit(functools.partial(beam_search, toy.step, **options, **ids))
    cache = toy.cache(6)
    for row in range(6):
        own = {name: leaf[row : row + 1] for name, leaf in cache.items()}
        found = alone(own, jnp.asarray(lengths[row : row + 1]))
        np.testing.assert_array_equal(together.tokens[row], found.tokens[0])
        np.testing.assert_allclose(together.scores[row], found.scores[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "poison"), [({}, np.nan), ({}, -np.inf), ({"beam_size": 3}, np.inf)]
)
def test_a_row_that_is_not_a_number_says_so_and_spoils_no_other(options, poison):
    """Also if one of its prefixes alone is not."""
    toy = Toy(4, vocabulary=9, max_length=6, eos_bias=-3.0)
    step, good = toy.step, search(toy, 3, **options)
    marked = float(toy.cache(3)["context"][1, 0])

    def broken(cache, tokens, positions):
        logits, cache = step(cache, tokens, positions)
        bad = (cache["context"][:, :1] == marked) & (positions == 2)
        bad &= cache["history"][:, 1:3] == good.tokens[1, :1, :2]
        return jnp.where(bad.all(1, keepdims=True), poison, logits), cache

    toy.step = broken
    result = search(toy, 3, **options)
    assert np.all(np.isnan(result.scores[1]))
    np.testing.assert_array_equal(result.scores[[0, 2]], good.scores[[0, 2]])
