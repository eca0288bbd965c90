"""benchmarks/serving.py, on a run of no use: that all three translate in turn, and what is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ctranslate2", reason="needs the extra `export`")

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "benchmarks/serving.py"]


@pytest.mark.whole_run
def test_what_it_measures(run_of, tmp_path):
    out, run = tmp_path / "found.json", run_of("translation", **{"model.attention.kind": "mhe_mul"})
    flags = ["--sentences", "5", "--beam", "2", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(
        [*COMMAND, run, *flags, "--out", out], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(out.read_text())
    rows, start = found["results"], found["start"]
    assert len(start["first_s"]) == len(start["second_s"]) == 1
    assert 0 < max(start["second_s"]) < min(start["first_s"])
    assert "A fresh process has its first translation of one sentence after" in done.stdout
    assert {row["case"] for row in rows} == {
        "mhe_jax float32", "CTranslate2 float32", "CTranslate2 int8",
    }  # fmt: skip
    (own,) = (row for row in rows if row["case"].startswith("mhe_jax"))
    assert (own["same"], own["speed"]) == (5, 1)
    for row in rows:
        assert row["rounds"] == 1
        assert row["memory_bytes"] > 1e7
        assert f"| {row['case']} | {row['sentences_per_second']:.1f} |" in done.stdout


@pytest.mark.whole_run
def test_another_task(run_of):
    run = run_of("lm")
    done = subprocess.run([*COMMAND, run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {run} is a run of task lm: takes translation")
    assert done.stderr.count("\n") == 1
