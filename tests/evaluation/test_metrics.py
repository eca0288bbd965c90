"""Scores against values known by hand, sacreBLEU's signature, and the words of WikiText-2."""

import lzma
import math
from pathlib import Path

import pytest

from mhe_jax.data.rows import count_words
from mhe_jax.tasks.metrics import lower_is_better, perplexity, translation_scores

WIKITEXT = Path(__file__).parents[3] / "shared/data/wikitext-2/test.txt.xz"
REFERENCES = ["Ein Hund läuft über die Wiese.", "Zwei Männer spielen Fußball im Park."]
JAPANESE = ["私は昨日東京で友達に会いました。", "この猫はとても小さいです。"]


def test_the_better_direction():
    for metric in ("seconds", "training_seconds", "nats", "token_loss"):
        assert lower_is_better(metric)
    for metric in ("tokens_per_second", "output_tokens_per_second", "bleu"):
        assert not lower_is_better(metric)


def test_bleu_by_hand():
    """Four of five words, 3 of 4 pairs, 2 of 3 triples and 1 of 2 fours, no brevity penalty."""
    scores = translation_scores(["a b c d x"], ["a b c d e"])
    expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert scores["bleu"] == pytest.approx(expected)
    assert scores["exact_match"] == 0
    scores = translation_scores(REFERENCES, REFERENCES)
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    for part in ("case:mixed", "tok:13a", "nrefs:1"):
        assert part in scores["bleu_signature"]
    assert scores["chrf_signature"].startswith("nrefs:1|case:mixed")
    assert translation_scores([t.lower() for t in REFERENCES], REFERENCES)["bleu"] < 100
    scores = translation_scores([" a b ", "a  b", "x", ""], ["a b", "a b", "y", ""])
    assert scores["exact_match"] == 50  # only the spaces around do not count
    assert translation_scores(["", ""], REFERENCES)["bleu"] == 0


def test_a_translation_that_is_too_short_by_hand():
    """All that is there is right: BLEU has the brevity penalty alone, and chrF what is missing."""
    scores = translation_scores(["a b c d"], ["a b c d e"])
    assert scores["bleu"] == pytest.approx(100 * math.exp(1 - 5 / 4))
    scores = translation_scores(["abcd"], ["abcdefgh"])
    # Of n letters in a row 5 - n of 9 - n are found, for n to 4: sacreBLEU leaves out 5 and 6,
    # which no four letters have. chrF2 counts what is missing four times.
    precision, recall = 1, sum((5 - n) / (9 - n) for n in range(1, 5)) / 4
    assert scores["chrf"] < translation_scores(["abcdefgh"], ["abcd"])["chrf"]
    assert scores["chrf"] == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))


def test_texts_without_spaces_are_cut_by_another_tokenizer():
    found = [text.replace("東京", "京都").replace("猫", "犬") for text in JAPANESE]
    assert translation_scores(found, JAPANESE)["bleu"] == 0
    for tokenizer in ("char", "zh"):
        scores = translation_scores(found, JAPANESE, tokenizer)
        assert 50 < scores["bleu"] < 100
        assert f"tok:{tokenizer}" in scores["bleu_signature"]


def test_perplexity():
    assert perplexity(10 * math.log(7), 10) == pytest.approx(7)
    assert perplexity(1e6, 1) == math.exp(700)  # JSON has no infinity


@pytest.mark.skipif(not WIKITEXT.exists(), reason=f"needs the real data: {WIKITEXT.name}")
def test_words_of_wikitext_2():
    with lzma.open(WIKITEXT, "rt", encoding="utf-8", newline="\n") as file:
        assert count_words(line.removesuffix("\n") for line in file) == 245_569
