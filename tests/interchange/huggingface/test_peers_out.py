"""Runs of ours in transformers: the same logits, by torch."""

import numpy as np
import pytest
from small_models import LLAMA, apply, model_config, random_params, tokens_of
from tiny_runs import KINDS

from mhe_jax.interchange.huggingface import convert, write_files

torch = pytest.importorskip("torch", reason="needs torch and transformers: see `make peers`")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def loaded(config, params, directory):
    """The model that transformers makes of a run's files; every tensor has found its place."""
    tensors, values = convert(config, params)
    write_files(directory, tensors, values)
    kind = getattr(transformers, values["architectures"][0])
    model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def logits(model, **inputs):
    with torch.no_grad():
        found = model(**{name: torch.tensor(value).long() for name, value in inputs.items()})
    return found


BIASED = {"attention__use_bias": True}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in KINDS),
        ("mhe_add", {"attention__num_groups": 2}),
        ("mhe_add", {"attention__score_groups": 2, **BIASED}),
        ("mva", {"attention__num_groups": 2, "attention__score_features": 2}),
        ("mqa", {"attention__qkv_features": 8, "tie_embeddings": False}),
        ("mhe_mul", {"scan_layers": True, **BIASED}),
        ("mha", {"positions": "sinusoidal", "activation": "relu", "layer_norm_epsilon": 0.01}),
        ("mha", {"kronecker__attention": 2, "kronecker__mlp": 3, "kronecker__embedding": 2}),
        *((kind, LLAMA) for kind in ("mha", "mqa", "sha", "skv", "el")),
        (
            "gqa",
            LLAMA | {"rotary_pairs": "interleaved", "rotary_scaling": 3.0, "rotary_base": 50.0},
        ),
        ("gqa", LLAMA | BIASED | {"mlp_bias": True, "attention__qkv_features": 24}),
        ("mqa", LLAMA | {"tie_embeddings": False, "activation": "gelu_tanh"}),
    ],
    ids=str,
)
def test_language_models(kind, fields, tmp_path):
    config = model_config("lm", kind, **fields)
    params, tokens = random_params(config), tokens_of(config, (2, 11))
    model = loaded(config, params, tmp_path)
    one = kind in ("sha", "mqa", "mhe_add", "mhe_mul") and "attention__num_groups" not in fields
    name = "Llama" if "norm" in fields else "GPTBigCode" if one else "GPT2"
    assert type(model).__name__.startswith(name)
    ours = apply(config, params, tokens)[..., :37]
    theirs = logits(model, input_ids=tokens).logits.numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-4, rtol=0)
    assert np.abs(ours).max() > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", [0, 2])
def test_encoders(kind, types, tmp_path):
    """Of a row with padding too."""
    config = model_config("mlm", kind, num_token_types=types, tie_embeddings=types > 0)
    params, tokens = random_params(config), tokens_of(config, (2, 11))
    tokens[1, 7:] = 0
    token_types = np.repeat([[0, 1]], 2, 0).repeat([5, 6], 1) if types else None
    positions = np.repeat(np.arange(11)[None], 2, 0)
    ours = apply(config, params, tokens, positions, token_types)[..., :37]
    given = {} if token_types is None else {"token_type_ids": token_types}
    model = loaded(config, params, tmp_path)
    theirs = logits(model, input_ids=tokens, attention_mask=tokens > 0, **given).logits.numpy()
    np.testing.assert_allclose(theirs[tokens > 0], ours[tokens > 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("task", ["classification", "regression", "multiple_choice", "span"])
def test_encoders_with_the_head_of_a_task(task, tmp_path):
    config = model_config(task, "mhe_mul", num_token_types=2)
    params = random_params(config)
    shape = (2, 3, 11) if task == "multiple_choice" else (2, 11)
    tokens, types = tokens_of(config, shape), tokens_of(config, shape, 3) % 2
    tokens[1, ..., 7:] = 0
    marks = (tokens > 0).astype(np.int32)
    ours = apply(config, params, tokens, types, marks)
    found = logits(
        loaded(config, params, tmp_path),
        input_ids=tokens,
        attention_mask=tokens > 0,
        token_type_ids=types,
    )
    if task == "span":
        theirs = np.stack([found.start_logits.numpy(), found.end_logits.numpy()], 1)
        allowed = np.repeat((marks > 0)[:, None], 2, 1)
        np.testing.assert_allclose(theirs[allowed], ours[allowed], atol=1e-4, rtol=0)
    else:
        theirs = found.logits.numpy().reshape(ours.shape)
        np.testing.assert_allclose(theirs, ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {"layer_norm_epsilon": 1e-5}) for kind in KINDS),
        ("mha", {"layer_norm_epsilon": 0.02}),
        ("mha", {"layer_norm_epsilon": 0.02, "tie_embeddings": False, **BIASED}),
        ("mha", {"positions": "learned", "num_decoder_layers": 1, "activation": "relu"}),
        ("mha", {"attention_by_role__decoder__kind": "mhe_add"}),
        ("mha", {"attention_by_role__encoder__num_heads": 2}),
    ],
    ids=str,
)
def test_translation(kind, fields, tmp_path):
    config = model_config("translation", kind, **{"positions": "sinusoidal", **fields})
    params = random_params(config)
    sources, targets = tokens_of(config, (2, 9)), tokens_of(config, (2, 11), 2)
    sources[1, 6:] = 0
    model = loaded(config, params, tmp_path)
    found = logits(model, input_ids=sources, attention_mask=sources > 0, decoder_input_ids=targets)
    ours = apply(config, params, sources, targets)[..., :37]
    np.testing.assert_allclose(found.logits.numpy(), ours, atol=1e-4, rtol=0)
