"""A loaded run in Python: the same results as by the command, lazily, and compiled once."""

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhe_jax
from mhe_jax import InputError, data
from mhe_jax.evaluation.generation import Continuation
from mhe_jax.evaluation.run import Run
from mhe_jax.evaluation.translator import Translation, translate

LINES = ["the cat", "", "a small dog runs", "  ", "old", "the big bird sleeps", "a dog"]


def test_translations_are_those_of_the_command(load, by_lines):
    run = load("translation")
    found = run.translate(LINES)
    assert [*found, ""] == by_lines("translate", run, LINES)[0].split("\n")
    assert found[1] == found[3] == ""
    assert len(set(found)) > 4
    greedy = run.translate(LINES, beam_size=1, extra_length=3)
    settings = {"beam_size": 1, "extra_length": 3}
    assert [*greedy, ""] == by_lines("translate", run, LINES, **settings)[0].split("\n")
    assert greedy == load("translation", beam_size=1, extra_length=3).translate(LINES)
    assert greedy != found


def test_texts_are_those_of_the_command(load, by_lines):
    run = load("lm")
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "extra_length": 6}
    found = run.generate(LINES, **settings)
    lines = [" ".join(text.splitlines()) for text in found]
    assert [*lines, ""] == by_lines("generate", run, LINES, **settings)[0].split("\n")
    assert found != run.generate(LINES, **settings | {"seed": 6})


@pytest.mark.parametrize("seed", [2**31 + 7, 2**32 + 5, 2**63 - 1])
def test_a_large_seed_is_that_of_jax(load, seed):
    """The first token, drawn by hand."""
    run = load("lm")
    (found,) = run.generate([""], temperature=1.0, seed=seed, extra_length=1, details=True)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), 0)
    logits = jax.jit(run.model.apply)({"params": run.params}, jnp.full((1, 1), 2))[0, 0]
    allowed = logits.at[jnp.array([0, 1, 2, 4])].set(-jnp.inf)
    assert found.tokens == [int(jax.random.categorical(key, allowed))]


def test_a_text_has_a_translation(load, run_of):
    """Even if the model finds the empty one the likeliest; unless it is allowed."""
    workdir = run_of("translation", "ending", output_bias=True)
    run, lines = load(workdir, length_penalty=0.0), LINES[:3]
    assert run.translate(lines, min_length=0) == [""] * 3
    assert [bool(found.strip()) for found in run.translate(lines)] == [True, False, True]


def test_the_longest_and_the_shortest_translation(load, run_of):
    """As long as the text with its eos, and `extra_length`, if nothing is less likely than eos."""
    run = load(run_of("translation", "endless", output_bias=True))
    for text, found in zip(LINES, run.translate(LINES, details=True, extra_length=2), strict=True):
        longest = len(run.tokenizer.encode(text)) + 1 + 2
        assert len(found.tokens) == min(longest, run.config.model.max_length) * bool(text.strip())


class Tempted:
    """A model that finds tokens of no text the most probable."""

    def __init__(self, model):
        self.model, self.cache_batch_axis = model, model.cache_batch_axis

    def apply(self, variables, *inputs, method, mutable):
        output, state = self.model.apply(variables, *inputs, method=method, mutable=mutable)
        if method == "decode_step":
            output = output.at[..., np.array([data.PAD, data.UNK, data.BOS, data.MASK])].add(99.0)
        return output, state


def test_a_translation_has_no_special_token_but_its_end(load):
    run = load("translation")
    run = dataclasses.replace(run, model=Tempted(run.model), compiled={})
    for found in translate(run, run.evaluation, ["the cat", "a small dog runs"]):
        assert len(found.tokens) > 1
        assert not {data.PAD, data.UNK, data.BOS, data.MASK} & {*found.tokens}


def test_one_text_gives_one_result(load):
    run, lm = load("translation"), load("lm")
    for text in ("the cat", "the cat\n", ""):
        assert run.translate(text) == run.translate([text])[0]
        assert lm.generate(text) == lm.generate([text])[0]
    assert isinstance(run.translate("the cat", details=True), Translation)
    assert isinstance(lm.generate("the cat", details=True), Continuation)
    assert run.translate([]) == lm.generate([]) == list(run.translate(iter([]))) == []


def test_one_by_one_is_all_together(load):
    run = load("translation")
    together = run.translate(LINES, details=True)
    for line, one in zip(LINES, together, strict=True):
        alone = run.translate(line, details=True)
        assert (alone.text, alone.tokens) == (one.text, one.tokens)
        assert alone.score == pytest.approx(one.score, abs=1e-5)


def test_an_endless_iterator_is_read_a_little_ahead(load):
    run, read = load("translation"), []

    def lines():
        for number in itertools.count():
            read.append(number)
            yield LINES[number % len(LINES)]

    found = run.translate(lines())
    assert read == []
    expected = run.translate(LINES * 3)
    assert list(itertools.islice(found, 8)) == expected[:8]
    assert len(read) == 8
    assert list(itertools.islice(found, 9)) == expected[8:17]
    assert len(read) == 40
    lm = load("lm")
    assert list(itertools.islice(lm.generate(lines()), 14)) == lm.generate(LINES * 2)


def test_the_end_of_a_line_is_no_text(load, tmp_path):
    """Of a prompt it is, unless it comes from a file."""
    run, lm, lines = load("translation"), load("lm"), ["the cat", "a dog"]
    (tmp_path / "lines").write_text("the cat\na dog\n")
    with (tmp_path / "lines").open() as file:
        assert list(run.translate(file)) == run.translate(lines)
        file.seek(0)
        assert list(lm.generate(file)) == lm.generate(lines)
    assert lm.generate("a dog\n").startswith("a dog\n")


def test_the_same_shapes_compile_nothing_again(load, compiled):
    """Rows up to a power of two and lengths up to another are one program; so are all seeds."""
    run, lm = load("translation"), load("lm")
    drawn = {"temperature": 1.0, "extra_length": 5}
    for call, first, second in (
        (lambda of: run.translate(of, extra_length=2), LINES[:3], LINES[4:6]),
        (lambda of: lm.generate(LINES[:3], seed=of, **drawn), 1, 3),
    ):
        compiled.clear()
        call(first)
        assert compiled
        compiled.clear()
        call(second)
        assert compiled == []


def test_a_run_without_validation_has_its_last_checkpoint(load, translation_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(translation_run, workdir)
    values = json.loads((workdir / "config.json").read_text())
    values["data"]["validation"] = []
    (workdir / "config.json").write_text(json.dumps(values))
    assert load(workdir).steps == load(workdir, checkpoint=7).steps == [7]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run: run.translate(b"a text"), "not bytes"),
        (lambda run: run.translate("\ud800"), "texts has half a surrogate pair"),
        (lambda run: run.translate(["a", None]), r"texts\[1\] is of type NoneType"),
        (lambda run: run.translate(["a"], beam=1), "translate has no setting beam"),
        (lambda run: run.translate(["a"], beam_size=0), "evaluation.beam_size is 0"),
        (lambda run: mhe_jax.load(run.workdir / "none"), "no run at .*/none"),
        (lambda run: mhe_jax.load(run.workdir, checkpoint=99), "has no checkpoint '99'"),
        (lambda run: mhe_jax.load(run.workdir, beem_size=9), "evaluation.beem_size"),
    ],
)
def test_bad_input(load, call, says):
    with pytest.raises(InputError, match=says) as found:
        call(load("translation"))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("method", "name", "change"),
    [
        ("generate", "lm", "not a number"),
        ("log_probs", "lm", "not a number"),
        ("log_probs", "lm", "never ending"),
        ("encode", "mlm", "not a number"),
        ("predict", "sst2", "not a number"),
    ],
)
def test_a_broken_checkpoint_gives_nothing(load, run_of, labelled_run, method, name, change):
    bias = {"output_bias": True} if change == "never ending" else {}
    workdir = labelled_run(name, change) if name == "sst2" else run_of(name, change, **bias)
    with pytest.raises(InputError, match="NaN or infinite"):
        getattr(load(workdir), method)(["a"])


def test_several_processes(load, monkeypatch):
    run = load("translation")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="takes one process, not 2"):
        run.translate(["a"])


def test_a_tokenizer_that_does_not_fit(load):
    run = load("lm")
    model = dataclasses.replace(run.config.model, vocabulary_size=400)
    with pytest.raises(InputError, match="model.vocabulary_size is 400"):
        Run.load(run.workdir, dataclasses.replace(run.config, model=model))
