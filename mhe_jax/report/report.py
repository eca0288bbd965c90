"""The comparison of finished runs: the paper's table for them.

    PRR  = 100 · score / score_MHA                        performance retention ratio, per cent
    PEoP = ((score - score_SHA) / score_SHA)              performance elasticity of parameters
           / ((P - P_SHA) / P_SHA)

P is the attention parameters of all layers. Source: Xue & Aletras 2023, arXiv 2310.07911, section
on metrics. For scores where lower is better, the paper's formula is not known; ours are

    PRR  = 100 · (1 - (score - score_MHA) / score_MHA)
    PEoP = ((score_SHA - score) / score_SHA) / ((P - P_SHA) / P_SHA)

OUT/report.html    self-contained: tables and pictures, nothing from a network
OUT/table.csv      its tables of groups as one, with numbers in full
OUT/runs.csv       every run: its group, numbers and scores in full, and where configs differ
"""

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mhe_jax.config import Comparison, InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import check_scheme
from mhe_jax.report.pictures import CAPTION, pictures
from mhe_jax.report.runs import (
    FIELDS,
    NUMBERS,
    SETTINGS,
    STEP,
    TIMES,
    VALIDATION,
    Section,
    read_runs,
    sections,
)
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.metrics import lower_is_better

PAGE, TITLE = "report.html", "Comparison of attention kinds"
BEST_LOSS = VALIDATION.replace("_", " ")
NO_TABLE = pd.DataFrame(index=pd.Index([], name="title"))
DIFFERENCE = "minus mha", "± 2 SE", "against mha"
SCORES = ("data.tokenizer", *(f"eval.{name}" for name in SETTINGS))
RATIOS = (
    "PRR = 100 · score / score of mha; PEoP = ((score - sha) / sha) / ((P - P_sha) / P_sha), P the "
    "attention parameters; each against the mha or sha that differs in its attention alone. Better "
    "and worse are by more than two standard errors (SE) of the difference, of three seeds or more."
)
LOWER = (
    "Lower is better here: PRR = 100 · (1 - (score - mha) / mha), PEoP with sha - score. The paper "
    "does not say how it does that."
)
HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; }}
body {{ padding: 0 1rem; overflow-wrap: anywhere; }}
.pictures {{ display: flex; flex-wrap: wrap; align-items: start; gap: 1rem; }}
img {{ background: #fff; max-width: 100%; }}
/* A shadow where the table goes on to the right, covered by what scrolls with its end. */
.table {{ overflow-x: auto; background:
  linear-gradient(Canvas, Canvas) right / 1rem 100% no-repeat local,
  linear-gradient(to left, #8888, transparent) right / 1rem 100% no-repeat; }}
table {{ border-collapse: collapse; font-size: 14px; overflow-wrap: normal; }}
th, td {{ padding: .3rem .5rem; border-bottom: 1px solid #8888; text-align: right; }}
:is(th, td):first-child {{ position: sticky; left: 0; background: Canvas; text-align: left; }}
td:first-child {{ min-width: 11rem; overflow-wrap: anywhere; }}
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
    if out.is_file():
        raise InputError(f"--out {out}: is a file; takes a directory")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / PAGE).exists():
        raise InputError(f"--out {out}: holds something other than a report; give another")
    devices = ", ".join(sorted({*runs.device.dropna()})) or "not known"
    body = [HEAD, _text(f"{len(runs)} runs, {settings.split} split. Devices: {devices}.")]
    told, tables = [], []
    for section in found:
        frame, digits, notes = main_table(section, settings.split)
        groups = frame.astype(object).where(frame.notna(), None).to_dict("records")
        names = {"title": section.title, "metric": section.metric}
        told.append({**names, "groups": groups, "notes": notes})
        tables.append(frame.assign(title=section.title).set_index("title"))
        images = [f'<img alt="{name}" src="{data}">' for name, data in pictures(section).items()]
        body += [f"<h2>{html.escape(section.title)}</h2>"]
        body += ['<div class="pictures">', *images, "</div>"]
        body += [_text(CAPTION), _html(frame, digits), *map(_text, notes)]
    runs = pd.concat([*(section.runs for section in found), runs[runs.config.isna()]])
    runs = runs.astype({"seed": "Int64"})  # whole also beside runs without one
    names = ["group", "seed", "status", "reason", VALIDATION, "best_step", "training_seconds"]
    listed = runs.reindex(columns=names).reset_index()
    listed.columns = listed.columns.str.replace("_", " ")
    body += ["<h2>Runs</h2>", _html(listed, {BEST_LOSS: 4, "training seconds": 1})]
    write_whole(out / PAGE, "\n".join([*body, "</body>\n</html>\n"]))
    write_whole(out / "table.csv", pd.concat([NO_TABLE, *tables]).to_csv())
    write_whole(out / "runs.csv", _of_each(runs).to_csv())
    statuses = ("done", "not finished", "failed")
    of_each = {status: int((runs.status == status).sum()) for status in statuses}
    return {"out": str(out), "runs": of_each, "sections": told}


def _of_each(runs: Any) -> Any:
    """What runs.csv has: who a run is, its numbers, and other columns in which runs differ."""
    kept = {"group", "kind", "seed", "status", "reason", *NUMBERS, *runs.scores.explode()}
    known = runs.drop(columns=["config", "curve", "scores"]).dropna(axis="columns", how="all")
    differ = known[runs.config.notna()].nunique(dropna=False) > 1
    found = known[[name for name in known if name in kept or differ[name]]]
    texts = [name for name in found if name in FIELDS or name.startswith("eval.")]
    return found.assign(**{name: found[name].map(_plain, na_action="ignore") for name in texts})


def _plain(text: str) -> str | None:
    """A value of a config as JSON; text without its quotes, None for null."""
    value = json.loads(text)
    return value if value is None or isinstance(value, str) else text


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
    """The paper's table: score and its difference from mha, parameters, PRR, PEoP, cache, speed.

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
    differences = zip(*map(s.against, groups, mha), strict=True) if len(groups) else [()] * 3
    columns = {
        "seeds": s.seeds[s.metric],
        titled: score,
        "± over seeds": s.std[s.metric],
        **dict(zip(DIFFERENCE, map(list, differences), strict=True)),
        "parameters": mean["parameters.total"],
        "in attention": count,
        "% of mha": 100 * count / mha_count,
        "PRR": retention(score, mha_score, **how),
        "PEoP": peop.where(count != sha_count),  # else nothing was spent
        BEST_LOSS: mean[VALIDATION],
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
    digits |= dict.fromkeys((titled, "± over seeds", *DIFFERENCE), 2)
    digits |= {"PEoP": 3, BEST_LOSS: 4}
    ratios = [RATIOS, *[LOWER] * how["lower_is_better"]] if any((*mha, *sha)) else []
    return frame, digits, [*ratios, *_notes(section, split)]


def _notes(section: Section, split: str) -> list[str]:
    s, runs = section, section.runs[section.runs.group.notna()]
    missing = runs.index[runs[s.metric].isna() | (runs.scores.str.len() == 0)]
    commands = (f"`python eval.py {shlex.quote(path)} --split {split}`" for path in missing)
    labelled = row_of(s.runs.config.iloc[0]) if s.metric == "score" else None
    official = " and ".join(labelled.scored_by or labelled.metrics) if labelled else ""
    told = {
        "The score is {}, in per cent.": "the mean of " * (" and " in official) + official,
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
    return f'<div class="table">{pd.DataFrame(cells).to_html(index=False, border=0)}</div>'
