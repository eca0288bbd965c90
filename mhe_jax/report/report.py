"""The comparison of finished runs: the paper's tables for them, as Markdown, CSV and one page.

OUT/report.html    self-contained: tables that sort by a click, plots, nothing from a network
OUT/report.md      the same tables
OUT/NAME.csv       each table with its numbers in full
"""

import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mhe_jax.analysis.memory import layer_memory
from mhe_jax.config import Comparison, InputError
from mhe_jax.config.files import publish
from mhe_jax.config.places import check_scheme
from mhe_jax.model.layers import attention_module
from mhe_jax.report import plots
from mhe_jax.report.atlas import atlas
from mhe_jax.report.comparison import (
    Memory,
    main_table,
    memory_table,
    published_tables,
    runs_table,
    scores_table,
)
from mhe_jax.report.groups import Section, sections
from mhe_jax.report.page import Part, Picture, page
from mhe_jax.report.runs import RunRecord, read_runs

PAGE, TEXT = "report.html", "report.md"


def compare(paths: Sequence[str | Path], settings: Comparison) -> dict[str, Any]:
    """Writes the report of the runs at and below `paths`; returns its numbers.

    Raises:
      InputError: no runs, a metric that none has, or an `out` that holds something else.
    """
    check_scheme("out", settings.out, ())
    out = Path(settings.out)
    _check_out(out)
    runs = read_runs(paths, settings.split)
    found = sections(runs, settings.metric, settings.choose)
    # A missing matplotlib is reported before minutes of compiling.
    plots.new_figure()
    _make_out(out)
    parts: list[Part] = []
    numbers = []
    for number, section in enumerate(found, 1):
        suffix = f"-{number}" if len(found) > 1 else ""
        memory = memory_of(section, settings.lengths)
        main = main_table(section, memory, f"comparison{suffix}", settings.split)
        tables = [main, memory_table(memory, f"memory{suffix}"), scores_table(section, suffix)]
        tables = [table for table in tables if table is not None]
        pictures = _pictures(section, memory)
        parts.append(Part(section.title, tables, pictures, atlas(section)))
        titles = [column.title for column in main.columns]
        numbers.append(
            {
                "title": section.title,
                "metric": section.metric,
                "groups": [dict(zip(titles, row, strict=True)) for row in main.rows],
                "notes": main.notes,
            }
        )
    parts.append(Part("All runs", [runs_table(found, runs)]))
    parts.append(Part("Published", published_tables()))
    about = (
        f"{len(runs)} runs, {settings.split} split, written "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC. Devices of the runs: "
        f"{', '.join(_devices(runs)) or 'not known'}. Memory compiled for "
        f"{jax.devices()[0].device_kind} with jax {jax.__version__}."
    )
    files = {
        PAGE: page("Comparison of attention kinds", about, parts),
        TEXT: _markdown(about, parts),
        **{f"{table.name}.csv": table.csv() for part in parts for table in part.tables},
    }
    for name, text in files.items():
        with publish(out / name) as file:
            # File names may hold bytes that are not characters.
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
    counts = {status: sum(run.status == status for run in runs) for status in STATUSES}
    return {"out": str(out), "runs": counts, "sections": numbers}


STATUSES = ("done", "not finished", "failed")


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file")
    if out.is_dir() and any(out.iterdir()) and not (out / PAGE).exists():
        raise InputError(f"--out {out}: holds something other than a report; give another")


def _make_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: not writable")


def _devices(runs: Sequence[RunRecord]) -> list[str]:
    return sorted({run.device for run in runs if run.device})


def memory_of(section: Section, lengths: Sequence[int]) -> Memory:
    """Bytes of one self-attention layer of each group, one example, at each length."""
    found: Memory = {"forward": {}, "with gradients": {}}
    known: dict[Any, int] = {}
    for group in section.groups:
        model = group.config.model
        role = group.config.facts.roles[0]
        module = attention_module(model, role)
        for run, gradients in (("forward", False), ("with gradients", True)):
            for length in lengths:
                key = (module, model.features, length, gradients)
                if key not in known:
                    print(f"memory: {group.name}, T = {length}, {run}", file=sys.stderr)
                    options = {"causal": role == "decoder", "gradients": gradients}
                    call = ((1, length, model.features), model.dtype)
                    try:
                        known[key] = layer_memory(module, *call, **options)
                    except InputError:  # its engine is for another device
                        known[key] = layer_memory(module.copy(engine="auto"), *call, **options)
                found[run].setdefault(group.name, {})[length] = known[key]
    return found


def _pictures(section: Section, memory: Memory) -> list[Picture]:
    """The pictures of a section, beside its atlas."""
    figures = [("Learning curves: a line for each seed.", plots.learning_curves(section))]
    if benchmark := plots.published_for(section):
        caption = (
            "Share of mha's score against share of its attention parameters. Hollow marks are the "
            f"numbers published for {benchmark}, of other sizes and budgets: not comparable in "
            "absolute terms."
        )
        figures.append((caption, plots.beside_the_paper(section, benchmark)))
    if memory["forward"]:
        caption = "Memory of one attention layer against the length T, one example."
        figures.append((caption, plots.memory_figure(memory)))
    return [Picture(caption, plots.svg(figure)) for caption, figure in figures]


def _markdown(about: str, parts: Sequence[Part]) -> str:
    lines = ["# Comparison of attention kinds", "", about]
    for part in parts:
        lines += ["", f"## {' '.join(part.title.split())}"]
        for table in part.tables:
            lines += ["", table.markdown()]
    return "\n".join(lines) + "\n"
