"""Columns of Parquet and Arrow, and sources of several files: directories and patterns."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from text_for_tests import write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import files_of
from mhe_jax.data import columns
from mhe_jax.data.sources import stream

TEXTS = ["ein Häuschen", "", "two\nlines\r\n", "tab\there", "😀 ja", "last"]


def write(path, **named):
    parquet.write_table(pa.table(named), path, row_group_size=4)


def write_stream(path, size=2, **named):
    table = pa.table(named)
    with ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=size)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), None])
def test_texts_of_a_column(read, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 3)  # the array of a part begins inside a buffer
    texts = pa.array(TEXTS, pa.string())
    array = texts.cast(kind) if kind else texts.dictionary_encode()
    write(tmp_path / "a.parquet", number=list(range(6)), text=array)
    source = read("a.parquet")
    assert list(source) == TEXTS
    assert source.extent == sum(len(text.encode()) for text in TEXTS)
    assert [bytes(source.utf8(i)[0][:]) for i in range(6)] == [text.encode() for text in TEXTS]


def test_fields_are_one_text_or_a_pair(read, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", en=["one", "two"], de=["eins", "zwei"])
    assert list(read("a.parquet", fields=("de",))) == ["eins", "zwei"]
    pairs = read("a.parquet", content="pair", fields=("en", "de"))
    assert list(pairs) == [("one", "eins"), ("two", "zwei")]
    monkeypatch.setattr(columns, "_column_parts", lambda *_: pytest.fail("read again"))
    assert list(read("a.parquet", content="pair", fields=("en", "de"))) == list(pairs)


def test_what_datasets_has_saved(read, tmp_path):
    for split, texts in {"train": TEXTS, "test": ["so"]}.items():
        place = tmp_path / "saved" / split
        place.mkdir(parents=True)
        names = ["b.arrow", "a.arrow"]  # the order of state.json counts
        write_stream(place / names[0], text=texts[:4])
        write_stream(place / names[1], text=texts[4:] or ["end"])
        for name in ("cache-1b7223d7c4.arrow", "c.arrow"):
            write_stream(place / name, text=["mapped"])
        state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
        (place / "state.json").write_text(json.dumps(state))
        (place / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert list(read("saved/train")) == TEXTS
    # Without it, the caches of the library are left out, unless a pattern names them.
    (tmp_path / "saved/test/state.json").unlink()
    assert list(read("saved/test/*.arrow")) == ["end", "so", "mapped"]
    assert list(read("saved/test/cache-*.arrow")) == ["mapped"]
    with pytest.raises(InputError, match="saved: holds several splits: .*saved/test"):
        read("saved")


@pytest.mark.parametrize(
    "state",
    [
        *("{", "[]", '{"_data_files": []}', '{"_data_files": [{"filename": 1}]}'),
        '{"_data_files": [{"filename": "../a.arrow"}]}',
        '{"_data_files": [{"filename": "gone.arrow"}]}',
        '{"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i.arrow"}]}',
    ],
)
def test_a_state_that_does_not_name_all_data(read, tmp_path, state):
    (tmp_path / "saved").mkdir()
    write_stream(tmp_path / "saved" / "a.arrow", text=["one"])
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(InputError, match=r"saved/(state\.json: .*_data_files|gone\.arrow)"):
        read("saved")


NESTED = [
    {"id": 1, "pair": {"en": "one", "de": "eins"}, "a": {"b": {"c": "deep"}}, "a.b": "own"},
    {"id": 2, "pair": {"en": "two", "de": "zwei"}, "a": {"b": {"c": "deeper"}}, "a.b": "own 2"},
]


def write_rows(path, rows):
    if path.suffix == ".jsonl":
        write_lines(path, map(json.dumps, rows))
    else:
        table = pa.Table.from_pylist(rows)
        write_ = write if path.suffix == ".parquet" else write_stream
        write_(path, **dict(zip(table.column_names, table.columns, strict=True)))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.arrow"])
def test_nested_fields(read, tmp_path, name):
    write_rows(tmp_path / name, NESTED)
    pairs = read(name, content="pair", fields=("pair.en", "pair.de"))
    assert list(pairs) == [("one", "eins"), ("two", "zwei")]
    assert list(read(name, fields=("a.b.c",))) == ["deep", "deeper"]
    assert list(read(name, fields=("a.b",))) == ["own", "own 2"]  # rather than what is below `a`
    for field in ("pair.fr", "pair.", "en"):
        with pytest.raises(InputError, match=f"{name}.*'{field}'.*'pair.en', 'pair.de', 'a.b.c'"):
            read(name, fields=(field,))
    for field in ("pair", "id"):
        with pytest.raises(InputError, match=f"{name}.* field '{field}'"):
            read(name, fields=(field,))
    write_rows(tmp_path / name, [{"pair": {"en": "one"}}, {"pair": None}])
    with pytest.raises(InputError, match=rf"{name}:(row )?2: .*'pair.en'"):
        read(name, fields=("pair.en",))


BROKEN = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"d"]).buffers())


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"other": ["a"]}, "a.parquet: .*'text'.*'other'"),
        ({"text": [1, 2]}, "a.parquet: field 'text' is int64"),
        ({"text": [" ", "\n", ""]}, "a.parquet: has no text in text"),
        ({"text": ["a", "b", "c", None]}, "a.parquet:row 4: field 'text' is empty"),
        ({"text": BROKEN}, "a.parquet: is .*UTF8"),
    ],
    ids=["name", "numbers", "blank", "null", "bytes"],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_bad_columns(read, tmp_path, monkeypatch, column, says, rows):
    monkeypatch.setattr(columns, "ROWS", rows)
    write(tmp_path / "a.parquet", **column)
    with pytest.raises(InputError, match=f"^{tmp_path}/{says}"):
        read("a.parquet")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_damaged_files(read, tmp_path):
    for form, write_ in {"parquet": write, "arrow": write_stream}.items():
        path = tmp_path / f"a.{form}"
        write_(path, text=["long enough"] * 50)
        whole = path.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"text\n" * 100, b""):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=rf"a\.{form}: is .*"):
                read(f"a.{form}")
    table, path = pa.table({"text": ["aaaa", "bbbb"]}), tmp_path / "b.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, path, **plain)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaca"))
    with pytest.raises(InputError, match=r"b\.parquet: .*CRC"):
        read("b.parquet")


# Several files


def test_a_directory_or_pattern_is_all_its_files(read, tmp_path):
    (tmp_path / "c" / "deep").mkdir(parents=True)
    for name, lines in {"b": ["3", "4"], "a": ["1", "2"], "deep/c": ["5"]}.items():
        write_lines(tmp_path / "c" / f"{name}.txt", lines)
    for name in ("_SUCCESS", ".hidden.txt", ".a.txt.swp", "a.txt~"):
        (tmp_path / "c" / name).write_text("no\n")
    assert list(read("c")) == list(read("c/*.txt")) == ["1", "2", "3", "4"]
    assert list(read(f"{tmp_path}/c/[b].txt")) == ["3", "4"]
    assert list(read("c/**/*.txt")) == ["1", "2", "3", "4", "5"]
    assert read("c").name == "c"
    write_lines(tmp_path / "c*.txt", ["with a star"])
    assert list(read("c*.txt")) == ["with a star"]
    (tmp_path / "d[1]").mkdir()
    for i in range(2):
        write_lines(tmp_path / "d[1]" / f"part.{i:02}", [str(i)])
    assert list(read("d[1]")) == ["0", "1"]
    assert files_of(str(tmp_path / "d[1]"), "part.*") == ["part.00", "part.01"]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("*.gz", r"/\*\.gz: no file matches"),
        ("empty", "empty: holds no files"),
        ("mixed", r"mixed/.*mixed/.* have different formats"),
        ("beside/*", r"beside/README.md and .*beside/a.txt have"),
        ("link", r"link/b\.txt: no such file"),
        ("link/*.txt", r"link/b\.txt: no such file"),
    ],
)
def test_bad_patterns(read, tmp_path, written, says):
    for name in ("empty", "mixed", "beside", "link"):
        (tmp_path / name).mkdir()
    for name in ("mixed/a.txt", "beside/a.txt", "beside/README.md", "link/a.txt"):
        write_lines(tmp_path / name, ["a"])
    write_lines(tmp_path / "mixed/b.jsonl", ['{"text": "b"}'])
    (tmp_path / "link/b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(InputError, match=says):
        read(written)


def test_parallel_patterns(read, tmp_path):
    for i in range(2):
        write_lines(tmp_path / f"{i}.en", [f"one {i}", "two"])
        write_lines(tmp_path / f"{i}.de", [f"eins {i}", "zwei"])
    source = read("*.en", "*.de", content="pair")
    assert list(source)[::2] == [("one 0", "eins 0"), ("one 1", "eins 1")]
    (tmp_path / "1.de").unlink()
    with pytest.raises(InputError, match=r"\*.en names 2 files, \*.de names 1"):
        read("*.en", "*.de", content="pair")


def test_text_in_several_files_is_read_as_in_one(read, tmp_path):
    draw = random.Random(0)
    lines = ["".join(draw.choice("ab c") for _ in range(draw.randrange(1, 30))) for _ in range(90)]
    write_lines(tmp_path / "one.txt", lines)
    (tmp_path / "c").mkdir()
    for i, (first, stop) in enumerate([(0, 1), (1, 40), (40, 41), (41, 90)]):
        write_lines(tmp_path / "c" / f"{i}.txt", lines[first:stop])
    one, many = read("one.txt"), read("c")
    assert (len(many), many.extent) == (len(one), one.extent)
    for place in np.linspace(0, one.extent, 400):
        assert many.locate(place) == pytest.approx(one.locate(place))
        for longest in (3.0, 1e9):
            parts = [list(stream(source, place, longest)) for source in (one, many)]
            assert parts[0] == parts[1]
    assert [many.size(i) for i in range(90)] == [one.size(i) for i in range(90)]
