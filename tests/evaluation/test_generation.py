"""Generation: greedy against the full pass, what may be drawn and how often, prompts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mhe_jax.data import BOS, EOS
from mhe_jax.data.tokenizer_json import JsonTokenizer
from mhe_jax.evaluation import decoding
from mhe_jax.evaluation.decoding import FORBIDDEN
from mhe_jax.evaluation.generation import Continuation, continued, filter_logits, generate

T = 16
PROMPTS = ["the cat", "", "a small dog runs", "old", "the big bird sleeps the"]


def full_pass(run):
    """`tokens -> log-probabilities [V]` of what comes next, without a cache."""
    forward = jax.jit(lambda params, row: jax.nn.log_softmax(run.model.apply(params, row)[0]))

    def following(tokens):
        row = np.zeros((1, T), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(forward({"params": run.params}, row)[len(tokens) - 1], np.float64)

    return following


@pytest.mark.parametrize(
    ("scan_layers", "batch_size", "platform"), [(False, 2, "cpu"), (True, 8, "gpu")]
)
def test_greedy_is_the_argmax_of_the_full_pass(
    run_of, load, batch_size, scan_layers, platform, monkeypatch
):
    """On a GPU the layers of a scanned model are apart while it decodes."""
    monkeypatch.setattr(decoding, "platform", lambda: platform)
    workdir = run_of("lm", scan_layers=True) if scan_layers else run_of("lm")
    run = load(workdir, batch_size=batch_size, extra_length=6)
    following = full_pass(run)
    found = run.generate(PROMPTS, details=True)
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


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-50, None), (1e-30, 0.9)])
def test_hardly_any_temperature_is_greedy(load, temperature, top_p):
    """The first is 0 in float32, where nothing may be divided by it."""
    run, greedy = load("lm"), {"temperature": 0.0}
    cold = {"temperature": temperature, "top_p": top_p}
    found = [
        [one.tokens for one in run.generate(PROMPTS, details=True, extra_length=3, **settings)]
        for settings in (greedy, cold)
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


@pytest.mark.parametrize(
    ("count", "cut", "left"),
    [
        (6, {"top_k": 4}, 4),
        (6, {"top_p": 0.4}, 3),
        (4, {"top_p": 0.5}, 2),  # those that have just the probability are enough
        (4, {"top_p": 1e-50}, 1),  # 0 in float32: the most probable stays all the same
    ],
)
def test_of_equal_probabilities_the_lower_ids_stay(count, cut, left):
    found = jax.nn.softmax(filter_logits(jnp.zeros(count), 1.0, **cut))
    np.testing.assert_allclose(found, [1 / left] * left + [0] * (count - left), atol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [pytest.param(None, None, marks=pytest.mark.rest), (9, 0.8)]
)
def test_tokens_are_drawn_as_often_as_they_should(load, top_k, top_p):
    """The first token after a prompt, and the second after the most common first."""
    count, temperature, draws = 8192, 0.7, {"top_k": top_k, "top_p": top_p, "min_length": 0}
    run = load("lm", temperature=temperature, extra_length=2, batch_size=count, **draws)
    found = run.generate(["the cat"] * count, details=True)
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
    run = load("lm", temperature=1.0, extra_length=8)
    together = [one.tokens for one in run.generate(PROMPTS, details=True)]
    assert [one.tokens for one in run.generate(PROMPTS, details=True, seed=1)] != together
    for parts in ([[prompt] for prompt in PROMPTS], [PROMPTS[:3], PROMPTS[3:]]):
        counter = itertools.count()
        found = [one for part in parts for one in generate(run, run.evaluation, part, counter)]
        assert [one.tokens for one in found] == together
    assert generate(run, run.evaluation, PROMPTS[:1], counter)[0].tokens != together[0]


def test_a_text_ends_at_eos_or_its_length(load):
    # So hot that each token, eos too, is about as probable as any other.
    run = load("lm", temperature=1000.0, extra_length=50, batch_size=256)
    found = run.generate(["the cat"] * 256, details=True)
    prompt = len(run.tokenizer.encode("the cat")) + 1
    lengths = {len(continuation.tokens) for continuation in found}
    assert max(lengths) == T - prompt
    assert len(lengths) > 2
    for continuation in found:
        assert EOS not in continuation.tokens[:-1]
        assert continuation.tokens[-1] == EOS or len(continuation.tokens) == T - prompt
    none = run.generate("the cat", details=True, extra_length=0)
    assert (none.tokens, none.text) == ([], "the cat")


def test_settings_of_a_call_are_not_those_of_the_call_before(load):
    """Programs stay with a run, and each of these settings is inside of one."""
    run = load("lm", temperature=1.0, extra_length=8)
    drawn, coldest = run.generate(PROMPTS), run.generate(PROMPTS, temperature=0.0)
    assert drawn != coldest
    for settings in ({"top_k": 1}, {"top_p": 1e-6}):
        assert run.generate(PROMPTS, **settings) == coldest
    assert run.generate(PROMPTS) == drawn


def test_a_least_number_of_tokens(load, run_of):
    """Of a model to which nothing is likelier than the end."""
    run = load(run_of("lm", "ending", output_bias=True), temperature=1.0, extra_length=6)
    for least in (0, 3):
        for found in run.generate(["the cat", ""], details=True, min_length=least):
            assert len(found.tokens) == least + 1
            assert found.tokens.index(EOS) == least


def test_of_a_long_prompt_the_end_is_read(load, capsys, by_lines):
    run = load("lm", extra_length=4)
    long = "the cat sleeps " * 20 + "a dog"
    found = run.generate(long, details=True)
    assert found.truncated
    assert found.text.startswith(long)
    end = [BOS, *run.tokenizer.encode(long)[-(T // 2 - 1) :]]
    allowed = full_pass(run)(end)
    allowed[list(FORBIDDEN)] = -np.inf
    assert found.tokens[0] == allowed.argmax()
    _, summary = by_lines("generate", run, ["x", long])
    assert summary["truncated_lines"] == 1
    assert "line 2" in capsys.readouterr().err


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
TYPED = ["A Cafe\u0301", "caf\u00e9 \u8a9e", "a\nDog\u2028a\x0b", "a  dog ", "a\t", "<s> a</s>"]
TYPED += [" ", "Dog", "Dog\n", "A dog  " * 900]


@pytest.mark.parametrize("make", [None, uncased])
def test_a_prompt_comes_back_as_it_went_in(load, make):
    run = load("lm", extra_length=3, temperature=2.0)
    run = dataclasses.replace(run, tokenizer=make()) if make else run
    found = run.generate(TYPED, details=True)
    assert [one.text[: len(prompt)] for one, prompt in zip(found, TYPED, strict=True)] == TYPED
    assert [one.truncated for one in found] == [False] * (len(TYPED) - 1) + [True]
    assert len({one.text for one in found}) == len(TYPED)


def test_a_line_gives_a_line(load, monkeypatch, by_lines):
    """A continuation may have line breaks, of every kind; those of a prompt are its own."""
    run, prompt = load("lm"), "the\x0bcat"
    read, (_, *new) = map(run.tokenizer.encode, (prompt, "\nb\r\nc\u2028d"))
    text = continued(run.tokenizer, prompt, read, new)
    assert text == prompt + "\nb\r\nc\u2028d"
    found = [Continuation(text, new, False)]
    monkeypatch.setattr("mhe_jax.evaluation.run.generate", lambda *_, counter: found)
    assert by_lines("generate", run, [prompt])[0] == prompt + " b c d\n"
