"""`mhe-jax data NAME`: what is there is checked, what is missing fetched, whole or not at all."""

import gzip
import hashlib
import json
import lzma
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from text_for_tests import REAL_DATA

from mhe_jax.cli import commands
from mhe_jax.config import DataConfig, InputError
from mhe_jax.data import open_source
from mhe_jax.data.cache import PUBLISHED, Published

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


def known(suffix):
    return {f"{name}{suffix}": hashlib.sha256(data).hexdigest() for name, data in TEXTS.items()}


@pytest.fixture
def files(served, monkeypatch):
    directory, url, asked = served
    for name, data in TEXTS.items():
        (directory / f"{name}.gz").write_bytes(gzip.compress(data))
    monkeypatch.setitem(PUBLISHED, "tiny", Published("two lines", "free", url, known(".gz")))
    return asked


@pytest.fixture
def archive(served, monkeypatch):
    directory, url, asked = served
    with zipfile.ZipFile(directory / "tiny.zip", "w") as out:
        for name, data in TEXTS.items():
            out.writestr(f"in/{name}", data)
    made = Published("two lines", "free", f"{url}tiny.zip", known(".xz"), ("in/a.en", "in/a.de"))
    monkeypatch.setitem(PUBLISHED, "tiny", made)
    return asked


def get(capsys, *arguments):
    commands.main(["data", "tiny", *arguments])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_files_are_fetched_and_checked(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found, said = get(capsys)
    assert found == {"data": "tiny", "directory": "data/tiny", "files": ["a.en.gz", "a.de.gz"]}
    assert "a.en.gz, a.de.gz" in said
    assert "free" in said
    data = DataConfig(directory="data/tiny", cache_directory=str(tmp_path / "c"))
    source = open_source(["a.en.gz", "a.de.gz"], "pair", data)
    assert list(source) == [("one", "eins"), ("two", "zwei")]
    # What is there is not asked for again, and may be packed anew.
    (tmp_path / "data/tiny/a.de.gz").write_bytes(gzip.compress(TEXTS["a.de"], 1, mtime=7))
    (tmp_path / "data/tiny/a.en.gz").unlink()
    files.clear()
    assert get(capsys)[0] == found
    assert files == ["/a.en.gz"]


def test_what_is_there_is_left_alone(files, tmp_path, capsys):
    """Another file of the name, and a link to what is not mounted."""
    path = tmp_path / "x" / "a.de.gz"
    path.parent.mkdir()
    for mine in (gzip.compress(b"mine\n"), b"mine\n", b""):
        path.write_bytes(mine)
        with pytest.raises(InputError, match="x/a.de.gz: is not the a.de.gz of tiny"):
            get(capsys, "--directory", str(path.parent))
        assert path.read_bytes() == mine
    path.unlink()
    path.symlink_to(tmp_path / "not_mounted" / "a.de.gz")
    with pytest.raises(OSError, match="No such file"):
        get(capsys, "--directory", str(path.parent))
    assert path.is_symlink()
    assert files == []


def test_nothing_is_left_of_what_is_wrong(files, served, tmp_path, capsys):
    directory, url, _ = served
    place = tmp_path / "x"
    for wrong in (gzip.compress(b"eins\nzwo!\n"), gzip.compress(TEXTS["a.de"])[:-9], b"<html>"):
        (directory / "a.de.gz").write_bytes(wrong)
        with pytest.raises(InputError, match=f"{url}.*a.de.gz"):
            get(capsys, "--directory", str(place))
        assert [path.name for path in place.iterdir()] == ["a.en.gz"]
    (directory / "a.de.gz").unlink()
    with pytest.raises(InputError, match=f"{url}a.de.gz"):
        get(capsys, "--directory", str(place))


def test_an_archive_is_fetched_once(archive, tmp_path, capsys):
    found, _ = get(capsys, "--directory", str(tmp_path / "x"))
    assert archive == ["/tiny.zip"]
    packed = [(tmp_path / "x" / name).read_bytes() for name in found["files"]]
    assert [*map(lzma.decompress, packed)] == [*TEXTS.values()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--directory"], "'--directory'"),
        (["tiny", "x"], "tiny x is given"),
        (["wikitext2"], "wikitext2: TFDS "),
        (["glue/none"], "glue/none: TFDS cannot"),
        (["squad", "--directory", "x"], "--directory x: squad"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError, match=says) as error:
        commands.main(["data", *arguments])
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not REAL_DATA.exists(), reason=f"needs the texts in {REAL_DATA}")
@pytest.mark.parametrize(
    ("name", "place"), [("multi30k", "multi30k-en-de/raw"), ("wikitext-2", "wikitext-2")]
)
def test_the_published_texts_are_those_that_were_measured(capsys, name, place):
    commands.main(["data", name, "--directory", str(REAL_DATA / place)])
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["files"] == [*PUBLISHED[name].files]
