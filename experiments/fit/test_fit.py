"""What is compiled to see what fits a TPU, by what a compiler would say."""

import itertools

import pytest

from experiments.fit import fit
from mhe_jax.analysis import ahead
from mhe_jax.config import InputError
from mhe_jax.tasks import TASKS


@pytest.fixture
def compiled(monkeypatch):
    """The configs that were compiled; no kind but `sha` is refused."""
    configs = []

    def search_batch(config, devices):
        if config.model.attention.kind == "sha":
            raise InputError("no sha today")
        configs.append((config, len(devices)))
        rows, length = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
        return {
            "jax": "1.2.3",
            "attention": {config.model.attention.kind: "folded on xla"},
            "parameters": {"total": 12_300_000},
            "batch": {"rows": rows, "length": length, "rows_per_chip": rows / len(devices)},
            "fits": True,
            "bytes_per_chip": {
                **{"parameters": 2**30, "optimizer": 2**31, "averaged_parameters": 0},
                **{"temporaries": 2**29, "total": 7 * 2**29},
            },
            "collectives": {"all-reduce": {"count": 1, "bytes": 5_000_000, "largest": 1}},
            "estimated_cycles": 77_000_000,
            "compile_seconds": 0.0,
        }

    monkeypatch.setattr(ahead, "search_batch", search_batch)
    monkeypatch.setattr(fit.reports, "version_of", lambda package: "4.5.6")
    chips = {"v5e:16x16": 256}
    monkeypatch.setattr(fit, "describe_devices", lambda name: [None] * chips[name])
    return configs


def test_every_cell_once(compiled, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--kinds", "mha", "gqa", "sha", "--shapes", "bert-large"]
    arguments += ["transformer-big"]
    assert fit.main(arguments) == 0
    text = capsys.readouterr().out
    # mha and gqa of two shapes at two rates; sha is refused.
    assert len(compiled) == 2 * 2 * 2
    assert len(list(tmp_path.glob("*.json"))) == len(compiled)
    assert "v5e:16x16, largest batch that fits" in text
    row = "folded on xla | 12.3M | 8 × 512 | yes | 3.00 | 0.50 | 3.50 | 5 | 77 |"
    for rate in ("0.1", "0"):
        assert text.count(f"| bert-large `mha` | {rate} | {row}") == 1
    assert text.index("`mha` | 0.1 |") < text.index("`mha` | 0 |") < text.index("`gqa` | 0.1 |")
    assert "v5e-16x16-bert-large-sha-0: no sha today" in text
    for config, devices in compiled:
        rows, length = TASKS[config.task].rows_per_batch(config), config.data.sequence_length
        assert rows * length == devices * fit.TOKENS
        assert (config.model.num_layers, config.model.features) in ((24, 1024), (6, 1024))
    attention = {(a.num_kv_heads, a.dropout_rate) for a in (c.model.attention for c, _ in compiled)}
    assert attention == set(itertools.product((None, 4), (0.1, 0.0)))

    before = len(compiled)
    assert fit.main(arguments) == 0
    assert len(compiled) == before
    assert capsys.readouterr().out == text
