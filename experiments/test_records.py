"""The tables of each page come out of its records."""

import importlib
import json
import re
import statistics
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from experiments import pictures, reports
from experiments.atlas import cases, sizes
from experiments.atlas import tables as atlas
from experiments.atlas.cases import Case
from experiments.fit import fit
from experiments.paper import published
from experiments.paper import tables as paper
from experiments.runs import read
from experiments.uptraining import uptraining
from mhe_jax.config.rules import check
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cost import cached_numbers

HERE = Path(__file__).parent
QUANTITIES = ("parameters", "PRR", "PEoP")
# Programs that print a table of the results of a JSON, by the beginning of its name.
PROGRAMS = {
    "core_cpu": "speed.attention",
    "train_step": "speed.train_step",
    "decode_cpu": "speed.decode",
    "torch_cpu": "speed.torch_layers",
    "decode_bytes": "kernels_gpu.decode_bytes",
    "gpu_schedule": "kernels_gpu.gpu_schedule",
    "cycles": "kernels_tpu.cycles",
    "input": "input.input",
    "long_rows": "memory.long_rows",
    "int8": "serving.int8",
}
RECORDS = [
    (record, program)
    for name, program in PROGRAMS.items()
    for record in sorted(HERE.glob(f"*/records/{name}*.json"))
]


def page(folder: str) -> str:
    return (HERE / folder / "README.md").read_text(encoding="utf-8")


def rows_of(table: str) -> list[str]:
    """Without the line that aligns columns."""
    return [line for line in table.splitlines() if line.startswith("|") and "---" not in line]


def missing(table: str, text: str) -> list[str]:
    return [row for row in rows_of(table) if row not in text]


@pytest.mark.parametrize(("record", "program"), RECORDS, ids=lambda x: getattr(x, "stem", x))
def test_a_record_gives_the_table_of_its_page(record, program):
    results = json.loads(record.read_text())["results"]
    text = page(record.parents[1].name)
    columns = importlib.import_module(f"experiments.{program}").COLUMNS
    assert results
    for table in reports.tables(results):
        assert not missing(reports.table(columns, table), text)
    assert f"/records/{record.name}" in text


def test_what_fits():
    files = (HERE / "fit/records").glob("search-*.json")
    found = sorted((json.loads(file.read_text()) for file in files), key=fit.in_order)
    assert not missing(reports.table(fit.COLUMNS, found), page("fit"))


def test_memory():
    from experiments.memory import memory

    for name, lengths in (("cpu", memory.LENGTHS), ("v5e", [2048, 4096])):
        results = read(HERE / f"memory/records/memory_{name}.json")["results"]
        for run in memory.RUNS:
            assert not missing(memory.table(results, run, lengths), page("memory"))


def test_paper():
    records = HERE / "paper/records"
    tables = [paper.encoders(records), paper.pretraining(records), paper.warm(records)]
    for table in [*tables, *paper.tasks(records)]:
        assert rows_of(table)
        assert not missing(table, page("paper"))
    for point in pictures.of_translation():
        start = re.escape(point.name.replace("-2-groups", ", num_groups=2"))
        start = start.replace(r"\-2\-score\-groups", ", score_groups=2")
        (row,) = re.findall(rf"^\| {start}, learning_rate.*$", page("paper"), re.M)
        error = "-" if point.error is None else f"{point.error:.2f}"
        assert f"| {point.y:.2f} | {error} |" in row
        assert f"| {round(1e6 * point.x):,} |" in row


def test_what_is_published_is_recomputed_and_rounding_explains_what_differs():
    rows = [*published.rows()]
    verdicts = {name: Counter(r.verdict for r in rows if r.quantity == name) for name in QUANTITIES}
    assert verdicts == {
        "parameters": {"equal": 20, "differs": 1},
        "PRR": {"equal": 25, "within": 10},
        "PEoP": {"equal": 20, "within": 4},
    }
    (row,) = (row for row in rows if row.verdict == "differs")
    assert (row.table, row.name, row.printed, row.shown) == ("encoder", "mha", "28.32", "28.31")


def test_intervals_hold_every_score_that_rounds_to_the_printed_one():
    """By brute force over scores in steps of a hundredth, for one PRR and one PEoP."""
    rows = {(r.quantity, r.table, r.name): r for r in published.rows()}
    row = rows["PRR", "GLUE", "mqa"]
    around = [Fraction(n, 100) for n in range(-5, 6)]
    found = [100 * (Fraction("81.3") + a) / (Fraction("81.9") + b) for a in around for b in around]
    assert (min(found), max(found)) == (min(row.values), max(row.values))
    assert row.values[0] == 100 * Fraction("81.3") / Fraction("81.9")
    row = rows["PEoP", "GLUE", "mhe_add"]
    spent = Fraction(8_875_008 - 8_847_360, 8_847_360)
    found = [
        (Fraction("80.4") + a - Fraction("79.2") - b) / (Fraction("79.2") + b) / spent
        for a in around
        for b in around
    ]
    assert (min(found), max(found)) == (min(row.values), max(row.values))


def test_uptraining():
    for task, source in uptraining.SOURCES.items():
        lines = read(HERE / f"uptraining/records/{task}.json")["lines"]
        assert not missing(uptraining.table(lines, source.score), page("uptraining"))


def test_atlas():
    tables, text = atlas.page(HERE / "atlas/records"), page("atlas")
    assert len(tables) == 10
    for title, table in tables.items():
        assert f"### {title}\n" in text
        assert not missing(table, text)
    for task in cases.TASKS:
        points = pictures.of_atlas(atlas.lines_of(HERE / "atlas/records", task), task)
        front = pictures.front([(p.x, p.y) for p in points], task == "lm")
        assert [(p.x, p.y) in front for p in points if p.name == "mva-narrow, wider MLP"] == [True]


# The models and the rules of atlas.


def parameters(task: str, fields: dict) -> int:
    """Those of the model that is really made."""
    import jax

    config = sizes.changed(cases.base_of(task), fields)
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    return count_parameters(jax.eval_shape(initialize, jax.random.key(0)))["total"]


@pytest.mark.parametrize("task", cases.TASKS)
def test_models_of_the_same_number_of_parameters(task):
    """By the closed form and by the model as it is made, to 1 % of MHA's, with half its cache."""
    base, models = cases.base_of(task), cases.models(task)
    wanted, mha = parameters(task, models["shape"]["mha"]), models["shape"]["mha"]
    for regime in ("depth", "width"):
        for name, fields in models[regime].items():
            config = sizes.changed(base, fields)
            check(config)
            made = parameters(task, fields)
            assert made == sizes.parameters(config), (regime, name)
            assert abs(made / wanted - 1) < 0.01, (regime, name)
            assert ("model.num_layers" in fields) == (regime == "depth")
            cached = cached_numbers(sizes.changed(base, mha))
            assert name == "mha" or cached_numbers(config) <= cached / 2, name
    for name in cases.RIVALS:
        fields = models["shape"][name]
        assert parameters(task, fields) == sizes.parameters(sizes.changed(base, fields)), name
    planned = [case for stage in cases.stages(task) for case in stage.cases]
    assert sorted(planned) == sorted(Case(r, name) for r, own in models.items() for name in own)


@pytest.mark.parametrize("task", cases.PLANS)
def test_models_of_the_controls(task):
    """By the closed form, with SwiGLU and RMSNorm too, and by the model as it is made."""
    base, models = cases.base_of(task), cases.models(task)
    wanted, cached = parameters(task, models["shape"]["mha"]), {}
    for regime, own in models.items():
        for name, fields in own.items():
            config = sizes.changed(base, fields)
            check(config)
            made, cached[name] = parameters(task, fields), cached_numbers(config)
            assert made == sizes.parameters(config), name
            assert abs(made / wanted - 1) < 0.01, name
            assert ("model.mlp_features" in fields) == (regime == "width"), name
    heads = 8 * (base.model.num_layers if task != "translation_controls" else 2 * 2)
    for name in {"mha-thin-narrow", "mva-narrow-no-bias"} & cached.keys():
        assert cached[name] == cached["mva-narrow"] - heads
    assert all(cached[name] <= cached["mva-narrow"] for name in {"gqa", "mqa"} & cached.keys())
    planned = [case for stage in cases.stages(task) for case in stage.cases]
    assert sorted(planned) == sorted(Case(r, name) for r, own in models.items() for name in own)


def test_leads_over_the_controls():
    """By two rates with all steps; two standard errors of three seeds are (0.01 / √3) · √2 · 2."""
    found = []
    for name, loss in (("mva-narrow", 2.0), ("mha-thin-narrow", 2.01), ("gqa", 2.1), ("mqa", 1.9)):
        who = {"regime": "width", "name": name, "rate": "4e-3", "steps": 2000}
        found += [
            who | {"rate": rate, "seed": 0, "validation_loss": 3.0} for rate in ("4e-3", "8e-3")
        ]
        losses = enumerate((loss - 0.01, loss, loss + 0.01), 4)
        found += [who | {"seed": seed, "validation_loss": value} for seed, value in losses]
    rows = rows_of(atlas.controls(found, "lm_controls"))
    assert "| mva-narrow | mha-thin-narrow | +0.010 ± 0.016 | not told apart |" in rows
    assert "| mva-narrow | gqa | +0.100 ± 0.016 | better |" in rows
    assert "| mva-narrow | mqa | -0.100 ± 0.016 | worse |" in rows
    assert "| mva-narrow | mha | not measured | not measured |" in rows
    one = [line for line in found if line["rate"] != "8e-3"]
    assert atlas.measured(one, Case("width", "gqa"), "lm_controls") is None


def test_sides_grow_in_turn():
    fields = cases.models("translation")["depth"]
    sides = {n: (f["model.num_layers"], f["model.num_decoder_layers"]) for n, f in fields.items()}
    assert sides["mha"] == (3, 2)
    assert sides["mhe_add-2-groups"] == (3, 3)
    assert sides["sha"] == (4, 3)


def lines(regime, name, losses, scores, score="perplexity_per_token"):
    """A search whose best rate is in the middle, and the fresh seeds."""
    who = {"regime": regime, "name": name, "rate": "4e-3"}
    edges = [who | {"rate": rate, "seed": 0, "validation_loss": 9.0} for rate in ("2e-3", "8e-3")]
    fresh = [
        who | {"seed": seed, "steps": 2000, "validation_loss": loss, score: value}
        for seed, (loss, value) in enumerate(zip(losses, scores, strict=True), 1)
    ]
    return [*edges, who | {"seed": 0, "validation_loss": 1.0}, *fresh]


def test_rows_of_atlas():
    found = lines("depth", "gqa", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    # A seed at another rate, such as one that was best until a line was deleted, does not count.
    other = found[-1] | {"rate": "2e-3", "validation_loss": 9.0}
    failed = found[-1] | {"seed": 4, "failed": "no memory"}
    row = atlas.row([*found, other, failed], "lm", Case("depth", "gqa"))
    error = statistics.stdev([2.0, 2.1, 2.2]) / 3**0.5
    assert row[3:] == [
        *("256", "33", "7.00", "2,000", "4e-3", "1.000"),
        *(f"2.100 ± {error:.3f}", "41.00 ± 0.58"),
    ]
    # A search that has not ended says nothing, nor one in which every rate failed.
    assert atlas.row(found[1:], "lm", Case("depth", "gqa"))[-4:] == ["not measured"] * 4
    none = [line | {"validation_loss": None} for line in found[:3]]
    assert atlas.measured(none, Case("depth", "gqa")) is None


@pytest.mark.parametrize(
    ("bleu", "deep", "bar"),
    [
        ([36.0, 36.1, 36.2], [33.0, 33.1, 33.2], "yes"),
        # As good as the error allows; better than one `mha` and not than the other.
        ([33.2, 34.2, 35.2], [33.0, 33.1, 33.2], "no"),
        ([36.0, 36.1, 36.2], [37.0, 37.1, 37.2], "no"),
        ([], [33.0, 33.1, 33.2], "not measured"),
    ],
)
def test_the_bar(bleu, deep, bar):
    """Better than both `mha`, in both tasks, by more than two standard errors of the difference."""
    records: dict = {
        "lm": [
            *lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1]),
            *lines("depth", "mha", [2.1, 2.11, 2.12], [1, 1, 1]),
            *lines("depth", "gqa", [1.9, 1.91, 1.92], [1, 1, 1]),
        ],
        "translation": [
            *lines("shape", "mha", [1, 1, 1], [33.4, 33.5, 33.6], score="bleu"),
            *lines("depth", "mha", [1, 1, 1], deep, score="bleu"),
            *lines("depth", "gqa", [1] * len(bleu), bleu, score="bleu"),
        ],
    }
    (row,) = rows_of(atlas.decision(records))[1:]
    # (0.01 / √3) · √2 · 2
    assert row.startswith(f"| {atlas.REGIMES['depth']} | gqa | +0.100 ± 0.016 |")
    assert row.endswith(f" {bar} |")
