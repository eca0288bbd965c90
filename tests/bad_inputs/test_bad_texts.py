"""Texts that cannot be read, by every way in which a text is named."""

import gzip
import lzma
import random

import pytest

BINARY = random.Random(0).randbytes(5000)
GOOD = b"one small dog\n" * 3000


def link(to):
    return lambda path: path.symlink_to(to)


def nothing(path):
    pass


# What is wrong: name of the file, what makes it, what is said of it.
FAULTS = {
    "missing": ("bad.txt", nothing, "no such file"),
    "empty": ("bad.txt", b"", "is empty"),
    "directory": ("bad.txt", lambda path: path.mkdir(), "is a directory, not a file"),
    "blank": ("bad.txt", b"\n \r\n\t\n", "has no text, only blank lines"),
    "not UTF-8": ("bad.txt", GOOD + b"on\xe9\n" + GOOD, r"3001: is not UTF-8 \(.*\)"),
    "UTF-16": ("bad.txt", "one dog\n".encode("utf-16"), r"1: is not UTF-8 \(.*\)"),
    "binary": ("bad.txt", BINARY, r"\d+: is not UTF-8 \(.*\)"),
    "cut in a character": ("bad.txt", "ein Hund lä".encode()[:-1], r"1: is not UTF-8 \(.*\)"),
    "broken line of 10 MB": (
        "bad.txt",
        b"one dog " * 1_250_000 + b"\xff\n",
        r"1: is not UTF-8 \(.*\)",
    ),
    "link to nothing": ("bad.txt", link("nowhere.txt"), "no such file"),
    "link to itself": ("bad.txt", link("bad.txt"), "Too many levels of symbolic links"),
    "below a file": ("train.en/bad.txt", nothing, "Not a directory"),
    "name too long": ("a" * 300 + ".txt", nothing, "File name too long"),
    "no such home": ("~nobody-at-all/bad.txt", nothing, "no such file"),
    "no gz": ("bad.txt.gz", GOOD, r"is not a \.gz file \(.*\)"),
    "cut gz": (
        "bad.txt.gz",
        gzip.compress(GOOD)[:-9],
        r"is cut short \(the \.gz stream has no end\)",
    ),
    "broken gz": (
        "bad.txt.gz",
        gzip.compress(BINARY)[:900] + bytes(99) + gzip.compress(BINARY)[999:],
        r"is not a \.gz file \(.*\)",
    ),
    "nothing in gz": ("bad.txt.gz", gzip.compress(b""), "is empty once unpacked"),
    "not UTF-8 in gz": (
        "bad.txt.gz",
        gzip.compress(GOOD + b"\xff\n"),
        r"3001: is not UTF-8 \(.*\)",
    ),
    "no xz": ("bad.txt.xz", GOOD, r"is not a \.xz file \(.*\)"),
    "cut xz": (
        "bad.txt.xz",
        lzma.compress(GOOD)[:-40],
        r"is cut short \(the \.xz stream has no end\)",
    ),
}
# Ways of naming it.
ENTRIES = {
    "train": "train.py tiny.py:lm --workdir runs/new --data.train {}",
    "validation": "train.py tiny.py:mlm --workdir runs/new --data.validation {}",
    "mixture": "train.py tiny.py:lm --workdir runs/new --data.train train.en {} "
    "--data.train_weights 1 2",
    "packed": "train.py tiny.py:mlm --workdir runs/new --data.packing True --data.train {}",
    "one of two": "train.py tiny.py:translation --workdir runs/new --data.train train.en {}",
    "score": "eval.py runs/lm --sources {}",
}


def spoil(place, name, made):
    made(place / name) if callable(made) else (place / name).write_bytes(made)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_text(place, refused, fault, entry):
    name, made, says = FAULTS[fault]
    spoil(place, name, made)
    refused(ENTRIES[entry].format(name), f"{name}: ?{says}$")
