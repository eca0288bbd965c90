"""Serving and input, at a small size: what is measured, and what is told."""

import json
import lzma
import subprocess
import sys

import pytest

from experiments.input import input as input_pipeline
from experiments.runs import ROOT
from experiments.serving import int8, serving

SMALL = {"features": 16, "mlp_features": 16, "num_layers": 1, "attention.num_heads": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A translation run of no use."""
    workdir = str(tmp_path_factory.mktemp("runs") / "demo")
    flags = ["--train.num_steps", "2", "--workdir", workdir]
    for field, value in SMALL.items():
        flags += [f"--model.{field}", str(value)]
    command = [sys.executable, "train.py", "configs/demo.py", *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return workdir


def test_serving(run, tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="needs the extra `export`")
    out, flags = tmp_path / "found.json", ["--sentences", "5", "--beam", "2", "--rounds", "1"]
    assert serving.main([run, *flags, "--threads", "1", "--out", str(out)]) == 0
    rows, text = json.loads(out.read_text())["results"], capsys.readouterr().out
    assert {row["case"] for row in rows} == set(serving.CASES)
    (own,) = (row for row in rows if row["case"] == serving.OURS)
    assert (own["same"], own["speed"]) == (5, 1)
    for row in rows:
        assert row["rounds"] == 1
        assert row["memory_bytes"] > 1e7
        assert row["first_s"] > row["median_ms"] / 1e3
        assert f"| {row['case']} | {row['sentences_per_second']:.1f} |" in text


def test_serving_of_another_task(tmp_path, capsys):
    place = tmp_path / "lm"
    place.mkdir()
    record = ROOT / "experiments/paper/records/mlm/mha/config.json"
    (place / "config.json").write_text(record.read_text())
    with pytest.raises(SystemExit) as stopped:
        serving.main([str(place)])
    assert stopped.value.code == 2
    assert "is a run of task mlm: takes translation" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:'VariableState' was removed")  # by flax, and named by qwix
def test_int8(tmp_path, run, capsys):
    """One row as it is and one in int8; a run of another task is refused."""
    pytest.importorskip("qwix", reason="needs qwix: the extra `quantize`")
    text, workdir, out = tmp_path / "text.txt", tmp_path / "lm", tmp_path / "found.json"
    text.write_text("the dog and the cat see a tree\n" * 99)
    flags = ["--workdir", str(workdir), "--data.directory", str(tmp_path), "--train.num_steps", "2"]
    flags += ["--model.vocabulary_size", "300", "--train.eval_every", "2"]
    for split in ("train", "validation", "test"):
        flags += [f"--data.{split}", text.name]
    command = [sys.executable, "train.py", "configs/wikitext2_lm.py:local", *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert int8.main([str(workdir), "--rounds", "1", "--out", str(out)]) == 0
    plain, small = json.loads(out.read_text())["results"]
    assert (plain["case"], small["case"]) == ("lm float32", "lm int8")
    assert plain["share"] is None
    assert 0.25 < small["share"] < 0.3
    assert small["bytes"] < 0.4 * plain["bytes"]
    assert small["perplexity"] == pytest.approx(plain["perplexity"], rel=0.02)
    assert small["perplexity"] != plain["perplexity"]
    with pytest.raises(SystemExit):
        int8.main([run])
    assert "is a run of task translation: takes lm" in capsys.readouterr().err


def test_input(tmp_path, monkeypatch):
    """One case, cold and warm."""
    monkeypatch.setattr(input_pipeline, "VOCABULARY_SIZE", 300)
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"the dog and the cat see a tree\n" * 99))
    out = tmp_path / "input.json"
    arguments = ["--text", str(tmp_path / "text.xz"), "--cases", "translation"]
    arguments += ["--gigabytes", "0.002", "--steps", "5", "--out", str(out)]
    assert input_pipeline.main(arguments) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["case"] for row in rows] == ["translation"]
    for row in rows:
        assert min(row["cold_seconds"], row["warm_seconds"], row["memory_megabytes"]) > 0
        assert 0.5 < row["full"] <= 1
        assert row["tokens_per_second"] < row["tokens_per_core_second"] * 16
