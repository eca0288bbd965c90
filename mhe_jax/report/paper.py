"""How much of a score a kind keeps, for how many parameters; and the paper's tables recomputed.

    PRR  = 100 · score / score_MHA                        performance retention ratio, per cent
    PEoP = ((score - score_SHA) / score_SHA)              performance elasticity of parameters
           / ((P - P_SHA) / P_SHA)

P is the attention parameters of all layers. SHA, the row that PEoP starts from, has no PEoP.
`python eval.py paper` prints every published count, PRR and PEoP beside ours, and the cost of one
sublayer of every kind.

Source: Xue & Aletras 2023, "Pit One Against Many", section on metrics. For scores where lower is
better, the paper's formula is not known; ours are

    PRR  = 100 · (1 - (score - score_MHA) / score_MHA)
    PEoP = ((score_SHA - score) / score_SHA) / ((P - P_SHA) / P_SHA)
"""

import typing
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from mhe_jax.attention import make_attention
from mhe_jax.attention.cost import cached_numbers, forward_flops, parameters
from mhe_jax.config import FIELDS_OF_KINDS, Kind
from mhe_jax.report import published

Number = TypeVar("Number", float, Fraction)
Verdict = Literal["equal", "within", "differs"]


def retention(score: Number, mha: Number, *, lower_is_better: bool = False) -> Number:
    """PRR, in per cent of the score of `mha`.

    >>> retention(36.5, 36.5), retention(110.0, 100.0, lower_is_better=True)
    (100.0, 90.0)
    """
    if lower_is_better:
        return 100 * (1 - (score - mha) / mha)
    return 100 * score / mha


def elasticity(
    score: Number, count: int, sha: Number, sha_count: int, *, lower_is_better: bool = False
) -> Number | None:
    """PEoP of a score with `count` attention parameters, against that of `sha`.

    None where the counts are equal: nothing was spent.

    >>> elasticity(11.0, 400, 10.0, 200)
    0.1
    """
    if count == sha_count:
        return None
    gain = (sha - score if lower_is_better else score - sha) / sha
    return gain / Fraction(count - sha_count, sha_count)


class Row(NamedTuple):
    """One published number beside ours."""

    table: str
    name: str
    printed: str
    computed: Fraction
    low: Fraction  # what the rounding of the printed scores allows
    high: Fraction

    @property
    def shown(self) -> str:
        """`computed` with as many digits as are printed."""
        if "," in self.printed:
            return f"{int(self.computed):,}"
        return str(rounded(self.computed, _decimals(self.printed)))

    @property
    def verdict(self) -> Verdict:
        """Whether the rounded number is the printed one, or could be within the scores' rounding.

        'within': some scores that round to the printed ones have a ratio that rounds to this one.
        """
        printed, half = Fraction(self.printed.replace(",", "")), _half(self.printed)
        if Fraction(self.shown.replace(",", "")) == printed:
            return "equal"
        reachable = self.low <= printed + half and self.high >= printed - half
        return "within" if reachable else "differs"


def rounded(number: Fraction, decimals: int) -> str:
    """Rounded to `decimals`, exactly, halves to even.

    >>> rounded(Fraction(1, 8), 2), rounded(Fraction(283, 10), 0)
    ('0.12', '28')
    """
    return f"{float(round(number, decimals)):.{decimals}f}"


def _decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


def _half(printed: str) -> Fraction:
    """Half of the last printed place: what rounding may have taken or added."""
    return Fraction(1, 2 * 10 ** _decimals(printed))


def _score(printed: str) -> tuple[Fraction, Fraction, Fraction]:
    """A printed score, and the lowest and highest scores that are printed as it is."""
    value, half = Fraction(printed), _half(printed)
    return value, value - half, value + half


def parameter_rows() -> list[Row]:
    """The 21 published counts."""
    rows = []
    for kind, printed in published.ENCODER_MILLIONS.items():
        count = Fraction(encoder_parameters(kind), 1_000_000)
        rows.append(Row("encoder", kind, printed, count, count, count))
    for shape in published.TRANSLATION:
        for kind in ("mha", "mhe_mul"):
            count = Fraction(translation_parameters(shape, kind))
            printed = f"{getattr(shape, kind):,}"
            rows.append(Row("translation", f"{shape.name}: {kind}", printed, *[count] * 3))
    return rows


def encoder_parameters(kind: str) -> int:
    """Attention parameters of the paper's encoder."""
    module = make_attention(kind, num_heads=published.ENCODER_HEADS, use_bias=False)
    return published.ENCODER_LAYERS * parameters(module, published.ENCODER_FEATURES)


def translation_parameters(row: published.Translation, kind: str) -> int:
    """Attention parameters of one of the paper's translation models."""
    module = make_attention(kind, num_heads=row.heads, use_bias=False)
    one = parameters(module, row.features)
    return published.TRANSLATION_SUBLAYERS * row.layers * one


def retention_rows() -> list[Row]:
    """The 35 published PRR."""
    rows = []
    for column, benchmark in enumerate(published.BENCHMARKS):
        mha = published.ENCODER_SCORES["mha"][column].score
        for kind, entries in published.ENCODER_SCORES.items():
            entry = entries[column]
            bounds = _retention(entry.score, mha, is_mha=kind == "mha")
            rows.append(Row(benchmark, kind, entry.prr, *bounds))
    for row in published.TRANSLATION:
        bounds = _retention(row.mhe_mul_bleu, row.mha_bleu)
        rows.append(Row("translation", f"{row.name}: mhe_mul", row.prr, *bounds))
    return rows


def _retention(score: str, mha: str, is_mha: bool = False) -> tuple[Fraction, Fraction, Fraction]:
    if is_mha:  # one and the same number over itself
        return Fraction(100), Fraction(100), Fraction(100)
    (s, s_low, s_high), (m, m_low, m_high) = _score(score), _score(mha)
    return retention(s, m), retention(s_low, m_high), retention(s_high, m_low)


def elasticity_rows() -> list[Row]:
    """The 24 published PEoP."""
    rows = []
    for column, benchmark in enumerate(published.BENCHMARKS):
        base, base_low, base_high = _score(published.ENCODER_SCORES["sha"][column].score)
        base_count = encoder_parameters("sha")
        for kind, entries in published.ENCODER_SCORES.items():
            entry, count = entries[column], encoder_parameters(kind)
            if entry.peop is None:
                continue
            score, low, high = _score(entry.score)
            # PEoP grows with the score and falls with that of sha.
            bounds = [
                elasticity(s, count, b, base_count)
                for s, b in ((score, base), (low, base_high), (high, base_low))
            ]
            assert None not in bounds
            rows.append(Row(benchmark, kind, entry.peop, *bounds))  # pyright: ignore
    return rows


MEANING = {
    "equal": "the rounded number is the printed one",
    "within": "scores that round to the printed ones can give it",
    "differs": "neither",
}


def tables() -> str:
    """Every published count, PRR and PEoP with ours, as Markdown."""
    parts = [
        "Xue & Aletras 2023, arXiv 2310.07911: as printed, and recomputed from the formulas and "
        "the printed scores."
    ]
    for title, rows in (
        ("Attention parameters", parameter_rows()),
        ("PRR", retention_rows()),
        ("PEoP", elasticity_rows()),
    ):
        lines = [
            f"## {title}",
            "",
            "| table | model | printed | recomputed | rounding allows | |",
            "|---|---|---:|---:|---|---|",
        ]
        for row in rows:
            allowed = ""
            if row.low != row.high:
                digits = _decimals(row.printed) + 1
                allowed = f"{rounded(row.low, digits)} to {rounded(row.high, digits)}"
            lines.append(
                f"| {row.table} | {row.name} | {row.printed} | {row.shown} | {allowed} "
                f"| {row.verdict} |"
            )
        found = counts(rows)
        told = ", ".join(f"{number} {verdict}" for verdict, number in found.items() if number)
        lines += ["", f"{len(rows)} entries: {told}."]
        parts.append("\n".join(lines))
    parts.append(_cost_table())
    parts.append("\n".join(f"- {verdict}: {meaning}" for verdict, meaning in MEANING.items()))
    return "\n\n".join(parts)


def _cost_table() -> str:
    """Parameters, cache and operations of one sublayer, for every kind."""
    M = 768
    lines = [
        "## One sublayer",
        "",
        "M = 768, H = 12, D = 64 (gqa and gta with 4 key and value heads), 512 keys, no biases",
        "",
        "| kind | parameters | cached numbers per token | forward FLOPs per token |",
        "|---|---:|---:|---:|",
    ]
    for kind in typing.get_args(Kind):
        fields = {"num_kv_heads": 4} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
        module = make_attention(kind, num_heads=12, use_bias=False, **fields)
        lines.append(
            f"| {kind} | {parameters(module, M):,} | {cached_numbers(module, M):,} "
            f"| {forward_flops(module, M, keys=512):,} |"
        )
    return "\n".join(lines)


def counts(rows: list[Row]) -> dict[Verdict, int]:
    """The number of rows with each verdict."""
    verdicts: tuple[Verdict, ...] = ("equal", "within", "differs")
    return {verdict: sum(row.verdict == verdict for row in rows) for verdict in verdicts}


def summary() -> dict[str, Any]:
    """The counts of verdicts, as JSON."""
    return {
        "parameters": counts(parameter_rows()),
        "prr": counts(retention_rows()),
        "peop": counts(elasticity_rows()),
    }
