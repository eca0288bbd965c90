"""A place with good texts, configs and finished runs; and what every bad input must come to."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import jax
import pytest
from labelled_files import squad
from random_parameters import random_parameters

from mhe_jax import tasks
from mhe_jax.config.fields import save_json
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import load_config
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.loop import train

ROOT = Path(__file__).parents[2]
CONFIG = """
import dataclasses
from typing import Literal

from mhe_jax.config import *

TASKS = {"labels": "classification"}


def get_config(variant: Literal["lm", "mlm", "translation", "labels", "span"]):
    pair, labelled = variant == "translation", variant in ("labels", "span")
    splits = ("train", "dev")
    train, dev = ((f"{split}.en", f"{split}.de") if pair else (f"{split}.en",) for split in splits)
    if labelled:
        train = dev = ("labels.tsv",) if variant == "labels" else ("squad.json",)
    return Config(
        task=TASKS.get(variant, variant),
        workdir=f"runs/{variant}",
        model=ModelConfig(vocabulary_size=300, features=16, mlp_features=16, num_layers=1,
                          attention=AttentionConfig(num_heads=2), max_length=16),
        data=DataConfig(train=train, validation=dev, test=dev, sequence_length=16, batch_size=8,
                        length_buckets=(16,) if pair or labelled else (),
                        tokens_per_batch=256, cache_directory="cache",
                        dataset="squad" if variant == "span" else "own",
                        window_stride=4, question_length=8),
        optimizer=OptimizerConfig(warmup_steps=1),
        train=TrainConfig(num_steps=2, checkpoint_every=1, keep_checkpoints=2, log_every=1),
        evaluation=EvaluationConfig(batch_size=8),
    )
"""
WORDS = {
    "en": "one small dog runs over the green meadow and a man with red hat watches him",
    "de": "ein kleiner hund läuft über die grüne wiese und einer mit rotem hut sieht ihm",
}
RUNS = ("lm", "mlm", "translation", "labels")


def text_of(language, count):
    """Lines of three words, all different."""
    words = WORDS[language].split()
    lines = ([words[i % 15], words[i // 15 % 15], words[7 * i % 15]] for i in range(count))
    return "".join(" ".join(line) + "\n" for line in lines)


def leave_untrained(config):
    """What evaluation and tuning need of a run."""
    config, workdir = tasks.resolve(config), Path(config.workdir)
    tokenizer = tasks.make_tokenizer(config, workdir / TOKENIZER)
    save_json(config, workdir / "config.json")
    model = tasks.of(config).model(config.model)
    initialize = tasks.of(config).initializer(model, config.data.sequence_length)
    params = random_parameters(initialize)
    checkpoints = Checkpoints(workdir)
    checkpoints.save_best(params, 2, {"validation": {"loss": 1.0}, "tokenizer": tokenizer.key})
    checkpoints.close()


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """Texts, `tiny.py`, and a run of each of `RUNS`, the first trained; named relative to here."""
    place = tmp_path_factory.mktemp("good")
    (place / "tiny.py").write_text(CONFIG)
    for language in WORDS:
        (place / f"train.{language}").write_text(text_of(language, 200), encoding="utf-8")
        (place / f"dev.{language}").write_text(text_of(language, 20), encoding="utf-8")
    rows = (f"{line}\t{'ab'[i % 2]}\n" for i, line in enumerate(text_of("en", 100).splitlines()))
    (place / "labels.tsv").write_text("text\tlabel\n" + "".join(rows))
    (place / "squad.json").write_text(squad())
    here = os.getcwd()
    os.chdir(place)
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        train(load_config(f"tiny.py:{RUNS[0]}"), jax.devices()[:1])
        for name in RUNS[1:]:
            leave_untrained(load_config(f"tiny.py:{name}"))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        os.chdir(here)
    shutil.rmtree(place / "cache")
    return place


@pytest.fixture
def place(good, tmp_path, monkeypatch):
    """A copy of what is good, to spoil; everything is started in it."""
    copy = tmp_path / "place"
    shutil.copytree(
        good, copy, ignore=lambda directory, _: RUNS if directory[-5:] == "/runs" else ()
    )
    monkeypatch.chdir(copy)
    monkeypatch.setenv("MHE_JAX_CACHE", "cache")
    return copy


@pytest.fixture
def run(good, place):
    """`run("lm")`: the directory of a copy of this run; `refused` makes that of those it names."""

    def make(name):
        copy = Path.cwd() / "runs" / name
        if not copy.exists():
            shutil.copytree(good / "runs" / name, copy)
        return copy

    return make


COMPILED = []


@pytest.fixture(scope="session", autouse=True)
def count_compilations():
    def heard(name, seconds, *, fun_name="", **about):
        # A number that becomes an array is a program too, unless another test made one before.
        if name.endswith("backend_compile_duration") and fun_name != "jit(convert_element_type)":
            COMPILED.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)


def contents(place):
    """{path: bytes} of all below `place` but the cache, where good texts may leave an index."""
    found = {}
    for directory, _, names in os.walk(place):
        for path in (Path(directory, name) for name in names):
            name = str(path.relative_to(place))
            if not name.startswith("cache/"):
                with contextlib.suppress(PermissionError):
                    found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes()
            else:
                assert path.suffix != ".tmp", f"{path} was left"
    return found


def start(monkeypatch, arguments, stdin=b""):
    """The exit status of a script of ours, started in this process as by its name."""
    script, *arguments = arguments
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    raise AssertionError("scripts exit")


@pytest.fixture
def refused(place, run, monkeypatch, capfd):
    """`refused("train.py ...", "what it must say")`: runs it and checks all that must hold.

    Exit status 2, one line on standard error that begins with the regular expression `says`,
    `lines` lines on standard output, nothing compiled, every file as it was, and no other.
    """

    def check(arguments, says, *, status=2, stdin=b"", compiles=False, lines=0, within=None):
        arguments = arguments.split() if isinstance(arguments, str) else arguments
        for name in RUNS:
            if any(word == "runs" or word.startswith(f"runs/{name}") for word in arguments):
                run(name)
        before = contents(Path.cwd())
        COMPILED.clear()
        capfd.readouterr()
        with within or contextlib.nullcontext():
            found = start(monkeypatch, arguments, stdin)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        assert re.match(f"error: {says}", err), err
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
        assert found == status
        assert out.count("\n") == lines
        after = contents(Path.cwd())
        assert not set(after) - set(before)
        assert {name: after.get(name) for name in before} == before
        assert compiles or not COMPILED

    return check


@pytest.fixture
def change(place):
    """`change(file, **{"model.features": 8})`: fields of a JSON file; None takes one out."""

    def make(name, **fields):
        values = json.loads((place / name).read_text())
        for field, value in fields.items():
            *parts, last = field.split(".")
            inner = values
            for part in parts:
                inner = inner[part]
            inner[last] = value
        (place / name).write_text(json.dumps(values))

    return make


@pytest.fixture
def said():
    """`said("a.txt", ": is empty")`: the regular expression of just that.

    Before it may stand, with `or_field`, the field that names the file, and with `or_file` the
    config that has the value.
    """

    def make(name, says, or_field=False, or_file=False):
        before = r"(data\.\w+: )?" if or_field else r"(bad\.py: )?" if or_file else ""
        return before + re.escape(name + says)

    return make
