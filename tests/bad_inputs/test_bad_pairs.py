"""Pairs that are none, by every way in which a source of pairs is named."""

import gzip
import json

import pytest

TRAIN = "train.py tiny.py:translation --workdir runs/new --data.train"
ENTRIES = {
    "train": f"{TRAIN} {{}}",
    "validation": f"{TRAIN} train.en train.de --data.validation {{}}",
    "mixture": f"{TRAIN} train.en train.de {{}} --data.train_weights 2 1",
    "score": "eval.py runs/translation --sources {}",
}
PAIR = json.dumps({"en": "one dog", "de": "ein Hund"}) + "\n"


def objects(*lines):
    return (PAIR * 20 + "".join(line + "\n" for line in lines)).encode()


# Bytes of a table of pairs, and what is said of them after its name.
TABLES = {
    "one column": ("a\tb\nc\nd\te\n", ":2: has 1 column, needs 2 (source, tab, target)"),
    "three columns": ("a\tb\n" * 9 + "c\td\te", ":10: has 3 columns, needs 2"),
    "no tab at all": ("one dog\n" * 9, ":1: has 1 column, needs 2"),
    "blank": ("\t\n\t\n", ": has no text, only blank lines"),
    "empty": ("", ": is empty"),
}
# The same of lines of JSON.
OBJECTS = {
    "half an object": (objects('{"en": "one'), ":21: is not JSON ("),
    "a list": (objects('["one", "ein"]'), ":21: is not a JSON object"),
    "no field": (objects('{"en": "x", "fr": "y"}'), ":21: has no field 'de'; it has 'en', 'fr' (d"),
    "a number": (objects('{"en": "x", "de": 7}'), ":21: field 'de' is not a string (data.fields)"),
    "a null": (objects('{"en": null, "de": "x"}'), ":21: field 'en' is not a string"),
    "half a surrogate": (objects('{"en": "x", "de": "\\ud83d"}'), ":21: field 'de' has half a sur"),
    "too deep": (objects("[" * 100_000), ":21: is not JSON that can be read (nested too deeply)"),
    "not UTF-8": (
        objects() + b'{"en": "\xff", "de": ""}',
        ":21: is not UTF-8 (invalid start byte)",
    ),
    "a line of 10 MB": (
        objects() + b'{"en": "' + b"dog " * 2_500_000 + b"\n",
        ":21: is not JSON (",
    ),
    "half a surrogate in bytes": (
        objects() + b'{"en": "\xed\xa0\x80", "de": ""}',
        ":21: is not UTF-8 (invalid continuation byte)",
    ),
    "only a mark": (b"\xef\xbb\xbf", ": has no text in en, de"),
    "no text": (b'{"en": "", "de": " "}\n' * 3, ": has no text in en, de"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fault", TABLES)
def test_a_table(place, refused, said, fault, entry):
    text, says = TABLES[fault]
    (place / "bad.tsv").write_text(text)
    refused(ENTRIES[entry].format("bad.tsv"), said("bad.tsv", says))


@pytest.mark.parametrize("entry", ["train", "validation"])
@pytest.mark.parametrize("fault", OBJECTS)
def test_objects(place, refused, said, fault, entry):
    text, says = OBJECTS[fault]
    (place / "bad.jsonl").write_bytes(text)
    (place / "good.jsonl").write_bytes(objects())
    files = {"train": "{0}", "validation": "good.jsonl --data.validation {0}"}[entry]
    refused(f"{TRAIN} {files.format('bad.jsonl')} --data.fields en de", said("bad.jsonl", says))


def test_a_table_in_gz(place, refused):
    (place / "bad.tsv.gz").write_bytes(gzip.compress(b"a\tb\nc\n"))
    refused(ENTRIES["score"].format("bad.tsv.gz"), r"bad\.tsv\.gz:2: has 1 column, needs 2")


@pytest.mark.parametrize("entry", ENTRIES)
def test_two_files_of_other_lengths(place, refused, entry):
    (place / "short.de").write_text("ein Hund\n")
    field = r" \(data\.validation\)" if entry == "validation" else ""
    refused(
        ENTRIES[entry].format("train.en short.de"),
        r"train\.en has 200 lines, short\.de has 1; parallel files have the same number"
        f"{field}$",
    )


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (
            "train.en",
            r"data\.train=train\.en: translation needs two parallel text files, a \.tsv, a \.json",
        ),
        ("train.en train.de dev.en", r"data\.train is .*: takes one source or two parallel files;"),
        ("a.tsv b.tsv", r"data\.train=a\.tsv,b\.tsv: only two text files can be parallel$"),
        (
            "demo:train b.tsv",
            r"data\.train=demo:train,b\.tsv: only two text files can be parallel$",
        ),
        ("demo:dev", r"demo:dev: has no split 'dev'; it has train, validation, test$"),
        (
            "good.jsonl --data.fields en",
            r"data\.fields=\('en',\): good\.jsonl needs 2; .* --data\.fields en de$",
        ),
        ("good.jsonl --data.fields en en", r"data\.fields=\('en', 'en'\): good\.jsonl needs 2; "),
        (
            "train.en train.de a.tsv --data.train_weights 1",
            r"data\.train_weights is \(1\.0,\): takes",
        ),
        ("train.en train.de a.tsv --data.train_weights 1 0", r"data\.train_weights is .*above 0$"),
        (
            "train.en train.de a.tsv --data.train_weights 1 nan",
            r"data\.train_weights is .*above 0$",
        ),
    ],
)
def test_names(place, refused, sources, says):
    (place / "good.jsonl").write_bytes(objects())
    refused(f"{TRAIN} {sources}", says)


def test_no_pair_is_short_enough(place, refused):
    (place / "long.tsv").write_text(f"{'dog ' * 50}\t{'Hund ' * 50}\na\t\n")
    refused(
        f"{TRAIN} long.tsv --model.vocabulary_size 270",
        r"long\.tsv: none of 2 pairs can be used: 1 have an empty side, 1 are longer than "
        r"data\.sequence_length=16 tokens$",
    )
