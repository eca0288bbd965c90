"""Runs of ours in transformers by the code that goes with them: by torch and that file alone."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from small_models import apply, model_config, random_params, tokens_of

from mhe_jax.attention.cost import cached_numbers
from mhe_jax.config import InputError
from mhe_jax.interchange import transformers as ours
from mhe_jax.interchange.huggingface import write_files
from mhe_jax.model.layers import attention_module

torch = pytest.importorskip("torch", reason="needs torch and transformers: see `make peers`")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def written(config, params, directory):
    tensors, values = ours.convert(config, params)
    write_files(directory, tensors, values)
    shutil.copy(ours.MODELING, directory)


def loaded(config, params, directory):
    """The model; every tensor has found its place."""
    written(config, params, directory)
    auto = getattr(transformers, ours.CLASSES[config.task][0])
    model, report = auto.from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True
    )
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def of(model, **inputs):
    with torch.no_grad():
        return model(**{name: torch.tensor(value).long() for name, value in inputs.items()})


def cached(output):
    """Numbers in the cache of a layer."""
    layer = output["cache" if "cache" in output else "past_key_values"].layers[0]
    return layer.keys.numel() + layer.values.numel()


ROTARY = {
    "positions": "rotary",
    "norm": "rms",
    "mlp": "gated",
    "activation": "silu",
    "tie_embeddings": False,
    "mlp_bias": False,
}
POST = {"norm_position": "post", "positions": "sinusoidal", "output_bias": True}
BIASED = {"attention__use_bias": True}
LM = [
    *((kind, {}) for kind in ours.OWN),
    ("mva", {"attention__num_groups": 2, **BIASED}),
    ("mhe_add", {"attention__num_groups": 2, **POST, **BIASED}),
    ("mhe_mul", {"attention__num_groups": 2, "scan_layers": True}),
    ("mva", ROTARY | {"attention__score_features": 6}),
    ("mva", ROTARY | BIASED | {"rotary_pairs": "interleaved", "attention__score_features": 2}),
    ("mhe_add", {"attention__score_groups": 2}),
    ("gqa", ROTARY),
    ("mha", {"kronecker__attention": 2, "kronecker__embedding": 2}),
]


@pytest.mark.parametrize(("kind", "fields"), LM, ids=str)
def test_language_models(kind, fields, tmp_path):
    """Logits, the greedy continuation, the numbers in its cache, and rows padded on the left."""
    config = model_config("lm", kind, **fields)
    params, tokens = random_params(config), tokens_of(config, (2, 7))
    model = loaded(config, params, tmp_path)
    theirs = of(model, input_ids=tokens, use_cache=1)
    np.testing.assert_allclose(theirs.logits, apply(config, params, tokens)[..., :37], atol=1e-4)
    numbers = cached_numbers(attention_module(config.model, "decoder"), config.model.features)
    assert cached(theirs) == tokens.size * numbers
    ids, begun = torch.tensor(tokens).long(), tokens
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings).numpy()
    for _ in range(5):
        best = np.asarray(apply(config, params, begun)[:, -1, :37]).argmax(-1)
        begun = np.concatenate([begun, best[:, None]], 1)
    np.testing.assert_array_equal(found, begun)
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    left = model.generate(padded, attention_mask=mask, **settings).numpy()
    np.testing.assert_array_equal(left[:, 3:], begun)


@pytest.mark.parametrize("kind", ours.OWN)
@pytest.mark.parametrize("types", [0, 2])
def test_encoders(kind, types, tmp_path):
    more = {"norm_position": "post"} if types else {}
    config = model_config("mlm", kind, num_token_types=types, tie_embeddings=types > 0, **more)
    params, tokens = random_params(config), tokens_of(config, (2, 11))
    tokens[1, 7:] = 0
    token_types = np.repeat([[0, 1]], 2, 0).repeat([5, 6], 1) if types else None
    positions = np.repeat(np.arange(11)[None], 2, 0)
    wanted = apply(config, params, tokens, positions, token_types)[..., :37]
    given = {} if token_types is None else {"token_type_ids": token_types}
    model = loaded(config, params, tmp_path)
    theirs = of(model, input_ids=tokens, attention_mask=tokens > 0, **given).logits.numpy()
    np.testing.assert_allclose(theirs[tokens > 0], wanted[tokens > 0], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mva", {}),
        ("mhe_add", {"num_decoder_layers": 1}),
        ("mhe_mul", POST),
        ("mva", {"attention_by_role__cross__kind": "mha"}),
    ],
    ids=str,
)
def test_translation(kind, fields, tmp_path):
    """Logits, greedy search against ours, and beams that are no worse than it."""
    config = model_config("translation", kind, **fields)
    params = random_params(config)
    sources, targets = tokens_of(config, (2, 9)), tokens_of(config, (2, 11), 2)
    sources[1, 6:] = 0
    model = loaded(config, params, tmp_path)
    seen = {"input_ids": sources, "attention_mask": sources > 0}
    theirs = of(model, **seen, decoder_input_ids=targets).logits
    np.testing.assert_allclose(theirs, apply(config, params, sources, targets)[..., :37], atol=1e-4)
    given = {name: torch.tensor(value).long() for name, value in seen.items()}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    begun = np.full((2, 1), 2)
    for _ in range(6):
        best = np.asarray(apply(config, params, sources, begun)[:, -1, :37]).argmax(-1)
        begun = np.concatenate([begun, best[:, None]], 1)
    np.testing.assert_array_equal(model.generate(**given, **settings).numpy(), begun)
    beams = model.generate(**given, **settings, num_beams=3, length_penalty=0.0).numpy()

    def score(rows):
        logits = apply(config, params, sources, rows[:, :-1])[..., :37]
        return np.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1).sum((1, 2))

    assert (score(beams) >= score(begun) - 1e-4).all()


def test_scores_far_apart_fall_back_to_a_softmax_for_each_head():
    sys.path.insert(0, str(ours.MODELING.parent))
    try:
        from modeling_mhe import shared_attention
    finally:
        sys.path.pop(0)
    query, key, value = (torch.randn(1, 1, 5, 8) for _ in range(3))
    bias = torch.tensor([[[0.0, -200.0, -210.0, 50.0, 0.0], [0.0] * 5]])
    seen = torch.ones(5, 5).tril().bool()[None, None]
    seen[..., 3, :] = torch.tensor([False, True, True, False, False])
    seen[..., 4, :] = False
    found = shared_attention(query, key, value, bias, seen)
    scores = (query @ key.transpose(-1, -2)).double() / 8**0.5 + bias[:, :, None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf)[..., :4, :], -1)
    np.testing.assert_allclose(found[..., :4, :], (weights @ value.double()), rtol=1e-4, atol=1e-5)
    assert not found[..., 4, :].any()


def test_the_file_needs_torch_and_transformers_alone(tmp_path):
    config = model_config("lm", "mva")
    written(config, random_params(config), tmp_path)
    code = (
        "import sys; sys.modules['jax'] = sys.modules['mhe_jax'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained('.', trust_remote_code=True)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "config.json").read_bytes())["auto_map"]


@pytest.mark.parametrize(
    ("task", "kind", "fields", "named"),
    [
        ("lm", "mla", {}, "mla"),
        ("lm", "mva", {"attention__normalize_qk": True}, "normalize_qk"),
        ("lm", "mhe_mul", {"positions": "rotary"}, "mhe_mul"),
        ("classification", "mva", {}, "classification"),
    ],
)
def test_what_has_no_way_out_says_why(task, kind, fields, named):
    config = model_config(task, kind, **fields)
    with pytest.raises(InputError, match=named):
        ours.convert(config, random_params(config))
