"""Parameter counts that Xue & Aletras 2023 print, to compare with the cost table.

"Pit One Against Many: Leveraging Attention-head Embeddings for Parameter-efficient Multi-head
Attention", Findings of EMNLP 2023, arXiv 2310.07911.
"""

from typing import NamedTuple

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


class Translation(NamedTuple):
    """One row of the translation table: shape, and attention parameters of two kinds."""

    name: str
    layers: int  # of the encoder, and as many of the decoder
    features: int
    heads: int
    mha: int
    mhe_mul: int


# Three attention sublayers for each pair of an encoder and a decoder layer.
TRANSLATION_SUBLAYERS = 3
TRANSLATION = (
    Translation("base", 6, 512, 8, 18_874_368, 6_515_712),
    Translation("base, 16 heads", 6, 512, 16, 18_874_368, 5_630_976),
    Translation("base, 4 heads", 6, 512, 4, 18_874_368, 8_285_184),
    Translation("4 layers", 4, 512, 8, 12_582_912, 4_343_808),
    Translation("8 layers", 8, 512, 8, 25_165_824, 8_687_616),
    Translation("12 heads", 6, 768, 12, 42_467_328, 13_312_512),
    Translation("big", 6, 1024, 16, 75_497_472, 22_468_608),
)
