"""The tables of a comparison: the columns of the paper, for these runs."""

import shlex
from collections.abc import Sequence

from mhe_jax.report import paper, published
from mhe_jax.report.conditions import unlike, unlike_times
from mhe_jax.report.groups import Group, Section
from mhe_jax.report.runs import SETTINGS, STEP, VALIDATION, RunRecord, score_names
from mhe_jax.report.tables import Column, Table
from mhe_jax.tasks.metrics import lower_is_better

# Bytes by run of `layer_memory`, group and length.
Memory = dict[str, dict[str, dict[int, float]]]


def main_table(section: Section, memory: Memory, name: str, split: str) -> Table:
    """The paper's table: parameters, score, PRR, PEoP, then memory, cache and speed."""
    metric, lower = section.metric, lower_is_better(section.metric)
    longest = max((n for sizes in memory["forward"].values() for n in sizes), default=None)
    columns = [
        Column("attention"),
        Column("seeds", 0),
        Column("parameters", 0),
        Column("in attention", 0),
        Column("% of mha", 1),
        Column(metric.replace("_", " "), 2),
        Column("± over seeds", 2),
        Column("PRR", 1),
        Column("against mha"),
        Column("PEoP", 3),
        Column("lowest validation loss", 4),
        Column("cached numbers a token", 0),
        Column(f"MB with gradients, T = {longest}", 1),
        Column("training tokens/s", 0),
        Column("ms a step", 1),
        Column("training minutes", 1),
        Column("output tokens/s", 0),
    ]
    rows = []
    for group in section.groups:
        mean, count = group.mean(metric), group.parameters("attention")
        mha, sha = section.base(group, "mha"), section.base(group, "sha")
        sizes = memory["with gradients"].get(group.name, {})
        seconds, step = group.mean("training_seconds"), group.mean(STEP)
        rows.append(
            [
                group.name,
                len(group.values(metric)),
                group.parameters("total"),
                count,
                _share(count, mha and mha.parameters("attention")),
                mean,
                group.spread(metric),
                _retention(mean, mha and mha.mean(metric), lower),
                None if mha is None or mha is group else group.against(mha, metric),
                _elasticity(group, sha, metric),
                None if metric == VALIDATION else group.mean(VALIDATION),
                group.cached_numbers(),
                sizes[longest] / 1e6 if longest in sizes else None,
                group.mean("tokens_per_second") if group.mean("training_seconds") else None,
                None if step is None else 1000 * step,
                None if seconds is None else seconds / 60,
                group.mean("output_tokens_per_second"),
            ]
        )
    notes = []
    related = any(section.base(group, base) for group in section.groups for base in ("mha", "sha"))
    if related:
        notes.append(
            "PRR = 100 · score / score of mha; PEoP = ((score - sha) / sha) / ((P - P_sha) / "
            "P_sha), P the attention parameters. Each is taken against the mha or sha that differs "
            "in its attention alone; - where there is none. Better and worse are by more than two "
            "standard errors of the difference."
        )
    if related and lower:
        notes.append(
            "Lower is better here: PRR = 100 · (1 - (score - mha) / mha), PEoP with sha - score. "
            "The paper does not say how it does that."
        )
    runs = [run for group in section.groups for run in group.runs]
    missing = []
    for run in runs:
        if metric in run.scores and run.value(metric) is None:
            missing.append(f"{run.path} ({metric} is no number)")
        elif run.value(metric) is None or not run.scores:
            missing.append(f"`python eval.py {shlex.quote(str(run.path))} --split {split}`")
    if missing:
        notes.append(f"Not scored on the {split} split: {', '.join(missing)}.")
    if changed := [f"{run.path} ({told})" for run in runs if (told := run.fields["changed"])]:
        notes.append(f"Trained on with other fields, and so a group apart: {', '.join(changed)}.")
    if section.chosen:
        told = ", ".join(section.chosen)
        notes.append(f"Each group has the value of {told} with the best validation loss.")
    if any(group.cached_numbers() for group in section.groups):
        both = " and a source token" if section.task == "translation" else ""
        notes.append(f"Cached numbers are those of a token{both} in all layers of the decoder.")
    if told := unlike_times(section, STEP, "training_seconds"):
        notes.append(f"Times do not compare: {told}.")
    tokenizers = [(str(run.path), run.fields["data.tokenizer"]) for run in runs]
    if told := unlike("data.tokenizer", tokenizers):
        notes.append(
            f"{told}: numbers per token, such as losses, compare only if these are the same."
        )
    for setting in SETTINGS:
        values = [
            (group.name, run.scores.get(setting))
            for group in section.groups
            for run in group.runs
            if setting in run.scores
        ]
        if told := unlike(setting, values):
            notes.append(f"Not evaluated alike: {told}.")
    return Table(name, "Comparison", columns, rows, notes).without_empty_columns()


def _share(count: int | None, base: int | None) -> float | None:
    return 100 * count / base if count and base else None


def _retention(score: float | None, mha: float | None, lower: bool) -> float | None:
    if score is None or not mha:
        return None
    return paper.retention(score, mha, lower_is_better=lower)


def _elasticity(group: Group, sha: Group | None, metric: str) -> float | None:
    if sha is None or sha is group:
        return None
    score, base = group.mean(metric), sha.mean(metric)
    count, base_count = group.parameters("attention"), sha.parameters("attention")
    if score is None or not base or count is None or base_count is None:
        return None
    return paper.elasticity(score, count, base, base_count, lower_is_better=lower_is_better(metric))


def memory_table(memory: Memory, name: str) -> Table | None:
    """MB of one layer, a column for each length and run."""
    names = list(memory["forward"])
    if not names:
        return None
    pairs = [(run, length) for run in memory for length in memory[run][names[0]]]
    rows = [
        [group, *(memory[run][group][length] / 1e6 for run, length in pairs)] for group in names
    ]
    columns = [Column("attention"), *(Column(f"{run}, T = {n}", 2) for run, n in pairs)]
    note = (
        "MB of one self-attention layer and one example: temporaries and outputs as the compiler "
        "lays them out, without inputs and parameters. An engine for another device counts as "
        "auto."
    )
    return Table(name, "Memory of the attention calculation", columns, rows, [note])


def scores_table(section: Section, suffix: str) -> Table | None:
    """Every score that eval.py found, mean and spread over seeds."""
    names = score_names([run for group in section.groups for run in group.runs])
    if not names:
        return None
    columns = [Column("attention")]
    for name in names:
        columns += [Column(name.replace("_", " "), 3), Column("±", 3)]
    rows = [
        [group.name, *(f(name) for name in names for f in (group.mean, group.spread))]
        for group in section.groups
    ]
    return Table(f"scores{suffix}", "All scores", columns, rows).without_empty_columns()


def runs_table(found: Sequence[Section], runs: Sequence[RunRecord]) -> Table:
    """One line per run, whatever became of it."""
    metrics = {id(run): section.metric for section in found for run in section.runs}
    places = {
        id(run): group.name for section in found for group in section.groups for run in group.runs
    }
    columns = [
        Column("run"),
        Column("attention"),
        Column("seed", 0),
        Column("status"),
        Column("score"),
        Column("", 4),
        Column("lowest validation loss", 4),
        Column("best step", 0),
        Column("minutes", 1),
        Column("tokens/s", 0),
    ]
    rows = []
    for run in runs:
        metric = metrics.get(id(run))
        seconds = run.value("training_seconds")
        rows.append(
            [
                str(run.path),
                places.get(id(run)),
                run.seed,
                ": ".join(filter(None, [run.status, run.reason, run.fields.get("changed")])),
                metric,
                metric and run.value(metric),
                run.validation_loss,
                run.value("best_step"),
                None if seconds is None else seconds / 60,
                run.result.get("tokens_per_second"),
            ]
        )
    return Table("runs", "Runs", columns, rows)


def published_tables() -> list[Table]:
    """The figures of the paper, for orientation."""
    columns = [Column("kind"), Column("attention parameters", 0)]
    for benchmark in published.BENCHMARKS:
        columns += [Column(benchmark, 1), Column("PRR", 1), Column("PEoP", 2)]
    rows = [
        [kind, paper.encoder_parameters(kind)]
        + [None if cell is None else float(cell) for entry in entries for cell in entry]
        for kind, entries in published.ENCODER_SCORES.items()
    ]
    note = (
        "As printed by Xue & Aletras 2023 (arXiv 2310.07911), of models and budgets far larger "
        "than most of ours: not comparable in absolute terms."
    )
    encoders = Table("published-encoders", "Published: encoders", columns, rows, [note])
    columns = [
        Column("model"),
        Column("mha parameters", 0),
        Column("mhe_mul parameters", 0),
        Column("mha BLEU", 1),
        Column("mhe_mul BLEU", 1),
        Column("PRR", 1),
    ]
    rows = [
        [row.name, row.mha, row.mhe_mul]
        + [float(cell) for cell in (row.mha_bleu, row.mhe_mul_bleu, row.prr)]
        for row in published.TRANSLATION
    ]
    title = "Published: translation, WMT14"
    return [encoders, Table("published-translation", title, columns, rows, [note])]
