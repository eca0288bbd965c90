"""The comparison of finished runs: the paper's tables for them.

OUT/report.html    self-contained: tables and pictures, nothing from a network
OUT/runs.csv       every run: its group, config, numbers and scores in full
"""

import functools
import html
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from mhe_jax.analysis.ahead import layer_memory
from mhe_jax.config import Comparison, InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import check_scheme
from mhe_jax.model.layers import attention_module
from mhe_jax.report import plots
from mhe_jax.report.groups import Section, sections
from mhe_jax.report.runs import read_runs
from mhe_jax.report.tables import Table, main_table, memory_table, runs_table

PAGE, TITLE = "report.html", "Comparison of attention kinds"
STATUSES = ("done", "not finished", "failed")
COSTS = (
    "Score against costs. The line goes through what nothing beats by its mean; bars are one "
    "standard deviation over seeds; the cross is mha."
)
HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .5rem; border-bottom: 1px solid #8888; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>{TITLE}</h1>
"""


def compare(paths: Sequence[str | Path], settings: Comparison) -> dict[str, Any]:
    """Writes the report of the runs at and below `paths`; returns its numbers.

    Raises:
      InputError: no runs, a metric that none has, or an `out` that holds something else.
    """
    check_scheme("out", settings.out, ())
    out = Path(settings.out)
    runs = read_runs(paths, settings.split)
    found = sections(runs, settings.metric, settings.choose)
    out.mkdir(parents=True, exist_ok=True)  # before minutes of compiling
    if any(out.iterdir()) and not (out / PAGE).exists():
        raise InputError(f"--out {out}: holds something other than a report; give another")
    devices = ", ".join(sorted({*runs.device.dropna()})) or "not known"
    about = (
        f"{len(runs)} runs, {settings.split} split. Devices of the runs: {devices}. Memory "
        f"compiled for {jax.devices()[0].device_kind}."
    )
    told, body = [], [HEAD, _paragraph(about)]
    for section in found:
        memory = memory_of(section, settings.lengths)
        main = main_table(section, memory, settings.split)
        groups = main.frame.astype(object).where(main.frame.notna(), None).to_dict("records")
        names = {"title": section.title, "metric": section.metric}
        told.append({**names, "groups": groups, "notes": main.notes})
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        body += _picture(COSTS, plots.scores_and_costs(section))
        body += _picture("Learning curves: a line for each run.", plots.learning_curves(section))
        tables = [main, *[memory_table(memory)] * bool(memory.size)]
        body += [line for table in tables for line in _table(table)]
    runs = pd.concat([*(section.runs for section in found), runs[runs.config.isna()]])
    body += _table(runs_table(runs))
    text = "\n".join([*body, "</body>\n</html>\n"])
    whole = runs.drop(columns=["config", "curve", "scores"]).dropna(axis="columns", how="all")
    for name, content in ((PAGE, text), ("runs.csv", whole.to_csv())):
        write_whole(out / name, content)
    of_each = {status: int((runs.status == status).sum()) for status in STATUSES}
    return {"out": str(out), "runs": of_each, "sections": told}


def memory_of(section: Section, lengths: Sequence[int]) -> Any:
    """MB of one self-attention layer of each group, one example, a column for each length."""

    def of(group: str, gradients: bool, length: int) -> float:
        config = section.groups.config[group]
        model, role = config.model, config.facts.roles[0]
        print(f"memory: {group}, T = {length}", file=sys.stderr)
        shape = 1, length, model.features
        module: Any = attention_module(model, role)
        return _bytes(module, shape, model.dtype, role == "decoder", gradients) / 1e6

    groups = section.groups.index
    columns = {
        f"{name}, T = {length}": [of(group, gradients, length) for group in groups]
        for name, gradients in (("forward", False), ("with gradients", True))
        for length in lengths
    }
    return pd.DataFrame(columns, groups)


@functools.cache  # equal modules are compiled once
def _bytes(module: Any, shape: tuple[int, int, int], dtype: str, causal: bool, back: bool) -> int:
    try:
        return layer_memory(module, shape, dtype, causal=causal, gradients=back)
    except InputError:  # its engine is for another device
        auto = module.copy(engine="auto")
        return layer_memory(auto, shape, dtype, causal=causal, gradients=back)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _picture(caption: str, figure: Any) -> Iterator[str]:
    yield f'<p><img alt="" src="{plots.embedded(figure)}"></p>'
    yield _paragraph(caption)


def _table(table: Table) -> Iterator[str]:
    yield f"<h3>{table.title}</h3>"
    yield f"<div>{table.html()}</div>"
    yield from map(_paragraph, table.notes)
