"""Runs of ours in transformers by the code that goes with them: by torch and that file alone."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from small_models import apply, model_config, random_params, tokens_of
from tiny_runs import KINDS, WORDS, tiny_config

from mhe_jax import tasks
from mhe_jax.attention.cost import cached_numbers
from mhe_jax.config import InputError
from mhe_jax.interchange import export
from mhe_jax.interchange import transformers as ours
from mhe_jax.interchange.huggingface import write_files
from mhe_jax.model.layers import attention_module
from mhe_jax.training import loop

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


def cached(output, role="self"):
    """Numbers in the cache of a layer."""
    cache = output["cache" if "cache" in output else "past_key_values"]
    layer = getattr(cache, f"{role}_attention_cache", cache).layers[0]
    return layer.keys.numel() + layer.values.numel()


def loss(logits, labels):
    """The mean cross-entropy."""
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], -1).mean()


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
    theirs = of(model, input_ids=tokens, labels=tokens, use_cache=1)
    wanted = apply(config, params, tokens)[..., :37]
    np.testing.assert_allclose(theirs.logits, wanted, atol=1e-4)
    np.testing.assert_allclose(theirs.loss, loss(wanted[:, :-1], tokens[:, 1:]), atol=1e-4)
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


PAGE = Path(ours.__file__).parents[2] / "docs" / "kinds.md"


@pytest.mark.parametrize("kind", [*ours.OWN, "mha", "gqa", "mqa", "sha"])
def test_the_cache_has_as_many_numbers_as_the_table_says(kind, tmp_path):
    row = re.search(rf"^\| `{kind}` \|.*= ([\d,]+) \|[^|]*\|$", PAGE.read_text(), re.MULTILINE)
    assert row
    size = {"features": 768, "mlp_features": 8, "num_layers": 1, "attention__num_heads": 12}
    more = {"gqa": {"attention__num_kv_heads": 4}, "mva": {"attention__score_features": None}}
    config = model_config("lm", kind, **size, **more.get(kind, {}))
    model = loaded(config, random_params(config), tmp_path)
    numbers = int(row[1].replace(",", ""))
    assert cached(of(model, input_ids=[[5]], use_cache=1)) == numbers


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
    """Logits, the loss, the numbers in both caches, and greedy search against ours."""
    config = model_config("translation", kind, **fields)
    params = random_params(config)
    sources, targets = tokens_of(config, (2, 9)), tokens_of(config, (2, 11), 2)
    sources[1, 6:] = 0
    model = loaded(config, params, tmp_path)
    seen = {"input_ids": sources, "attention_mask": sources > 0}
    theirs = of(model, **seen, decoder_input_ids=targets, use_cache=1)
    wanted = apply(config, params, sources, targets)[..., :37]
    np.testing.assert_allclose(theirs.logits, wanted, atol=1e-4)
    own, cross = (attention_module(config.model, role) for role in ("decoder", "cross"))
    for name, module, ids in (("self", own, targets), ("cross", cross, sources)):
        assert cached(theirs, name) == ids.size * cached_numbers(module, config.model.features)
    shifted = np.concatenate([np.full((2, 1), 2), targets[:, :-1]], 1)
    wanted = loss(apply(config, params, sources, shifted)[..., :37], targets)
    np.testing.assert_allclose(of(model, **seen, labels=targets).loss, wanted, atol=1e-4)
    given = {name: torch.tensor(value).long() for name, value in seen.items()}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    begun = np.full((2, 1), 2)
    for _ in range(6):
        best = np.asarray(apply(config, params, sources, begun)[:, -1, :37]).argmax(-1)
        begun = np.concatenate([begun, best[:, None]], 1)
    np.testing.assert_array_equal(model.generate(**given, **settings).numpy(), begun)


@pytest.mark.parametrize("kind", [*ours.OWN, "gqa"])
def test_beams_find_our_translations(kind, tmp_path, load):
    """By the search that the files ask for, with scores, where no translation is cut off."""
    draw = random.Random(1)
    sources = [" ".join(draw.choices(WORDS, k=draw.randint(1, 7))) for _ in range(400)]
    pairs = [f"{source}\t{' '.join(reversed(source.split()))}\n" for source in sources]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    fields = {f"model.attention.{name}": value for name, value in KINDS[kind].items()}
    fields |= {"model.max_length": 40, "evaluation.extra_length": 24, "evaluation.beam_size": 4}
    fields |= {"train.num_steps": 80, "train.checkpoint_every": 80, "optimizer.warmup_steps": 20}
    fields |= {"optimizer.learning_rate": 1e-2, "data.tokens_per_batch": 512}
    fields["model.attention.kind"] = kind
    run = tmp_path / "run"
    loop.train(tiny_config("translation", tmp_path, run, **fields), jax.devices()[:1])
    export(run, tmp_path / "out", "transformers")
    texts = sources[:100]
    found = load(run).translate(texts, details=True)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    ).eval()
    given = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
    limits = given["attention_mask"].sum(1).tolist()
    assert all(len(one.tokens) < n + 24 for one, n in zip(found, limits, strict=True))
    more = {"return_dict_in_generate": True, "output_scores": True}
    theirs = model.generate(**given, **more)
    assert tokenizer.batch_decode(theirs.sequences, skip_special_tokens=True) == [
        one.text for one in found
    ]
    scores = [one.score for one in found]
    np.testing.assert_allclose(theirs.sequences_scores, scores, rtol=0, atol=1e-4)
    # Beams matter: greedy search finds others.
    greedy = model.generate(**given, num_beams=1)
    greedy = tokenizer.batch_decode(greedy, skip_special_tokens=True)
    assert len({one.text for one in found}) > 30
    assert sum(a != one.text for a, one in zip(greedy, found, strict=True)) > 9


@pytest.mark.parametrize("highest", [3.0, 50.0])
@pytest.mark.parametrize("causal", [False, True])
def test_shared_scores(highest, causal, monkeypatch):
    """In blocks of queries, with and without the fallback to a softmax for each head."""
    monkeypatch.syspath_prepend(str(ours.MODELING.parent))
    import modeling_mhe  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(modeling_mhe, "BLOCK", 2)
    query, key = (torch.randn(1, 2, n, 8) for n in (5, 7))
    value = torch.randn(1, 4, 7, 3)
    bias = torch.randn(1, 4, 7) + torch.tensor([0.0, -4 * highest, -4 * highest, 0, highest, 0, 0])
    seen = torch.ones(5, 7).tril(2 if causal else 7).bool()[None, None].clone()
    seen[..., 3, :] = torch.tensor([False, True, True, False, False, False, False])
    seen[..., 4, :] = False
    found = modeling_mhe.shared_attention(query, key, value, bias, seen, causal)
    scores = (query @ key.transpose(-1, -2)).double() / 8**0.5
    scores = scores.repeat_interleave(2, 1) + bias[:, :, None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf)[..., :4, :], -1)
    wanted = (weights @ value.double()).transpose(1, 2)
    np.testing.assert_allclose(found[:, :4], wanted, rtol=1e-4, atol=1e-5)
    assert not found[:, 4].any()


# The example of the card, where all that belongs to mhe_jax cannot be imported.
ALONE = """
import sys
for name in {needless}:
    sys.modules[name] = None
import torch
{example}
ids = tokenizer("the small dog runs", return_tensors="pt")
more = {{"decoder_input_ids": ids["input_ids"]}} if model.config.is_encoder_decoder else {{}}
with torch.no_grad():
    logits = model(**ids, **more).logits
torch.save([ids["input_ids"].tolist(), logits.tolist()], "found")
"""
NEEDLESS = (
    *("mhe_jax", "jax", "jaxlib", "flax", "optax", "orbax", "chex", "grain", "sacrebleu"),
    *("sentencepiece", "tensorflow", "tensorflow_datasets", "ctranslate2", "ml_dtypes"),
)


@pytest.mark.parametrize("task", ours.CLASSES)
def test_torch_and_transformers_alone_give_the_logits(task, run_of, load, tmp_path):
    """In an empty directory, where the files have not been before."""
    run = run_of(task, **{"model.attention.kind": "mva"})
    export(run, tmp_path / "out", "transformers")
    empty, own = tmp_path / "empty", tmp_path / "own"
    empty.mkdir()
    homes = {name: str(own / name) for name in ("HOME", "HF_HOME", "HF_MODULES_CACHE")}
    card = (tmp_path / "out" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    example = example.replace("DIRECTORY", str(tmp_path / "out"))
    code = ALONE.format(needless=NEEDLESS, example=example)
    how = {"cwd": empty, "env": os.environ | homes | {"HF_HUB_OFFLINE": "1"}, "check": True}
    subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, **how)
    ids, logits = torch.load(empty / "found")
    loaded = load(run)
    assert loaded.tokenizer.encode("the small dog runs") == [i for i in ids[0] if i not in (2, 3)]
    tokens = np.array(ids, np.int32)
    positions = np.arange(tokens.shape[1])[None]
    given = {"lm": (), "mlm": (positions,), "translation": (tokens,)}[task]
    model = tasks.of(loaded.config).model(loaded.config.model)
    wanted = np.asarray(model.apply({"params": loaded.params}, tokens, *given))
    np.testing.assert_allclose(logits, wanted[..., : len(logits[0][0])], rtol=0, atol=1e-4)


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
