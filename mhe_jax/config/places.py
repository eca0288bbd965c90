"""Where files lie: `path_of` a name, either a local one or `gs://bucket/name`.

    name                 a run                          a source of data
    runs/a, /data/a      a local directory              a local file
    gs://bucket/a        objects whose names begin so   an object, fetched once into the cache
    s3://bucket/a        refused                        likewise
    any other x://       refused                        refused

A place in a bucket has the methods of `pathlib.Path` that a run needs. An object store has no
directories, no links, no append and no rename, but each write is whole or not at all.
"""

import base64
import contextlib
import errno
import functools
import importlib
import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from mhe_jax.config.errors import InputError, not_installed

LIBRARIES = {"gs": ("gcsfs", "google.cloud.storage"), "s3": ("s3fs",)}  # Orbax needs the second
RUNS, SOURCES = ("gs",), ("gs", "s3")


def scheme_of(name: str | os.PathLike[str]) -> str | None:
    """What stands before `://`, if anything does.

    >>> scheme_of("gs://bucket/run"), scheme_of("runs/a"), scheme_of("tfds:glue/cola:train")
    ('gs', None, None)
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", os.fspath(name))
    return found and found[1]


def check_scheme(field: str, name: str, allowed: tuple[str, ...]) -> None:
    """Raises InputError where `name`, which `field` gives, has a scheme that is not allowed."""
    scheme = scheme_of(name)
    start = f"{field}={name}" if field else name
    if scheme is not None and scheme not in allowed:
        takes = "".join(f" or {one}://bucket/name" for one in allowed)
        raise InputError(f"{start}: {scheme}:// is not supported here: takes a local path{takes}")
    if scheme is not None and not re.match(r"[^/]+://[^/]+", name):
        raise InputError(f"{start}: names no bucket: takes {scheme}://bucket/name")
    if scheme is not None and ".." in name.split("/"):
        raise InputError(f"{start}: takes a name without ..")  # some libraries would go up


def path_of(name: str | os.PathLike[str]) -> Path:
    """The place of a run, or of a file in one: local, or in a bucket of `gs://`.

    Raises:
      InputError: no name, another scheme, or the extra `cloud` is not installed.
    """
    if isinstance(name, Path | Bucket):
        return cast(Path, name)
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"{name!r} is not a path: takes a str or a pathlib.Path")
    return _place(os.fspath(name), RUNS)


def source_path(directory: str, name: str) -> Path:
    """The file that a source names, relative to `directory`; in both `~` is the user's home.

    Raises:
      InputError: as `path_of`, but for `s3://` too.
    """
    local = os.path.expanduser(name)
    if scheme_of(name) is None and scheme_of(directory) and not os.path.isabs(local):
        name = f"{directory.rstrip('/')}/{name}"
    if scheme_of(name):
        return _place(name, SOURCES)
    return Path(os.path.expanduser(directory)) / local


def _place(name: str, allowed: tuple[str, ...]) -> Path:
    check_scheme("", name, allowed)
    scheme = scheme_of(name)
    if scheme is None:
        return Path(name)
    for library in LIBRARIES[scheme]:
        try:
            importlib.import_module(library)
        except ImportError:
            raise not_installed(f"{name} needs {library}", "cloud") from None
    return cast(Path, Bucket(name))  # duck-typed


@functools.cache
def _store(scheme: str) -> Any:
    import fsspec
    from fsspec.config import conf

    # Orbax uses these libraries too, by fsspec if its own library is told not to use TensorFlow.
    # None may cache listings: they would miss what other processes, or other libraries, write.
    os.environ.setdefault("EPATH_USE_TF", "0")
    conf.setdefault({"gs": "gcs"}.get(scheme, scheme), {})["use_listings_cache"] = False
    # It prints the traceback of each error that it raises; `_telling` reports them in one line.
    logging.getLogger(LIBRARIES[scheme][0]).setLevel(logging.CRITICAL)
    return fsspec.filesystem(scheme, use_listings_cache=False)


class Bucket(PurePosixPath):
    """A place in a bucket: an object, or all objects whose names continue with `/`.

    Every error is an OSError with the place and a reason, whatever library it came from.
    """

    def __str__(self) -> str:
        return re.sub(r"^([a-z0-9]+):/", r"\1://", super().__str__())

    @property
    def _fs(self) -> Any:
        return _store(self.parts[0].removesuffix(":"))

    def _info(self) -> dict[str, Any] | None:
        try:
            with _telling(self):
                return self._fs.info(str(self))
        except FileNotFoundError:
            return None

    def _must(self) -> dict[str, Any]:
        if (found := self._info()) is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        return found

    def _named(self, names: list[str]) -> list["Bucket"]:
        """Places by the names that the libraries give, which have no scheme."""
        found = {Bucket(f"{self.parts[0]}//{name}") for name in names}
        return sorted(found - {self})

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        return (self._info() or {}).get("type") == "file"

    def is_dir(self) -> bool:
        return (self._info() or {}).get("type") == "directory"

    def is_symlink(self) -> bool:
        return False

    def absolute(self) -> "Bucket":
        return self

    def resolve(self) -> "Bucket":
        return self

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=self._must()["size"])

    def crc32c(self) -> tuple[int, int]:
        """The checksum of an object, as the store has it, and its size: nothing is read."""
        found = self._must()
        return _number(found["crc32c"]), found["size"]

    def is_copied_by(self, copy: tuple[int, int]) -> bool:
        """Whether a copy with this CRC32C and size can be what the store has."""
        found, (crc, size) = self._must(), copy
        if found.get("contentEncoding") == "gzip":
            return True  # the store may unpack it on the way, but not in what it says of it
        return size == found["size"] and ("crc32c" not in found or crc == _number(found["crc32c"]))

    def version(self) -> tuple[int, str]:
        """Size and version of an object, which change when it is rewritten."""
        found = self._must()
        return found["size"], str(found.get("generation") or found["ETag"])

    def iterdir(self) -> Iterator["Bucket"]:
        with _telling(self):
            names = self._fs.ls(str(self), detail=False)
        yield from self._named(names)

    def matches(self) -> list["Bucket"]:
        """All objects whose names match this one, taken as a pattern."""
        with _telling(self):
            found = self._fs.glob(str(self), detail=True)
        return self._named([name for name, about in found.items() if about["type"] == "file"])

    def glob(self, pattern: str) -> Iterator["Bucket"]:
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError), _telling(self):
            names = self._fs.glob(f"{self}/{pattern}")
        yield from self._named(names)

    def rglob(self, pattern: str) -> Iterator["Bucket"]:
        """All objects below; takes no pattern but `*`."""
        assert pattern == "*"
        with _telling(self):
            names = self._fs.find(str(self))
        yield from self._named(names)

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
    ) -> Any:
        """For reading only, and small files: a file is read whole, as it is written."""
        assert mode in ("r", "rb"), mode
        file = io.BytesIO(self.read_bytes())
        return file if mode == "rb" else io.TextIOWrapper(file, encoding, errors)

    def read_bytes(self) -> bytes:
        with _telling(self):
            return self._fs.cat_file(str(self))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def fetch(self, file: Path) -> None:
        """Copies an object to a local file."""
        with _telling(self):
            self._fs.get_file(str(self), str(file))

    def write_bytes(self, data: bytes) -> None:
        with _telling(self):
            self._fs.pipe_file(str(self), data)

    def create(self, data: bytes) -> bool:
        """Writes an object if there is none; returns whether there was none."""
        try:
            with _telling(self):
                self._fs.pipe_file(str(self), data, mode="create")
        except FileExistsError:
            return False
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with _telling(self):
                self._fs.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: "Bucket") -> None:
        """Copies each object below, then deletes the old ones: not atomically, unlike on a disk."""
        with _telling(self):
            for name in sorted(self._fs.find(str(self))):
                end = f"{self.parts[0]}//{name}".removeprefix(str(self))
                self._fs.cp_file(name, f"{target}{end}")
            self._fs.rm(str(self), recursive=True)

    rename = replace

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """There are no directories, but the bucket must be there."""
        bucket = Bucket(f"{self.parts[0]}//{self.parts[1]}")
        if bucket._info() is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}", str(self))


def _number(crc32c: str) -> int:
    return int.from_bytes(base64.b64decode(crc32c), "big")


@contextlib.contextmanager
def _telling(place: Bucket) -> Iterator[None]:
    """Turns the errors of each library, some of which have no message, into OSErrors."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(place)) from None
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "is there already", str(place)) from None
    except Exception as error:
        words = " ".join(str(error).split())
        words = re.sub(r"^\[Errno -?\d+\] ", "", words)[:300] or type(error).__name__
        raise OSError(errno.EIO, words, str(place)) from error
