"""Files and directories that may not be read or written, disks that are full, ports that are taken.

Permissions do not bind root: a test that root runs is run by nobody, by the effective user.
"""

import contextlib
import gzip
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from free_ports import free_port

import mhe_jax.report.report  # noqa: F401  (nobody may not read where Python itself lies)
import mhe_jax.training.loop  # noqa: F401
from mhe_jax.config import InputError
from mhe_jax.data import open_source

NOBODY = 65534
NEW = "train.py tiny.py:lm --workdir"


@contextlib.contextmanager
def bound_by_permissions():
    """Inside, this process has no other rights than its user's."""
    if os.getuid():
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def closed(place, run, refused, monkeypatch):
    """`closed(arguments, says, path, mode)`: `refused` where `path` has no more than that mode."""
    # Nobody can go into the directories of pytest.
    with tempfile.TemporaryDirectory() as outside:
        os.chmod(outside, 0o755)

        def check(arguments, says, path, mode):
            where = shutil.copytree(place, Path(outside, "place"))
            monkeypatch.chdir(where)
            run("lm")
            for each in [where, *where.rglob("*")] if os.getuid() == 0 else ():
                os.chown(each, NOBODY, NOBODY)
            (where / path).chmod(mode)
            try:
                refused(arguments, says, within=bound_by_permissions())
            finally:
                (where / path).chmod(0o755)

        yield check
        monkeypatch.chdir(place)


@pytest.mark.parametrize(
    ("arguments", "path", "says"),
    [
        (f"{NEW} runs/new", "tiny.py", r"tiny\.py: PermissionError: .*Permission denied"),
        (f"{NEW} runs/new", "train.en", r"train\.en: Permission denied$"),
        (f"{NEW} runs/new", "dev.en", r"dev\.en: Permission denied \(data\.validation\)$"),
        ("train.py tiny.py:translation --workdir runs/new", "train.de", r"train\.de: Permission"),
        ("train.py tiny.py:labels --workdir runs/new", "labels.tsv", r"labels\.tsv: Permission"),
        ("train.py tiny.py:span --workdir runs/new", "squad.json", r"squad\.json: Permission"),
        (f"{NEW} runs/lm", "runs/lm/config.json", r"(cannot read )?runs/lm/config\.json: Permiss"),
        (f"{NEW} runs/lm", "runs/lm/tokenizer.model", r"runs/lm/tokenizer\.model: Permission den"),
        (f"{NEW} runs/lm", "runs/lm", r"runs/lm/config\.json: Permission denied$"),
        ("eval.py runs/lm", "runs/lm", r"runs/lm/config\.json: Permission denied$"),
        ("eval.py runs/lm", "runs/lm/config.json", r"cannot read runs/lm/config\.json: Permission"),
        ("eval.py runs/lm", "runs/lm/tokenizer.model", r"runs/lm/tokenizer\.model: Permission de"),
        ("eval.py runs/lm", "runs/lm/checkpoints_best", r".*runs/lm/checkpoints_best.*: Permissi"),
        ("eval.py runs/lm", "dev.en", r"dev\.en: Permission denied$"),
        ("eval.py compare runs/lm", "runs/lm/result.json", r"runs/lm/result\.json: .*Permission"),
        ("eval.py compare runs/lm", "runs/lm/metrics.jsonl", r"runs/lm/metrics\.jsonl: Permissio"),
    ],
)
def test_what_may_not_be_read(closed, arguments, path, says):
    closed(arguments, says, path, 0)


def test_a_text_that_was_checked_and_may_no_more_be_read(place, monkeypatch):
    """Its index is in the cache, so that nothing but the text itself is opened."""
    open_source(["train.en"], "text", cache=place / "cache")

    def closed(path, flags):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(InputError, match=r"^train\.en: Permission denied$"):
        open_source(["train.en"], "text", cache=place / "cache")


@pytest.mark.parametrize(
    ("arguments", "path", "says"),
    [
        (f"{NEW} runs/new", "runs", r"workdir=runs/new: Permission denied$"),
        (f"{NEW} runs/lm", "runs/lm", r"workdir=runs/lm: not writable$"),
        (f"{NEW} runs/new --seeds 2", "runs", r"cannot make runs/new: Permission denied$"),
        ("eval.py compare runs/lm --out out/report", ".", r"--out out/report: Permission denied$"),
        ("eval.py compare runs/lm --out runs", "runs", r"--out runs: "),
    ],
)
def test_what_may_not_be_written(closed, arguments, path, says):
    closed(arguments, says, path, 0o555)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"{NEW} train.en", r"workdir=train\.en: is a file, takes a directory$"),
        (f"{NEW} train.en/new", r"workdir=train\.en/new: Not a directory$"),
        (f"{NEW} {'a' * 300}", r"a+/config\.json: File name too long$"),
        (f"{NEW} runs/new --data.cache_directory train.en", r"data\.cache_directory=train\.en: F"),
        (f"{NEW} runs/new --data.cache_directory dev.en/x", r"data\.cache_directory=dev\.en/x: N"),
        (f"{NEW} runs/new --data.cache_directory ~nobody-at-all/x", r"data\.cache_directory=~nob"),
        (f"{NEW} train.en --seeds 2", r"workdir=train\.en: is a file, takes a directory$"),
        ("train.py tiny.py:labels --workdir runs/new --train.init_from train.en", r"train\.init"),
        ("eval.py compare runs/lm --out train.en", r"--out train\.en: is a file$"),
    ],
)
def test_files_where_directories_must_be(refused, arguments, says):
    refused(arguments, says)


@pytest.fixture
def full(place):
    """`full(path)`: a file system of this directory alone, without room for a byte more."""
    mounted = []

    def make(path):
        (place / path).mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=50", "tmpfs", place / path]
        if os.getuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
        mounted.append(place / path)
        (place / path / "all").write_bytes(bytes(4096))

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize(
    ("arguments", "path", "says"),
    [
        (f"{NEW} runs/new", "runs/new", r"cannot write runs/new/lock\.json: No space left on de"),
        (f"{NEW} runs/new", "cache", r"cannot write cache/index/\w+\.int64: No space left on devi"),
        (f"{NEW} runs/new --data.train x.gz", "cache", r"cannot write cache/unpacked/\w+/\w+: No "),
        ("eval.py compare runs/lm --out full --lengths", "full", r"--out full: holds something o"),
    ],
)
def test_a_full_disk(place, full, refused, arguments, path, says):
    (place / "x.gz").write_bytes(gzip.compress((place / "train.en").read_bytes() * 9))
    full(path)
    refused(arguments, says)


def test_results_that_cannot_be_written(place, run, refused, monkeypatch):
    """The scores of a run on a disk that fills up."""
    run("lm")
    write_text = Path.write_text

    def no_room(path, *arguments, **options):
        if path.name.startswith(".eval_test.json."):
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", no_room)
    says = r"cannot write runs/lm/eval_test\.json: No space left on device$"
    refused("eval.py runs/lm", says, compiles=True)


@pytest.mark.parametrize("script", ["train.py tiny.py:lm --workdir runs/new", "eval.py runs/lm"])
def test_a_port_that_is_taken(refused, script):
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        flags = f"--coordinator localhost:{port} --num_processes 2 --process_id 0"
        refused(f"{script} {flags}", f"port {port} of the coordinator: Address already in use")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("script", ["train.py tiny.py:lm --workdir runs/new", "eval.py runs/lm"])
def test_a_process_that_does_not_come(refused, script, index):
    port = free_port()
    says = [
        r"process 1 of 2 did not come within 1 s$",
        rf"process 0 did not answer at localhost:{port} within 1 s$",
    ][index]
    flags = f"--coordinator localhost:{port} --num_processes 2 --process_id {index}"
    refused(f"{script} {flags} --process_timeout 1", says)
