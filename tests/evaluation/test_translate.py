"""Lines in, lines out; and `eval.py` as a user runs it."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mhe_jax.cli import commands
from mhe_jax.cli.runs import input_lines
from mhe_jax.config import InputError
from mhe_jax.evaluation.forward import text_of

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


@pytest.fixture
def run(load):
    return load("translation", beam_size=1)


def test_one_line_out_for_each_line_in_whatever_the_chunk(run, capsys, by_lines):
    # The fifth is cut too: characters of other scripts are several byte tokens each.
    lines = [*ODD, "the big dog " * 60, "end"] * 2
    whole, summary = by_lines("translate", run, lines)
    assert whole.count("\n") == len(lines) == summary["lines"]
    assert summary["truncated_lines"] == 4
    notes = capsys.readouterr().err.splitlines()
    assert [note.split()[2] for note in notes] == ["5", "8", "14", "17"]
    written = []
    assert by_lines("translate", run, lines, written, chunk=1)[0] == whole
    assert len(written) == len(lines)
    outputs = whole.split("\n")
    assert outputs[1] == outputs[2] == ""
    assert all(len(text.splitlines()) <= 1 for text in outputs)
    assert by_lines("translate", run, [])[0] == ""


def test_other_tasks_are_refused(load, by_lines):
    for method, task in (("translate", "lm"), ("generate", "translation"), ("predict", "lm")):
        with pytest.raises(InputError, match=f"is a run of task {task}"):
            by_lines(method, load(task), ["a"])


def test_only_a_line_feed_ends_a_line():
    text = "\ufeffa\r\nb\u2028c\x85d\re\n\n  \n\ufefflast".encode()
    lines = list(input_lines(io.BytesIO(text)))
    # A byte order mark is one at the beginning only.
    assert lines == ["a", "b\u2028c\x85d\re", "", "  ", "\ufefflast"]
    assert list(input_lines(io.BytesIO(b""))) == []
    assert list(input_lines(io.BytesIO(b"a\n"))) == ["a"]


def test_one_line_end_of_a_text_is_dropped():
    assert [text_of(text, "") for text in ("a\n", "a \n\n", "\na")] == ["a", "a \n", "\na"]
    assert text_of("a\n", "", end="") == "a\n"


@pytest.fixture
def command(monkeypatch, capfd):
    """`command(run, flags, lines)`: standard output and error of eval.py, in this process."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)

    def start(run, flags, lines=()):
        text = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        capfd.readouterr()
        commands.main(["eval", str(run.workdir), *flags.split()])
        return capfd.readouterr()

    return start


@pytest.mark.whole_run
def test_the_commands(command, load, labelled_run):
    """Results alone on standard output; where these are texts, the summary on standard error."""
    run, lines = load("translation"), ["the cat", "", "\u2028日本"]
    out, _ = command(run, "--split validation --beam_size 1")
    result = json.loads(out)
    assert out.count("\n") == 1
    assert (result["split"], result["beam_size"]) == ("validation", 1)
    for name, flags, settings in (
        ("translation", "--translate --beam_size 1", {"beam_size": 1}),
        ("lm", "--generate --temperature 0.9 --seed 3", {"temperature": 0.9, "seed": 3}),
        ("sst2", "--predict", {}),
    ):
        run = load(labelled_run(name) if name == "sst2" else name, **settings)
        out, err = command(run, flags, lines)
        summary = json.loads(err.splitlines()[-1])
        assert summary["lines"] == 3
        found = out.split("\n")[:-1]
        if name == "sst2":
            labels = [one.label for one in run.predict(lines)]
            assert [line.split("\t")[0] for line in found] == [labels[0], "", labels[2]]
        elif name == "lm":
            texts = run.generate(lines)
            assert [" ".join(line.split()) for line in found] == [
                " ".join(text.split()) for text in texts
            ]
        else:
            assert found == run.translate(lines)


@pytest.mark.whole_run
def test_eval_py_translates_and_stops_at_ctrl_c(translation_run):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "LC_ALL": "C"}
    flags = ["--translate", "--beam_size", "1", "--batch_size", "1"]
    process = subprocess.Popen(
        [sys.executable, "eval.py", str(translation_run), *flags],
        cwd=ROOT,
        env=environment,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
    )
    # A batch is translated at once, then four at a time: it waits for no more than these.
    process.stdin.write("the cat\n\n\u2028日本\nthe dog\na cat\n".encode())
    process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(5)]
    assert all(line.endswith(b"\n") for line in lines)
    assert lines[1] == b"\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert output == b""
    assert b"Traceback" not in errors
