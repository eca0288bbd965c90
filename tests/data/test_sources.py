"""Every kind of source gives its items, and every kind of bad input its own one line."""

import gzip
import json
import lzma
import os
import random

import numpy as np
import pytest
from text_for_tests import REAL_DATA, sentences, write_lines

from mhe_jax.config import InputError
from mhe_jax.data import index, open_source, unpacking
from mhe_jax.data.pieces import PIECE, pieces
from mhe_jax.data.sources import stream


@pytest.fixture(params=[7, 64, 1 << 20])
def chunk(request, monkeypatch):
    """Chunks that cut lines and characters anywhere."""
    for module in (index, unpacking):
        monkeypatch.setattr(module, "CHUNK", request.param)


LINES = ["ein Häuschen", "", "  two  spaces ", "tab\there", "😀 ja", "last"]


def test_text_lines(read, tmp_path, chunk):
    write_lines(tmp_path / "a.txt", LINES)
    source = read("a.txt")
    assert len(source) == len(LINES)
    assert [source[i] for i in range(len(source))] == LINES
    with pytest.raises(IndexError):
        source[len(LINES)]


def test_last_line_without_end_and_carriage_returns_and_mark(read, tmp_path, chunk):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\r\nfour")
    source = read("a.txt")
    assert list(source) == ["one", "two", "", "four"]


def test_random_files(read, tmp_path, monkeypatch):
    draw = random.Random(0)
    for i in range(30):
        monkeypatch.setattr(index, "CHUNK", draw.randrange(4, 50))
        lines = [
            "".join(draw.choice("ab ä語😀\t") for _ in range(draw.randrange(20))) + "."
            for _ in range(draw.randrange(1, 40))
        ]
        write_lines(tmp_path / f"{i}.txt", lines)
        assert list(read(f"{i}.txt")) == lines


def test_two_parallel_files(read, tmp_path):
    write_lines(tmp_path / "a.en", ["one", "two"])
    write_lines(tmp_path / "a.de", ["eins", "zwei"])
    source = read("a.en", "a.de", content="pair")
    assert list(source) == [("one", "eins"), ("two", "zwei")]


def test_tsv(read, tmp_path, chunk):
    write_lines(tmp_path / "a.tsv", ["one\teins", "two  x\tzwei", "\tdrei"])
    assert list(read("a.tsv", content="pair")) == [
        ("one", "eins"),
        ("two  x", "zwei"),
        ("", "drei"),
    ]
    write_lines(tmp_path / "b.tsv", ["one", "two"])
    assert list(read("b.tsv")) == ["one", "two"]


def test_jsonl(read, tmp_path):
    rows = [{"id": 1, "de": "ja\nwohl", "en": "yes"}, {"de": "😀ü", "en": ""}]
    write_lines(tmp_path / "a.jsonl", [json.dumps(row) for row in rows])
    pairs = read("a.jsonl", content="pair", fields=("de", "en"))
    assert list(pairs) == [("ja\nwohl", "yes"), ("😀ü", "")]
    assert list(read("a.jsonl", fields=("de",))) == ["ja\nwohl", "😀ü"]


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.jsonl"])
def test_packed_equals_plain(read, tmp_path, suffix, name):
    lines = {
        "a.txt": sentences(50),
        "a.tsv": [f"{line}\t{line}" for line in sentences(50)],
        "a.jsonl": [json.dumps({"x": line, "y": line}) for line in sentences(50)],
    }[name]
    content = "text" if name == "a.txt" else "pair"
    plain = write_lines(tmp_path / name, lines)
    opener = gzip.open if suffix == ".gz" else lzma.open
    with opener(tmp_path / (name + suffix), "wb") as out:
        out.write(plain.read_bytes())
    one, other = (read(path, content=content, fields=("x", "y")) for path in (name, name + suffix))
    assert list(one) == list(other)


ROW = '{"text": "x"}'


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((f"a{end}", ROW) for end in (".JSONL", ".jsonlines", ".ndjson", ".Ndjson", ".jsonl.GZ")),
        *((f"a{end}", ROW) for end in (".jl", ".LDJSON", ".ldjson.gz")),
        *((f"a{end}", "x\ty") for end in (".Tsv", ".TSV", ".tab", ".TAB.Xz")),
        *((f"a{end}", "x") for end in (".TXT.GZ", ".GZ", ".en")),
    ],
)
def test_names_of_formats(read, tmp_path, name, line):
    packing = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:].lower(), bytes)
    (tmp_path / name).write_bytes(packing(f"{line}\n".encode()))
    pair = "\t" in line
    assert list(read(name, content="pair" if pair else "text")) == [("x", "y") if pair else "x"]


@pytest.mark.parametrize(
    "name", ["a.CSV", "a.Json", "a.ZIP", "a.bz2", "a.TAR.gz", "a.feather", "a.sgm", "a.XLSX"]
)
def test_formats_that_are_not_text(read, tmp_path, name):
    write_lines(tmp_path / name, ["x"])
    with pytest.raises(InputError, match=rf"/{name}: "):
        read(name)


ROWS = [ROW, ROW.replace('"x"', '"y"')]
PAIRS = ["x\ta", "y\tb"]


@pytest.mark.parametrize(("name", "lines"), [("a.jsonl", ROWS), ("a.tsv", PAIRS)])
@pytest.mark.parametrize("blank", ["\n", "\r\n", "  \n", "\n\n \r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_blank_lines_are_no_records(read, tmp_path, name, lines, blank, mark):
    end = "\r\n" if "\r" in blank else "\n"
    pair = name == "a.tsv"
    for text in (
        f"{end.join(lines)}{end}{blank}",
        f"{lines[0]}{end}{blank}{lines[1]}",
        f"{blank}{end.join(lines)}",
    ):
        (tmp_path / name).write_bytes((mark + text).encode())
        found = list(read(name, content="pair" if pair else "text"))
        assert found == ([("x", "a"), ("y", "b")] if pair else ["x", "y"])
    (tmp_path / name).write_bytes(f"{mark}{lines[0]}{end}{blank}broken".encode())
    number = 2 + blank.count("\n")
    with pytest.raises(InputError, match=rf"/{name}:{number}: (?!.*line)"):
        read(name, content="pair" if pair else "text")


@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1])
def test_many_records(read, tmp_path, size):
    write_lines(tmp_path / "a.tsv", [f"{i}\t{i}\n" for i in range(size)])
    source = read("a.tsv", content="pair")
    assert len(source) == size
    assert [source[i] for i in {0, size // 2, size - 1}] == [
        (str(i), str(i)) for i in {0, size // 2, size - 1}
    ]


def test_blank_lines_of_text_stay(read, tmp_path):
    for name in ("a.en", "a.de", "a.tsv"):
        write_lines(tmp_path / name, ["x", "", "y"])
    assert list(read("a.en", "a.de", content="pair")) == [("x", "x"), ("", ""), ("y", "y")]
    assert list(read("a.tsv")) == ["x", "", "y"]


@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        *((f"{a}\t{b}", True) for a, b in [("source", "target"), ("en", "de"), ("src", "tgt")]),
        *((f"{a}\t{b}", True) for a, b in [("EN", "pt-BR"), ("English", "German")]),
        *(
            (f"{a}\t{b}", True)
            for a, b in [("Source text", "Target text"), ("src_text", "tgt_text")]
        ),
        *((f"{a}\t{b}", False) for a, b in [("ja", "yes"), ("is it", "es ist"), ("no", "no")]),
        *(
            (f"{a}\t{b}", False)
            for a, b in [("Hallo", "Hello"), ("English", "Englisch."), ("", "")]
        ),
    ],
)
def test_a_header_of_pairs_is_told_once(read, tmp_path, capsys, first, is_header):
    write_lines(tmp_path / "a.tsv", [first, "one\teins"])
    for _ in range(2):
        assert len(read("a.tsv", content="pair")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == said.count(f"{tmp_path}/a.tsv") == is_header


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_link_is_what_its_own_name_says(read, tmp_path, suffix):
    """In a content-addressed store the file itself has no suffix."""
    pack = gzip.compress if suffix == ".gz" else lzma.compress
    (tmp_path / "blob").write_bytes(pack(b"one\ntwo\n"))
    (tmp_path / f"a.txt{suffix}").symlink_to("blob")
    assert list(read(f"a.txt{suffix}")) == ["one", "two"]


def test_two_names_of_one_file_share_nothing(read, tmp_path):
    (tmp_path / "blob").write_bytes(gzip.compress(b"one\n"))
    for name in ("a.txt.gz", "a.txt.xz", "a.txt"):
        (tmp_path / name).symlink_to("blob")
    assert list(read("a.txt.gz")) == ["one"]
    with pytest.raises(InputError, match=r"a.txt.xz: is not a .xz file"):
        read("a.txt.xz")
    with pytest.raises(InputError, match=r"a.txt:1: is not UTF-8"):
        read("a.txt")


def test_demo(read):
    pytest.importorskip("num2words", reason="needs the extra demo")
    pytest.importorskip("babel", reason="needs the extra demo")
    source = read("demo:test", content="pair")
    assert len(source) > 100
    assert len(source[0]) == 2


def test_cache_is_used_and_a_changed_file_is_read_again(read, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.txt", ["one", "two"])
    first = read("a.txt")
    with monkeypatch.context() as patch:
        patch.setattr(index, "_scan_lines", lambda *_: pytest.fail("checked again"))
        assert list(read("a.txt")) == ["one", "two"]
        assert read("a.txt").key == first.key
    write_lines(path, ["one", "TWO", "three"])
    assert list(read("a.txt")) == ["one", "TWO", "three"]
    assert read("a.txt").key != first.key
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix == ".tmp"]


def test_broken_index_is_built_again(read, tmp_path):
    write_lines(tmp_path / "a.txt", ["one", "two"])
    read("a.txt")
    (built,) = (tmp_path / "cache" / "index").iterdir()
    os.truncate(built, 16)
    assert list(read("a.txt")) == ["one", "two"]


# file name -> bytes; what is opened; the message, with {dir} for the directory.
BAD = {
    "missing": ({}, ["a.txt"], "{dir}/a.txt: no such file"),
    "a table": (
        {"a.csv": b"a,b\n"},
        ["a.csv"],
        "{dir}/a.csv: .csv is not a supported format",
    ),
    "packed": ({"a.csv.gz": b""}, ["a.csv.gz"], "{dir}/a.csv.gz: .csv is not a supported format"),
    "empty": ({"a.txt": b""}, ["a.txt"], "{dir}/a.txt: is empty"),
    "directory": ({}, ["."], "{dir}: holds no files"),
    "blank": ({"a.txt": b"\n \r\n\t\n"}, ["a.txt"], "{dir}/a.txt: has no text, only blank lines"),
    "bytes": (
        {"a.txt": b"one\ntwo\nth\xffree\nfour\n"},
        ["a.txt"],
        "{dir}/a.txt:3: is not UTF-8 (invalid start byte)",
    ),
    "cut character": (
        {"a.txt": b"one\nt\xc3\nthree\n"},
        ["a.txt"],
        "{dir}/a.txt:2: is not UTF-8 (invalid continuation byte)",
    ),
    "cut at the end": (
        {"a.txt": b"one\nt\xe2\x82"},
        ["a.txt"],
        "{dir}/a.txt:2: is not UTF-8 (unexpected end of data)",
    ),
    "one column": (
        {"a.tsv": b"a\tb\nc\nd\te\n"},
        ["a.tsv"],
        "{dir}/a.tsv:2: has 1 column, needs 2 (source, tab, target)",
    ),
    "three columns": (
        {"a.tsv": b"a\tb\nc\td\ne\tf\tg"},
        ["a.tsv"],
        "{dir}/a.tsv:3: has 3 columns, needs 2 (source, tab, target)",
    ),
    "no json": (
        {"a.jsonl": b'{"de": "a", "en": "b"}\n{"de\n'},
        ["a.jsonl"],
        "{dir}/a.jsonl:2: is not JSON (",
    ),
    "no object": ({"a.jsonl": b"[1]\n"}, ["a.jsonl"], "{dir}/a.jsonl:1: is not a JSON object"),
    "no field": (
        {"a.jsonl": b'{"de": "a", "en": "b"}\n{"de": "a", "fr": "b"}\n'},
        ["a.jsonl"],
        "{dir}/a.jsonl:2: has no field 'en'; it has 'de', 'fr' (data.fields)",
    ),
    "no string": (
        {"a.jsonl": b'{"de": "a", "en": 7}\n'},
        ["a.jsonl"],
        "{dir}/a.jsonl:1: field 'en' is not a string (data.fields)",
    ),
    "json bytes": (
        {"a.jsonl": b'{"de": "a\xff", "en": "b"}\n'},
        ["a.jsonl"],
        "{dir}/a.jsonl:1: is not UTF-8 (invalid start byte)",
    ),
    "half a pair": (
        {"a.jsonl": b'{"de": "\\ud83d", "en": "b"}\n'},
        ["a.jsonl"],
        "{dir}/a.jsonl:1: field 'de' has half a surrogate pair",
    ),
    "no gz": ({"a.tsv.gz": b"a\tb\n"}, ["a.tsv.gz"], "{dir}/a.tsv.gz: is not a .gz file ("),
    "no xz": ({"a.tsv.xz": b"a\tb\n"}, ["a.tsv.xz"], "{dir}/a.tsv.xz: is not a .xz file ("),
    "cut gz": (
        {"a.tsv.gz": gzip.compress(b"a\tb\n" * 999)[:-9]},
        ["a.tsv.gz"],
        "{dir}/a.tsv.gz: is cut short (the .gz stream has no end)",
    ),
    "cut xz": (
        {"a.tsv.xz": lzma.compress(b"a\tb\n" * 999)[:-40]},
        ["a.tsv.xz"],
        "{dir}/a.tsv.xz: is cut short (the .xz stream has no end)",
    ),
    "nothing packed": (
        {"a.tsv.gz": gzip.compress(b"")},
        ["a.tsv.gz"],
        "{dir}/a.tsv.gz: is empty once unpacked",
    ),
    "lengths": (
        {"a.en": b"a\nb\n", "a.de": b"a\nb\nc\n"},
        ["a.en", "a.de"],
        "{dir}/a.en has 2 lines, {dir}/a.de has 3; parallel files have the same number",
    ),
    "one text": (
        {"a.en": b"a\n"},
        ["a.en"],
        "data=a.en: translation needs two parallel text files, a .tsv, a .jsonl, a ",
    ),
    "three texts": ({}, ["a", "b", "c"], "data has 3 names, allowed is one source or two"),
    "two tables": ({}, ["a.tsv", "b.tsv"], "data=a.tsv,b.tsv: only two text files can be parallel"),
    "nothing": ({}, [], "data is not set: it names the file or data set to read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(read, tmp_path, chunk, case):
    files, written, message = BAD[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    text = case in ("missing", "empty", "directory", "blank") or written == ["a.txt"]
    with pytest.raises(InputError) as caught:
        read(
            *written, content="text" if text else "pair", fields=("text",) if text else ("de", "en")
        )
    said = str(caught.value)
    assert said.startswith(message.format(dir=tmp_path))
    assert "\n" not in said
    # Nothing of a bad file stays in the cache, except that it unpacked well.
    left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert not [p for p in left if p.suffix == ".tmp"]
    if case != "lengths":
        assert not [p for p in left if p.parent.name == "index"]


def test_wrong_number_of_fields(read, tmp_path):
    write_lines(tmp_path / "a.jsonl", ["{}"])
    with pytest.raises(InputError, match=r"data.fields=\('text',\): .* needs 2"):
        read("a.jsonl", content="pair")


def test_cache_that_cannot_be_written(tmp_path):
    write_lines(tmp_path / "file", ["x"])
    from mhe_jax.config.files import cache_directory

    with pytest.raises(InputError, match=r"data.cache_directory=.*file"):
        cache_directory(str(tmp_path / "file"))


@pytest.mark.parametrize("letters", ["ab  ", "ä語😀 ", "ä語😀"])
def test_pieces_of_a_long_text(letters):
    draw = random.Random(1)
    for _ in range(20):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(1, 5 * PIECE)))
        parts = list(pieces(text.encode()))
        assert max(len(part.encode()) for part in parts) <= PIECE
        # Only single spaces at the cuts are missing.
        at = 0
        for part in parts:
            at += text[at:].startswith(" " + part) and not text[at:].startswith(part)
            assert text[at:].startswith(part)
            at += len(part)
        assert at == len(text)
        end = "".join(pieces(text.encode(), 0.5))
        assert len(text.encode()) * 0.4 - PIECE < len(end.encode()) <= len(text.encode()) * 0.6 + 4


def test_a_text_of_just_a_piece_is_one():
    text = b"abc " * (PIECE // 4 - 1) + b"abcd"
    assert list(pieces(text)) == [text.decode()]
    assert len(list(pieces(text + b"e"))) == 2


def test_stream_starts_inside_long_items_only(read, tmp_path):
    lines = ["short one", "word " * 2000 + "end", "short two"]
    write_lines(tmp_path / "a.txt", lines)
    source = read("a.txt")
    assert source.locate(0) == (0, 0.0)
    assert source.locate(5)[0] == 0
    assert source.locate(10)[0] == 1
    assert source.locate(source.extent - 1)[0] == 2
    assert source.locate(source.extent)[0] == 2
    assert next(stream(source, 5, 100)) == ("short one", True)
    middle = list(stream(source, 5000, 100))
    assert middle[0][0].startswith("word word")
    assert 4900 < sum(len(part) + 1 for part, _ in middle[:-1]) < 5100
    assert middle[-1] == ("short two", True)
    whole = list(stream(source, 5000, 1e9))
    assert " ".join(part for part, _ in whole[:-1]) == lines[1]
    assert [last for _, last in whole] == [False] * (len(whole) - 2) + [True, True]


def test_after_the_first_item_each_is_read_from_its_beginning(read, tmp_path):
    lines = ["first " + "one " * 2000, "second " + "two " * 2000]
    write_lines(tmp_path / "a.txt", lines)
    found = "".join(f"{part} " for part, _ in stream(read("a.txt"), 4000, 100))
    assert not found.startswith("first")
    assert "second two" in found


def test_places_cover_a_file_evenly(read, tmp_path):
    write_lines(tmp_path / "a.txt", sentences(1000))
    source = read("a.txt")
    found = [source.locate(place)[0] for place in np.linspace(0, source.extent, 20_000)]
    counts = np.bincount(found, minlength=len(source))
    sizes = np.array([source.size(i) for i in range(len(source))])
    np.testing.assert_allclose(counts / 20_000, sizes / source.extent, atol=1e-4)
    assert sizes.sum() == source.extent


def test_multi30k():
    raw = REAL_DATA / "multi30k-en-de" / "raw"
    if not raw.exists():
        pytest.skip(f"the real data is not at {raw}")
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as cache:
        source = open_source(
            ["train.en.gz", "train.de.gz"], "pair", directory=str(raw), cache=Path(cache)
        )
        assert len(source) == 29_000
        assert source[0] == (
            "Two young, White males are outside near many bushes.",
            "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
        )
        with gzip.open(raw / "train.de.gz", "rt", encoding="utf-8", newline="\n") as file:
            assert [line.rstrip("\n") for line in file] == [pair[1] for pair in source]
