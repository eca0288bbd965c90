"""Generation: greedy against the full pass, what may be drawn and how often, the command."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import mhe_jax
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json
from mhe_jax.data import BOS, EOS
from mhe_jax.data.tokenizer_json import JsonTokenizer
from mhe_jax.evaluation import decoding, generate
from mhe_jax.evaluation.decoding import FORBIDDEN
from mhe_jax.evaluation.generation import Generator, filter_logits
from mhe_jax.evaluation.run import Run

ROOT = Path(__file__).parents[2]
T = 16
PROMPTS = ["the cat", "", "a small dog runs", "old", "the big bird sleeps the"]


@pytest.fixture(scope="module")
def workdir(run_of):
    return run_of("lm")


@pytest.fixture(scope="module")
def load(workdir):
    config = load_json(workdir / "config.json")

    def make(config=config, workdir=workdir, **changes):
        evaluation = dataclasses.replace(config.evaluation, **changes)
        of = dataclasses.replace(config, evaluation=evaluation)
        return Run.load(workdir, of, jax.devices()[:1])

    return make


def generator_of(run):
    return Generator(run)


def full_pass(run):
    """`tokens -> log-probabilities [V]` of what comes next, without a cache."""
    forward = jax.jit(lambda params, row: jax.nn.log_softmax(run.model.apply(params, row)[0]))

    def following(tokens):
        row = np.zeros((1, T), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(forward({"params": run.params}, row)[len(tokens) - 1], np.float64)

    return following


@pytest.mark.parametrize(
    ("scan_layers", "batch_size", "platform"),
    [pytest.param(False, 2, "cpu", marks=pytest.mark.rest), (True, 8, "cpu"), (True, 8, "gpu")],
    ids=str,
)
def test_greedy_is_the_argmax_of_the_full_pass(
    run_of, load, batch_size, scan_layers, platform, monkeypatch
):
    """On a GPU the layers of a scanned model are apart while it decodes."""
    monkeypatch.setattr(decoding, "platform", lambda: platform)
    run = load(batch_size=batch_size, extra_length=6)
    if scan_layers:
        workdir = run_of("lm", scan_layers=True)
        config = load_json(workdir / "config.json")
        run = load(config, workdir, batch_size=batch_size, extra_length=6)
    following = full_pass(run)
    found = generator_of(run).generate(PROMPTS)
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        tokens, new = [BOS, *run.tokenizer.encode(prompt)], []
        for _ in range(min(6, T - len(tokens))):
            allowed = following(tokens)
            allowed[[*FORBIDDEN, *([] if new else [EOS])]] = -np.inf
            new.append(int(allowed.argmax()))
            tokens.append(new[-1])
            if new[-1] == EOS:
                break
        assert continuation.tokens == new
        text = run.tokenizer.decode([*run.tokenizer.encode(prompt), *new])
        assert continuation.text == text
    assert len({tuple(continuation.tokens) for continuation in found}) > 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e-50, 1e-40, 1e-30])
def test_hardly_any_temperature_is_greedy(load, temperature, cuts):
    """The first two are 0 in float32, where nothing may be divided by them."""
    found = [
        [continuation.tokens for continuation in generator_of(load(**changes)).generate(PROMPTS)]
        for changes in ({}, {"temperature": temperature, **cuts})
    ]
    assert found[0] == found[1]


def allowed_by(probabilities, top_k, top_p):
    """The definition, one token at a time."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[:top_k]
    total, kept = sum(probabilities[i] for i in order), {}
    for i in order:
        if top_p is not None and sum(kept.values()) >= top_p * total:
            break
        kept[i] = probabilities[i]
    expected = np.zeros(len(probabilities))
    for i, p in kept.items():
        expected[i] = p / sum(kept.values())
    return expected


@pytest.mark.parametrize("temperature", [1e-30, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (1, None), (4, None), (99, 1.0), (None, 0.6), (5, 0.5)]
)
def test_what_may_be_drawn(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(3, 11)) * 2
    logits[:, 7] = -np.inf
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    found = jax.nn.softmax(filter_logits(jnp.asarray(logits), temperature, top_k, top_p))
    for row, expected in zip(np.asarray(found), probabilities, strict=True):
        np.testing.assert_allclose(row, allowed_by(expected, top_k, top_p), atol=1e-6)


def test_of_equal_probabilities_the_lower_ids_stay():
    found = jax.nn.softmax(filter_logits(jnp.zeros(6), 1.0, top_k=4))
    np.testing.assert_allclose(found, [0.25] * 4 + [0] * 2, atol=1e-6)
    found = jax.nn.softmax(filter_logits(jnp.zeros(6), 1.0, top_p=0.4))
    np.testing.assert_allclose(found, [1 / 3] * 3 + [0] * 3, atol=1e-6)


def test_those_that_have_just_the_probability_are_enough():
    """Quarters are exact in float32."""
    found = jax.nn.softmax(filter_logits(jnp.zeros(4), 1.0, top_p=0.5))
    np.testing.assert_allclose(found, [0.5, 0.5, 0, 0], atol=1e-6)
    # 0 in float32: the most probable stays all the same.
    assert filter_logits(jnp.zeros(4), 1.0, top_p=1e-50).tolist() == [0.0, *[-np.inf] * 3]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        (None, None),
        pytest.param(7, None, marks=pytest.mark.rest),
        pytest.param(None, 0.5, marks=pytest.mark.rest),
        (9, 0.8),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should(load, top_k, top_p):
    """The first token after a prompt, and the second after the most common first."""
    count, temperature, draws = 8192, 0.7, {"top_k": top_k, "top_p": top_p, "min_length": 0}
    run = load(temperature=temperature, extra_length=2, batch_size=count, **draws)
    found = generator_of(run).generate(["the cat"] * count)
    start, following = [BOS, *run.tokenizer.encode("the cat")], full_pass(run)

    def chances(tokens):
        allowed = following(tokens)
        allowed[list(FORBIDDEN)] = -np.inf
        scaled = np.exp((allowed - allowed.max()) / temperature)
        return allowed_by(scaled / scaled.sum(), top_k, top_p)

    def compare(tokens, expected):
        counts = np.bincount(tokens, minlength=len(expected))
        assert (counts[expected == 0] == 0).all()
        expected = expected * len(tokens)
        # Those that are too rare to be told apart count together.
        often = expected >= 5
        observed = [*counts[often], counts[~often].sum()]
        wanted = [*expected[often], expected[~often].sum()]
        if wanted[-1] < 1e-6:
            assert observed.pop() == 0
            wanted.pop()
        assert len(wanted) > 2
        assert stats.chisquare(observed, wanted).pvalue > 1e-4

    firsts = [continuation.tokens[0] for continuation in found]
    compare(firsts, chances(start))
    common = max(set(firsts) - {EOS}, key=firsts.count)
    seconds = [c.tokens[1] for c in found if c.tokens[0] == common]
    assert len(seconds) > 100
    compare(seconds, chances([*start, common]))


def test_draws_depend_on_seed_and_number_alone(load):
    def tokens(seed=0):
        run = load(temperature=1.0, extra_length=8, seed=seed)
        return [c.tokens for c in generator_of(run).generate(PROMPTS)]

    together = tokens()
    assert tokens(seed=1) != together
    generator = generator_of(load(temperature=1.0, extra_length=8))
    assert [generator.generate([prompt])[0].tokens for prompt in PROMPTS] == together
    assert generator.generate([PROMPTS[0]])[0].tokens != together[0]


def test_a_text_ends_at_eos_or_its_length(run_of, load):
    # So hot that each token, eos too, is about as probable as any other.
    run = load(temperature=1000.0, extra_length=50, batch_size=256)
    found = generator_of(run).generate(["the cat"] * 256)
    prompt = len(run.tokenizer.encode("the cat")) + 1
    lengths = {len(continuation.tokens) for continuation in found}
    assert max(lengths) == T - prompt
    assert len(lengths) > 2
    for continuation in found:
        assert EOS not in continuation.tokens[:-1]
        assert continuation.tokens[-1] == EOS or len(continuation.tokens) == T - prompt
    none = generator_of(load(extra_length=0)).generate(["the cat"])[0]
    assert (none.tokens, none.text) == ([], "the cat")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_least_number_of_tokens(run_of, temperature):
    """Of a model to which nothing is likelier than the end, loaded once."""

    def ending(params):
        params["embeddings"]["vocabulary_bias"][EOS] = 1000.0
        return params

    run = mhe_jax.load(run_of("lm", ending, output_bias=True), devices=jax.devices()[:1])
    settings = {"temperature": temperature, "extra_length": 6}
    for least in (0, 1, 3):
        for found in run.generate(["the cat", ""], details=True, min_length=least, **settings):
            assert len(found.tokens) == least + 1
            assert found.tokens.index(EOS) == least


def test_of_a_long_prompt_the_end_is_read(load, workdir, capsys):
    run = load(extra_length=4)
    long = "the cat sleeps " * 20 + "a dog"
    (found,) = generator_of(run).generate([long])
    assert found.truncated
    assert len(found.tokens) > 0
    assert found.text.startswith(long)
    end = [BOS, *run.tokenizer.encode(long)[-(T // 2 - 1) :]]
    allowed = full_pass(run)(end)
    allowed[list(FORBIDDEN)] = -np.inf
    assert found.tokens[0] == allowed.argmax()
    written = []
    summary = generate(
        workdir, run.evaluation, iter(["x", long]), written.append, devices=jax.devices()[:1]
    )
    assert summary["truncated_prompts"] == 1
    assert capsys.readouterr().err == "note: of prompt 2 only the end is read\n"


def test_of_a_long_prompt_no_more_is_tokenized_than_can_be_read(load):
    run = load(extra_length=4)
    generator = generator_of(run)
    seen, encode = [], run.tokenizer.encode_batch
    run.tokenizer.encode_batch = lambda texts: seen.extend(map(len, texts)) or encode(texts)
    prompts = [" a red cat" * 4001 + " runs", "x" * 40_001, "cat" + " " * 40_003, "the cat"]
    found = generator.generate(prompts)
    assert max(seen) < 2000
    assert [one.truncated for one in found] == [True, True, True, False]
    assert all(one.text.startswith(text) for one, text in zip(found, prompts, strict=True))
    generator = generator_of(run)
    generator._enough = 10**9
    assert generator.generate(prompts) == found
    assert max(seen) > 40_000


def uncased():
    """As BERT has, of as many tokens as the model."""
    t = pytest.importorskip("tokenizers")
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "a", "##s", "cafe", "dog", "."]
    pieces += [f"x{i}" for i in range(304 - len(pieces))]
    made = t.Tokenizer(t.models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    made.normalizer = t.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    made.decoder = t.decoders.WordPiece()
    return JsonTokenizer(made.to_str().encode())


# What a tokenizer may change: composed and unknown characters, case, spaces, names of tokens.
TYPED = [
    "A Cafe\u0301",
    "caf\u00e9 \u8a9e",
    "a\nDog\u2028a\x0b",
    "a  dog ",
    "a\t",
    "<s> a</s>",
    " ",
    "Dog",
    "Dog\n",
]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("make", [None, uncased])
def test_a_prompt_comes_back_as_it_went_in(load, make, long):
    run = load(extra_length=3, temperature=2.0)
    run = dataclasses.replace(run, tokenizer=make()) if make else run
    prompts = ["A dog  " * 900 + text for text in TYPED] if long else TYPED
    found = run.generate(prompts, details=True)
    assert [one.text[: len(prompt)] for one, prompt in zip(found, prompts, strict=True)] == prompts
    assert {one.truncated for one in found} == {long}
    assert len({one.text for one in found}) == len(prompts)


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        ("A Dog", ["##s", ".", "a"], "A Dogs. a"),
        ("A  Dog", ["a", "dog"], "A  Dog a dog"),
        ("A Dog ", ["a", "</s>"], "A Dog a"),
        ("Cafe\u0301\n", ["cafe"], "Cafe\u0301\ncafe"),
        ("\u8a9e a", ["dog"], "\u8a9e a dog"),
        ("", ["dog"], "dog"),
    ],
)
def test_a_continuation_goes_on_from_its_prompt(load, prompt, new, text):
    run = dataclasses.replace(load(), tokenizer=(made := uncased()))
    ids = dict(zip(made.pieces(range(304)), range(304), strict=True))
    tokens = [ids[piece] for piece in new]
    found = generator_of(run)._continuation(prompt, made.encode(prompt), True, tokens)
    assert found.text == text


def test_a_line_gives_a_line(load):
    """A continuation may have line breaks, of every kind; those of a prompt are its own."""
    run, prompt = load(), "the\x0bcat"
    read, (_, *new) = map(run.tokenizer.encode, (prompt, "\nb\r\nc\u2028d"))
    for one_line, end in ((False, "\nb\r\nc\u2028d"), (True, " b c d")):
        generator = Generator(run, one_line=one_line)
        assert generator._continuation(prompt, read, True, new).text == prompt + end


def test_rows_that_no_memory_holds(load, monkeypatch):
    generator = generator_of(load())
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1}.get)
    with pytest.raises(InputError, match=r"1 rows of 8 tokens need \d.* GB of memory, the machine"):
        generator.generate(["the cat"])


def test_only_language_models_generate(translation_run):
    evaluation = load_json(translation_run / "config.json").evaluation
    with pytest.raises(InputError, match="is a run of task translation: only lm generates"):
        generate(translation_run, evaluation, iter([]), print)


def test_a_broken_checkpoint_generates_nothing(run_of):
    workdir = run_of("lm", change=lambda params: jax.tree.map(lambda x: x * jnp.nan, params))
    written = []
    with pytest.raises(InputError, match="NaN or infinite: a broken checkpoint"):
        generate(
            workdir,
            load_json(workdir / "config.json").evaluation,
            iter(["x"]),
            written.append,
            devices=jax.devices()[:1],
        )
    assert written == []


def test_the_command(workdir, load):
    command = [sys.executable, "eval.py", str(workdir), "--generate", "--extra_length", "5"]
    done = subprocess.run(
        [*command, "--temperature", "0.9", "--top_p", "0.9", "--seed", "3"],
        input="\n".join(PROMPTS) + "\n",
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    run = load(temperature=0.9, top_p=0.9, seed=3, extra_length=5)
    generator = Generator(run, one_line=True)
    expected = [continuation.text for continuation in generator.generate(PROMPTS)]
    assert done.stdout.split("\n")[:-1] == expected
    summary = json.loads(done.stderr.splitlines()[-1])
    assert summary["prompts"] == len(PROMPTS)
    assert summary["top_p"] == 0.9
