"""Xue & Aletras 2023: what the paper prints, and its counts and ratios recomputed.

    PRR  = 100 · score / score_MHA                        performance retention ratio, per cent
    PEoP = ((score - score_SHA) / score_SHA)              performance elasticity of parameters
           / ((P - P_SHA) / P_SHA)

P is the attention parameters of all layers. SHA, the row that PEoP starts from, has no PEoP.

Source: "Pit One Against Many: Leveraging Attention-head Embeddings for Parameter-efficient
Multi-head Attention", Findings of EMNLP 2023, arXiv 2310.07911, section on metrics. For scores
where lower is better, the paper's formula is not known; ours are

    PRR  = 100 · (1 - (score - score_MHA) / score_MHA)
    PEoP = ((score_SHA - score) / score_SHA) / ((P - P_SHA) / P_SHA)
"""

import typing
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from mhe_jax.attention import make_attention
from mhe_jax.attention.cost import cached_numbers, forward_flops, parameters
from mhe_jax.config import FIELDS_OF_KINDS, Kind

# Attention parameters of the encoder in millions, as printed: 12 layers, M = 768, H = 12.
ENCODER_LAYERS, ENCODER_FEATURES, ENCODER_HEADS = 12, 768, 12
ENCODER_MILLIONS = {
    "sha": "8.85",
    "mha": "28.32",
    "el": "14.16",
    "mqa": "15.34",
    "skv": "21.23",
    "mhe_add": "8.88",
    "mhe_mul": "8.88",
}

# GLUE and SuperGLUE are mean accuracies. `sha` is the row that PEoP starts from.
BENCHMARKS = ("GLUE", "SuperGLUE", "SQuAD v1.1", "SQuAD v2.0")
_SCORES = """
sha      79.2 96.7 -     67.1 95.1 -      82.5 93.1 -      67.6 87.8 -
mha      81.9 100  0.02  70.5 100  0.02   88.6 100  0.03   77.0 100  0.06
el       80.3 98.0 0.02  69.5 98.5 0.06   86.5 97.6 0.08   72.2 93.8 0.11
mqa      81.3 99.2 0.04  69.3 98.2 0.04   86.7 97.9 0.07   74.8 97.1 0.15
skv      81.4 99.4 0.02  69.9 99.1 0.03   88.1 99.4 0.05   75.9 98.6 0.09
mhe_add  80.4 98.2 4.92  69.1 97.9 9.44   83.7 94.5 4.65   71.8 93.2 19.88
mhe_mul  80.6 98.3 5.53  69.6 98.7 12.07  85.9 97.0 13.19  72.3 93.9 22.25
"""
# Kind -> score, PRR and PEoP on each of `BENCHMARKS`.
ENCODER_SCORES = {
    kind: list(zip(cells[::3], cells[1::3], cells[2::3], strict=True))
    for kind, *cells in map(str.split, _SCORES.strip().splitlines())
}


class Translation(NamedTuple):
    """One row of the translation table: shape, and attention parameters and BLEU of two kinds."""

    name: str
    layers: int  # of the encoder, and as many of the decoder
    features: int
    heads: int
    mha: int
    mhe_mul: int
    mha_bleu: str
    mhe_mul_bleu: str
    prr: str  # of mhe_mul


# Three attention sublayers for each pair of an encoder and a decoder layer.
TRANSLATION_SUBLAYERS = 3
TRANSLATION = (
    Translation("base", 6, 512, 8, 18_874_368, 6_515_712, "24.8", "23.6", "95.0"),
    Translation("base, 16 heads", 6, 512, 16, 18_874_368, 5_630_976, "25.1", "22.9", "91.5"),
    Translation("base, 4 heads", 6, 512, 4, 18_874_368, 8_285_184, "24.7", "23.6", "95.3"),
    Translation("4 layers", 4, 512, 8, 12_582_912, 4_343_808, "23.9", "22.4", "93.6"),
    Translation("8 layers", 8, 512, 8, 25_165_824, 8_687_616, "25.3", "24.3", "96.0"),
    Translation("12 heads", 6, 768, 12, 42_467_328, 13_312_512, "25.7", "24.2", "94.2"),
    Translation("big", 6, 1024, 16, 75_497_472, 22_468_608, "26.5", "24.8", "93.6"),
)

VERDICTS = {
    "equal": "the rounded number is the printed one",
    "within": "scores that round to the printed ones can give it",
    "differs": "neither",
}


def retention(score: Any, mha: Any, *, lower_is_better: bool = False) -> Any:
    """PRR, in per cent of the score of `mha`, of numbers or of Series.

    >>> retention(36.5, 36.5), retention(110.0, 100.0, lower_is_better=True)
    (100.0, 90.0)
    """
    if lower_is_better:
        return 100 * (1 - (score - mha) / mha)
    return 100 * score / mha


def elasticity(
    score: Any, count: Any, sha: Any, sha_count: Any, *, lower_is_better: bool = False
) -> Any:
    """PEoP of a score with `count` attention parameters against that of `sha`, which has others.

    >>> elasticity(11.0, 400, 10.0, 200)
    0.1
    """
    gain = (sha - score if lower_is_better else score - sha) / sha
    return gain * sha_count / (count - sha_count)


class Row(NamedTuple):
    """One published number beside ours, in [low, high] whatever the printed scores were."""

    table: str
    name: str
    printed: str
    computed: Fraction
    low: Fraction
    high: Fraction

    @property
    def shown(self) -> str:
        """`computed` with as many digits as are printed; exact, halves to even."""
        digits, comma = len(self.printed.partition(".")[2]), "," * ("," in self.printed)
        return f"{float(round(self.computed, digits)):{comma}.{digits}f}"

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.shown == self.printed:
            return "equal"
        _, low, high = _interval(self.printed)
        return "within" if self.low <= high and low <= self.high else "differs"


def _interval(printed: str) -> tuple[Fraction, Fraction, Fraction]:
    """A printed number, and the lowest and the highest that are printed as it is."""
    value = Fraction(printed.replace(",", ""))
    half = Fraction(1, 2 * 10 ** len(printed.partition(".")[2]))
    return value, value - half, value + half


def encoder_parameters(kind: str) -> int:
    """Attention parameters of the paper's encoder."""
    module = make_attention(kind, num_heads=ENCODER_HEADS, use_bias=False)
    return ENCODER_LAYERS * parameters(module, ENCODER_FEATURES)


def parameter_rows() -> Iterator[Row]:
    """The 21 published counts."""
    for kind, printed in ENCODER_MILLIONS.items():
        yield Row("encoder", kind, printed, *[Fraction(encoder_parameters(kind), 10**6)] * 3)
    for shape in TRANSLATION:
        for kind in ("mha", "mhe_mul"):
            module = make_attention(kind, num_heads=shape.heads, use_bias=False)
            count = TRANSLATION_SUBLAYERS * shape.layers * parameters(module, shape.features)
            printed = f"{getattr(shape, kind):,}"
            yield Row("translation", f"{shape.name}: {kind}", printed, *[Fraction(count)] * 3)


def retention_rows() -> Iterator[Row]:
    """The 35 published PRR."""
    for column, benchmark in enumerate(BENCHMARKS):
        mha = ENCODER_SCORES["mha"][column][0]
        for kind, entries in ENCODER_SCORES.items():
            score, printed, _ = entries[column]
            # That of mha is one and the same number over itself.
            bounds = [Fraction(100)] * 3 if kind == "mha" else _retention(score, mha)
            yield Row(benchmark, kind, printed, *bounds)
    for row in TRANSLATION:
        bounds = _retention(row.mhe_mul_bleu, row.mha_bleu)
        yield Row("translation", f"{row.name}: mhe_mul", row.prr, *bounds)


def _retention(score: str, mha: str) -> list[Fraction]:
    (s, s_low, s_high), (m, m_low, m_high) = _interval(score), _interval(mha)
    return [retention(s, m), retention(s_low, m_high), retention(s_high, m_low)]


def elasticity_rows() -> Iterator[Row]:
    """The 24 published PEoP."""
    for column, benchmark in enumerate(BENCHMARKS):
        base, base_low, base_high = _interval(ENCODER_SCORES["sha"][column][0])
        for kind, entries in ENCODER_SCORES.items():
            printed, counts = entries[column], (encoder_parameters(kind), encoder_parameters("sha"))
            if kind != "sha":
                score, low, high = _interval(printed[0])
                # PEoP grows with the score and falls with that of sha.
                pairs = (score, base), (low, base_high), (high, base_low)
                bounds = [elasticity(s, counts[0], b, counts[1]) for s, b in pairs]
                yield Row(benchmark, kind, printed[2], *bounds)


def tables() -> tuple[str, dict[str, dict[str, int]]]:
    """Every published count, PRR and PEoP with ours, as Markdown; and how many agree."""
    parts = [
        "Xue & Aletras 2023, arXiv 2310.07911: as printed, and recomputed from the formulas and "
        "the printed scores."
    ]
    summary = {}
    for name, title, rows in (
        ("parameters", "Attention parameters", parameter_rows()),
        ("prr", "PRR", retention_rows()),
        ("peop", "PEoP", elasticity_rows()),
    ):
        cells = [[r.table, r.name, r.printed, r.shown, r.verdict] for r in rows]
        found = [verdict for *_, verdict in cells]
        summary[name] = {verdict: found.count(verdict) for verdict in VERDICTS}
        parts += [f"## {title}", _markdown(["table", "model", "printed", "recomputed", ""], cells)]
    parts += ["\n".join(f"- {verdict}: {meaning}" for verdict, meaning in VERDICTS.items())]
    return "\n\n".join([*parts, "## One sublayer", _cost_table()]), summary


def _cost_table() -> str:
    """Parameters, cache and operations of one sublayer, for every kind."""
    M, rows = 768, []
    for kind in typing.get_args(Kind):
        fields = {"num_kv_heads": 4} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
        module = make_attention(kind, num_heads=12, use_bias=False, **fields)
        costs = parameters(module, M), cached_numbers(module, M), forward_flops(module, M, keys=512)
        rows.append([kind, *(f"{cost:,}" for cost in costs)])
    columns = ["kind", "parameters", "cached numbers per token", "forward FLOPs per token"]
    return (
        "M = 768, H = 12, D = 64 (gqa and gta with 4 key and value heads), 512 keys, no biases\n\n"
        + _markdown(columns, rows)
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All but the first column to the right."""
    shown = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n".join([shown[0], f"|---|{'---:|' * (len(columns) - 1)}", *shown[1:]])
