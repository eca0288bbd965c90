"""A command as a process: which start once more to have huge pages, and how they end."""

import json
import os
import re
import signal
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


# How a command ends


ENDING = """
import sys
from mhe_jax.config import InputError
from mhe_jax.cli.process import run_entry_point

def main():
    {body}

run_entry_point(main)
"""


def run_program(body, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", ENDING.format(body=body)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        # Who started the tests may have it ignored, as nohup does.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def test_entry_point_exits_zero():
    done = run_program("print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_entry_point_prints_a_mistake_on_one_line():
    done = run_program("raise InputError('a\\n b')")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: a b\n")


def test_entry_point_shows_a_traceback_when_asked():
    done = run_program("raise InputError('a')", MHE_JAX_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_entry_point_keeps_other_errors():
    done = run_program("raise KeyError('a')")
    assert done.returncode == 1
    assert "KeyError" in done.stderr


def test_entry_point_says_what_needs_less_memory():
    done = run_program("import jax; jax.numpy.zeros(1 << 44).block_until_ready()")
    assert (done.returncode, done.stdout) == (1, "")
    line = r"error: Out of memory .*[^.]\. Less is needed with fewer rows \(data.batch_size.*\n"
    assert re.fullmatch(line, done.stderr)


def test_entry_point_is_quiet_on_interrupt():
    done = run_program("raise KeyboardInterrupt")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_an_interrupt_at_exit_is_quiet():
    done = run_program(
        "import atexit, os, signal\n"
        "    atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "    print('fine')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "fine\n", "")


def test_an_interrupt_while_a_module_loads_is_no_error_of_the_module(tmp_path):
    """As an extension does it, which turns every exception into its own."""
    (tmp_path / "extension.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
        "except BaseException:\n    raise ImportError('while initializing') from None\n"
    )
    done = run_program(f"import sys; sys.path.append({str(tmp_path)!r}); import extension")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_a_callback_is_not_lost(number):
    """Python drops what is raised there; JAX has a callback for each collection of garbage."""
    done = run_program(
        "import gc, os, signal, time\n"
        f"    gc.callbacks.append(lambda *_: os.kill(os.getpid(), {int(number)}))\n"
        "    gc.collect(); gc.callbacks.clear(); time.sleep(9); print('went on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_draft(tmp_path, number):
    done = run_program(
        "import os, pathlib\n"
        "    from mhe_jax.config.files import publish_directory\n"
        f"    with publish_directory(pathlib.Path({str(tmp_path / 'out')!r})) as draft:\n"
        "        (draft / 'weights').write_text('half')\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        print('went on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("stopped", ["KeyboardInterrupt", "SystemExit(128 + 15)"])
def test_a_signal_ends_a_process_at_once_where_xla_may_be_compiling(stopped):
    """The interpreter's own end, of which `atexit` is part, may crash then."""
    status = 130 if stopped == "KeyboardInterrupt" else 143
    body = "import atexit; atexit.register(print, 'its end', flush=True)"
    done = run_program(f"{body}; print('said'); import jax; raise {stopped}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "said\n", "")
    done = run_program(f"{body}; raise {stopped}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "its end\n", "")


def test_entry_point_is_quiet_when_the_reader_leaves():
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -n 1', sys.executable,
         ENDING.format(body="[print('x' * 1000) for _ in range(1000)]")],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_current_directory_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom mhe_jax.cli.process import run_entry_point\nrun_entry_point(os.getcwd)\n"
    )
    inherited = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = f'cd "$1" && rmdir "$1" && exec "{sys.executable}" "{program}"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", str(gone)], env=inherited, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: the current directory: No such file or directory\n"
