"""Cycles of cores on TPUs, by schedules that a compiler would give."""

import json
import types

import numpy as np
import pytest

from experiments import reports
from experiments.kernels_tpu import cycles, schedule


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The rows of some lengths, by case, with cycles from a function of case, length and blocks."""

    def measured(cycles_of, *lengths):
        def measure(args, case, length, blocks):
            count = cycles_of(case, length, blocks)
            row = {"case": case, "length": length, "blocks": blocks, "matrix_units": []}
            return row | dict.fromkeys(("forward", "backward", "rest", "cycles"), count)

        device = types.SimpleNamespace(device_kind="a chip")
        monkeypatch.setattr(reports, "describe_devices", lambda topology: [device])
        monkeypatch.setattr(reports, "version_of", lambda library: "1")
        monkeypatch.setattr(cycles, "measure", measure)
        file = tmp_path / "cycles.json"
        assert cycles.main(["--lengths", *map(str, lengths), "--out", str(file)]) == 0
        return json.loads(file.read_text())["results"]

    return measured


def test_cycles_of_a_length_of_which_nothing_compiles(measured):
    """Do not take the rows of another length with them."""
    counts = {"mha splash": None, "mha tokamax": 600, "sha splash": 300, "mhe_add shared": 200}
    found = measured(lambda case, length, _: None if length == 512 else counts[case], 256, 512)
    assert [row["fewer"] for row in found] == [None, 1, 2, 3, *[None] * 4]


def test_cycles_are_compared_with_the_better_peer_by_its_best_blocks(measured):
    counts = {"mha splash": 9000, "mha tokamax": 8096, "sha splash": 6000, "mhe_add shared": 1000}

    def count(case, _, blocks):
        return None if blocks[:1] == (512,) else counts[case] - sum(blocks[1:2])

    found = {row["case"]: row for row in measured(count, 4096)}
    assert found["mha splash"]["blocks"] == [1024, 4096, 1024]
    assert found["mhe_add shared"]["fewer"] == 4


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(cycles, "TOKAMAX", False)
    args = types.SimpleNamespace(batch=2, heads=3, head_features=8, causal=False)
    row = cycles.measure(args, "mha tokamax", 512, (512, 512, 512)) | {"fewer": None}
    assert cycles.COLUMNS["times fewer"](row) == "not installed: needs Python 3.12 and tokamax"
    assert cycles.COLUMNS["all"](row) == "-"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)])
def test_blocks_that_a_mask_leaves_whole_or_cuts(causal, sizes):
    queries, keys = sizes
    seen = np.tril(np.ones((16, 16), bool)) | (not causal)
    parts = seen.reshape(16 // queries, queries, 16 // keys, keys).swapaxes(1, 2)
    whole, some = parts.all((2, 3)).sum(), parts.any((2, 3)).sum()
    for by_keys, rows in ((False, 16 // queries), (True, 16 // keys)):
        found = schedule.blocks_of(3, 16, sizes, causal, by_keys=by_keys)
        assert found == (3 * whole, 3 * (some - whole), 3 * rows)


def test_cycles_of_a_kernel():
    """What all steps have, what blocks have that are not hidden, and what ends a row of them."""
    blocks = schedule.Blocks(whole=7, cut=5, rows=4)
    kernel = schedule.Kernel("k", 18, 10, blocks=(), ends=100, matrix_units=0.5)
    assert kernel.cycles(blocks) == 180 + 400
    assert kernel._replace(blocks=(1000,)).cycles(blocks) == 180 + 400 + 12_000
    assert kernel._replace(blocks=(1000, 2000)).cycles(blocks) == 180 + 400 + 17_000
    assert kernel._replace(steps=None).cycles(blocks) == 120 + 400
