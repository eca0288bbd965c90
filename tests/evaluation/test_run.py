"""A loaded run in Python: the same results as by the command, lazily, and compiled once."""

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pytest

import mhe_jax
from mhe_jax import InputError, evaluation
from mhe_jax.config.fields import load_json
from mhe_jax.data import EOS
from mhe_jax.evaluation import evaluate, generate, translate
from mhe_jax.evaluation.generation import Continuation
from mhe_jax.evaluation.translator import Translation

LINES = ["the cat", "", "a small dog runs", "  ", "old", "the big bird sleeps", "a dog"]


def load(workdir, **options):
    return mhe_jax.load(workdir, devices=jax.devices()[:1], **options)


@pytest.fixture(scope="module")
def translating(translation_run):
    return load(translation_run)


@pytest.fixture(scope="module")
def generating(run_of):
    return load(run_of("lm"))


def by_command(command, run, lines, **settings):
    """What `eval.py` writes, line by line."""
    written = []
    changed = dataclasses.replace(run.evaluation, **settings)
    devices = jax.devices()[:1]
    command(run.workdir, changed, iter(lines), written.append, devices=devices)
    return "".join(written).split("\n")[:-1]


def test_translations_are_those_of_the_command(translating):
    found = translating.translate(LINES)
    assert found == by_command(translate, translating, LINES)
    assert found[1] == found[3] == ""
    assert len(set(found)) > 4
    greedy = translating.translate(LINES, beam_size=1, extra_length=3)
    assert greedy == by_command(translate, translating, LINES, beam_size=1, extra_length=3)
    assert greedy != found


def test_hypotheses_of_a_split_are_translations(translating, texts):
    changed = dataclasses.replace(translating.evaluation, split="validation")
    evaluate(translating.workdir, changed, devices=jax.devices()[:1])
    hypotheses = (translating.workdir / "validation.hypotheses.txt").read_text().split("\n")[:-1]
    sources = [line.split("\t")[0] for line in (texts / "pairs.tsv").read_text().splitlines()]
    assert translating.translate(sources) == hypotheses


def test_texts_are_those_of_the_command(generating):
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "extra_length": 6}
    found = generating.generate(LINES, **settings)
    lines = [" ".join(text.splitlines()) for text in found]
    assert lines == by_command(generate, generating, LINES, **settings)
    assert found == generating.generate(LINES, **settings, batch_size=2)
    assert found == generating.generate(LINES, **settings)
    assert found != generating.generate(LINES, **settings | {"seed": 6})
    assert generating.generate(LINES) == by_command(generate, generating, LINES)


@pytest.mark.parametrize("seed", [2**31 + 7, 2**32 + 5, 2**63 - 1])
def test_a_large_seed_is_that_of_jax(generating, seed):
    """The first token, drawn by hand."""
    (found,) = generating.generate([""], temperature=1.0, seed=seed, extra_length=1, details=True)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), 0)
    row = jax.numpy.full((1, 1), 2)
    logits = jax.jit(generating.model.apply)({"params": generating.params}, row)[0, 0]
    allowed = logits.at[jax.numpy.array([0, 1, 2, 4])].set(-jax.numpy.inf)
    assert found.tokens == [int(jax.random.categorical(key, allowed))]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_text_has_a_translation(run_of, beam_size):
    """Even if the model finds the empty one the likeliest; unless it is allowed."""

    def ending(params):
        params["embeddings"]["vocabulary_bias"][EOS] = 50.0
        return params

    run = load(run_of("translation", ending, output_bias=True), length_penalty=0.0)
    assert run.translate(LINES, beam_size=beam_size, min_length=0) == [""] * len(LINES)
    for text, found in zip(LINES, run.translate(LINES, beam_size=beam_size), strict=True):
        assert bool(found.strip()) == bool(text.strip())
    longer = run.translate(LINES[:1], beam_size=beam_size, min_length=4, details=True)
    assert [len(one.tokens) for one in longer] == [5]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_longest_translation(run_of, beam_size):
    """As long as the text with its eos, and `extra_length`, if nothing is less likely than eos."""

    def endless(params):
        params["embeddings"]["vocabulary_bias"][EOS] = -50.0
        return params

    run = load(run_of("translation", endless, output_bias=True), beam_size=beam_size)
    for text, found in zip(LINES, run.translate(LINES, details=True, extra_length=2), strict=True):
        longest = len(run.tokenizer.encode(text)) + 1 + 2
        assert len(found.tokens) == min(longest, run.config.model.max_length) * bool(text.strip())


def test_details(translating, generating):
    found = translating.translate([*LINES, "the cat " * 40], details=True)
    assert all(isinstance(one, Translation) for one in found)
    assert [one.text for one in found[:-1]] == translating.translate(LINES)
    assert [one.truncated for one in found] == [False] * len(LINES) + [True]
    (one,) = generating.generate(["the cat"], details=True)
    assert isinstance(one, Continuation)
    assert one.text == generating.generate(["the cat"])[0]


def test_one_text_gives_one_result(translating, generating):
    (line, *_), blank = LINES, ""
    for text in (line, f"{line}\n", blank):
        assert translating.translate(text) == translating.translate([text])[0]
        assert generating.generate(text) == generating.generate([text])[0]
    assert isinstance(translating.translate(line, details=True), Translation)
    (scored,) = generating.log_probs([line])
    assert generating.log_probs(line).log_probs.tolist() == scored.log_probs.tolist()
    for pooling in ("mean", None):
        (row,) = translating.encode([line], pooling)
        np.testing.assert_array_equal(translating.encode(line, pooling), row)


def test_one_by_one_is_all_together(translating):
    together = translating.translate(LINES, details=True)
    for line, one in zip(LINES, together, strict=True):
        (alone,) = translating.translate([line], details=True)
        assert (alone.text, alone.tokens) == (one.text, one.tokens)
        assert alone.score == pytest.approx(one.score, abs=1e-5)


def test_an_endless_iterator_is_read_a_little_ahead(translating, generating):
    read = []

    def lines():
        for number in itertools.count():
            read.append(number)
            yield LINES[number % len(LINES)]

    found = translating.translate(lines(), beam_size=1, batch_size=3)
    assert read == []
    expected = translating.translate(LINES * 2, beam_size=1)
    assert list(itertools.islice(found, 3)) == expected[:3]
    assert len(read) == 3
    assert list(itertools.islice(found, 9)) == expected[3:12]
    assert len(read) == 15
    drawn = {"temperature": 1.0, "extra_length": 4}
    found = generating.generate(lines(), batch_size=3, **drawn)
    assert list(itertools.islice(found, 14)) == generating.generate(LINES * 2, **drawn)


def test_lines_before_a_bad_one_come_out(translating):
    found = translating.translate(iter(["the cat", "a dog", 3]))
    assert [next(found), next(found)] == translating.translate(["the cat", "a dog"])
    with pytest.raises(InputError, match=r"texts\[2\] is of type int: takes a str"):
        next(found)


def test_the_end_of_a_line_is_no_text(translating, generating, tmp_path):
    """Of a prompt it is, unless it comes from a file."""
    (tmp_path / "lines").write_text("the cat\na dog\n")
    lines = ["the cat", "a dog"]
    with (tmp_path / "lines").open() as file:
        assert list(translating.translate(file)) == translating.translate(lines)
        file.seek(0)
        assert list(generating.generate(file)) == generating.generate(lines)
    assert generating.generate("a dog\n").startswith("a dog\n")


def test_no_texts(translating, generating):
    assert translating.translate([]) == generating.generate([]) == []
    assert list(translating.translate(iter([]))) == []


def test_the_same_shapes_compile_nothing_again(translation_run, run_of, compiled):
    """Rows up to a power of two and lengths up to another are one program; so are all seeds."""
    run = load(translation_run)
    drawn = {"temperature": 1.0, "extra_length": 4}
    calls = [
        (lambda: run.translate(["the cat"]), lambda: run.translate(["old"])),
        (lambda: run.translate(LINES[:3]), lambda: run.translate(LINES[4:6])),
        (lambda: run.translate(LINES, beam_size=1), lambda: run.translate(LINES, beam_size=1)),
    ]
    lm = load(run_of("lm"))
    calls += [
        (lambda: lm.generate(["the cat"]), lambda: lm.generate(["a dog"])),
        (lambda: lm.generate(LINES, **drawn), lambda: lm.generate(LINES, seed=3, **drawn)),
    ]
    for first, second in calls:
        compiled.clear()
        first()
        assert compiled
        compiled.clear()
        second()
        assert compiled == []


def test_a_short_text_is_not_padded_to_a_batch(translation_run, monkeypatch):
    run = load(translation_run, batch_size=64)
    shapes = []
    monkeypatch.setattr(run.programs, "_put", lambda rows: shapes.append(rows.shape) or rows)
    run.translate(["the cat"])
    run.translate(["the cat"] * 5)
    run.translate(["the cat"] * 65)
    assert shapes == [(1, 16), (1,), (8, 16), (8,), *[(64, 16), (64,)] * 2]


def test_what_is_loaded(translating):
    assert translating.config == load_json(translating.workdir / "config.json")
    assert translating.steps == [7]
    assert translating.tokenizer.decode(translating.tokenizer.encode("the cat")) == "the cat"
    inputs = [jax.numpy.ones((1, 3), int)] * 2
    assert jax.eval_shape(
        translating.model.apply, {"params": translating.params}, *inputs
    ).shape == (1, 3, 304)
    assert "workdir" in repr(translating)
    assert len(repr(translating)) < 300


def test_settings_take_the_place_of_the_runs_own(translation_run, translating):
    run = load(translation_run, beam_size=1, length_penalty=0)
    assert (run.evaluation.beam_size, run.evaluation.length_penalty) == (1, 0.0)
    assert run.translate(LINES) == translating.translate(LINES, beam_size=1)


def test_a_run_without_validation_has_its_last_checkpoint(translation_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(translation_run, workdir)
    values = json.loads((workdir / "config.json").read_text())
    values["data"]["validation"] = []
    (workdir / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="has no checkpoint 'last'; there are: none; best: 7"):
        load(workdir)
    assert load(workdir, checkpoint="best").steps == load(workdir, checkpoint=7).steps == [7]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run: run.translate(b"a text"), "not bytes"),
        (lambda run: run.translate({"a": 1}), "texts is of type dict"),
        (lambda run: run.translate("\ud800"), "texts has half a surrogate pair"),
        (lambda run: run.translate(None), "not NoneType"),
        (lambda run: run.translate([b"a"]), r"texts\[0\] is of type bytes: takes a str"),
        (lambda run: run.translate(["a", None]), r"texts\[1\] is of type NoneType: takes a str"),
        (lambda run: run.translate(["\ud800"]), r"texts\[0\] has half a surrogate pair"),
        (lambda run: run.translate(["a"], beam=1), "translate has no setting beam: takes beam_siz"),
        (lambda run: run.translate(["a"], seed=1), "translate has no setting seed: takes beam_siz"),
        (lambda run: run.translate(["a"], beam_size=0), "evaluation.beam_size is 0: takes"),
        (lambda run: run.translate(["a"], beam_size="x"), "evaluation.beam_size is 'x': takes a w"),
        (lambda run: run.generate(["a"]), "is a run of task translation: only lm generates"),
        (lambda run: load(run.workdir / "none"), "no run at .*/none"),
        (lambda run: load("x" * 300), r"^x+/config\.json: File name too long$"),
        (lambda run: mhe_jax.load(None), "None is not a path: takes a str or a pathlib.Path"),
        (
            lambda run: mhe_jax.load(run.workdir, devices=2),
            "devices is 2: takes devices of JAX, or None",
        ),
        (
            lambda run: mhe_jax.load(run.workdir, devices=[]),
            r"devices is \[\]: takes devices of JAX",
        ),
        (
            lambda run: mhe_jax.load(run.workdir, devices=["cpu"]),
            r"devices is \['cpu'\]: takes devices",
        ),
        (lambda run: load(run.workdir, checkpoint=99), "has no checkpoint '99'"),
        (lambda run: load(run.workdir, beem_size=9), "unknown field evaluation.beem_size; did you"),
        (lambda run: load(run.workdir, beam_size=-1), "evaluation.beam_size is -1: takes"),
        (lambda run: load(run.workdir, checkpoint="first"), "evaluation.checkpoint is 'first'"),
    ],
)
def test_bad_input(translating, compiled, call, says):
    compiled.clear()
    with pytest.raises(InputError, match=says) as found:
        call(translating)
    assert "\n" not in str(found.value)
    assert compiled == []


def test_several_processes(translating, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="takes one process, not 2"):
        load(translating.workdir)
    with pytest.raises(InputError, match="takes one process, not 2"):
        translating.translate(["a"])


def test_names_at_the_top():
    assert mhe_jax.load is evaluation.load
    assert set(mhe_jax.__all__) <= set(dir(mhe_jax))
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        mhe_jax.lod  # noqa: B018


def test_several_devices_give_the_same(translating):
    run = mhe_jax.load(translating.workdir, devices=jax.devices()[:2])
    assert run.translate(LINES) == translating.translate(LINES)
