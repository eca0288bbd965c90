"""Memory of a layer: what is measured, and how it is told."""

import json
import os
import subprocess
import sys

import pytest

from experiments.memory import long_rows, memory
from experiments.runs import ROOT
from mhe_jax.config import rules

MEMORY = ["--lengths", "6", "64", "--heads", "3", "--head_features", "4"]


def test_memory(capsys, tmp_path):
    """Both runs at both lengths, and what share of mha's it is."""
    file = tmp_path / "memory.json"
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "auto", "folded", "--causal", *MEMORY]
    assert memory.main([*arguments, "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["left_out"] == {}
    rows = {(r["case"], r["run"], r["length"]): r for r in found["results"]}
    assert len(rows) == 3 * 2 * 2
    for (case, run, length), row in rows.items():
        mha = rows["mha", run, length]
        assert row["of_mha"] == row["memory_bytes"] / mha["memory_bytes"]
        # At least the output, float32.
        assert row["memory_bytes"] >= 4 * length * 12
        if run == "with gradients":
            assert row["memory_bytes"] > rows[case, "forward", length]["memory_bytes"]
    # Few queries are folded.
    assert rows["mhe_add", "forward", 6]["runs_as"] == "folded on xla"
    assert rows["mhe_add", "forward", 64]["runs_as"] == "shared on xla"
    assert rows["mhe_add folded", "forward", 6]["runs_as"] == "folded on xla"
    text = capsys.readouterr().out
    assert "| mhe_add (folded on xla or shared on xla) |" in text
    assert found["header"]["date"] in text


@pytest.mark.libtpu
def test_memory_of_a_chip_that_is_not_here(tmp_path):
    """In a process of its own: libtpu reads the environment once."""
    file = tmp_path / "memory.json"
    arguments = ["--kinds", "mha", "mhe_add", "--forms", "auto", "--lengths", "256"]
    arguments += ["--heads", "2", "--head_features", "64", "--dtype", "bfloat16"]
    done = subprocess.run(
        [sys.executable, "experiments/memory/memory.py", *arguments, "--topology", "v5e:2x2"]
        + ["--out", str(file)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["header"]["backend"] == "tpu"
    assert "one chip of v5e:2x2, ahead of time" in done.stdout
    (shared,) = {r["runs_as"] for r in found["results"] if r["kind"] == "mhe_add"}
    assert shared == "shared on pallas"
    assert len(found["results"]) == 4


@pytest.mark.parametrize(("kind", "split"), long_rows.CASES)
def test_long_rows_are_models_of_a_slice(kind, split):
    config = long_rows.config_of(kind, split, 131_072)
    rules.check(config)
    rules.check_devices(config, 16)
