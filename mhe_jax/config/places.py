"""Where files lie: a run is local or below `gs://bucket/name`, a source of data also in `s3://`.

An object store has no directories, no append and no rename, but each write is whole or not at all.
"""

import errno
import functools
import importlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mhe_jax.config.values import InputError, not_installed

LIBRARIES = {"gs": ("gcsfs", "google.cloud.storage"), "s3": ("s3fs",)}  # Orbax needs the second
RUNS, SOURCES = ("gs",), ("gs", "s3")


def scheme_of(name: str | os.PathLike[str]) -> str | None:
    """What stands before `://`, if anything does."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", os.fspath(name))
    return found and found[1]


def check_scheme(field: str, name: str, allowed: tuple[str, ...]) -> None:
    """Raises InputError where `name`, which `field` gives, has a scheme that is not allowed."""
    scheme = scheme_of(name)
    whole = re.match(r"[^/]+://[^/]+", name) and ".." not in name.split("/")
    if scheme is not None and not (scheme in allowed and whole):
        takes = "".join(f" or {one}://bucket/name, without .." for one in allowed)
        start = f"{field}={name}" if field else name
        raise InputError(f"{start}: takes a local path{takes}")


def path_of(name: str | os.PathLike[str], allowed: tuple[str, ...] = RUNS) -> Path:
    """The place of a run, or of a file in one: local, or in a bucket."""
    if isinstance(name, Path | Bucket):
        return cast(Path, name)  # duck-typed
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"{name!r} is not a path: takes a string or a Path")
    name, scheme = os.fspath(name), scheme_of(name)
    check_scheme("", name, allowed)
    if scheme is None:
        return Path(name)
    for library in LIBRARIES[scheme]:
        try:
            importlib.import_module(library)
        except ImportError:
            raise not_installed(f"{name} needs {library}", "cloud") from None
    return cast(Path, Bucket(name))


def source_path(directory: str, name: str) -> Path:
    """The file that a source names, relative to `directory`; in both `~` is the user's home."""
    local = os.path.expanduser(name)
    if scheme_of(name):
        return path_of(name, SOURCES)
    if scheme_of(directory) and not os.path.isabs(local):
        return path_of(f"{directory.rstrip('/')}/{name}", SOURCES)
    return Path(os.path.expanduser(directory), local)


@functools.cache
def _store(scheme: str) -> Any:
    import fsspec
    from fsspec.config import conf

    # Orbax uses these libraries too, by fsspec if its own library is told not to use TensorFlow.
    # None may cache listings: they would miss what other processes, or other libraries, write.
    os.environ.setdefault("EPATH_USE_TF", "0")
    conf.setdefault({"gs": "gcs"}.get(scheme, scheme), {})["use_listings_cache"] = False
    # It logs, with a traceback, what it raises.
    logging.getLogger(LIBRARIES[scheme][0]).setLevel(logging.CRITICAL)
    return fsspec.filesystem(scheme, use_listings_cache=False)


class Bucket(PurePosixPath):
    """An object, or all whose names continue with `/`; every error is an OSError with the place."""

    def __str__(self) -> str:
        return re.sub(r"^([a-z0-9]+):/", r"\1://", super().__str__())

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        store = _store(self.parts[0].removesuffix(":"))
        try:
            return getattr(store, method)(str(self), *arguments, **options)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self)) from None
        except FileExistsError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())[:300] or type(error).__name__
            raise OSError(errno.EIO, words, str(self)) from error

    def _named(self, names: list[str]) -> Iterator["Bucket"]:
        # The libraries give names without a scheme, and some the place itself.
        yield from sorted({Bucket(f"{self.parts[0]}//{name}") for name in names} - {self})

    def info(self) -> dict[str, Any]:
        """What the store says of an object: `size`, a version, of `gs://` a `crc32c`."""
        return self._call("info")

    def _type(self) -> str | None:
        try:
            return self.info()["type"]
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._type() is not None

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def resolve(self) -> "Bucket":
        return self

    absolute = resolve

    def iterdir(self) -> Iterator["Bucket"]:
        return self._named(self._call("ls", detail=False))

    def glob(self, pattern: str) -> Iterator["Bucket"]:
        found = (self / pattern)._call("glob", detail=True).items()
        return self._named([name for name, about in found if about["type"] == "file"])

    def rglob(self, _: str) -> Iterator["Bucket"]:
        """All objects below, whatever the pattern."""
        return self._named(self._call("find"))

    def read_bytes(self) -> bytes:
        return self._call("cat_file")

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def fetch(self, file: Path) -> None:
        self._call("get_file", str(file))

    def write_bytes(self, data: bytes, mode: str = "overwrite") -> None:
        """Writes an object; with mode `create` only if there is none, else FileExistsError."""
        self._call("pipe_file", data, mode=mode)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            self._call("rm_file")

    def replace(self, target: "Bucket") -> None:
        """Copies each object below, then deletes the old ones: not atomically, unlike on a disk."""
        self._call("mv", str(target), recursive=self.is_dir())

    rename = replace

    def mkdir(self, **_: bool) -> None:
        """There are no directories, but the bucket must be there."""
        bucket = Bucket(f"{self.parts[0]}//{self.parts[1]}")
        if not bucket.exists():
            raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}", str(self))
