"""Texts that cannot be read, by every way in which a text is named."""

import gzip
import lzma
import random
import re
import time

import pytest

from mhe_jax.config import InputError
from mhe_jax.data import open_source
from mhe_jax.data.sources import stream

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
    "directory": ("bad.txt", lambda path: path.mkdir(), "holds no files"),
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
    "more behind gz": ("bad.txt.gz", gzip.compress(GOOD) + GOOD, r"is not a \.gz file \(.*\)"),
    "more behind xz": ("bad.txt.xz", lzma.compress(GOOD) + GOOD, r"is not a \.xz file \(.*\)"),
    "trap in gz": (
        "bad.txt.gz",
        gzip.compress(bytes(10_000_000)) * 100,
        r"unpacks to more than 100 times its size; if it should, set MHE_JAX_UNPACKED_LIMIT, "
        r"the most bytes that a file may unpack to",
    ),
    "only a mark": ("bad.txt", b"\xef\xbb\xbf", "has no text, only blank lines"),
    "a mark and blank lines": ("bad.txt", b"\xef\xbb\xbf\r\n \n", "has no text, only blank lines"),
    "half a surrogate pair": ("bad.txt", b"one\n\xed\xa0\x80\n", r"2: is not UTF-8 \(.*\)"),
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_text(place, refused, fault, entry):
    name, made, says = FAULTS[fault]
    spoil(place, name, made)
    field = r" \(data\.validation\)" if entry == "validation" else ""
    refused(ENTRIES[entry].format(name), f"{name}: ?{says}{field}$")


def test_a_name_that_is_not_utf8(place, refused):
    """As the shell gives it: a byte that is no character comes as half a surrogate pair."""
    (place / "bad\udcff.txt").write_bytes(GOOD)
    for entry in ENTRIES.values():
        refused(entry.format("bad\udcff.txt"), r"'bad\\udcff\.txt': is not UTF-8$")
    # A config in Python names files without the command line.
    with pytest.raises(InputError, match=r"udcff\.txt': the name of this file is not UTF-8$"):
        open_source(("bad\udcff.txt",), "text")


LONG = b"dog " * 15_000_000  # 60 MB


@pytest.mark.parametrize(
    ("name", "begin", "end", "entry"),
    [
        ("bad.tsv", b"", b"\tHund\n", "translation --data.train bad.tsv"),
        ("bad.en", b"", b"\n", "translation --data.train bad.en train.de"),
        ("bad.jsonl", b'{"text": "', b'"}\n', "lm --data.train bad.jsonl"),
        ("bad.jsonl", b'{"text": "', b'", "label": "a"}\n', "labels --data.train bad.jsonl"),
        ("bad.tsv", b"text\tlabel\n", b"\ta\n", "labels --data.train bad.tsv"),
        ("bad.csv", b"text,label\n", b",a\n", "labels --data.train bad.csv"),
    ],
)
def test_a_line_of_60_mb(place, refused, name, begin, end, entry):
    (place / name).write_bytes(begin + LONG + end)
    line = 1 + begin.count(b"\n")
    began = time.monotonic()
    refused(
        f"train.py tiny.py:{entry} --workdir runs/new",
        rf"{re.escape(name)}:{line}: has more than 16 MiB, too much for one example$",
    )
    assert time.monotonic() - began < 5


def test_a_text_of_one_line_of_60_mb(place):
    """A book may be one line: it is read and tokenized in parts."""
    (place / "long.txt").write_bytes(LONG + b"\n")
    began = time.monotonic()
    source = open_source(["long.txt"], "text", cache=place / "cache")
    assert next(stream(source, 30e6, 1000))[0].startswith("dog dog")
    assert time.monotonic() - began < 5
