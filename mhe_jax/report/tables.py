"""The tables of a comparison: the columns of the paper, for these runs."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from mhe_jax.report import paper
from mhe_jax.report.groups import Section
from mhe_jax.report.runs import FIELDS, SETTINGS, STEP, VALIDATION
from mhe_jax.tasks.cost import cached_numbers
from mhe_jax.tasks.metrics import lower_is_better

# What times depend on beside the model, and what scores depend on.
CONDITIONS = ("mesh.", "model.remat", "model.max_length", "data.batch_size", "data.length_buckets")
CONDITIONS += ("data.tokens_per_batch", "data.sequence_length")
TIMES = ("device", *(name for name in FIELDS if name.startswith(CONDITIONS)))
SCORES = ("data.tokenizer", *(f"eval.{name}" for name in SETTINGS))
RATIOS = (
    "PRR = 100 · score / score of mha; PEoP = ((score - sha) / sha) / ((P - P_sha) / P_sha), P the "
    "attention parameters. Each is taken against the mha or sha that differs in its attention "
    "alone; - where there is none. Better and worse are by more than two standard errors of the "
    "difference."
)
LOWER = (
    "Lower is better here: PRR = 100 · (1 - (score - mha) / mha), PEoP with sha - score. The paper "
    "does not say how it does that."
)
MEMORY = (
    "MB of one self-attention layer and one example: temporaries and outputs as the compiler lays "
    "them out, without inputs and parameters. An engine for another device counts as auto."
)


class Table(NamedTuple):
    """A DataFrame, the digits after the point of its columns of numbers (0 if not told), notes."""

    title: str
    frame: Any
    digits: dict[str, int] = {}
    notes: Sequence[str] = ()

    def html(self) -> str:
        """Rounded and escaped; `-` where there is nothing."""

        def text(cell: Any, digits: int) -> str:
            if isinstance(cell, str):
                return cell
            return "-" if pd.isna(cell) else f"{cell:,.{digits}f}"

        frame = self.frame.astype(object)
        shown = frame.apply(lambda of: of.map(lambda cell: text(cell, self.digits.get(of.name, 0))))
        return shown.to_html(index=False, border=0)


def main_table(section: Section, memory: Any, split: str) -> Table:
    """The paper's table: parameters, score, PRR, PEoP, then memory, cache and speed.

    Of `memory`, from `memory_of`, the last column is shown.
    """
    s, how = section, {"lower_is_better": lower_is_better(section.metric)}
    score, count, mean = s.mean[s.metric], s.mean["parameters.attention"], s.mean
    titled = s.metric.replace("_", " ")
    groups = s.groups.index.to_series()
    mha, sha = ([s.base(group, kind) for group in groups] for kind in ("mha", "sha"))
    mha_score, mha_count = (of.reindex(mha).to_numpy() for of in (score, count))
    sha_score, sha_count = (of.reindex(sha).to_numpy() for of in (score, count))
    peop = paper.elasticity(score, count, sha_score, sha_count, **how)
    columns = {
        "seeds": s.seeds[s.metric],
        "parameters": mean["parameters.total"],
        "in attention": count,
        "% of mha": 100 * count / mha_count,
        titled: score,
        "± over seeds": s.std[s.metric],
        "PRR": paper.retention(score, mha_score, **how),
        "against mha": [*map(s.against, groups, mha)],
        "PEoP": peop.where(count != sha_count),  # else nothing was spent
        "lowest validation loss": None if s.metric == VALIDATION else mean[VALIDATION],
        "cached numbers a token": s.groups.config.map(cached_numbers).replace(0, pd.NA),
        **{f"MB {name}": memory[name] for name in memory.columns[-1:]},
        "training tokens/s": mean.tokens_per_second.where(mean.training_seconds.notna()),
        "ms a step": 1000 * mean[STEP],
        "training minutes": mean.training_seconds / 60,
        "output tokens/s": mean.output_tokens_per_second,
    }
    whole = ("seeds", "parameters", "in attention", "cached numbers a token")
    frame: Any = pd.DataFrame(columns, groups).astype(dict.fromkeys(whole, "Int64"))
    digits = dict.fromkeys(frame.columns, 1) | dict.fromkeys((titled, "± over seeds"), 2)
    digits |= {"PEoP": 3, "lowest validation loss": 4}
    digits |= dict.fromkeys((*whole, "training tokens/s", "output tokens/s"), 0)
    frame = frame.dropna(axis="columns", how="all").reset_index()
    ratios = [RATIOS, *[LOWER] * how["lower_is_better"]] if any((*mha, *sha)) else []
    return Table("Comparison", frame, digits, [*ratios, *_notes(section, split)])


def _notes(section: Section, split: str) -> Sequence[str]:
    """What a reader has to know of the numbers of `main_table`."""
    s, runs = section, section.runs[section.runs.group.notna()]
    missing = runs.index[runs[s.metric].isna() | (runs.scores.str.len() == 0)]
    commands = (f"`python eval.py {shlex.quote(path)} --split {split}`" for path in missing)
    told = {
        f"Not scored on the {split} split: {{}}.": ", ".join(commands),
        "Each group has the value of {} with the best validation loss.": ", ".join(s.chosen),
        "Cached numbers are those of all layers of the decoder; a translator's also of a source "
        "token.": any(map(cached_numbers, s.groups.config)),
        "Times do not compare: {}.": unlike(s, TIMES, STEP, "training_seconds"),
        "Scores do not compare, or not per token: {}.": unlike(s, SCORES, s.metric),
    }
    return [note.format(what) for note, what in told.items() if what]


def unlike(section: Section, names: Sequence[str], *numbers: str) -> str:
    """The columns in which runs differ, `NAME is A (as one), B (as another)`; "" for none.

    A run that has none of `numbers` does not count.
    """
    runs = section.runs[section.runs.group.notna()].set_index("group")
    runs = runs[runs[list(numbers)].notna().any(axis="columns")]
    told = []
    for name in names:
        found = runs[name].dropna().drop_duplicates()
        if len(found) > 1:
            each = ", ".join(f"{value} (as {group})" for group, value in found.items())
            told.append(f"{name} is {each}")
    return ", ".join(told)


def memory_table(memory: Any) -> Table:
    """MB of one layer, a column for each length and direction."""
    digits = dict.fromkeys(memory.columns, 2)
    return Table("Memory of the attention calculation", memory.reset_index(), digits, [MEMORY])


def runs_table(runs: Any) -> Table:
    """One line per run, whatever became of it."""
    names = ["group", "seed", "status", "reason", VALIDATION, "best_step", "training_seconds"]
    digits = {VALIDATION: 4, "training_seconds": 1}
    return Table("Runs", runs.reindex(columns=names).reset_index(), digits)
