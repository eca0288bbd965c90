"""`benchmarks/fit.py`, `stored.py` and `cycles.py`, on what a compiler would say."""

import itertools
import json
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import cycles, fit, stored
from mhe_jax.analysis import ahead
from mhe_jax.config import InputError
from mhe_jax.tasks import TASKS


@pytest.fixture
def compiled(monkeypatch):
    """The configs that were compiled; no kind but `sha` is refused."""
    configs = []

    def compile_step(config, devices):
        if config.model.attention.kind == "sha":
            raise InputError("no sha today")
        configs.append((config, len(devices)))
        rows, length = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
        return {
            "jax": "1.2.3",
            "attention": {config.model.attention.kind: "folded on xla"},
            "parameters": {"total": 12_300_000},
            "batch": {"rows": rows, "length": length, "rows_per_chip": rows // len(devices)},
            "fits": True,
            "bytes_per_chip": {
                **{"parameters": 2**30, "optimizer": 2**31, "averaged_parameters": 0},
                **{"temporaries": 2**29, "total": 7 * 2**29},
            },
            "collectives": {"all-reduce": {"count": 1, "bytes": 5_000_000, "largest": 1}},
            "estimated_cycles": 77_000_000,
            "compile_seconds": 0.0,
        }

    monkeypatch.setattr(ahead, "compile_step", compile_step)
    monkeypatch.setattr(ahead, "search_batch", compile_step)
    monkeypatch.setattr(fit.reports, "version_of", lambda package: "4.5.6")
    chips = {"v5e:16x16": 256, "v6e:16x16": 256, "v5p:8x8x8": 512}
    monkeypatch.setattr(fit, "describe_devices", lambda name, n: [None] * n * chips[name])
    return configs


def test_every_cell_once(compiled, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--kinds", "mha", "gqa", "sha", "--shapes", "bert-large"]
    arguments += ["transformer-big"]
    assert fit.main(arguments) == 0
    text = capsys.readouterr().out
    # Searched: mha and gqa of two shapes; at a fixed batch: mha of two shapes in three places; each
    # at two rates.
    assert len(compiled) == 2 * (4 + 6)
    assert len(list(tmp_path.glob("*.json"))) == 2 * (4 + 2 + 6)
    assert "v5e:16x16, largest batch that fits:" in text
    assert "2 slices of v5e:16x16, one batch:" in text
    row = "folded on xla | 12.3M | 8 × 512 | yes | 3.00 | 0.50 | 3.50 | 5 | 77 |"
    for rate in ("0.1", "0"):
        assert text.count(f"| bert-large `mha` | {rate} | {row}") == 4
    assert text.index("`mha` | 0.1 |") < text.index("`mha` | 0 |") < text.index("`gqa` | 0.1 |")
    assert "not compiled: bert-large sha on v5e:16x16: no sha today" in text
    for config, devices in compiled:
        rows, length = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
        assert rows * length == devices * fit.FIXED_TOKENS
        assert (config.model.num_layers, config.model.features) in ((24, 1024), (6, 1024))
    attention = {(a.num_kv_heads, a.dropout_rate) for a in (c.model.attention for c, _ in compiled)}
    assert attention == set(itertools.product((None, 4), (0.1, 0.0)))

    before = len(compiled)
    assert fit.main(arguments) == 0
    assert len(compiled) == before
    assert capsys.readouterr().out == text


def test_stored_scores_beside_blocks(compiled, tmp_path, monkeypatch, capsys):
    """Each case by both engines, with the same rows, tokens and dropout."""
    device = types.SimpleNamespace(device_kind="a chip")
    monkeypatch.setattr(stored, "describe_devices", lambda name: [device] * 4)
    assert stored.main(["--out", str(tmp_path / "stored.json")]) == 0
    text = capsys.readouterr().out
    assert "| transformer-big | 64 × 128 | 3.50 | 3.50 | 77.0 | 77.0 |" in text
    pairs = zip(compiled[::2], compiled[1::2], strict=True)
    for case, both in zip(stored.CASES, pairs, strict=True):
        attention = [config.model.attention for config, _ in both]
        assert [(a.kind, a.dropout_rate) for a in attention] == [("mha", 0.1)] * 2
        assert tuple(a.engine for a in attention) == stored.ENGINES
        for config, devices in both:
            rows, tokens = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
            assert (rows, tokens, devices) == (4 * case[1], case[2], 4)
    assert len(json.loads((tmp_path / "stored.json").read_text())["results"]) == len(stored.CASES)


@pytest.mark.parametrize("command", [fit, cycles, stored], ids=lambda command: command.__name__)
def test_a_wrong_flag_is_one_line(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--kind", "no"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_topology_that_there_is_not_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        cycles.main(["--topology", "v5e"])
    assert stopped.value.code == 2
    captured = capsys.readouterr().err
    assert "takes a kind of device and its layout" in captured
    assert captured.count("\n") == 1
