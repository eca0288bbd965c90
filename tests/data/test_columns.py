"""Columns of Parquet and Arrow, and sources of several files: directories and patterns."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from text_for_tests import small_tokenizer, write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import files_of
from mhe_jax.data import columns, unpacking
from mhe_jax.data.blocks import density
from mhe_jax.data.sources import stream
from mhe_jax.data.tokenizer import sample_text

TEXTS = ["ein Häuschen", "", "two\nlines\r\n", "tab\there", "😀 ja", "last"]


def write(path, **named):
    parquet.write_table(pa.table(named), path, row_group_size=4)


def write_stream(path, size=2, **named):
    table = pa.table(named)
    with ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=size)


@pytest.mark.parametrize(
    "made",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
def test_texts_of_a_column(read, tmp_path, made, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 3)  # the array of a part begins inside a buffer
    texts = pa.array(TEXTS, pa.string())
    array = texts.dictionary_encode() if pa.types.is_dictionary(made) else texts.cast(made)
    write(tmp_path / "a.parquet", number=list(range(6)), text=array)
    source = read("a.parquet")
    assert list(source) == TEXTS
    assert source.extent == sum(len(text.encode()) for text in TEXTS)
    assert [bytes(source.utf8(i)[0][:]) for i in range(6)] == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("fields", [["text"], None])
def test_no_more_than_a_part_of_a_file_is_held(tmp_path, fields, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 10)
    texts = [random.Random(i).randbytes(5000).hex() for i in range(800)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=20, compression="none")
    before, most = pa.total_allocated_bytes(), 0
    _, batches = columns._opened(path, ".parquet", fields)
    for _ in batches:
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < path.stat().st_size / 8


def test_fields_are_one_text_or_a_pair(read, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", en=["one", "two"], de=["eins", "zwei"])
    assert list(read("a.parquet", fields=("de",))) == ["eins", "zwei"]
    pairs = read("a.parquet", content="pair", fields=("en", "de"))
    assert list(pairs) == [("one", "eins"), ("two", "zwei")]
    monkeypatch.setattr(columns, "_column_parts", lambda *_: pytest.fail("read again"))
    assert list(read("a.parquet", content="pair", fields=("en", "de"))) == list(pairs)


def test_the_same_texts_have_one_key_and_others_another(read, tmp_path):
    write(tmp_path / "a.parquet", text=TEXTS)
    parquet.write_table(pa.table({"n": [0] * 6, "text": TEXTS}), tmp_path / "b.parquet")
    write(tmp_path / "c.parquet", text=["ein Häuschentwo", *TEXTS[2:], ""])
    keys = [read(f"{name}.parquet").key for name in "abc"]
    assert keys[0] == keys[1] != keys[2]


def test_a_file_is_copied_once(read, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", text=TEXTS)
    assert list(read("a.parquet")) == TEXTS
    with monkeypatch.context() as patch:
        patch.setattr(columns, "_column_parts", lambda *_: pytest.fail("read again"))
        assert list(read("a.parquet")) == TEXTS
    (copy,) = (tmp_path / "cache" / "unpacked").glob("*/*")
    copy.unlink()
    assert list(read("a.parquet")) == TEXTS
    write(tmp_path / "a.parquet", text=["other"])
    assert list(read("a.parquet")) == ["other"]
    assert len(list((tmp_path / "cache" / "unpacked").glob("*/*"))) == 1


def test_what_datasets_has_saved(read, tmp_path):
    for split, texts in {"train": TEXTS, "test": ["so"]}.items():
        place = tmp_path / "saved" / split
        place.mkdir(parents=True)
        names = ["b.arrow", "a.arrow"]  # the order of state.json counts
        write_stream(place / names[0], text=texts[:4])
        write_stream(place / names[1], text=texts[4:] or ["end"])
        for name in ("cache-1b7223d7c4.arrow", "cache-0_00000_of_00002.arrow", "c.arrow"):
            write_stream(place / name, text=["mapped"])
        state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
        (place / "state.json").write_text(json.dumps(state))
        (place / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert list(read("saved/train")) == TEXTS
    with pytest.raises(
        InputError, match=r"saved: holds several splits: name one of .*saved/test, "
    ):
        read("saved")


@pytest.mark.parametrize(
    "state",
    [
        *("", "{", "[]", "{}", '"a"', "\0", '{"_data_files": null}', '{"_data_files": []}'),
        *("[" * 9999, '{"_data_files": [{"filename": "a\\n.arrow"}]}'),
        *('{"_data_files": [1]}', '{"_data_files": [{"filename": 1}]}'),
        *(f'{{"_data_files": [{{"filename": "{name}"}}]}}' for name in ("../a.arrow", "/a.arrow")),
        '{"_data_files": [{"filename": "a.txt"}]}',
        '{"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i.arrow"}]}',
    ],
)
def test_a_state_that_does_not_name_all_data(read, tmp_path, state):
    (tmp_path / "saved").mkdir()
    write_stream(tmp_path / "saved" / "a.arrow", text=["one"])
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(InputError, match=r"^.*saved/state\.json: .*_data_files"):
        read("saved")


def test_a_pattern_leaves_out_the_caches_of_datasets(read, tmp_path):
    """But for one that names them; a directory may be called so."""
    place = tmp_path / "cache-a"
    place.mkdir()
    write_stream(place / "a.arrow", text=["one"])
    write_stream(place / "cache-1.arrow", text=["mapped"])
    for name in ("cache-a/*", "cache-a/*.arrow", "**/*.arrow", "cache-a"):
        assert list(read(name)) == ["one"]
    assert list(read("cache-a/cache-*.arrow")) == ["mapped"]


def test_a_state_that_names_a_file_that_is_gone(read, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=r"saved/a\.arrow: no such file"):
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


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize(
    ("rows", "has", "flag"),
    [
        ([{"id": 1, "en": "one", "de": "eins"}], "'en', 'de'", "en de"),
        (NESTED, "'pair.en', 'pair.de', 'a.b.c'", "pair.en pair.de"),
        ([{"the text": "x", "b": "y"}], "'the text', 'b'", "'the text' b"),
        ([{"id": 1}], "none", None),
    ],
)
def test_fields_are_told_in_the_order_of_the_file(read, tmp_path, name, rows, has, flag):
    write_rows(tmp_path / name, rows)
    with pytest.raises(InputError) as error:
        read(name, content="pair")
    said = str(error.value)
    assert has in said
    assert said.endswith(f"--data.fields {flag}") if flag else "--data.fields" not in said


def test_two_columns_of_one_name(read, tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: .*text"):
        read("a.parquet")


@pytest.mark.parametrize("rows", [1, 3])
def test_bad_columns(read, tmp_path, monkeypatch, rows):
    monkeypatch.setattr(columns, "ROWS", rows)
    write(
        tmp_path / "a.parquet",
        number=[1, 2, 3, 4, 5],
        null=["a", "b", "c", None, "d"],
        blank=[" ", "", "\n", "", ""],
        broken=pa.Array.from_buffers(
            pa.string(), 5, pa.array([b"a", b"b", b"c", b"\xff", b"d"], pa.binary()).buffers()
        ),
    )
    for field, message in {
        "text": "has no field 'text'; it has 'number', 'null', 'blank', 'broken' (data.fields)",
        "number": "field 'number' is int64, not text (data.fields)",
        "blank": "has no text in blank",
    }.items():
        with pytest.raises(InputError) as error:
            read("a.parquet", fields=(field,))
        assert str(error.value) == f"{tmp_path}/a.parquet: {message}"
    for field, message in {
        "null": "field 'null' is empty (null)",
        "broken": "field 'broken' is not UTF-8 (invalid start byte)",
    }.items():
        with pytest.raises(InputError) as error:
            read("a.parquet", fields=(field,))
        assert str(error.value) == f"{tmp_path}/a.parquet:row 4: {message}"
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_damaged_files(read, tmp_path, form):
    path = tmp_path / f"a.{form}"
    {"parquet": write, "arrow": write_stream}[form](path, text=["long enough"] * 50)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"text\n" * 100):
        path.write_bytes(damaged)
        with pytest.raises(
            InputError, match=rf"a\.{form}: is not an? .*, or is damaged \("
        ) as error:
            read(f"a.{form}")
        assert "\n" not in str(error.value)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=rf"a\.{form}: is empty"):
        read(f"a.{form}")


def test_a_stream_whose_texts_lie_outside_of_it(read, tmp_path):
    texts = [f"text {i:02}" for i in range(64)]
    write_stream(tmp_path / "a.arrow", 64, text=texts)
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    at = data.find(np.arange(0, 65 * 7, 7, np.int32).tobytes())
    data[at + 4 * 9 + 2] ^= 1  # the end of the ninth text
    (tmp_path / "a.arrow").write_bytes(data)
    said = "a.arrow: is not an Arrow stream, or is damaged .*offset"
    with pytest.raises(InputError, match=said):
        read("a.arrow")
    with pytest.raises(InputError, match=said):
        list(columns.rows_of(tmp_path / "a.arrow", tmp_path, named=True))


def test_a_column_that_unpacks_to_far_too_much(read, tmp_path, monkeypatch):
    """A text is in a file once, and a row is a number."""
    monkeypatch.setattr(unpacking, "ALWAYS", 1 << 16)
    parquet.write_table(pa.table({"text": ["x" * 10_000] * 1000}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="a.parquet: unpacks to more than 100 times its size"):
        read("a.parquet")
    monkeypatch.setenv("MHE_JAX_UNPACKED_LIMIT", "10000000")
    assert len(read("a.parquet")) == 1000


def test_checksums_of_parquet_are_looked_at(read, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["aaaa", "bbbb"]})
    parquet.write_table(
        table, path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaca"))
    with pytest.raises(InputError, match="a.parquet: is not a Parquet file, or is damaged .*CRC"):
        read("a.parquet")


def test_a_file_that_changes_while_it_is_read(read, tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write(path, text=["one", "two"])
    arrays = columns._column_parts

    def meddle(*arguments):
        yield from arrays(*arguments)
        write(path, text=["six", "ten"])

    with monkeypatch.context() as patch:
        patch.setattr(columns, "_column_parts", meddle)
        with pytest.raises(InputError, match=r"a.parquet: changed while it was being read$"):
            read("a.parquet")
    assert list(read("a.parquet")) == ["six", "ten"]


def test_a_text_too_long_for_a_pair(read, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "LONGEST", 1 << 20)
    long = "x" * ((1 << 20) + 1)
    write(tmp_path / "a.parquet", en=["one", long], de=["eins", "zwei"])
    with pytest.raises(InputError, match=r"a.parquet:row 2: has more than 1 MiB"):
        read("a.parquet", content="pair", fields=("en", "de"))
    assert list(read("a.parquet", fields=("en",))) == ["one", long]


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


def test_patterns_begin_in_a_directory_whose_name_is_none(tmp_path):
    (tmp_path / "a[1]").mkdir()
    write_lines(tmp_path / "a[1]" / "b.txt", ["yes"])
    assert files_of(str(tmp_path / "a[1]"), "*.txt") == ["b.txt"]


def test_parallel_patterns(read, tmp_path):
    for i in range(2):
        write_lines(tmp_path / f"{i}.en", [f"one {i}", "two"])
        write_lines(tmp_path / f"{i}.de", [f"eins {i}", "zwei"])
    source = read("*.en", "*.de", content="pair")
    assert list(source)[::2] == [("one 0", "eins 0"), ("one 1", "eins 1")]
    (tmp_path / "1.de").unlink()
    with pytest.raises(
        InputError, match=r"\*.en names 2 files, \*.de names 1; parallel files have"
    ):
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


def test_the_key_of_several_files_is_of_their_order_and_content(read, tmp_path):
    for name, lines in {
        "a/1": "x",
        "a/2": "y",
        "b/1": "y",
        "b/2": "x",
        "c/7": "x",
        "c/8": "y",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / f"{name}.txt", [lines])
    a, b, c = (read(name).key for name in "abc")
    assert a == c != b


def test_bad_patterns(read, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    write_lines(tmp_path / "mixed" / "a.txt", ["a"])
    write_lines(tmp_path / "mixed" / "b.jsonl", ['{"text": "b"}'])
    for name, message in {
        "*.gz": f"{tmp_path}/*.gz: no file matches",
        "empty": f"{tmp_path}/empty: holds no files",
        "mixed": f"{tmp_path}/mixed/b.jsonl and {tmp_path}/mixed/a.txt have different formats: "
        f"name one of them by a pattern, such as {tmp_path}/mixed/*.jsonl",
    }.items():
        with pytest.raises(InputError) as error:
            read(name)
        assert str(error.value) == message


@pytest.mark.parametrize(
    "beside", ["README.md", "LICENSE", "b.txt.bak", "c.tmp", "c.zip", "i.json"]
)
@pytest.mark.parametrize(("name", "line"), [("b.txt", "x"), ("b.jsonl", '{"text": "x"}')])
@pytest.mark.parametrize("written", ["d", "d/*"])
def test_what_lies_beside_the_data_is_not_data(read, tmp_path, beside, name, line, written):
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / name, [line])
    (tmp_path / "d" / beside).write_text("not data\n")
    with pytest.raises(InputError) as error:
        read(written)
    pattern = f"d/*{(tmp_path / name).suffix}"
    assert str(error.value).endswith(f"{tmp_path}/{pattern}")
    assert f"d/{beside} " in str(error.value)
    assert list(read(pattern)) == ["x"]


def test_texts_that_are_numbered(read, tmp_path):
    (tmp_path / "d").mkdir()
    for i in range(2):
        write_lines(tmp_path / "d" / f"part.{i:02}", [str(i)])
    assert list(read("d")) == list(read("d/part.*")) == ["0", "1"]


def test_a_tokenizer_is_trained_on_a_column(read, tmp_path):
    write(tmp_path / "a.parquet", text=["the cat sat\non the mat"] * 30)
    tokenizer = small_tokenizer()
    source = read("a.parquet")
    assert tokenizer.decode(tokenizer.encode(source[0])) == source[0]


def test_a_column_of_which_hardly_a_row_has_text(read, tmp_path, tokenizer):
    """Of the rows that are looked at, none has any."""
    texts = [*[""] * 20_000, "the only text of all"]
    write(tmp_path / "a.parquet", text=texts)
    source = read("a.parquet")
    assert list(sample_text(source)) == [texts[-1]]
    tokens, bytes_per_token = density(source, tokenizer)
    assert tokens > 0
    assert bytes_per_token > 0


@pytest.mark.parametrize("written", ["d", "d/*.txt"])
def test_a_shard_that_is_a_link_to_nothing(read, tmp_path, written):
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / "a.txt", ["one"])
    (tmp_path / "d" / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(InputError, match=r"d/b.txt: no such file$"):
        read(written)
