"""Lines in, lines out; and `eval.py` as a user runs it."""

import dataclasses
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mhe_jax.cli import evaluate as cli_evaluate
from mhe_jax.cli.evaluate import PART, input_lines
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json
from mhe_jax.data import EOS
from mhe_jax.evaluation import translate
from mhe_jax.evaluation.decoding import Hypotheses
from mhe_jax.evaluation.programs import Programs
from mhe_jax.evaluation.run import Run
from mhe_jax.evaluation.translator import Translator, encode_some

pytestmark = pytest.mark.whole_run

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
    # A byte order mark is one at the beginning only.
    marked = io.BytesIO("\ufeffa\n\ufeffb".encode())
    assert list(input_lines(marked)) == ["a", "\ufeffb"]


def test_a_line_that_is_not_utf8_is_named():
    lines = input_lines(io.BytesIO(b"good\nba\xff\n"))
    assert next(lines) == "good"
    with pytest.raises(InputError, match="standard input, line 2: is not UTF-8 .byte 3"):
        next(lines)


class Parts(io.BytesIO):
    """Remembers how much was asked for at once."""

    most = 0

    def readline(self, size=-1):
        assert size > 0
        self.most = max(self.most, size)
        return super().readline(size)


@pytest.mark.parametrize("length", [PART - 1, PART, PART + 1, 3 * PART])
def test_a_long_line_is_read_in_parts(length):
    # Characters of one, two and three bytes, so that every part ends inside of one.
    text = ("aé日" * length)[:length]
    for end in ("\n", "\r\n", ""):
        file = Parts(f"{text}{end}".encode() + b"b\n" * bool(end))
        assert list(input_lines(file)) == [text, "b"][: 1 + bool(end)]
        assert file.most == PART
    (found, last) = input_lines(io.BytesIO(f"{text}\nb".encode()), keep=101)
    assert text.startswith(found)
    assert 101 <= len(found) <= 101 + PART
    assert last == "b"
    bad = f"{text}".encode()
    with pytest.raises(InputError, match=rf"line 2: is not UTF-8 .byte {len(bad) + 1}\)"):
        list(input_lines(io.BytesIO(b"x\n" + bad + b"\xffz\n"), keep=101))


def test_what_is_dropped_of_a_line_decides_whether_it_is_blank():
    spaces = b" " * 3 * PART
    blank, text = input_lines(io.BytesIO(spaces + b"\n" + spaces + b"x" * PART + b"\n"), keep=7)
    assert blank.strip() == ""
    assert text.strip() == "x"


def test_a_line_that_is_kept_whole_has_a_limit(monkeypatch):
    monkeypatch.setattr(cli_evaluate, "LONGEST_LINE", 3 * PART)
    lines = input_lines(io.BytesIO(b"a\n" + b"b" * (3 * PART - 1) + b"\n" + b"c" * 5 * PART))
    assert [len(line) for line in itertools.islice(lines, 2)] == [1, 3 * PART - 1]
    with pytest.raises(InputError, match="standard input, line 3: has over 196,608 characters"):
        next(lines)


def test_of_a_long_line_no_more_is_tokenized_than_can_be_read(translation_run):
    config = load_json(translation_run / "config.json")
    config = dataclasses.replace(config, evaluation=settings(translation_run))
    run = Run.load(translation_run, config, jax.devices()[:1])
    translator = Translator(run)
    seen, encode = [], run.tokenizer.encode_batch
    run.tokenizer.encode_batch = lambda texts: seen.extend(map(len, texts)) or encode(texts)
    texts = ["the big dog " * 5000, "x" * 40_000, " " * 40_000 + "cat", "the cat"]
    found = translator.translate(texts)
    assert max(seen) < 2000
    assert [one.truncated for one in found] == [True, True, True, False]
    translator._enough = 10**9
    whole = translator.translate(texts)
    assert max(seen) == 60_000
    assert [(a.tokens, a.truncated) for a in whole] == [(b.tokens, b.truncated) for b in found]


@pytest.mark.parametrize("count", [1, 15, 18, 19, 20, 31])
def test_what_is_read_of_a_line_that_just_fits(translation_run, monkeypatch, count):
    """`model.max_length` is 20 tokens with eos."""
    config = load_json(translation_run / "config.json")
    config = dataclasses.replace(config, evaluation=settings(translation_run))
    run = Run.load(translation_run, config, jax.devices()[:1])
    translator = Translator(run)
    run.tokenizer.encode_batch = lambda texts: [[*range(100, 100 + count)]]
    read = []

    def program(self, name, decode, sources, limits):
        read.extend([*map(int, sources[0])])
        found = [np.full(shape, EOS) for shape in [(1, 1, 1), (1, 1), (1, 1), (1, 1)]]
        return lambda: Hypotheses(*found)

    monkeypatch.setattr(Programs, "__call__", program)
    (found,) = translator.translate(["the cat"])
    kept = min(count, 19)
    assert [token for token in read if token] == [*range(100, 100 + kept), EOS]
    assert len(read) == (16 if count < 16 else 20)
    assert found.truncated == (count > 19)


def test_rows_that_no_memory_holds(translation_run, monkeypatch):
    """On a machine of one page."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1}.get)
    says = r"2 rows of 16 tokens need \d.* GB of memory, the machine has 0.0: give shorter lines"
    with pytest.raises(InputError, match=says):
        run_lines(translation_run, ["the cat", "a dog"])


def test_a_tokenizer_that_drops_characters_reads_on():
    tokenizer = SimpleNamespace(encode_batch=lambda texts: [[7] * len(t.strip()) for t in texts])
    texts = ["   abc", "abcdef", "      "]
    found = encode_some(tokenizer, texts, slice(4), 3)
    assert found == ([[7] * 3, [7] * 4, []], ["   abc", "abcd", "      "])


def test_something_comes_out_before_much_is_read(translation_run):
    """One batch; later ones are read together, to be sorted by length."""
    read, written = [], []

    def lines():
        for number in range(60):
            read.append(len(written))
            yield f"the cat {number}"

    changed = settings(translation_run, beam_size=1, batch_size=7)
    translate(translation_run, changed, lines(), written.append, devices=jax.devices()[:1])
    assert [read.count(n) for n in range(4)] == [7, 28, 25, 0]
    assert [text.count("\n") for text in written] == [7, 28, 25]


def start(*arguments, **options):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "LC_ALL": "C"}
    command = [sys.executable, "eval.py", *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes | options)


def test_eval_py_ends_with_a_line_of_json(translation_run, texts):
    flags = "--split", "validation", "--beam_size", "2"
    terminal, its_end = os.openpty()
    process = start(translation_run, *flags, stderr=its_end)
    os.close(its_end)
    shown = []
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: shown.extend(iter(lambda: read(terminal), b"")))
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        reading.result(timeout=60)
    os.close(terminal)
    (line,) = output.splitlines()
    result = json.loads(line)
    assert (result["split"], result["beam_size"]) == ("validation", 2)
    assert (translation_run / "validation.hypotheses.txt").exists()
    said = b"".join(shown).decode()
    assert f"scoring {translation_run}" in "".join(said.split("\r\n"))
    assert f"validation: bleu {round(result['bleu'], 4)}, chrf " in said
    assert said.endswith(f"(steps {result['steps']})\r\n")


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody writes to it any more
        return b""


def test_eval_py_translates_and_stops_at_ctrl_c(translation_run):
    process = start(translation_run, "--translate", "--beam_size", 1, "--batch_size", 1)
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
