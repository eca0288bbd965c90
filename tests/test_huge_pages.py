"""Which commands start once more to have huge pages, and what stays as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhe_jax import command_line

PROGRAM = """
import json, os, sys
from mhe_jax.command_line import run_entry_point

def main():
    tunables = os.environ.get("GLIBC_TUNABLES")
    print(json.dumps([tunables, os.getpid(), sys.argv[1:], sys.flags.optimize]))

run_entry_point(main)
"""
GIVEN = "glibc.malloc.hugetlb=1"


@pytest.fixture
def on_demand():
    """Skips where Linux has huge pages for all, for none, or is not there."""
    pages = command_line.HUGE_PAGES
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
    ) as process:
        tunables, pid, arguments, optimize = json.loads(process.communicate()[0])
    assert (pid, arguments) == (process.pid, ["--a", "b c", ""])
    return tunables, optimize


def test_a_command_starts_once_more(tmp_path, on_demand):
    assert start(tmp_path) == (GIVEN, 0)
    assert start(tmp_path, "-O") == (GIVEN, 1)


@pytest.mark.parametrize("value", ["", "glibc.malloc.check=0"])
def test_a_choice_stays(tmp_path, value):
    assert start(tmp_path, GLIBC_TUNABLES=value) == (value, 0)


def test_nothing_starts_inside_another_program(monkeypatch, on_demand):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started anew"))
    with pytest.raises(SystemExit):
        command_line.run_entry_point(lambda: None)


@pytest.mark.parametrize("content", ["always madvise [never]", "[always] madvise never", None])
def test_nothing_starts_where_it_is_of_no_use(tmp_path, monkeypatch, content):
    pages = tmp_path / "enabled"
    if content is not None:
        pages.write_text(content)
    monkeypatch.setattr(command_line, "HUGE_PAGES", pages)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(sys, "argv", sys.orig_argv[-1:])
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started anew"))
    with pytest.raises(SystemExit):
        command_line.run_entry_point(lambda: None)
