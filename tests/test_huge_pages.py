"""Which commands start once more to have huge pages, and what stays as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhe_jax.cli import process

PROGRAM = """
import json, os, sys
from mhe_jax.cli.process import run_entry_point

def main():
    tunables = os.environ.get("GLIBC_TUNABLES")
    print(json.dumps([tunables, os.getpid(), sys.argv[1:], sys.flags.optimize]))

run_entry_point(main)
"""
GIVEN = "glibc.malloc.hugetlb=1"


@pytest.fixture
def on_demand():
    """Skips where Linux has huge pages for all, for none, or is not there."""
    pages = process.HUGE_PAGES
    if not pages.exists() or "[madvise]" not in pages.read_text():
        pytest.skip("huge pages are not given on demand here")


def start(place: Path, *options: str, **environment: str):
    """What the program sees, and the process that was started."""
    program = place / "program.py"
    program.write_text(PROGRAM)
    inherited = {name: v for name, v in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, *options, str(program), "--a", "b c", ""]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
    ) as begun:
        tunables, pid, arguments, optimize = json.loads(begun.communicate()[0])
    assert (pid, arguments) == (begun.pid, ["--a", "b c", ""])
    return tunables, optimize


def test_a_command_starts_once_more(tmp_path, on_demand):
    assert start(tmp_path) == (GIVEN, 0)
    assert start(tmp_path, "-O") == (GIVEN, 1)


@pytest.mark.parametrize("value", ["", "glibc.malloc.check=0"])
def test_a_choice_stays(tmp_path, value):
    assert start(tmp_path, GLIBC_TUNABLES=value) == (value, 0)


def test_a_launcher_stays(tmp_path):
    profile = str(tmp_path / "profile")
    assert start(tmp_path, "-m", "cProfile", "-o", profile) == (None, 0)


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """What says whether Linux gives huge pages; here it does, to those who ask."""
    place = tmp_path / "enabled"
    place.write_text("always [madvise] never")
    monkeypatch.setattr(process, "HUGE_PAGES", place)
    return place


def starts(monkeypatch, started, arguments):
    """Whether the process `started` so starts once more when it runs a script with `arguments`."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", *started])
    monkeypatch.setattr(sys, "argv", arguments)
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    with pytest.raises(SystemExit):
        process.run_entry_point(lambda: None)
    return bool(calls)


@pytest.mark.parametrize(
    ("started", "arguments", "expected"),
    [
        (["train.py", "a"], ["train.py", "a"], True),
        (["-O", "train.py", "a"], ["train.py", "a"], True),
        (["notebook"], ["train.py", "a"], False),
        (["train.py"], ["train.py", "a", "b"], False),
        (["launcher.py", "train.py", "a"], ["train.py", "a"], False),
        (["-m", "pytest"], ["train.py"], False),
        (["-m", "mhe_jax", "train", "a"], ["/x/mhe_jax/__main__.py", "train", "a"], True),
        (["-O", "-m", "mhe_jax", "train"], ["/x/mhe_jax/__main__.py", "train"], True),
        (["-m", "launcher", "-m", "mhe_jax", "a"], ["/x/mhe_jax/__main__.py", "a"], False),
        (["-m", "mhe_jax.attention.cost"], ["/x/mhe_jax/attention/cost.py"], False),
    ],
)
def test_only_whole_programs_start_once_more(monkeypatch, pages, started, arguments, expected):
    assert starts(monkeypatch, started, arguments) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("always [madvise] never", True),
        ("always madvise [never]", False),
        ("[always] madvise never", False),
        (None, False),
    ],
)
def test_nothing_starts_where_it_is_of_no_use(monkeypatch, pages, content, expected):
    pages.unlink() if content is None else pages.write_text(content)
    assert starts(monkeypatch, ["train.py"], ["train.py"]) == expected
