"""Scores of translations, by sacreBLEU with its signatures, and perplexities.

A metric for which lower is better adds a word of its name to `LOWER_IS_BETTER`.
Nothing else imports sacrebleu.
"""

import math
from collections.abc import Sequence

import sacrebleu

from mhe_jax.config import InputError

# Words in the names of metrics for which lower is better.
LOWER_IS_BETTER = ("loss", "nats", "seconds", "perplexity")


def lower_is_better(metric: str) -> bool:
    """Whether lower is better for the metric of this name.

    >>> lower_is_better("perplexity_per_word"), lower_is_better("bleu")
    (True, False)
    """
    return any(word in LOWER_IS_BETTER for word in metric.split("_"))


def check_bleu(tokenizer: str) -> None:
    """Raises InputError if sacreBLEU's tokenizer needs a package or a file that is not there."""
    try:
        sacrebleu.BLEU(tokenize=tokenizer)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"evaluation.bleu_tokenizer is {tokenizer!r}: {reason}") from None


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a"
) -> dict[str, float | str]:
    """Corpus BLEU and chrF with signatures, and the share of exact matches, from 0 to 100.

    BLEU cuts texts into words by sacreBLEU's `tokenizer`. Two texts match if they differ only in
    the spaces around them.

    >>> scores = translation_scores(["a small dog runs"], ["a small dog runs"])
    >>> round(scores["bleu"]), round(scores["chrf"]), scores["exact_match"]
    (100, 100, 100.0)
    """
    bleu, chrf = sacrebleu.BLEU(tokenize=tokenizer), sacrebleu.CHRF()
    matches = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "exact_match": 100.0 * matches / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def perplexity(nats: float, count: float) -> float:
    """`exp(nats / count)`; `count` counts tokens, or words for perplexity per word.

    >>> round(perplexity(nats=2 * math.log(8), count=2), 6)
    8.0
    """
    try:
        return math.exp(nats / count)
    except OverflowError:
        return math.inf
