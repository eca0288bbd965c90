"""Sources in buckets, against stores on 127.0.0.1."""

import gzip
import lzma
import uuid

import fsspec
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.places import Bucket
from mhe_jax.data import open_source
from mhe_jax.data.readers import open_records

LINES = "one\ntwo\nthree\n"


@pytest.fixture(params=["gs", "s3"])
def url(request):
    """A directory that no other test uses."""
    return f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}"


@pytest.fixture
def put(url):
    """`put(name, data)` makes an object, past the code that is tested."""

    def write(name, data):
        fsspec.filesystem(url.partition(":")[0]).pipe_file(f"{url}/{name}", data)

    return write


@pytest.fixture
def read(tmp_path):
    """What `open_source` gives, a text as itself."""

    def open_it(*written, content="text", directory="."):
        data = DataConfig(directory=directory, cache_directory=str(tmp_path / "cache"))
        source = open_source(written, content, data)
        return [item[0] if len(item) == 1 else item for item in source]

    return open_it


def test_every_form_is_read_as_a_local_one(url, put, read, tmp_path):
    put("a.txt", LINES.encode())
    put("a.txt.gz", gzip.compress(LINES.encode()))
    put("a.txt.xz", lzma.compress(LINES.encode()))
    put("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    parquet.write_table(pa.table({"text": LINES.split()}), tmp_path / "a.parquet")
    put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    for name in ("a.txt", "a.txt.gz", "a.txt.xz", "a.jsonl", "a.parquet"):
        assert read(f"{url}/{name}") == ["one", "two", "three"], name
    records = open_records("a.parquet", (), url, tmp_path / "cache")  # of labelled examples
    assert [values for _, values in records.read()] == [{"text": text} for text in LINES.split()]
    put("a.tsv", b"one\teins\ntwo\tzwei\n")
    pairs = [("one", "eins"), ("two", "zwei")]
    assert read(f"{url}/a.tsv", content="pair") == pairs
    put("p.en", b"one\ntwo\n")
    put("p.de", b"eins\nzwei\n")
    assert read("p.en", "p.de", content="pair", directory=url) == pairs


def test_its_key_is_that_of_the_same_text_on_a_disk(url, put, tmp_path):
    put("a.txt", LINES.encode())
    (tmp_path / "b.txt").write_text(LINES)
    keys = set()
    for name, place in (("a.txt", url), ("b.txt", str(tmp_path))):
        data = DataConfig(directory=place, cache_directory=str(tmp_path / "cache"))
        keys.add(open_source([name], "text", data).key)
    assert len(keys) == 1


def test_patterns_and_directories_are_sources_of_all_their_files(url, put, read):
    put("c/2.txt", b"three\nfour\n")
    put("c/1.txt", b"one\ntwo\n")
    put("c/_about", b"no text\n")
    put("c/deeper/3.txt", b"five\n")
    assert read(f"{url}/c/*.txt") == ["one", "two", "three", "four"]
    assert read("c/?.txt", directory=url) == ["one", "two", "three", "four"]
    assert read(f"{url}/c/**/*.txt") == ["one", "two", "three", "four", "five"]
    assert read(f"{url}/c/[12d]*") == ["one", "two", "three", "four"]  # no directory
    assert read(f"{url}/c") == ["one", "two", "three", "four"]
    put("d/[a].txt", b"a name, no pattern\n")
    assert read(f"{url}/d/[a].txt") == ["a name, no pattern"]


def test_a_saved_data_set_is_what_its_state_names(url, put, read, tmp_path):
    for name, texts in {"a": ["one", "two"], "b": ["other"]}.items():
        table = pa.table({"text": texts})
        with ipc.new_stream(tmp_path / name, table.schema) as out:
            out.write_table(table)
        put(f"s/{name}.arrow", (tmp_path / name).read_bytes())
    put("s/state.json", b'{"_data_files": [{"filename": "a.arrow"}]}')
    assert read(f"{url}/s") == ["one", "two"]
    assert read(f"{url}/s/*.arrow") == ["one", "two", "other"]


def test_it_is_fetched_once_and_anew_when_it_has_changed(url, put, read, tmp_path, monkeypatch):
    fetched = []
    fetch = Bucket.fetch
    monkeypatch.setattr(Bucket, "fetch", lambda *args: fetched.append(args) or fetch(*args))
    put("a.txt", b"one\n")
    for _ in range(2):
        assert read(f"{url}/a.txt") == ["one"]
    assert len(fetched) == 1
    put("a.txt", b"two\n")  # of the same size
    assert read(f"{url}/a.txt") == ["two"]
    assert len(fetched) == 2
    put("x/a.txt", b"two\n")  # the same object elsewhere is another
    assert read(f"{url}/x/a.txt") == ["two"]
    copies = (tmp_path / "cache" / "fetched").iterdir()
    assert sorted(copy.read_bytes() for copy in copies) == [b"one\n", b"two\n", b"two\n"]


def test_what_is_wrong_is_told_with_the_url(url, put, read):
    put("a.txt", b"\xff\n")
    put("empty.txt", b"")
    for name, reason in [
        ("none.txt", "no such file"),
        ("none*.txt", "no file matches"),
        ("a.txt", "is not UTF-8"),
        ("empty.txt", "is empty"),
    ]:
        with pytest.raises(InputError) as error:
            read(f"{url}/{name}")
        assert f"{url}/{name}" in str(error.value)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
