"""Runs that somebody else made: what is written, whatever places their config names."""

import io
import json
import sys

import jax
import pytest

import mhe_jax
from mhe_jax.cli import convert, evaluate, export


def said(run, monkeypatch, *flags):
    """`eval.py RUN`, with a line on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one dog runs\n")))
    evaluate.main([run, *flags])


# What is called, and what it may leave in the run.
CALLS = {
    "score": (lambda run, patch: said(run, patch), {"eval_test.json"}),
    "sources": (
        lambda run, patch: said(run, patch, "--sources", "secret.txt"),
        {"eval_secret_txt.json"},
    ),
    "generate": (lambda run, patch: said(run, patch, "--generate"), set()),
    "load": (
        lambda run, _: mhe_jax.load(run, devices=jax.devices()[:1]).log_probs(["one dog"]),
        set(),
    ),
    "export": (lambda run, _: export.main([run, "new", "--to", "safetensors"]), set()),
    "convert": (lambda run, _: convert.main([run, "new", "--kind", "mqa", "--rows", "8"]), set()),
}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_written(run, place, change, tmp_path, monkeypatch, call, linked):
    """Only in the run, the caller's cache, and the new directory where one is asked for.

    Texts anywhere are read, also by links; a link in the place of a result is replaced.
    """
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret.txt").write_text("one dog runs\n" * 70)
    path = run("lm")
    names = {"workdir": outside / "run", "data.cache_directory": outside / "cache"}
    names |= {"data.directory": outside}
    texts = {f"data.{split}": ["secret.txt"] for split in ("train", "test")}
    change(path / "config.json", **{k: str(v) for k, v in names.items()}, **texts)
    if linked:
        (path / "tokenizer.model").rename(outside / "tokenizer.model")
        (path / "tokenizer.model").symlink_to(outside / "tokenizer.model")
        (path / "eval_test.json").symlink_to(place / "tiny.py")
    act, left = CALLS[call]

    def found():
        return {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}

    before = found()
    act("runs/lm", monkeypatch)
    after = found()
    assert set(before) <= set(after)
    changed = {p for p in after if p not in before or after[p] != before[p]}
    assert {p.name for p in changed if p.is_relative_to(path)} == left
    assert {p.relative_to(place).parts[0] for p in changed} <= {"runs", "cache", "new"}
    for name in left:
        assert json.loads((path / name).read_text())["tokens"] > 7
