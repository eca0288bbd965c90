"""The comparison of finished runs: the paper's table for them.

    PRR  = 100 · score / score_MHA                        performance retention ratio, per cent
    PEoP = ((score - score_SHA) / score_SHA)              performance elasticity of parameters
           / ((P - P_SHA) / P_SHA)

P is the attention parameters of all layers. Source: Xue & Aletras 2023, arXiv 2310.07911, section
on metrics. For scores where lower is better, the paper's formula is not known; ours are

    PRR  = 100 · (1 - (score - score_MHA) / score_MHA)
    PEoP = ((score_SHA - score) / score_SHA) / ((P - P_SHA) / P_SHA)

OUT/report.html    self-contained: tables and pictures, nothing from a network
OUT/runs.csv       every run: its group, config, numbers and scores in full
"""

import base64
import html
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from mhe_jax.config import Comparison, InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import check_scheme
from mhe_jax.report.runs import SETTINGS, STEP, TIMES, VALIDATION, Section, read_runs, sections
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better

PAGE, TITLE = "report.html", "Comparison of attention kinds"
MARKS = "osD^vh*d<>p"  # one more than there are colours in C0 to C9
SCORES = ("data.tokenizer", *(f"eval.{name}" for name in SETTINGS))
RATIOS = (
    "PRR = 100 · score / score of mha; PEoP = ((score - sha) / sha) / ((P - P_sha) / P_sha), P the "
    "attention parameters; each against the mha or sha that differs in its attention alone. Better "
    "and worse are by more than two standard errors of the difference."
)
LOWER = (
    "Lower is better here: PRR = 100 · (1 - (score - mha) / mha), PEoP with sha - score. The paper "
    "does not say how it does that."
)
CAPTION = (
    "Score against costs: the line goes through what nothing beats by its mean; bars are one "
    "standard deviation over seeds; the cross is mha. Below, learning curves: a line for each run."
)
HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{TITLE}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ padding: .3rem .5rem; border-bottom: 1px solid #8888; text-align: right; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>{TITLE}</h1>"""


def compare(paths: Sequence[str | Path], settings: Comparison) -> dict[str, Any]:
    """Writes the report of the runs at and below `paths`; returns its numbers.

    Raises InputError for no runs, a metric that none has, or an `out` with something else in it.
    """
    check_scheme("out", settings.out, ())
    out = Path(settings.out)
    runs = read_runs(paths, settings.split)
    found = sections(runs, settings.metric, settings.choose)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / PAGE).exists():
        raise InputError(f"--out {out}: holds something other than a report; give another")
    devices = ", ".join(sorted({*runs.device.dropna()})) or "not known"
    body = [HEAD, _text(f"{len(runs)} runs, {settings.split} split. Devices: {devices}.")]
    told = []
    for section in found:
        frame, digits, notes = main_table(section, settings.split)
        groups = frame.astype(object).where(frame.notna(), None).to_dict("records")
        names = {"title": section.title, "metric": section.metric}
        told.append({**names, "groups": groups, "notes": notes})
        image = f'<p><img alt="" src="{picture(section)}"></p>'
        body += [f"<h2>{html.escape(section.title)}</h2>", image]
        body += [_text(CAPTION), _html(frame, digits), *map(_text, notes)]
    runs = pd.concat([*(section.runs for section in found), runs[runs.config.isna()]])
    names = ["group", "seed", "status", "reason", VALIDATION, "best_step", "training_seconds"]
    listed = runs.reindex(columns=names).reset_index()
    body += ["<h2>Runs</h2>", _html(listed, {VALIDATION: 4, "training_seconds": 1})]
    whole = runs.drop(columns=["config", "curve", "scores"]).dropna(axis="columns", how="all")
    write_whole(out / PAGE, "\n".join([*body, "</body>\n</html>\n"]))
    write_whole(out / "runs.csv", whole.to_csv())
    statuses = ("done", "not finished", "failed")
    of_each = {status: int((runs.status == status).sum()) for status in statuses}
    return {"out": str(out), "runs": of_each, "sections": told}


def retention(score: Any, mha: Any, *, lower_is_better: bool = False) -> Any:
    """PRR, in per cent of the score of `mha`, of numbers or of Series.

    >>> retention(36.5, 36.5), retention(110.0, 100.0, lower_is_better=True)
    (100.0, 90.0)
    """
    return 100 * (1 - (score - mha) / mha) if lower_is_better else 100 * score / mha


def elasticity(
    score: Any, count: Any, sha: Any, sha_count: Any, *, lower_is_better: bool = False
) -> Any:
    """PEoP of a score with `count` attention parameters against that of `sha`, which has others.

    >>> elasticity(11.0, 400, 10.0, 200)
    0.1
    """
    gain = (sha - score if lower_is_better else score - sha) / sha
    return gain * sha_count / (count - sha_count)


def main_table(section: Section, split: str) -> tuple[Any, dict[str, int], list[str]]:
    """The paper's table: parameters, score, PRR, PEoP, then cache and speed.

    Returns the DataFrame, the digits of its columns, and what a reader has to know of it.
    """
    s, how = section, {"lower_is_better": lower_is_better(section.metric)}
    score, count, mean = s.mean[s.metric], s.mean["parameters.attention"], s.mean
    titled = s.metric.replace("_", " ")
    groups = s.groups.index.to_series()
    mha, sha = ([s.base(group, kind) for group in groups] for kind in ("mha", "sha"))
    mha_score, mha_count = (of.reindex(mha).to_numpy() for of in (score, count))
    sha_score, sha_count = (of.reindex(sha).to_numpy() for of in (score, count))
    peop = elasticity(score, count, sha_score, sha_count, **how)
    columns = {
        "seeds": s.seeds[s.metric],
        "parameters": mean["parameters.total"],
        "in attention": count,
        "% of mha": 100 * count / mha_count,
        titled: score,
        "± over seeds": s.std[s.metric],
        "PRR": retention(score, mha_score, **how),
        "against mha": [*map(s.against, groups, mha)],
        "PEoP": peop.where(count != sha_count),  # else nothing was spent
        "lowest validation loss": None if s.metric == VALIDATION else mean[VALIDATION],
        "cached numbers a token": s.groups.cached,
        "training tokens/s": mean.tokens_per_second.where(mean.training_seconds.notna()),
        "ms a step": 1000 * mean[STEP],
        "training minutes": mean.training_seconds / 60,
        "output tokens/s": mean.output_tokens_per_second,
    }
    whole = ("seeds", "parameters", "in attention", "cached numbers a token")
    frame: Any = pd.DataFrame(columns, groups).astype(dict.fromkeys(whole, "Int64"))
    frame = frame.dropna(axis="columns", how="all").reset_index()
    digits = dict.fromkeys(("% of mha", "PRR", "ms a step", "training minutes"), 1)
    digits |= {titled: 2, "± over seeds": 2, "PEoP": 3, "lowest validation loss": 4}
    ratios = [RATIOS, *[LOWER] * how["lower_is_better"]] if any((*mha, *sha)) else []
    return frame, digits, [*ratios, *_notes(section, split)]


def _notes(section: Section, split: str) -> list[str]:
    s, runs = section, section.runs[section.runs.group.notna()]
    missing = runs.index[runs[s.metric].isna() | (runs.scores.str.len() == 0)]
    commands = (f"`python eval.py {shlex.quote(path)} --split {split}`" for path in missing)
    told = {
        f"Not scored on the {split} split: {{}}.": ", ".join(commands),
        "Cached numbers are those of all layers of the decoder; a translator's also of a source "
        "token.": s.groups.cached.notna().any(),
        "Times do not compare: {}.": s.unlike(TIMES, STEP, "training_seconds"),
        "Scores do not compare, or not per token: {}.": s.unlike(SCORES, s.metric),
    }
    return [note.format(what) for note, what in told.items() if what]


def _text(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _html(frame: Any, digits: Mapping[str, int]) -> str:
    """Numbers with so many digits after the point, 0 if not told; `-` where there is nothing."""

    def shown(column: Any) -> list[str]:
        form = f",.{digits.get(column.name, 0)}f"
        numbers = ("-" if pd.isna(cell) else cell for cell in column)
        return [cell if isinstance(cell, str) else format(cell, form) for cell in numbers]

    cells = {name: shown(column) for name, column in frame.items()}
    return f"<div>{pd.DataFrame(cells).to_html(index=False, border=0)}</div>"


def front(points: Sequence[tuple[float, float]], lower: bool) -> list[tuple[float, float]]:
    """The points (cost, score) that no other beats, by cost: none is as cheap and better."""
    sign, kept = 1 if lower else -1, []
    for point in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not kept or sign * point[1] < sign * kept[-1][1]:
            kept.append(point)
    return kept


def picture(section: Section) -> str:
    """The address of an image that a page holds itself, with what `CAPTION` says.

    Curves are of the validation loss, or of the training loss where there is none.
    """
    s, lower = section, lower_is_better(section.metric)
    score, known = s.mean[s.metric], math.nan if s.unlike(TIMES, STEP) else 1.0
    costs = {
        "attention parameters (millions)": s.mean["parameters.attention"] / 1e6,
        "cached numbers a token": s.groups.cached,
        "time of a step (ms)": 1000 * s.mean[STEP] * known,
    }
    figure = Figure(layout="constrained", figsize=(11, 8 + 0.06 * len(s.groups)))
    axes: Any = figure.subplot_mosaic([[*costs], ["curves"] * len(costs)])
    for number, group in enumerate(s.groups.index):
        # A cross is mha, which the others are to match; a dollar would begin a formula.
        mark = "X" if group.partition(",")[0] == "mha" else MARKS[number % len(MARKS)]
        look = {"color": f"C{number % 10}", "marker": mark}
        label = group.replace("$", r"\$")
        for name, cost in costs.items():
            bars = {"yerr": s.std[s.metric][group], "capsize": 3, "linestyle": "none"}
            axes[name].errorbar(cost[group], score[group], **bars, **look, label=label)
        for curve in s.runs[s.runs.group == group].curve:
            if points := curve.get("validation") or curve.get("train"):
                axes["curves"].plot(*zip(*points, strict=True), **look, markersize=4, linewidth=1)
    for name, cost in costs.items():
        points = [each for each in zip(cost, score, strict=True) if not any(map(math.isnan, each))]
        if best := front(points, lower):
            end = (max(cost for cost, _ in points), best[-1][1])
            line = {"color": "0.5", "drawstyle": "steps-post", "zorder": 1}
            axes[name].plot(*zip(*best, end, strict=True), **line)
        axes[name].set(xlabel=name, title="" if points else "not known, or does not compare")
    better = "lower" if lower else "higher"
    axes[next(iter(costs))].set_ylabel(f"{s.metric.replace('_', ' ')} ({better} is better)")
    axes["curves"].set(xlabel="step", ylabel=f"loss ({TASKS[s.task].loss_unit})")
    legend = axes[next(iter(costs))].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=3, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
