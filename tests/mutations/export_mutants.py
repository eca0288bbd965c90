"""Bugs of models that go out to other programs."""

from mutations.mutant import Mutant

EXPORT = (
    Mutant(
        "CTranslate2 gets learned positions without their scale",
        "convert",
        'if model.positions == "learned":\n        # Tokens are multiplied',
        'if model.positions == "rotary":\n        # Tokens are multiplied',
        "test_ctranslate2.py::test_a_search_finds_the_same",
    ),
    Mutant(
        "CTranslate2 gets as many key heads as queries",
        "_set_attention",
        "spec.num_heads_kv = np.int32(_key_heads(found, path, heads))",
        "spec.num_heads_kv = np.int32(heads)",
        "test_ctranslate2.py::test_a_search_finds_the_same",
    ),
    Mutant(
        "CTranslate2 takes its own epsilon",
        "convert",
        "spec.config.layer_norm_epsilon = model.layer_norm_epsilon",
        "spec.config.layer_norm_epsilon = None",
        "test_ctranslate2.py::test_every_other_part_of_a_model",
    ),
    Mutant(
        "CTranslate2 sources have no eos",
        "convert",
        "spec.config.add_source_eos = True",
        "spec.config.add_source_eos = False",
        "test_ctranslate2.py::test_a_search_finds_the_same",
    ),
    Mutant(
        "CTranslate2 gets the gate as the other matrix",
        "_set_stack",
        '{"linear_0": "gate", "linear_0_noact": "up", "linear_1": "down"}',
        '{"linear_0": "up", "linear_0_noact": "gate", "linear_1": "down"}',
        "test_ctranslate2.py::test_every_other_part_of_a_model",
    ),
    Mutant(
        "StableHLO has another form than its card says",
        "at_any_length",
        'dict.fromkeys(MHE_KINDS, "folded") if folds else {}',
        "{}",
        "test_stablehlo.py::test_language_models",
    ),
    Mutant(
        "StableHLO folds what turns",
        "at_any_length",
        "not (rotated or attention.normalize_qk)",
        "not attention.normalize_qk",
        "test_stablehlo.py::test_language_models",
    ),
    Mutant(
        "each step of StableHLO starts from an empty cache again",
        "functions.step",
        'method="decode_step", cache=cache)',
        'method="decode_step", cache=jax.tree.map(jnp.zeros_like, cache))',
        "test_stablehlo.py::test_language_models",
    ),
    Mutant(
        "steps of StableHLO see the padding of a prompt",
        "functions.of_prompt",
        "tokens != PAD",
        "tokens >= PAD",
        "test_stablehlo.py::test_prompts_of_several_lengths",
    ),
    Mutant(
        "a parameter that the table lacks is left out in silence",
        "require_all",
        "tensors.keys() - {*used}",
        "tensors.keys() & set()",
        "test_huggingface.py::test_a_parameter_without_a_place_is_refused",
    ),
    Mutant(
        "a tokenizer.json keeps its own tokens around a text",
        "write_tokenizer",
        "if config.data.train:",
        "if not config.data.train:",
        "test_huggingface.py::test_a_file_puts_around_a_text_what_the_run_does",
    ),
)
