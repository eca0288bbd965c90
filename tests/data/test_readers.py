"""Every format gives its records, and every kind of bad input its own one line."""

import gzip
import json
import lzma

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from text_for_tests import sentences, write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import files_of
from mhe_jax.data import readers

LINES = ["ein Häuschen", "", "  two  spaces ", "tab\there", "😀 ja\u2028so", '"quoted', "last"]
PACK = {".gz": lambda data: gzip.compress(data, mtime=0), ".xz": lzma.compress}


def texts(source):
    return [item[0] if len(item) == 1 else item for item in source]


def test_lines(read, tmp_path):
    write_lines(tmp_path / "a.txt", LINES)
    source = read("a.txt")
    assert texts(source) == texts(source) == LINES
    assert (len(source), source.size) == (len(LINES), sum(len(line.encode()) for line in LINES))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\r\nf\rour")
    assert texts(read("b.txt")) == ["one", "two", "", "f\rour"]
    assert texts(read("a.txt", max_examples=2)) == LINES[:2]


TABLES = {
    "a.tsv": '\n \nde\ten\nja "wohl"\tyes\n\n\tno \n',
    "a.csv": '\r\nen,x,de\r\nyes,1,"ja ""wohl"""\r\n \r\nno ,2,\r\n',
    "a.jsonl": '\n{"de": "ja \\"wohl\\"", "en": "yes", "n": [1]}\n \n{"en": "no ", "de": ""}',
}
NAMES = {
    "a.tsv": ".Tsv .TAB .tsv.gz .TAB.Xz",
    "a.csv": ".CSV .csv.gz",
    "a.jsonl": ".JSONL .jsonlines .Ndjson .jsonl.GZ .jl .ldjson.xz",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(read, tmp_path, name):
    for suffix in ("", *NAMES[name].split()):
        packed = PACK.get(suffix[-3:].lower(), bytes)(TABLES[name].encode())
        (tmp_path / (f"b{suffix}" if suffix else name)).write_bytes(packed)
        found = read(f"b{suffix}" if suffix else name, content="pair", fields=("de", "en"))
        assert texts(found) == [('ja "wohl"', "yes"), ("", "no ")]
    assert texts(read(name, fields=("en",))) == ["yes", "no "]
    with pytest.raises(InputError, match=rf"{name}:\d: has no field 'fr'; it has .*'en'"):
        read(name, fields=("fr",))


def test_columns_without_names(read, tmp_path):
    """Two columns of pairs, and one of texts, need no first line of names, if none are given."""
    write_lines(tmp_path / "a.tsv", ["one\teins", "two  x\tzwei", "\tdrei"])
    pairs = [("one", "eins"), ("two  x", "zwei"), ("", "drei")]
    assert texts(read("a.tsv", content="pair")) == pairs
    with pytest.raises(InputError, match=r"a.tsv:2: .*'de'.*'one', 'eins'"):
        read("a.tsv", content="pair", fields=("de", "en"))
    write_lines(tmp_path / "b.tsv", ["one", "", "two"])
    assert texts(read("b.tsv")) == ["one", "", "two"]  # of one column, a blank line is a cell
    write_lines(tmp_path / "c.tsv", ["target\tsource", "eins\tone"])
    assert texts(read("c.tsv", content="pair")) == [("one", "eins")]


def test_demo(read):
    train, test = (set(read(f"demo:{split}", content="pair")) for split in ("train", "test"))
    assert (len(train), len(test)) == (27_000, 500)
    assert not train & test
    with pytest.raises(InputError, match="demo:dev: takes demo:train"):
        read("demo:dev", content="pair")


# Columns

TEXTS = ["ein Häuschen", "", "two\nlines\r\n", "tab\there", "😀 ja", "last"]


def write(path, **named):
    parquet.write_table(pa.table(named), path, row_group_size=4)


def write_stream(path, size=2, **named):
    table = pa.table(named)
    with ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=size)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), None])
def test_columns(read, tmp_path, kind):
    array = pa.array(TEXTS, pa.string())
    array = array.cast(kind) if kind else array.dictionary_encode()
    write(tmp_path / "a.parquet", number=list(range(6)), text=array, other=TEXTS[::-1])
    assert texts(read("a.parquet")) == TEXTS
    pairs = read("a.parquet", content="pair", fields=("other", "text"))
    assert texts(pairs) == [*zip(TEXTS[::-1], TEXTS, strict=True)]


def test_what_datasets_has_saved(read, tmp_path):
    for split, of_split in {"train": TEXTS, "test": ["so"]}.items():
        place = tmp_path / "saved" / split
        place.mkdir(parents=True)
        names = ["b.arrow", "a.arrow"]  # the order of state.json counts
        write_stream(place / names[0], text=of_split[:4])
        write_stream(place / names[1], text=of_split[4:] or ["end"])
        for name in ("cache-1b7223d7c4.arrow", "c.arrow"):
            write_stream(place / name, text=["mapped"])
        state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
        (place / "state.json").write_text(json.dumps(state))
        (place / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert texts(read("saved/train")) == TEXTS
    assert texts(read("saved/test/[ab].arrow")) == ["end", "so"]
    with pytest.raises(InputError, match="saved: holds several splits: .*saved/test"):
        read("saved")


@pytest.mark.parametrize(
    "state",
    [
        *("{", "[]", '{"_data_files": []}', '{"_data_files": [{"filename": 1}]}'),
        '{"_data_files": [{"filename": "gone.arrow"}]}',
    ],
)
def test_a_state_that_does_not_name_all_data(read, tmp_path, state):
    (tmp_path / "saved").mkdir()
    write_stream(tmp_path / "saved" / "a.arrow", text=["one"])
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(InputError, match=r"saved.*(no files|_data_files|gone\.arrow)"):
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
        make = write if path.suffix == ".parquet" else write_stream
        make(path, **dict(zip(table.column_names, table.columns, strict=True)))


FORMS = ["x.jsonl", "x.parquet", "x.arrow"]


@pytest.mark.parametrize("name", FORMS)
def test_nested_fields(read, tmp_path, name):
    write_rows(tmp_path / name, NESTED)
    pairs = read(name, content="pair", fields=("pair.en", "pair.de"))
    assert texts(pairs) == [("one", "eins"), ("two", "zwei")]
    assert texts(read(name, fields=("a.b.c",))) == ["deep", "deeper"]
    assert texts(read(name, fields=("a.b",))) == ["own", "own 2"]  # rather than what is below `a`
    for field in ("pair.fr", "pair.", "en", "id.x"):
        with pytest.raises(InputError, match=f"{name}:1: .*'{field}'.*'pair.en'"):
            read(name, fields=(field,))
    for field in ("pair", "id"):
        with pytest.raises(InputError, match=f"{name}:1: field '{field}' is not text"):
            read(name, fields=(field,))


@pytest.mark.parametrize("name", FORMS)
def test_a_few_nulls_are_left_out_and_counted(read, tmp_path, name):
    rows = [{"pair": {"en": f"{i}", "de": "ja"}} for i in range(18)]
    write_rows(tmp_path / name, [*rows, {"pair": {"en": None, "de": "ja"}}, {"pair": None}])
    source = read(name, content="pair", fields=("pair.en", "pair.de"))
    assert texts(source) == [(f"{i}", "ja") for i in range(18)]
    assert (len(source), source.num_empty) == (18, 2)
    assert "2 without text" in str(source)
    write_rows(tmp_path / name, [{"pair": {"en": None, "de": ""}}] * 2)
    with pytest.raises(InputError, match=f"{name}: has no text"):
        read(name, fields=("pair.en",))


# Several files


def test_a_directory_or_pattern_is_all_its_files(read, tmp_path):
    (tmp_path / "c" / "deep").mkdir(parents=True)
    for name, lines in {"b": ["3", "4"], "a": ["1", "2"], "deep/c": ["5"]}.items():
        write_lines(tmp_path / "c" / f"{name}.txt", lines)
    for name in ("_SUCCESS", ".hidden.txt", ".a.txt.swp", "a.txt~"):
        (tmp_path / "c" / name).write_text("no\n")
    assert texts(read("c")) == texts(read("c/*.txt")) == ["1", "2", "3", "4"]
    assert texts(read(f"{tmp_path}/c/[b].txt")) == ["3", "4"]
    assert texts(read("c/**/*.txt")) == ["1", "2", "3", "4", "5"]
    assert read("c").name == "c"
    write_lines(tmp_path / "c*.txt", ["with a star"])
    assert texts(read("c*.txt")) == ["with a star"]
    (tmp_path / "d[1]").mkdir()
    for i in range(2):
        write_lines(tmp_path / "d[1]" / f"part.{i:02}", [str(i)])
    assert texts(read("d[1]")) == ["0", "1"]
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


def test_parallel_files(read, tmp_path):
    for i in range(2):
        write_lines(tmp_path / f"{i}.en", [f"one {i}", ""])
        write_lines(tmp_path / f"{i}.de", [f"eins {i}", "zwei"])
    pairs = [("one 0", "eins 0"), ("", "zwei"), ("one 1", "eins 1"), ("", "zwei")]
    assert texts(read("*.en", "*.de", content="pair")) == pairs
    (tmp_path / "1.de").unlink()
    for written in (("*.en", "*.de"), ("*.de", "*.en")):
        with pytest.raises(InputError, match=r"\*.en has more lines than \*.de, which has 2"):
            read(*written, content="pair")


# What is wrong

PAIR = {"content": "pair", "fields": ("de", "en")}
OBJECT = b'{"de": "a", "en": "b"}\n'
# Bytes of `a`; its suffix, with a `!` for pairs; and what is said after its path.
BAD = [
    (b"", ".txt", ": is empty"),
    (b"one\ntwo\nth\xffree\nfour\n", ".txt", ":3: is not UTF-8"),
    (b"one\nt\xe2\x82", ".txt", ":2: is not UTF-8"),
    (b"de\ten\na\tb\nc\nd\te\n", ".tsv!", ":3: has 1 columns, not 2"),
    (b"de\ten\nc\td\ne\tf\tg", ".tsv!", ":3: has 3 columns, not 2"),
    (b'de,en\nja,"yes\n', ".csv!", ":2: is not CSV"),
    (OBJECT + b'\n{"de\n', ".jsonl!", ":3: is not JSON"),
    (b"[1]\n", ".jsonl!", ":1: is not a JSON object"),
    (OBJECT + b'{"de": "a", "fr": "b"}\n', ".jsonl!", ":2: has no field 'en'"),
    (b'{"de": "a", "en": 7}\n', ".jsonl!", ":1: field 'en' is not text"),
    (b'{"de": "\\ud83d", "en": "b"}\n', ".jsonl!", ":1: is not JSON"),
    (PACK[".gz"](b""), ".tsv.gz!", ": is empty"),
    (b"text\n" * 100, ".parquet", ": cannot be read"),
    (b"text\n" * 100, ".arrow", ": cannot be read"),
    (b"[" * 100_000, ".json", ": cannot be read"),
]


@pytest.mark.parametrize("header", ["de\ten", "en\tpt-BR", "src\ttgt"])
def test_a_first_line_that_looks_like_names_is_no_example(read, tmp_path, header):
    (tmp_path / "a.tsv").write_text(f"{header}\nja\tyes\n")
    with pytest.raises(InputError, match=r"a\.tsv:1: .* look like names .*--data\.fields"):
        read("a.tsv", content="pair")
    (tmp_path / "a.tsv").write_text(f"source\ttarget\n{header}\nja\tyes\n")
    assert len([*read("a.tsv", content="pair")]) == 2


@pytest.mark.parametrize(("content", "suffix", "says"), BAD)
def test_bad_files_are_one_clear_line(read, tmp_path, content, suffix, says):
    name, pair = f"a{suffix.removesuffix('!')}", suffix.endswith("!")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(name, **(PAIR if pair else {}))
    assert str(caught.value).startswith(f"{tmp_path}/{name}{says}")
    assert "\n" not in str(caught.value)
    # Nothing of a bad file stays in the cache.
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


ONE, TWO = (("".join(f"{line}\n" for line in sentences(101, seed))).encode() for seed in (1, 2))


@pytest.mark.parametrize("suffix", PACK)
def test_damage_loses_no_line_silently(read, tmp_path, suffix):
    one, two = PACK[suffix](ONE), PACK[suffix](TWO)
    (tmp_path / f"a.txt{suffix}").write_bytes(one + two)
    assert texts(read(f"a.txt{suffix}")) == (ONE + TWO).decode().splitlines()
    half = len(one) // 2
    for damaged in (one[:half] + b"?" + one[half + 1 :], one[:-3], one + two[:-3]):
        (tmp_path / f"a.txt{suffix}").write_bytes(damaged)
        with pytest.raises(InputError, match=rf"a\.txt{suffix}: "):
            read(f"a.txt{suffix}")


def test_damaged_columns(read, tmp_path):
    for form, make in {"parquet": write, "arrow": write_stream}.items():
        make(tmp_path / f"a.{form}", text=["long enough"] * 50)
        whole = (tmp_path / f"a.{form}").read_bytes()
        (tmp_path / f"a.{form}").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=rf"a\.{form}: cannot be read"):
            read(f"a.{form}")
    path = tmp_path / "b.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(pa.table({"text": ["aaaa", "bbbb"]}), path, **plain)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaca"))
    with pytest.raises(InputError, match=r"b\.parquet: .*CRC"):
        read("b.parquet")
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"d"]).buffers())
    for form, make in {"parquet": write, "arrow": write_stream}.items():
        make(tmp_path / f"c.{form}", text=broken)
        with pytest.raises(InputError, match=rf"c\.{form}: cannot be read .*UTF8"):
            read(f"c.{form}")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (("a.en",), "data=a.en: translation needs two parallel text files"),
        (("a", "b", "c"), "data=a,b,c: has 3 names"),
        (("a.jsonl", "a.en"), "data=a.jsonl,a.en: translation needs two parallel text files"),
        ((), "data is not set"),
        (("a.jsonl",), "a.jsonl:1: has no field 'source'"),
    ],
)
def test_bad_sources_are_one_clear_line(read, tmp_path, written, says):
    for name, line in (("a.en", "x"), ("a.jsonl", "{}")):
        write_lines(tmp_path / name, [line])
    with pytest.raises(InputError, match=says):
        read(*written, content="pair")


def test_a_new_format_is_a_function_and_a_line(read, tmp_path, monkeypatch):
    def upper(path, fields):
        for number, values in readers.lines(path):
            yield number, {"text": values["text"].upper()}

    monkeypatch.setitem(readers.READERS, ".loud", upper)
    write_lines(tmp_path / "a.loud", ["one"])
    assert texts(read("a.loud")) == ["ONE"]
