"""The tables of each page come out of its records."""

import importlib
import json
import math
import re
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
from experiments.reports import rows_of
from experiments.runs import read
from experiments.uptraining import uptraining
from mhe_jax.attention import cost
from mhe_jax.report.pictures import front
from mhe_jax.report.report import main_table
from mhe_jax.report.runs import read_runs, sections
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
# Records of several runs of a program of speed.
GPU = {"cores": "attention", "steps": "train_step", "decode": "decode"}
RECORDS = [
    (record, program)
    for name, program in PROGRAMS.items()
    for record in sorted(HERE.glob(f"*/records/{name}*.json"))
]


def page(folder: str) -> str:
    return (HERE / folder / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", GPU)
def test_measured_on_a_gpu(name):
    columns = importlib.import_module(f"experiments.speed.{GPU[name]}").COLUMNS
    runs = read(HERE / f"kernels_gpu/records/{name}.json")["results"]
    assert runs
    for run in runs:
        found = run["content"]["results"]
        assert not missing(reports.table(columns, found), page("kernels_gpu"))


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


def test_the_table_of_translation_is_that_of_compare():
    runs = read_runs([HERE / "paper/records/translation"], "test")
    (section,) = sections(runs, None, ["optimizer.learning_rate"])
    frame, digits, _ = main_table(section, "test")
    (table,) = re.findall(r"^\| attention \| seeds .*?\n\n", page("paper"), re.M | re.S)
    head, *rows = (row.strip("| ").split(" | ") for row in rows_of(table))
    assert head == [name for name in frame if name in head]  # in its order
    for row, cells in zip(rows, frame.to_dict("records"), strict=True):
        for name, shown in zip(head[1:], row[1:], strict=True):
            cell = cells[name]
            number = cell if cell == cell else None  # NaN is not
            told = cell if isinstance(cell, str) else reports.shown(number, digits.get(name, 0))
            assert shown == told
        assert row[0].split(", ")[0] == cells["attention"].split(", ")[0]


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
    """Each table stands below its title, with what was not measured, and there is no other."""
    tables, text = atlas.page(HERE / "atlas/records"), page("atlas")
    for title, table in tables.items():
        assert f"\n### {title}\n\n{table}\n" in text
    assert text.count("\n|---") == len(tables) > 0
    for task in cases.TASKS:
        points = pictures.of_atlas(pictures.RECORDS, task)
        found = front([(p.x, p.y) for p in points], task == "lm")
        assert [(p.x, p.y) in found for p in points if p.name == "mva-narrow"] == [True]


def test_the_pictures_are_those_of_their_records(tmp_path, monkeypatch, capsys):
    """The same words, and numbers to a hundredth of a point; processors may round otherwise."""
    kept, number = pictures.IMAGES, r"-?\d+(?:\.\d+)?"
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.main()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in kept.iterdir())
    for path in tmp_path.iterdir():
        texts = [place.read_text(encoding="utf-8") for place in (path, kept / path.name)]
        texts = [re.sub(r"\b[mp][0-9a-f]{10}\b", "id", text) for text in texts]
        words, numbers = ([f(number, text) for text in texts] for f in (re.split, re.findall))
        assert words[0] == words[1], path.name
        drawn, had = ([float(each) for each in found] for found in numbers)
        assert drawn == pytest.approx(had, abs=0.01), path.name


# Rows of the tables of README and docs/which_kind.md.
FRONT = {
    "`mva`": Case("shape", "mva"),
    "`mva-narrow`": Case("width", "mva-narrow"),
    "`mha-narrow`": Case("width", "mha-narrow"),
    "`mha`, 2 heads": Case("limits", "mha, 2 heads"),
    "`mha`, 2 heads of M/4": Case("width", "mha-narrow-2-heads"),
    "`gqa`, 2": Case("shape", "gqa"),
    "`mhe_add`, 2": Case("shape", "mhe_add-2-groups"),
    "`mqa`": Case("shape", "mqa"),
    "`mhe_mul`": Case("shape", "mhe_mul"),
    "`sha`": Case("shape", "sha"),
}


def case_of(row: str) -> Case:
    """The longest name that the row begins with, in a cell."""
    return FRONT[max((name for name in FRONT if f"| {name}" in row), key=len)]


def shares(task: str, case: Case) -> list[str]:
    """Of the attention's parameters and of the cache of `mha`."""
    base = cases.base_of(task)
    both = cases.models(task)[case.regime][case.name], cases.attention(base, "mha")
    one, mha = (sizes.changed(base, fields) for fields in both)
    return [f"{100 * f(one) / f(mha):.0f} %" for f in (sizes.of_attention, cached_numbers)]


def against_mha(task: str, case: Case, other: Case = atlas.MHA) -> tuple[float, float] | None:
    """How much better than an `mha` a case is on the test set, ± two standard errors of that.

    Differences of BLEU, % of perplexity; None without three seeds.
    """
    name = cases.SOURCES[task].score
    lines = atlas.lines_of(HERE / "atlas/records", task)
    scores = [
        found.values(name) if (found := atlas.measured(lines, one, task)) else []
        for one in (case, other)
    ]
    if task == "translation" and len(scores[0]) < 3:  # of the other protocol
        points = {point.name: point for point in pictures.of_translation()}
        pair = points[case.name], points["mha"]
        errors = [point.error / math.sqrt(3) for point in pair if point.error is not None]
        return (pair[0].y - pair[1].y, 2 * math.hypot(*errors)) if len(errors) > 1 else None
    if len(scores[0]) < 3:
        return None
    (own, error), (mha, its) = (atlas.with_error(values) for values in scores)
    assert error is not None
    assert its is not None
    if name == "bleu":
        return own - mha, 2 * math.hypot(error, its)
    return 100 * (1 - own / mha), 200 * own / mha * math.hypot(error / own, its / mha)


def test_scores_of_readme():
    rows = rows_of((HERE.parent / "README.md").read_text(encoding="utf-8").split("## Which")[1])
    rows = [row for row in rows if " %" in row]
    two_heads = Case("limits", "mha, 2 heads")
    assert len(rows) == 7
    for row in rows:
        case, scores, new = case_of(row), [], "new seeds" in row
        for other in (atlas.MHA, two_heads):
            trial = new and other == atlas.MHA
            found = against_mha("lm" + "_controls" * trial, case, other)
            if case == other or found is None:
                scores.append("" if case == other else "not measured")
                continue
            words = (
                f"{abs(found[0]):.1f} ± {found[1]:.1f} % {'lower' if found[0] > 0 else 'higher'}"
            )
            scores.append(words + ", unclear" * (abs(found[0]) < found[1]) + ", new seeds" * trial)
        own = shares("lm" + "_controls" * new, case)
        assert [cell.strip() for cell in row.split("|")][3:7] == [*own, *scores]


def test_scores_of_which_kind():
    page = (HERE.parent / "docs/which_kind.md").read_text(encoding="utf-8")
    rows = rows_of(page.split("## What they scored")[1].split("##")[0])[1:]
    assert len(rows) == len(FRONT)
    for row in rows:
        case, scores, trial = case_of(row), [], "_controls" * ("new seeds" in row)
        for task, unit in (("translation", ""), ("lm", " %"), ("lm_large", " %")):
            found = against_mha(task + trial * (task != "lm_large"), case)
            if found is None:
                one = task == "translation" and not trial
                scores.append("one seed" if one else "not measured")
                continue
            text = f"{found[0]:+.1f} ± {found[1]:.1f}{unit}".replace("-", "−")
            scores.append(text + ", unclear" * (abs(found[0]) < found[1]))
        own = shares("translation" + trial, case)
        assert [c.strip() for c in row.split("|")][2:7] == [*own, *scores]


def test_caches_of_which_kind(capsys):
    """They are what the commands of the page print."""
    page = (HERE.parent / "docs/which_kind.md").read_text(encoding="utf-8")
    text = page.split("## The cache")[1]
    printed = []
    for line in re.findall(r"^python -m mhe_jax\.attention\.cost (.*)$", text, re.MULTILINE):
        size = int(line.split()[line.split().index("--features") + 1])
        rows = [f"mva,score_features={3 * size // 8},qkv_features={size // 2}"]
        rows += [f"mva,score_features={size // 2}", f"mha,num_heads=2,qkv_features={size // 2}"]
        found = {}
        for more in ([], rows):
            cost.main([*line.split(), *more])
            for out in capsys.readouterr().out.splitlines()[3:]:
                found[out.split()[0].split(",num_kv")[0]] = out.split()[5]
        printed.append([found[n] for n in ("mha", *rows[::-1], "gqa", "mqa")])
    table = [[c.strip() for c in row.split("|")][2:4] for row in rows_of(text)[1:]]
    assert table == [list(pair) for pair in zip(*printed, strict=True)]
