"""Texts as people in a hurry type them, to test how much a model minds.

A misspelt word has one letter dropped, doubled or replaced by another, or two neighbours exchanged,
each equally likely if it changes the word. Words are runs of two letters or more.
"""

import re

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"[^\W\d_]{2,}")


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """The text with each word misspelt with probability `rate`.

    >>> misspell("the 2 small dogs", 0.0, np.random.default_rng(0))
    'the 2 small dogs'
    """

    def replaced(match: re.Match[str]) -> str:
        wrong = generator.random() < rate
        return _misspelt(match[0], generator) if wrong else match[0]

    return _WORD.sub(replaced, text)


def _misspelt(word: str, generator: np.random.Generator) -> str:
    """A misspelling of the word, which has two letters or more."""
    while True:
        i, letter = int(generator.integers(len(word))), LETTERS[generator.integers(len(LETTERS))]
        found = (
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + letter + word[i + 1 :],
            word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
        )[generator.integers(4)]
        if found != word:
            return found
