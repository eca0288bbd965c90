"""Runs that somebody else made: what they name is read only where the command line trusts it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mhe_jax.cli.evaluate import parse
from mhe_jax.config import InputError
from mhe_jax.config.rules.trust import is_own, remember
from mhe_jax.evaluation import evaluate


@pytest.fixture
def outside(tmp_path):
    """A directory beside `place`, with a file that is nobody else's business."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "secret.txt").write_text("one dog runs\n" * 7)
    return directory


def allowed(*arguments):
    """Whether the files of a run may be read; the complaint where they may not."""
    try:
        parse([str(argument) for argument in arguments])
    except InputError as error:
        return str(error)
    return True


NAMES = {
    "absolute": lambda outside: {"data.test": [f"{outside}/secret.txt"]},
    "upwards": lambda outside: {"data.test": ["../outside/secret.txt"]},
    "a directory": lambda outside: {"data.directory": str(outside), "data.test": ["secret.txt"]},
    "of the home": lambda outside: {"data.test": ["~/secret.txt"]},
    "a link": lambda outside: {"data.test": ["link.txt"]},
    "sources of its own": lambda outside: {"evaluation.sources": [f"{outside}/secret.txt"]},
    "the second file": lambda outside: {"data.test": ["dev.en", f"{outside}/secret.txt"]},
}


@pytest.mark.parametrize("names", NAMES)
def test_a_file_that_a_run_names(run, place, change, refused, outside, monkeypatch, names):
    monkeypatch.setenv("HOME", str(outside))
    (place / "link.txt").symlink_to(outside / "secret.txt")
    name = "translation" if names == "the second file" else "lm"
    change(run(name) / "config.json", **NAMES[names](outside))
    says = rf"runs/{name} names {outside}/secret\.txt: not in the run, and not below \.; --trust"
    refused(f"eval.py runs/{name}", rf"{says} \. {outside} allows it$")
    assert allowed(f"runs/{name}", "--trust", outside, ".") is True
    # Nothing but the run is trusted; translating reads no split.
    assert "and not trusted; --trust" in allowed(f"runs/{name}", "--trust")
    assert allowed(f"runs/{name}", "--translate", "--trust") is True


def test_several_files_elsewhere_are_told_at_once(run, change, outside, tmp_path):
    names = [f"{outside}/a.txt", f"{tmp_path}/b.txt"]
    change(run("translation") / "config.json", **{"data.test": names})
    told = f"{outside}/a.txt (and 1 more): not in the run, and not below .; "
    assert f"{told}--trust . {outside} {tmp_path} allows it" in allowed("runs/translation")
    assert allowed("runs/translation", "--trust", outside, tmp_path) is True


def test_ones_own_run_is_trusted(run, change, outside, monkeypatch):
    """Its config names what its user named; a byte changed since, and it is anybody's."""
    change(run("lm") / "config.json", **{"data.test": [f"{outside}/secret.txt"]})
    assert "--trust" in allowed("runs/lm")
    remember(Path("runs/lm"))
    assert allowed("runs/lm") is True
    # Also from another directory, and as a copy.
    shutil.copytree("runs/lm", outside / "copy")
    monkeypatch.setenv("MHE_JAX_CACHE", str(Path("cache").absolute()))
    monkeypatch.chdir(outside)
    assert allowed("copy", "--trust") is True
    # A link in it may be somebody else's all the same.
    (outside / "copy/link.txt").symlink_to("/etc/hosts")
    assert "copy/link.txt leads to /etc/hosts" in allowed("copy", "--trust")
    (outside / "copy/link.txt").unlink()
    change(outside / "copy/config.json", **{"data.test": ["/etc/hosts"]})
    assert "/etc/hosts: not in the run" in allowed("copy", "--trust")


def test_training_makes_a_run_ones_own(good):
    """The fixture trained this one with the cache of the whole session."""
    assert is_own(good / "runs/lm")
    assert not is_own(good / "runs/mlm")


def test_what_the_command_line_names_is_read(run, change, outside):
    change(run("lm") / "config.json", **{"data.directory": str(outside)})
    assert allowed("runs/lm", "--sources", outside / "secret.txt") is True
    # A relative name starts where the run says.
    assert "runs/lm names" in allowed("runs/lm", "--sources", "secret.txt")
    assert "runs/lm names" in allowed("runs/lm")


def test_what_is_trusted_without_a_word(run, change, outside, monkeypatch, place):
    assert allowed(run("lm")) is True
    monkeypatch.chdir(outside)
    assert f"names {outside}/dev.en" in allowed(place / "runs/lm", "--trust", place)
    assert allowed(place / "runs/lm") is True
    # A name that begins alike is not below.
    elsewhere = outside.with_name("outside2")
    change(place / "runs/lm/config.json", **{"data.test": [f"{elsewhere}/dev.en"]})
    assert "--trust" in allowed(place / "runs/lm")
    # What lies in the run itself, and what no path names.
    for name in (f"{place}/runs/lm/x.txt", "tfds:some/set:test"):
        change(place / "runs/lm/config.json", **{"data.test": [name]})
        assert allowed(place / "runs/lm", "--trust") is True


@pytest.mark.parametrize("file", ["tokenizer.model", "checkpoints_best", "checkpoints/1/extra"])
@pytest.mark.parametrize("flag", ["", " --generate"])
def test_a_link_in_a_run(run, refused, outside, file, flag):
    path = run("lm") / file
    if path.exists():
        path.rename(outside / path.name)
    path.symlink_to(outside / path.name)
    says = rf"runs/lm/{file} leads to {outside}/{path.name}: not in the run, and not below \.; "
    refused(f"eval.py runs/lm{flag}", says)
    assert allowed("runs/lm", "--trust", ".", outside) is True
    path.unlink()
    path.symlink_to(Path("runs/lm/config.json").absolute())
    assert allowed("runs/lm") is True


def test_a_pipe_in_a_run(run):
    """Reading it would wait for ever."""
    (run("lm") / "tokenizer.model").unlink()
    os.mkfifo("runs/lm/tokenizer.model")
    assert allowed("runs/lm") == "runs/lm/tokenizer.model: is neither a file nor a directory"


def test_what_is_written(run, place, change, outside):
    """The cache that a run names stays as it is, and so do files that its results lead to."""
    run("lm")
    change(
        "runs/lm/config.json",
        **{"data.cache_directory": str(outside / "cache"), "data.test": [f"{outside}/secret.txt"]},
    )
    (place / "runs/lm/eval_test.json").symlink_to(place / "tiny.py")
    before = {path: path.read_bytes() for path in place.parent.rglob("*") if path.is_file()}
    name, evaluation, _ = parse(["runs/lm", "--trust", str(outside), "."])
    result = evaluate(name, evaluation)
    assert result["tokens"] > 7
    after = {path: path.read_bytes() for path in place.parent.rglob("*") if path.is_file()}
    changed = {path for path in after if after[path] != before.get(path)}
    assert place / "runs/lm/eval_test.json" in changed
    assert {path.relative_to(place).parts[0] for path in changed} == {"runs", "cache"}
    assert len([path for path in changed if path.is_relative_to(place / "runs")]) == 1
    assert json.loads((place / "runs/lm/eval_test.json").read_text()) == result
