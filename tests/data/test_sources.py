"""Every kind of source gives its items, and every kind of bad input its own one line."""

import gzip
import json
import lzma
import random

import numpy as np
import pytest
from text_for_tests import sentences, write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.data import index
from mhe_jax.data.pieces import PIECE, pieces
from mhe_jax.data.sources import stream

LINES = ["ein Häuschen", "", "  two  spaces ", "tab\there", "😀 ja", "last"]


def test_text_lines(read, tmp_path):
    write_lines(tmp_path / "a.txt", LINES)
    source = read("a.txt")
    assert len(source) == len(LINES)
    assert [source[i] for i in range(len(source))] == LINES
    with pytest.raises(IndexError):
        source[len(LINES)]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\r\nfour")
    assert list(read("b.txt")) == ["one", "two", "", "four"]


def test_tsv(read, tmp_path):
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


PACK = {".gz": gzip.compress, ".xz": lzma.compress}
OF_FORM = {
    "jsonl": ('{"text": "x"}', ".JSONL .jsonlines .Ndjson .jsonl.GZ .jl .ldjson.xz"),
    "tsv": ("x\ty", ".Tsv .TAB .tsv.gz .TAB.Xz"),
    "txt": ("x", ".TXT.GZ .GZ .en .txt.xz"),
}


@pytest.mark.parametrize("form", OF_FORM)
def test_names_of_formats(read, tmp_path, form):
    line, suffixes = OF_FORM[form]
    for suffix in suffixes.split():
        packed = PACK.get(suffix[-3:].lower(), bytes)(f"{line}\n".encode())
        (tmp_path / f"a{suffix}").write_bytes(packed)
        found = list(read(f"a{suffix}", content="pair" if form == "tsv" else "text"))
        assert found == [("x", "y") if form == "tsv" else "x"]


def test_formats_that_are_not_text(read, tmp_path):
    for name in ("a.CSV", "a.Json", "a.csv.gz", "a.TAR.gz", "a.feather", "a.XLSX"):
        write_lines(tmp_path / name, ["x"])
        with pytest.raises(InputError, match=f"/{name}: "):
            read(name)


@pytest.mark.parametrize("blank", ["\n", "  \n", "\n\n \r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.tsv"])
def test_blank_lines_are_no_records(read, tmp_path, name, blank):
    end, content = "\r\n" if "\r" in blank else "\n", "text" if name == "a.jsonl" else "pair"
    one, two = ('{"text": "x"}', '{"text": "y"}') if name == "a.jsonl" else ("x\ta", "y\tb")
    for mark in ("", "\ufeff"):
        whole = f"{one}{end}{blank}{two}"
        for text in (f"{one}{end}{two}{end}{blank}", whole, f"{blank}{one}{end}{two}"):
            (tmp_path / name).write_bytes((mark + text).encode())
            expected = ["x", "y"] if content == "text" else [("x", "a"), ("y", "b")]
            assert list(read(name, content=content)) == expected
        (tmp_path / name).write_bytes(f"{mark}{whole}{end}broken".encode())
        with pytest.raises(InputError, match=rf"/{name}:{3 + blank.count(chr(10))}: (?!.*line)"):
            read(name, content=content)


def test_many_records(read, tmp_path):
    for size in (1, 1 << 16, (1 << 16) + 1):
        write_lines(tmp_path / "a.tsv", [f"{i}\t{i}\n" for i in range(size)])
        source = read("a.tsv", content="pair")
        assert len(source) == size
        for i in (0, size // 2, size - 1):
            assert source[i] == (str(i), str(i))


def test_blank_lines_of_text_stay(read, tmp_path):
    for name in ("a.en", "a.de", "a.tsv"):
        write_lines(tmp_path / name, ["x", "", "y"])
    assert list(read("a.en", "a.de", content="pair")) == [("x", "x"), ("", ""), ("y", "y")]
    assert list(read("a.tsv")) == ["x", "", "y"]


def test_a_link_is_what_its_own_name_says(read, tmp_path):
    """In a content-addressed store the file itself has no suffix."""
    for number, (suffix, pack) in enumerate(PACK.items()):
        (tmp_path / f"blob{number}").write_bytes(pack(b"one\ntwo\n"))
        (tmp_path / f"a.txt{suffix}").symlink_to(f"blob{number}")
        assert list(read(f"a.txt{suffix}")) == ["one", "two"]
    (tmp_path / "b.txt.xz").symlink_to("blob0")  # nothing that was unpacked by another name
    with pytest.raises(InputError, match=r"b.txt.xz: is not a .xz file"):
        read("b.txt.xz")


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
        patch.setattr(index, "_scan", lambda *_: pytest.fail("checked again"))
        assert list(read("a.txt")) == ["one", "two"]
        assert read("a.txt").key == first.key
    write_lines(path, ["one", "TWO", "three"])
    assert list(read("a.txt")) == ["one", "TWO", "three"]
    assert read("a.txt").key != first.key
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix == ".tmp"]


# Bytes of `a`; its suffix, with a `!` for pairs; and what is said after its path.
BAD = [
    (None, ".txt", ": no such file"),
    (b"a,b\n", ".csv", ": .csv is not a supported format"),
    (b"", ".txt", ": is empty"),
    (b"\n \r\n\t\n", ".txt", ": has no text"),
    (b"one\ntwo\nth\xffree\nfour\n", ".txt", ":3: is not UTF-8"),
    (b"one\nt\xc3\nthree\n", ".txt", ":2: is not UTF-8"),
    (b"one\nt\xe2\x82", ".txt", ":2: is not UTF-8"),
    (b"a\tb\nc\nd\te\n", ".tsv!", ":2: has 1 column, needs 2"),
    (b"a\tb\nc\td\ne\tf\tg", ".tsv!", ":3: has 3 columns, needs 2"),
    (b"a\na\tb\n", ".tsv", ":2: has several columns"),
    (b'{"de": "a", "en": "b"}\n{"de\n', ".jsonl!", ":2: is not JSON"),
    (b"[1]\n", ".jsonl!", ":1: is not a JSON object"),
    (b'{"de": "a", "en": "b"}\n{"de": "a", "fr": "b"}\n', ".jsonl!", ":2: has no field 'en'"),
    (b'{"de": "a", "en": 7}\n', ".jsonl!", ":1: field 'en' is not a string"),
    (b'{"de": "a\xff", "en": "b"}\n', ".jsonl!", ":1: is not UTF-8"),
    (b'{"de": "\\ud83d", "en": "b"}\n', ".jsonl!", ":1: has half a surrogate pair"),
    (b"a\tb\n", ".tsv.gz!", ": is not a .gz file"),
    (b"a\tb\n", ".tsv.xz!", ": is not a .xz file"),
    (gzip.compress(b"a\tb\n" * 999, mtime=0)[:-9], ".tsv.gz!", ": is cut short"),
    (lzma.compress(b"a\tb\n" * 999)[:-40], ".tsv.xz!", ": is cut short"),
    (gzip.compress(b"", mtime=0), ".tsv.gz!", ": is empty once unpacked"),
]


@pytest.mark.parametrize(("content", "suffix", "says"), BAD)
def test_bad_files_are_one_clear_line(read, tmp_path, content, suffix, says):
    name, pair = f"a{suffix.removesuffix('!')}", suffix.endswith("!")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    fields = ("de", "en") if pair else ("text",)
    with pytest.raises(InputError) as caught:
        read(name, content="pair" if pair else "text", fields=fields)
    assert str(caught.value).startswith(f"{tmp_path}/{name}{says}")
    assert "\n" not in str(caught.value)
    # Nothing of a bad file stays in the cache, except that it unpacked well.
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [p for p in left if p.suffix == ".tmp" or p.parent.name == "index"]


def test_bad_sources_are_one_clear_line(read, tmp_path):
    for name, lines in (("a.en", "xx"), ("a.de", "xxx"), ("a.jsonl", ["{}"])):
        write_lines(tmp_path / name, list(lines))
    for written, says in (
        ((".",), "have different formats"),
        (("a.en", "a.de"), "a.en has 2 lines, .*a.de has 3"),
        (("a.en",), "data=a.en: translation needs two parallel text files"),
        (("a", "b", "c"), "data has 3 names"),
        (("a.tsv", "b.tsv"), "data=a.tsv,b.tsv: only two text files can be parallel"),
        ((), "data is not set"),
        (("a.jsonl",), "data.fields=.*needs 2"),
    ):
        with pytest.raises(InputError, match=says):
            read(*written, content="pair")


def test_cache_that_cannot_be_written(tmp_path):
    write_lines(tmp_path / "file", ["x"])
    with pytest.raises(InputError, match=r"data.cache_directory=.*file"):
        cache_directory(str(tmp_path / "file"))


@pytest.mark.parametrize("letters", ["ab  ", "ä語😀 ", "ä語😀"])
def test_pieces_of_a_long_text(letters):
    just = b"abc " * (PIECE // 4 - 1) + b"abcd"
    assert [len(list(pieces(text))) for text in (just, just + b"e")] == [1, 2]
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


def test_stream_starts_inside_long_items_only(read, tmp_path):
    """And after the first item reads each from its beginning."""
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
    two = write_lines(tmp_path / "b.txt", ["first " + "one " * 2000, "second " + "two " * 2000])
    found = "".join(f"{part} " for part, _ in stream(read(two.name), 4000, 100))
    assert not found.startswith("first")
    assert "second two" in found
    whole = list(stream(source, 5000, 1e9))
    assert " ".join(part for part, _ in whole[:-1]) == lines[1]
    assert [last for _, last in whole] == [False] * (len(whole) - 2) + [True, True]


def test_places_cover_a_file_evenly(read, tmp_path):
    write_lines(tmp_path / "a.txt", sentences(1000))
    source = read("a.txt")
    found = [source.locate(place)[0] for place in np.linspace(0, source.extent, 20_000)]
    counts = np.bincount(found, minlength=len(source))
    sizes = np.array([source.size(i) for i in range(len(source))])
    np.testing.assert_allclose(counts / 20_000, sizes / source.extent, atol=1e-4)
    assert sizes.sum() == source.extent
