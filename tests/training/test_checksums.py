"""Files of a checkpoint that are not as they were written."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.bit_flips import abstract_of, flip_bits, save_run, small_state
from mhe_jax.config import InputError
from mhe_jax.training.checkpoint import Checkpoints, NotSaved, checksums, restore_params

TOKENIZER: Any = SimpleNamespace(key="k", name="n")  # so that `meta` is read
STATES = [small_state(1.0), small_state(2.0)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Steps 1 and 2, of which 2 is the best."""
    run = tmp_path_factory.mktemp("whole")
    save_run(run, STATES)
    return run


@pytest.fixture
def run(whole, tmp_path):
    """`run(harm, *kinds)`: a copy, whose newest or best step `harm` is done to."""

    def make(harm, *kinds):
        copy = tmp_path / "run"
        shutil.copytree(whole, copy)
        for kind in kinds:
            harm(copy / kind / "2")
        return copy

    return make


def evaluated(step):
    """The item that evaluation reads: the average, where there is one."""
    return step / ("ema_params" if (step / "ema_params").exists() else "params")


def arrays(step):
    files = (evaluated(step) / "ocdbt.process_0" / "d").iterdir()
    return max(files, key=lambda path: path.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def forget(step):
    for path in [step / "checksums", *step.glob("*/checksums.*")]:
        path.unlink()


# What is done, and what is said.
HARMS = {
    "arrays": (
        lambda step: flip(arrays(step)),
        "params/ocdbt.process_0/d/.* has a different checksum than when it was written",
    ),
    "longer": (
        lambda step: arrays(step).write_bytes(arrays(step).read_bytes() + b"0"),
        r"params/ocdbt.process_0/d/.* has [\d,]+ bytes, not [\d,]+",
    ),
    "one more": (
        lambda step: (evaluated(step) / "d" / "0123").write_bytes(b"0"),
        "params/d/0123 is not one of its files",
    ),
    "one less": (
        lambda step: (evaluated(step) / "_METADATA").unlink(),
        "params/_METADATA is missing",
    ),
    "an item less": (
        lambda step: shutil.rmtree(evaluated(step)),
        "(params/.* is missing|KeyError: .Item .(ema_)?params. was not found)",
    ),
    "meta": (
        lambda step: flip(step / "meta" / "metadata"),
        "meta/metadata has a different checksum",
    ),
    "the list": (lambda step: flip(step / "checksums"), "checksums has a different checksum"),
    "no list": (lambda step: (step / "checksums").unlink(), "checksums is missing"),
    "no list at all": (forget, "checksums is missing"),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("which", "kind"), [("last", "checkpoints"), ("best", "checkpoints_best")])
def test_evaluation_names_the_step_and_the_file(run, harm, which, kind):
    harm, says = HARMS[harm]
    copy = run(harm, kind)
    with pytest.raises(InputError) as told:
        restore_params(copy, which, abstract_of(STATES[0]).params, tokenizer=TOKENIZER)
    where = re.escape(f"{copy}/{kind}/2: cannot be read: ")
    assert re.match(f"{where}(ema_)?{says}", str(told.value))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_goes_on_from_the_one_before(run, harm):
    harm, says = HARMS[harm]
    checkpoints = Checkpoints(copy := run(harm, "checkpoints"))
    state, meta = checkpoints.restore(abstract_of(STATES[0]))
    checkpoints.put_aside()
    checkpoints.close()
    assert meta["tokens"] == 100.0
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, STATES[0])))
    (note,) = checkpoints.notes
    where = re.escape(f"warning: {copy}/checkpoints/2 cannot be read (")
    assert re.match(rf"{where}(ema_)?{says}.*\); it is now ", note)
    assert (copy / "checkpoints_unreadable" / "2").is_dir()


@pytest.mark.parametrize("harm", HARMS)
def test_a_best_one_is_put_aside_when_a_run_goes_on(run, harm):
    """Where its parameters are damaged too, which the run does not read."""
    harm, says = HARMS[harm]
    checkpoints = Checkpoints(copy := run(harm, "checkpoints_best"))
    assert checkpoints.best_criterion is None
    checkpoints.put_aside()
    checkpoints.close()
    (note,) = checkpoints.notes
    assert re.search(f"checkpoints_best/2 cannot be read .{says}", note)
    assert (copy / "checkpoints_best_unreadable" / "2").is_dir()


def test_what_is_not_read_is_not_verified(run):
    copy = run(lambda step: flip(step / "optimizer" / "manifest.ocdbt"), "checkpoints")
    params, steps = restore_params(copy, "last", abstract_of(STATES[0]).params)
    assert steps == [2]
    jax.tree.map(np.testing.assert_array_equal, params, STATES[1].ema_params)


def test_every_file_of_every_item_has_one(whole):
    """By another implementation: a table of 256 remainders."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)

    def crc32c(content):
        crc = 0xFFFFFFFF
        for byte in content:
            crc = crc >> 8 ^ table[(crc ^ byte) & 255]
        return crc ^ 0xFFFFFFFF

    assert crc32c(b"123456789") == 0xE3069283
    for kind in ("checkpoints", "checkpoints_best"):
        step = whole / kind / "2"
        first, *lines = (step / "checksums").read_text().splitlines()
        assert int(first, 16) == crc32c("".join(f"{line}\n" for line in lines).encode())
        found = {line.split(" ", 2)[2]: line.split(" ")[:2] for line in lines}
        files = {str(p.relative_to(step)): p for p in step.rglob("*") if p.is_file()}
        of_orbax = {"_CHECKPOINT_METADATA", "commit_success.txt"}
        assert found.keys() == files.keys() - of_orbax - {"checksums"}
        for name, (crc, size) in found.items():
            content = files[name].read_bytes()
            assert (int(crc, 16), int(size)) == (crc32c(content), len(content))


def test_bits_that_flip(tmp_path):
    found = flip_bits(tmp_path, 24, seed=5)
    assert found["other"] == 0
    assert found["refused"] > 10
    assert found["older"] > 5
    assert found["equal"] > 10


def saving_fails(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(STATES[0], 1, {})
    with pytest.raises(NotSaved) as told:
        checkpoints.wait()
    assert checkpoints.last_good() is None
    checkpoints.close()
    return str(told.value)


def test_a_save_that_could_not_be_read_is_told(tmp_path, monkeypatch):
    """As where Orbax does not find what it has to put together."""
    monkeypatch.setattr(type(epath.Path("/")), "glob", lambda self, pattern: iter(()))
    told = saving_fails(tmp_path)
    assert "/checkpoints: there is no ema_params/manifest.ocdbt" in told


def test_processes_that_share_no_directory_are_told(tmp_path, monkeypatch):
    """What the second of two processes wrote is on its own disk."""
    seal = checksums.Seal.__call__

    def of_two(self):
        with monkeypatch.context() as two:
            two.setattr(jax, "process_count", lambda: 2)
            seal(self)

    monkeypatch.setattr(checksums.Seal, "__call__", of_two)
    told = saving_fails(tmp_path)
    assert "there is no ema_params/checksums.1; the directory must be one that all" in told


FOREIGN = [".DS_Store", "._x", ".nfs0001", "@eaDir/x", "Thumbs.db"]


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_no_damage(run, name):
    def litter(step):
        for place in (step, *step.rglob("*")):
            if place.is_dir():
                (place / name).parent.mkdir(exist_ok=True)
                (place / name).write_bytes(b"0")

    copy = run(litter, "checkpoints", "checkpoints_best")
    for which in ("last", "best"):
        restored = restore_params(copy, which, abstract_of(STATES[0]).params, tokenizer=TOKENIZER)
        assert restored[1] == [2]
    checkpoints = Checkpoints(copy)
    state, _ = checkpoints.restore(abstract_of(STATES[0]))
    checkpoints.close()
    assert (int(state.step), checkpoints.notes, checkpoints.best_criterion) == (2, [], (0.5,))


def test_files_of_others_that_vanish_are_not_missed(tmp_path, monkeypatch):
    """They are there while the sums are written, and gone when they are verified."""
    seal = checksums.Seal.__call__

    def littered(self):
        litter = [self.step / "meta" / name for name in (".nfs0001", "@eaDir")]
        for path in litter:
            path.write_bytes(b"0")
        seal(self)
        for path in litter:
            path.unlink()

    monkeypatch.setattr(checksums.Seal, "__call__", littered)
    save_run(tmp_path, STATES[:1])
    _, steps = restore_params(tmp_path, "last", abstract_of(STATES[0]).params, tokenizer=TOKENIZER)
    assert steps


@pytest.mark.parametrize("name", ["a[b]", "a*", "what?", "[/run"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path, name):
    workdir = tmp_path / name
    with pytest.raises(InputError, match=r"^workdir=.*: takes a path without \*, \? and \[$"):
        Checkpoints(workdir)
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_moved_to_such_a_path_is_read(whole, tmp_path):
    shutil.copytree(whole, moved := tmp_path / "a[b]")
    params, steps = restore_params(moved, "last", abstract_of(STATES[0]).params)
    assert steps == [2]
    jax.tree.map(np.testing.assert_array_equal, params, STATES[1].ema_params)


def test_a_path_with_a_bracket_that_closes_is_a_path(tmp_path):
    save_run(tmp_path / "a]", STATES)
    assert restore_params(tmp_path / "a]", "last", abstract_of(STATES[0]).params)[1] == [2]
