"""Lines in, lines out; and `eval.py` as a user runs it."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mhe_jax.config import InputError
from mhe_jax.evaluation import input_lines, translate
from mhe_jax.loading import load_json

ROOT = Path(__file__).parents[2]
ODD = [
    "the cat",
    "",
    "  ",
    "a\u2028b\x85c\x0b",
    "\x00 \u2581 <s> 日本語 \U0001f600",
    "x\ry",
    "a\tb",
]


def settings(workdir, **changes):
    return dataclasses.replace(load_json(workdir / "config.json").evaluation, **changes)


def run_lines(workdir, lines, **options):
    written = []
    evaluation = settings(workdir, beam_size=1, batch_size=8)
    summary = translate(
        workdir, evaluation, iter(lines), written.append, devices=jax.devices()[:1], **options
    )
    return written, summary


def test_one_line_out_for_each_line_in_whatever_the_chunk(translation_run, capsys):
    # The fifth is cut too: characters of other scripts are several byte tokens each.
    lines = [*ODD, "the big dog " * 60, "end"] * 2
    whole, summary = run_lines(translation_run, lines)
    assert "".join(whole).count("\n") == len(lines) == summary["lines"]
    assert summary["truncated_lines"] == 4
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"note: line {n} is cut to 20 tokens" for n in (5, 8, 14, 17)]
    one_by_one, _ = run_lines(translation_run, lines, chunk=1)
    assert len(one_by_one) == len(lines)
    assert "".join(one_by_one) == "".join(whole)
    outputs = "".join(whole).split("\n")
    assert outputs[1] == outputs[2] == ""
    assert all(len(text.splitlines()) <= 1 for text in outputs)


def test_lines_before_a_bad_one_are_translated(translation_run):
    written = []

    def lines():
        yield from ["the cat", "the dog"]
        raise InputError("line 3 is bad")

    evaluation = settings(translation_run, beam_size=1)
    with pytest.raises(InputError, match="line 3 is bad"):
        translate(translation_run, evaluation, lines(), written.append, devices=jax.devices()[:1])
    assert "".join(written).count("\n") == 2


def test_no_lines(translation_run):
    written, summary = run_lines(translation_run, [])
    assert (written, summary["lines"]) == ([], 0)


def test_only_translation_runs_translate(run_of):
    workdir = run_of("lm")
    with pytest.raises(InputError, match="is a run of task lm"):
        run_lines(workdir, ["a"])


def test_only_a_line_feed_ends_a_line():
    text = "\ufeffa\r\nb\u2028c\x85d\re\n\n  \nlast".encode()
    lines = list(input_lines(io.BytesIO(text)))
    assert lines == ["a", "b\u2028c\x85d\re", "", "  ", "last"]
    assert list(input_lines(io.BytesIO(b""))) == []
    assert list(input_lines(io.BytesIO(b"a\n"))) == ["a"]


def test_a_line_that_is_not_utf8_is_named():
    lines = input_lines(io.BytesIO(b"good\nba\xff\n"), "standard input")
    assert next(lines) == "good"
    with pytest.raises(InputError, match="standard input, line 2: is not UTF-8 .byte 3"):
        next(lines)


def start(*arguments, **options):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "LC_ALL": "C"}
    command = [sys.executable, "eval.py", *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes | options)


def test_eval_py_ends_with_a_line_of_json(translation_run):
    process = start(translation_run, "--split", "validation", "--beam_size", "2")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    result = json.loads(output.splitlines()[-1])
    assert (result["split"], result["beam_size"]) == ("validation", 2)
    assert (translation_run / "validation.hypotheses.txt").exists()


@pytest.fixture
def heeds_ctrl_c():
    """A process started in the background ignores SIGINT, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_eval_py_translates_and_stops_at_ctrl_c(translation_run):
    process = start(translation_run, "--translate", "--beam_size", 1, "--batch_size", 1)
    process.stdin.write("the cat\n\n\u2028日本\nthe dog\n".encode())
    process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(4)]
    assert all(line.endswith(b"\n") for line in lines)
    assert lines[1] == b"\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert output == b""
    assert b"Traceback" not in errors


def test_eval_py_writes_translations_only_and_bears_a_closed_pipe(translation_run):
    process = start(translation_run, "--translate", "--beam_size", 1, "--batch_size", 1)
    output, errors = process.communicate(b"the cat\nthe dog\n", timeout=300)
    assert process.returncode == 0
    assert output.count(b"\n") == 2
    assert json.loads(errors.splitlines()[-1])["lines"] == 2

    read, write = os.pipe()
    process = start(
        translation_run, "--translate", "--beam_size", 1, "--batch_size", 1, stdout=write
    )
    os.close(write)
    os.close(read)
    _, errors = process.communicate(b"the cat\n" * 8, timeout=300)
    assert process.returncode == 141
    assert errors == b""


def test_eval_py_says_what_is_wrong_in_one_line(translation_run):
    process = start(translation_run, "--checkpoint", "99")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert output == b""
    (line,) = errors.decode().splitlines()
    assert line.startswith("error:")
    assert "has no checkpoint '99'" in line
