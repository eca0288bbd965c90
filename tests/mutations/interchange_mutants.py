"""Bugs of what comes in from other programs and goes out, of conversions, and of rotary positions.

Their tests need no torch: what `make peers` alone sees is in no mutant.
"""

from mutations.mutant import Mutant

IN, BAD = "test_runs_in.py", "test_bad_models.py"

INTERCHANGE = (
    Mutant(
        "a cache counts rotary positions from 0",
        "positions",
        'module.get_variable("cache", "cache_index")[:, None] + places',
        "places",
        "test_rotary.py::test_the_cache_counts_positions",
    ),
    Mutant(
        "cached keys turn at the positions of the queries",
        "Attention._run",
        "self._rotated(key, of_cache if self.decode else positions)",
        "self._rotated(key, jnp.broadcast_to(positions[:, -1:], key.shape[:2]) "
        "if self.decode and positions is not None else positions)",
        "test_rotary.py::test_the_cache_counts_positions",
    ),
    Mutant(
        "the key embedding of mhe_add is frozen under rotary positions",
        "MHEAddAttention.untrained",
        "if self.folds else",
        "if not self.normalize_qk else",
        "test_optimizer.py::test_key_embedding_that_matters_is_trained",
    ),
    Mutant(
        "interpolated positions are stretched",
        "rotate",
        "/ rotary.scaling",
        "* rotary.scaling",
        "test_rotary.py::test_a_turn_is_its_equation",
    ),
    Mutant(
        "cross-attention turns too",
        "attention_module",
        'if config.positions == "rotary" and role != "cross":',
        'if config.positions == "rotary":',
        "test_rotary_models.py::test_self_attention_is_rotated_as_the_config_says",
    ),
    Mutant(
        "rotary positions that are given are not read",
        "Attention._positions",
        "return positions.reshape(-1, queries)",
        "return jnp.arange(queries)[None]",
        "test_rotary_models.py::test_positions_that_are_given",
    ),
    Mutant(
        "a token that begins and ends texts is the beginning alone",
        "JsonTokenizer.__init__",
        "special[BOS] = ABSENT",
        "special[EOS] = ABSENT",
        f"{IN}::test_a_language_model[gpt2-special0]",
    ),
    Mutant(
        "special tokens have our names whatever the file calls them",
        "JsonTokenizer.pieces",
        "if n == ABSENT else",
        "if i < NUM_SPECIAL else",
        f"{IN}::test_a_token_is_ours_whatever_the_file_calls_it",
    ),
    Mutant(
        "the name of a special token is one inside a text",
        "JsonTokenizer.__init__",
        "self._tokenizer.encode_special_tokens = True",
        "self._tokenizer.encode_special_tokens = False",
        f"{IN}::test_pieces_are_those_of_the_file",
    ),
    Mutant(
        "the second eos of RoBERTa is left out",
        "JsonTokenizer._between",
        "return max(1, pair.ids[end : texts.index(1)].count(eos))",
        "return 1",
        f"{IN}::test_how_many_eos_stand_between_two_texts",
    ),
    Mutant(
        "wider heads keep the scale of narrow ones",
        "Heads.widened",
        "np.float32((width / scored) ** 0.5)",
        "np.float32(1)",
        "test_huggingface.py::test_out_and_in_is_the_same_function",
    ),
    Mutant(
        "sines are multiplied by the root of the width",
        "_scaled",
        ' and (name != "position" or model.positions == "learned")',
        "",
        "test_huggingface.py::test_out_and_in_is_the_same_function",
    ),
    Mutant(
        "pairs of features that turn together go out as they are",
        "write",
        'if model.rotary_pairs == "interleaved":',
        "if False:",
        "test_huggingface.py::test_out_and_in_is_the_same_function",
    ),
    Mutant(
        "Marian's logits grow with its tokens",
        "_larger",
        "array / factor if model.tie_embeddings else array",
        "array",
        "test_huggingface.py::test_out_and_in_is_the_same_function",
    ),
    Mutant(
        "output embeddings that differ are taken for the tied ones",
        "untied",
        "not np.array_equal(found.pop(name), found[of])",
        "not len(found.pop(name))",
        f"{BAD}::test_tensors_that_do_not_fit",
    ),
    Mutant(
        "a tensor without a place is left out",
        "take_in",
        "if name not in table:",
        "if False:",
        f"{BAD}::test_tensors_that_do_not_fit",
    ),
    Mutant(
        "an index leads out of its directory",
        "read_weights",
        "if Path(file).name != file:",
        "if False:",
        f"{BAD}::test_several_files",
    ),
    Mutant(
        "a run that was not trained here cannot be loaded",
        "with_settings",
        "check(config, trains=False)",
        "check(config)",
        f"{IN}::test_an_encoder",
    ),
    Mutant(
        "a run with rotary positions is converted as others are",
        "_converted",
        'if str(old.model.positions) == "rotary":',
        "if False:",
        "test_convert.py::test_what_cannot_be_converted_is_said",
    ),
    Mutant(
        "a converted run keeps the biases it had",
        "convert",
        'biased = any("bias" in one["out"] for one in made.values())',
        "biased = bool(old.model.attention.use_bias)",
        "test_convert.py::test_biases_are_made_where_only_they_keep_what_heads_do",
    ),
    Mutant(
        "a conversion counts the new attention twice",
        "convert",
        "found = unroll_layers(params)",
        "found = unroll_layers(params) if old.model.scan_layers else params",
        "test_convert.py::test_every_kind_of_every_task[mlm-gqa]",
    ),
    Mutant(
        "the head of other labels is taken",
        "_head",
        "m.num_spans, config.data.labels",
        "m.num_spans",
        "test_warm_start.py::test_other_labels_get_a_head_of_their_own",
    ),
    Mutant(
        "a run of the same task gives its encoder alone",
        "read_start",
        "found if _head(given) == _head(config) else {name: found[name] for name in ENCODER}",
        "{name: found[name] for name in ENCODER if name in found}",
        "test_warm_start.py::test_a_run_of_the_same_task_is_taken_whole",
    ),
    Mutant(
        "positions that both know are drawn anew",
        "_first_rows",
        "jnp.concatenate([taken[:both], drawn[both:]])",
        "drawn",
        "test_warm_start.py::test_positions_are_cut_or_drawn",
    ),
)
