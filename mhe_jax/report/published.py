"""Parameter counts and scores that Xue & Aletras 2023 print, to compare with what we compute.

"Pit One Against Many: Leveraging Attention-head Embeddings for Parameter-efficient Multi-head
Attention", Findings of EMNLP 2023, arXiv 2310.07911.
"""

import re
from typing import NamedTuple

from mhe_jax.config import Config
from mhe_jax.tasks.labelled.table import TABLE

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


class Entry(NamedTuple):
    """One cell as printed: score, PRR and PEoP; `sha` is the row that PEoP starts from."""

    score: str
    prr: str
    peop: str | None


BENCHMARKS = ("GLUE", "SuperGLUE", "SQuAD v1.1", "SQuAD v2.0")
WMT14 = "WMT14 English to German"
# Kind -> an entry for each of `BENCHMARKS`. GLUE and SuperGLUE are mean accuracies.
ENCODER_SCORES = {
    "sha": (
        Entry("79.2", "96.7", None),
        Entry("67.1", "95.1", None),
        Entry("82.5", "93.1", None),
        Entry("67.6", "87.8", None),
    ),
    "mha": (
        Entry("81.9", "100", "0.02"),
        Entry("70.5", "100", "0.02"),
        Entry("88.6", "100", "0.03"),
        Entry("77.0", "100", "0.06"),
    ),
    "el": (
        Entry("80.3", "98.0", "0.02"),
        Entry("69.5", "98.5", "0.06"),
        Entry("86.5", "97.6", "0.08"),
        Entry("72.2", "93.8", "0.11"),
    ),
    "mqa": (
        Entry("81.3", "99.2", "0.04"),
        Entry("69.3", "98.2", "0.04"),
        Entry("86.7", "97.9", "0.07"),
        Entry("74.8", "97.1", "0.15"),
    ),
    "skv": (
        Entry("81.4", "99.4", "0.02"),
        Entry("69.9", "99.1", "0.03"),
        Entry("88.1", "99.4", "0.05"),
        Entry("75.9", "98.6", "0.09"),
    ),
    "mhe_add": (
        Entry("80.4", "98.2", "4.92"),
        Entry("69.1", "97.9", "9.44"),
        Entry("83.7", "94.5", "4.65"),
        Entry("71.8", "93.2", "19.88"),
    ),
    "mhe_mul": (
        Entry("80.6", "98.3", "5.53"),
        Entry("69.6", "98.7", "12.07"),
        Entry("85.9", "97.0", "13.19"),
        Entry("72.3", "93.9", "22.25"),
    ),
}


def benchmark_of(config: Config) -> str | None:
    """The paper's name for the task of a run: one of `BENCHMARKS`, `WMT14`, or None for others."""
    data = config.data
    if config.task == "translation":
        names = "/".join((data.directory, *data.train, *data.test)).lower()
        source = "".join((data.train if len(data.train) == 2 else data.fields)[:1])
        # Of de-en/train.en, it is the last that tells.
        from_german = re.findall(r"(?<![a-z])(?:de|en)(?![a-z])", source.lower())[-1:] == ["de"]
        named = re.search(r"wmt_?14.*(?<![a-z])de(?![a-z])", names)
        return WMT14 if named and not from_german else None
    if not config.facts.labelled or data.dataset == "own":
        return None
    suite = {"glue": "GLUE", "superglue": "SuperGLUE"}.get(TABLE[data.dataset].suite)
    return suite or {"squad": "SQuAD v1.1", "squad_v2": "SQuAD v2.0"}[data.dataset]


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
