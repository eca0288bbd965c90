"""Bugs of evaluation."""

from mutations.mutant import Mutant

BRUTE_FORCE = "test_decoding.py::test_a_beam_that_loses_nothing_equals_brute_force"

EVALUATION = (
    # Searches.
    Mutant(
        "beams do not take the cache of their parents",
        "beam_search.body",
        "        cache = reorder_beams(cache, parents, batch_axis)\n",
        "",
        BRUTE_FORCE,
    ),
    Mutant(
        "beams do not take the tokens of their parents",
        "beam_search.body",
        "        tokens = jnp.take_along_axis(tokens, parents[:, :, None], axis=1)\n",
        "",
        BRUTE_FORCE,
    ),
    Mutant(
        "penalty of one token less",
        "beam_search.body",
        "ended / penalties[i + 1]",
        "ended / penalties[i]",
        BRUTE_FORCE,
    ),
    Mutant(
        "stops at the best of the list",
        "beam_search.body",
        "<= finished.scores[:, -1]",
        "<= finished.scores[:, 0]",
        "test_decoding.py::test_early_stop_changes_nothing",
    ),
    Mutant(
        "stops by the penalty of now",
        "beam_search.body",
        "best / largest_penalty <=",
        "best / penalties[i + 1] <=",
        "test_decoding.py::test_early_stop_changes_nothing",
    ),
    Mutant(
        "never stops early",
        "beam_search.body",
        "done |= best / largest_penalty <= finished.scores[:, -1]",
        "done |= False",
        "test_decoding.py::test_early_stop_does_stop",
    ),
    Mutant(
        "ended prefixes go on",
        "beam_search.body",
        "running = jnp.where(ids == eos_id, -jnp.inf, candidates)",
        "running = candidates",
        BRUTE_FORCE,
    ),
    Mutant(
        "nothing ends at the longest",
        "beam_search.body",
        "steps = jnp.where(must_end, jnp.where(is_eos, steps, -jnp.inf), choices)",
        "steps = choices",
        BRUTE_FORCE,
    ),
    Mutant(
        "beams begin alike",
        "beam_search",
        "(jnp.arange(beams)[None] == 0) & ~is_padding[:, None]",
        "(jnp.arange(beams)[None] >= 0) & ~is_padding[:, None]",
        BRUTE_FORCE,
    ),
    Mutant(
        "bos is generated",
        "FORBIDDEN",
        "(PAD, UNK, BOS, MASK)",
        "(PAD, UNK, MASK)",
        "test_forbidden.py",
    ),
    Mutant(
        "penalty of Google's formula without its 5",
        "length_penalties",
        "(5.0 + np.arange(max_length + 1)) / 6.0",
        "(1.0 + np.arange(max_length + 1)) / 6.0",
        "test_decoding.py",
    ),
    Mutant(
        "beams of all rows are mixed",
        "reorder_beams",
        "leaf = leaf.reshape(*before, rows, beams, *after)",
        "leaf = leaf.reshape(*before, beams, rows, *after).swapaxes(batch_axis, batch_axis + 1)",
        "test_decoding.py::test_reordering_stays_inside_a_row",
    ),
    Mutant(
        "greedy does not count eos",
        "greedy_search.body",
        "lengths = jnp.where(done, lengths, i + 1)",
        "lengths = jnp.where(done, lengths, i)",
        "test_decoding.py::test_one_beam_equals_greedy",
    ),
    Mutant(
        "greedy goes on past its row's longest",
        "greedy_search.body",
        "        best = jnp.where(i + 1 == max_lengths, eos_id, best)\n",
        "",
        "test_decoding.py::test_one_beam_equals_greedy",
    ),
    Mutant(
        "probabilities of what is allowed alone",
        "greedy_search.body",
        "steps, broken = _log_softmax(logits)",
        "steps, broken = _log_softmax(_allowed(logits, forbidden_ids))",
        "test_forbidden.py",
    ),
    # Generation.
    Mutant(
        "top-k keeps one more",
        "filter_logits",
        "ranks < top_k",
        "ranks <= top_k",
        "test_generation.py::test_what_may_be_drawn",
    ),
    Mutant(
        "top-p stops before its border",
        "filter_logits",
        "before = jnp.cumsum(probabilities, axis=-1) - probabilities",
        "before = jnp.cumsum(probabilities, axis=-1)",
        "test_generation.py::test_what_may_be_drawn",
    ),
    Mutant(
        "the temperature multiplies",
        "filter_logits",
        "keepdims=True)) / temperature",
        "keepdims=True)) * temperature",
        "test_generation.py::test_what_may_be_drawn",
    ),
    Mutant(
        "of equal probabilities the higher ids stay",
        "filter_logits",
        "order = jnp.argsort(-logits, axis=-1, stable=True)",
        "order = jnp.flip(jnp.argsort(logits, axis=-1, stable=True), axis=-1)",
        "test_generation.py::test_of_equal_probabilities_the_lower_ids_stay",
    ),
    # Metrics.
    Mutant(
        "spaces inside do not matter",
        "translation_scores",
        "h.strip() == r.strip()",
        "h.split() == r.split()",
        "test_metrics.py::test_exact_match_ignores_the_spaces_around_only",
    ),
    Mutant(
        "case never counts",
        "translation_scores",
        "bleu, chrf = sacrebleu.BLEU(tokenize=tokenizer), sacrebleu.CHRF()",
        "bleu, chrf = sacrebleu.BLEU(True, tokenize=tokenizer), sacrebleu.CHRF()",
        "test_metrics.py::test_case_counts",
    ),
    Mutant(
        "perplexity to the base of 2",
        "perplexity",
        "math.exp(nats / count)",
        "2 ** (nats / count)",
        "test_metrics.py::test_perplexity",
    ),
)
