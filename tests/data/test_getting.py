"""`mhe-jax data NAME`: what is there is checked, what is missing fetched, whole or not at all."""

import gzip
import hashlib
import io
import json
import lzma
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tensorflow_datasets as tfds
from text_for_tests import REAL_DATA

from mhe_jax.cli import commands
from mhe_jax.config import InputError
from mhe_jax.data import fetching, open_source, published
from mhe_jax.data.published import PUBLISHED, Published, Text

TEXTS = {"a.en": b"one\ntwo\n", "a.de": b"eins\nzwei\n"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        self.server.asked.append(self.path)


@pytest.fixture
def served(tmp_path):
    """A directory, its address, and the paths that were asked for."""
    directory = tmp_path / "served"
    directory.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield directory, f"http://127.0.0.1:{server.server_port}/", server.asked
    server.shutdown()
    thread.join()
    server.server_close()


def text(data: bytes, member: str | None = None) -> Text:
    return Text(hashlib.sha256(data).hexdigest(), len(data), member)


@pytest.fixture
def files(served, monkeypatch):
    directory, url, asked = served
    for name, data in TEXTS.items():
        (directory / f"{name}.gz").write_bytes(gzip.compress(data))
    known = {f"{name}.gz": text(data) for name, data in TEXTS.items()}
    monkeypatch.setitem(PUBLISHED, "tiny", Published("two lines", "free", url, known))
    return asked


@pytest.fixture
def archive(served, monkeypatch):
    directory, url, asked = served
    with zipfile.ZipFile(directory / "tiny.zip", "w") as out:
        for name, data in TEXTS.items():
            out.writestr(f"in/{name}", data)
    known = {f"{name}.xz": text(data, f"in/{name}") for name, data in TEXTS.items()}
    monkeypatch.setitem(PUBLISHED, "tiny", Published("two lines", "free", f"{url}tiny.zip", known))
    return asked


def get(capsys, *arguments):
    commands.main(["data", "tiny", *arguments])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_a_link_to_what_is_not_there_stays(files, tmp_path, monkeypatch, capsys):
    link = tmp_path / "a.en.gz"
    link.symlink_to(tmp_path / "not_mounted" / "a.en.gz")
    with pytest.raises(OSError, match="No such file"):
        get(capsys, "--directory", str(tmp_path))
    assert link.is_symlink()
    assert files == []


def test_files_are_fetched_and_checked(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found, said = get(capsys)
    assert found == {"data": "tiny", "directory": "data/tiny", "files": ["a.en.gz", "a.de.gz"]}
    assert said.startswith("fetching a.en.gz, a.de.gz from http://127.0.0.1:")
    assert said.endswith("; free\n")
    source = open_source(
        ["a.en.gz", "a.de.gz"], "pair", directory="data/tiny", cache=tmp_path / "c"
    )
    assert list(source) == [("one", "eins"), ("two", "zwei")]
    # What is there is not asked for again, and may be packed anew.
    (tmp_path / "data/tiny/a.de.gz").write_bytes(gzip.compress(TEXTS["a.de"], 1, mtime=7))
    (tmp_path / "data/tiny/a.en.gz").unlink()
    files.clear()
    assert get(capsys)[0] == found
    assert files == ["/a.en.gz"]


def test_an_archive_is_fetched_once(archive, tmp_path, capsys):
    found, _ = get(capsys, "--directory", str(tmp_path / "x"))
    assert archive == ["/tiny.zip"]
    packed = [(tmp_path / "x" / name).read_bytes() for name in found["files"]]
    assert [*map(lzma.decompress, packed)] == [*TEXTS.values()]


def test_another_file_is_left_alone(files, tmp_path, capsys):
    path = tmp_path / "x" / "a.de.gz"
    path.parent.mkdir()
    for mine in (gzip.compress(b"mine\n"), b"mine\n", b""):
        path.write_bytes(mine)
        with pytest.raises(
            InputError, match=r"x/a.de.gz: is not the a.de.gz of tiny: move it away"
        ):
            get(capsys, "--directory", str(path.parent))
        assert path.read_bytes() == mine
    assert files == []


def test_nothing_is_left_of_what_is_wrong(files, served, tmp_path, capsys):
    directory, url, _ = served
    place = tmp_path / "x"
    for wrong in (gzip.compress(b"eins\nzwo!\n"), gzip.compress(TEXTS["a.de"])[:-9], b"<html>"):
        (directory / "a.de.gz").write_bytes(wrong)
        with pytest.raises(
            InputError, match=rf"{url}: what it serves as a.de.gz is not that of tiny"
        ):
            get(capsys, "--directory", str(place))
        assert [path.name for path in place.iterdir()] == ["a.en.gz"]
    (directory / "a.de.gz").unlink()
    with pytest.raises(InputError, match=rf"cannot fetch {url}a.de.gz: File not found$"):
        get(capsys, "--directory", str(place))


def test_archives_that_are_others(archive, served, tmp_path, capsys):
    directory, url, _ = served
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    for wrong in (empty.getvalue(), b"<html>"):
        (directory / "tiny.zip").write_bytes(wrong)
        with pytest.raises(InputError, match=rf"{url}tiny.zip: is not the archive that it was \("):
            get(capsys, "--directory", str(tmp_path / "x"))


def test_an_answer_without_end(files, served, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fetching, "MOST", 20)
    monkeypatch.setattr(fetching, "CHUNK", 8)
    _, url, _ = served
    with pytest.raises(InputError, match=rf"{url}a.en.gz: gives more than 20 bytes"):
        get(capsys, "--directory", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_damaged_archive(archive, served, tmp_path, capsys):
    directory, url, _ = served
    with zipfile.ZipFile(directory / "tiny.zip", "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in TEXTS.items():
            out.writestr(f"in/{name}", data)
    whole = bytearray((directory / "tiny.zip").read_bytes())
    whole[30 + len("in/a.en")] = 0xFF  # the first block is of no type that there is
    (directory / "tiny.zip").write_bytes(whole)
    with pytest.raises(InputError, match=rf"{url}tiny.zip: is not the archive that it was \("):
        get(capsys, "--directory", str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nhalf", "IncompleteRead"),
    ],
)
def test_what_is_no_answer(files, served, tmp_path, capsys, monkeypatch, answer, says):
    _, url, _ = served

    def garbage(self):
        self.wfile.write(answer)
        self.close_connection = True

    monkeypatch.setattr(Quiet, "do_GET", garbage)
    with pytest.raises(InputError, match=rf"cannot fetch {url}a.en.gz: ") as error:
        get(capsys, "--directory", str(tmp_path / "x"))
    assert says in repr(error.value.__context__)
    assert not (tmp_path / "x").exists()


def test_a_directory_however_it_is_given(files, tmp_path, capsys):
    place = str(tmp_path / "x")
    found, _ = get(capsys, "--directory", place)
    assert get(capsys, f"--directory={place}")[0] == found
    commands.main(["data", "--directory", place, "tiny"])
    assert json.loads(capsys.readouterr().out) == found
    commands.main(["data", "tiny", "--help"])
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_file_that_is_missing_names_the_command(tmp_path):
    place = tmp_path / "multi30k"
    with pytest.raises(InputError) as error:
        open_source(["train.en.gz", "train.de.gz"], "pair", directory=str(place))
    assert str(error.value) == (
        f"{place}/train.en.gz: no such file (mhe-jax data multi30k --directory {place} gets it)"
    )
    assert published.hint(place / "mine.txt") == published.hint(tmp_path / "train.en.gz") == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--directory"], "'--directory': takes nothing, or a name; usage: "),
        ([""], "'': takes nothing, or a name; usage: "),
        (["tiny", "x"], "'tiny x': takes nothing, or a name; usage: "),
        (["no_such_set"], "no_such_set: TFDS knows no data set of this name"),
        (
            ["wikitext2"],
            "wikitext2: TFDS knows no data set of this name, prepared or not; did you mean "
            "wikitext-2?",
        ),
        (["glue/none"], "glue/none: TFDS cannot prepare it: "),
        (["squad", "--directory", "x"], "--directory x: squad lies where TFDS keeps it"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError) as error:
        commands.main(["data", *arguments])
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_what_takes_apache_beam_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(InputError) as error:
        commands.main(["data", "wiki40b/en"])
    assert str(error.value) == (
        "wiki40b/en: TFDS cannot prepare it: it is made by Apache Beam, which is not installed "
        "here: see docs/pods.md"
    )


def test_the_list_names_each_with_its_licence(capsys):
    commands.main(["data"])
    lines = capsys.readouterr().out.splitlines()
    for line, (name, data) in zip(lines, PUBLISHED.items(), strict=False):
        assert line.startswith(name)
        assert data.licence in line
    assert lines[-1].startswith("TFDS ")


@pytest.mark.skipif(not REAL_DATA.exists(), reason=f"needs the texts in {REAL_DATA}")
@pytest.mark.parametrize(
    ("name", "place"), [("multi30k", "multi30k-en-de/raw"), ("wikitext-2", "wikitext-2")]
)
def test_the_published_texts_are_those_that_were_measured(capsys, name, place):
    commands.main(["data", name, "--directory", str(REAL_DATA / place)])
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["files"] == [*PUBLISHED[name].files]
