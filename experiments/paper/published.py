"""Xue & Aletras 2023, arXiv 2310.07911: what the paper prints, and its numbers recomputed.

    python experiments/paper/published.py

Counts come from our modules, PRR and PEoP from the formulas (`mhe_jax/report/report.py`) and the
printed scores. SHA, the row that PEoP starts from, has no PEoP.
"""

import itertools
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from mhe_jax.attention import make_attention
from mhe_jax.attention.cost import parameters

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


class Row(NamedTuple):
    """One published number beside ours."""

    quantity: str
    table: str
    name: str
    printed: str
    values: list[Fraction]  # what the formula gives, then what it can give by the printed scores

    @property
    def shown(self) -> str:
        """Ours with as many digits as the printed one."""
        digits, comma = len(self.printed.partition(".")[2]), "," * ("," in self.printed)
        return f"{float(round(self.values[0], digits)):{comma}.{digits}f}"

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.shown == self.printed:
            return "equal"
        _, low, high = _interval(self.printed)
        return "within" if min(self.values) <= high and low <= max(self.values) else "differs"


def _interval(printed: str) -> tuple[Fraction, Fraction, Fraction]:
    """A printed number, and the lowest and the highest that are printed as it is."""
    value = Fraction(printed.replace(",", ""))
    half = Fraction(1, 2 * 10 ** len(printed.partition(".")[2]))
    return value, value - half, value + half


def _pairs(one: str, other: str) -> Iterator[tuple[Fraction, Fraction]]:
    """Two printed numbers as they are, then all corners of what they can be."""
    return itertools.product(_interval(one), _interval(other))


def _parameters(kind: str, num_heads: int, features: int, sublayers: int) -> int:
    module = make_attention(kind, num_heads=num_heads, use_bias=False)
    return sublayers * parameters(module, features)


def rows() -> Iterator[Row]:
    """The 21 published counts, 35 PRR and 24 PEoP."""
    from mhe_jax.report.report import elasticity, retention  # by pandas, which counts do not need

    encoder = ENCODER_HEADS, ENCODER_FEATURES, ENCODER_LAYERS
    counts = {kind: _parameters(kind, *encoder) for kind in ENCODER_MILLIONS}
    for kind, printed in ENCODER_MILLIONS.items():
        yield Row("parameters", "encoder", kind, printed, [Fraction(counts[kind], 10**6)])
    for t in TRANSLATION:
        for kind, printed in (("mha", t.mha), ("mhe_mul", t.mhe_mul)):
            count = _parameters(kind, t.heads, t.features, TRANSLATION_SUBLAYERS * t.layers)
            name = f"{t.name}: {kind}"
            yield Row("parameters", "translation", name, f"{printed:,}", [Fraction(count)])
        ratios = [retention(s, m) for s, m in _pairs(t.mhe_mul_bleu, t.mha_bleu)]
        yield Row("PRR", "translation", f"{t.name}: mhe_mul", t.prr, ratios)
    for column, benchmark in enumerate(BENCHMARKS):
        (mha, *_), (sha, *_) = (ENCODER_SCORES[kind][column] for kind in ("mha", "sha"))
        for kind, entries in ENCODER_SCORES.items():
            score, prr, peop = entries[column]
            # That of mha is one and the same number over itself.
            same = kind == "mha"
            ratios = [Fraction(100 if same else retention(s, m)) for s, m in _pairs(score, mha)]
            yield Row("PRR", benchmark, kind, prr, ratios)
            if kind != "sha":
                both = counts[kind], counts["sha"]
                found = [elasticity(s, both[0], base, both[1]) for s, base in _pairs(score, sha)]
                yield Row("PEoP", benchmark, kind, peop, found)


if __name__ == "__main__":
    from experiments.reports import grid

    found = [*rows()]
    cells = [[r.quantity, r.table, r.name, r.printed, r.shown, r.verdict] for r in found]
    print(grid(["quantity", "table", "model", "printed", "recomputed", ""], cells))
    for verdict, meaning in VERDICTS.items():
        print(f"- {verdict}: {sum(row.verdict == verdict for row in found)}, {meaning}")
