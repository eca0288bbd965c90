"""The same in processes of their own: what a person sees, and what the shell gets."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def typed(place):
    """`typed("train.py ...")`: exit status, standard output and error of a real process."""

    def run(arguments, environment=(), before="", **streams):
        script, *arguments = arguments.split()
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": str(ROOT),
            **dict(environment),
        }
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
        command = shlex.join([sys.executable, str(ROOT / script), *arguments])
        found = subprocess.run(
            ["sh", "-c", f"{before}exec {command}"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            **streams,
        )
        return found.returncode, found.stdout, found.stderr

    return run


def cut_parameters(run):
    for path in run.glob("checkpoints*/*/params/d/*"):
        os.truncate(path, 300)


@pytest.mark.parametrize("entry", ["train.py tiny.py:lm --workdir runs/lm", "eval.py runs/lm"])
def test_damaged_checkpoints_are_one_line(run, typed, entry):
    cut_parameters(run("lm"))
    more = " --train.num_steps 3" if entry.startswith("train") else ""
    status, out, err = typed(entry + more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_a_traceback_where_it_is_asked_for(typed):
    arguments = "train.py tiny.py:lm --workdir runs/new --lr 1"
    assert typed(arguments) == (
        2,
        "",
        "error: unknown field --lr; did you mean --optimizer.learning_rate?\n",
    )
    status, _, err = typed(arguments, {"MHE_JAX_TRACEBACK": "1"})
    assert status == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("InputError: unknown field --lr; did you mean --optimizer.learning_rate?\n")


def test_no_standard_input(run, typed):
    run("translation")
    status, out, err = typed("eval.py runs/translation --translate", before="exec <&-; ")
    assert (status, out) == (2, "")
    assert err == "error: standard input is closed: takes the lines to read\n"


def test_standard_output_that_is_full(run, typed):
    with open("/dev/full", "w") as full:
        status, _, err = typed("eval.py paper", stdout=full)
    assert (status, err) == (2, "error: standard output: No space left on device\n")


def test_no_standard_output(typed):
    assert typed("eval.py paper", before="exec >&-; ") == (0, "", "")


def test_no_standard_error(typed):
    """What is for people does not go to standard output instead."""
    assert typed("eval.py runs/none", before="exec 2>&-; ") == (2, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_error_without_a_reader(place, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open(writer, "wb") as closed:
        command = [sys.executable, str(ROOT / "eval.py"), "runs/none"]
        found = subprocess.run(command, env=environment, stderr=closed, timeout=300)
    assert found.returncode == 2


def test_a_sweep_tells_why_a_run_failed(place, typed):
    shutil.copy(place / "train.en", place / "x.txt")
    with (place / "x.txt").open("ab") as file:
        file.write(b"\xff\n")
    status, out, err = typed("train.py tiny.py:lm --workdir runs/new --data.train x.txt --seeds 1")
    assert status == 1
    assert "Traceback" not in err
    says = "x.txt:201: is not UTF-8 (invalid start byte)"
    assert f"| seed=0 | failed: {says} |" in err
    assert f'"reason": "{says}"' in out
