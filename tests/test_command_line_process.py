"""A command as a process: what it keeps, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Who started the tests may have SIGHUP ignored, as nohup does.
ENDING = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from mhe_jax.config import InputError
from mhe_jax.cli.process import run_entry_point

def main():
    {body}

run_entry_point(main)
"""


def run_program(body, unset=(), **environment):
    environment = {**{k: v for k, v in os.environ.items() if k not in unset}, **environment}
    return subprocess.run(
        [sys.executable, "-c", ENDING.format(body=body)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


# Whether Linux gives no new pages to arrays of 64 MiB, after the first of them.
KEPT = """import os, resource, sys; import numpy as np
    faults = []
    for _ in range(20):
        np.ones(1 << 23)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(faults[-1] - faults[0] < 200, sys.flags.optimize, sys.argv[1:])"""


def test_a_command_starts_once_more_to_keep_huge_pages(tmp_path):
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[madvise]" not in pages.read_text():
        pytest.skip("huge pages are not given on demand here")
    (program := tmp_path / "program.py").write_text(ENDING.format(body=KEPT))
    unset = {name: v for name, v in os.environ.items() if name != "GLIBC_TUNABLES"}

    def said(*command, **given):
        command = [sys.executable, *command, "--a", "b c", ""]
        return subprocess.run(command, env=unset | given, capture_output=True, text=True).stdout

    assert said("-O", str(program)) == "True 1 ['--a', 'b c', '']\n"
    assert said("-O", str(program), GLIBC_TUNABLES="") == "False 1 ['--a', 'b c', '']\n"
    (old := tmp_path / "old.py").write_text(
        f"import os; os.confstr = lambda name: 'glibc 2.34'\n{program.read_text()}"
    )
    assert said(str(old)) == "False 0 ['--a', 'b c', '']\n"
    inside = f"import sys; sys.argv = ['p']; exec(open({str(program)!r}).read())"
    assert said("-c", inside) == "False 0 []\n"


AT_EXIT = """import atexit, os, signal
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
    print('fine')"""
MEMORY = r"error: RESOURCE_EXHAUSTED: Out of memory .*data.batch_size.*\n"


@pytest.mark.parametrize(
    ("body", "status", "out", "err"),
    [
        ("print('fine')", 0, "fine\n", ""),
        ("raise InputError('a\\n b')", 2, "", "error: a b\n"),
        ("raise FileNotFoundError(2, 'not here', 'a.txt')", 2, "", "error: a.txt: not here\n"),
        ("raise KeyError('a')", 1, "", "(?s)Traceback.*KeyError: 'a'\n"),
        ("import os; os.environ['MHE_JAX_TRACEBACK'] = '1'; raise InputError('a')", 1, "",
         "(?s)Traceback.*InputError: a\n"),
        ("import jax; jax.numpy.zeros(1 << 44).block_until_ready()", 1, "", MEMORY),
        ("import os; os.environ['JAX_PLATFORMS'] = 'gpus'; import jax; jax.devices()", 2, "",
         r"error: JAX_PLATFORMS: .*'gpus'.*\n"),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT, "", ""),
        (AT_EXIT, -signal.SIGINT, "fine\n", ""),
    ],
)  # fmt: skip
def test_how_a_command_ends(body, status, out, err):
    done = run_program(body)
    assert (done.returncode, done.stdout) == (status, out)
    assert re.fullmatch(err, done.stderr), done.stderr


def test_an_interrupt_while_a_module_loads_is_no_error_of_the_module(tmp_path):
    """As an extension does it, which turns every exception into its own."""
    (tmp_path / "extension.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
        "except BaseException:\n    raise ImportError('while initializing') from None\n"
    )
    done = run_program(f"import sys; sys.path.append({str(tmp_path)!r}); import extension")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_draft(tmp_path, number):
    done = run_program(
        "import os, pathlib\n"
        "    from mhe_jax.config.files import publish\n"
        f"    with publish(pathlib.Path({str(tmp_path / 'out')!r}), is_directory=True) as draft:\n"
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


PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
UNSET = (PROGRAMS, "JAX_COMPILATION_CACHE_MAX_SIZE")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "cache/programs 1073741824"),
        ({PROGRAMS: "mine"}, "mine None"),  # and nothing that is there is deleted
        ({"MHE_JAX_CACHE": "file"}, "None None"),
    ],
)
def test_programs_are_kept_in_our_cache_or_where_jax_is_told(monkeypatch, tmp_path, given, kept):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    body = "import os; place, size = map(os.environ.get, {}); "
    body += "print(place and os.path.relpath(place), size)"
    done = run_program(body.format(UNSET), unset=UNSET, **{"MHE_JAX_CACHE": "cache", **given})
    assert (done.stdout, done.stderr) == (f"{kept}\n", "")


def test_the_second_start_finds_what_the_first_has_compiled(tmp_path):
    body = "import jax; jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones(7))"
    for written in (True, False):
        before = {path.name for path in (tmp_path / "programs").glob("*-cache")}
        done = run_program(body, unset=UNSET, MHE_JAX_CACHE=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        after = {path.name for path in (tmp_path / "programs").glob("*-cache")}
        assert (after > before) == written
