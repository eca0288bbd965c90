"""Fetches the files of `published.PUBLISHED`, and checks those that are already there."""

import hashlib
import io
import lzma
import os
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mhe_jax.config import InputError
from mhe_jax.config.files import publish
from mhe_jax.data.index import unpacked_parts
from mhe_jax.data.published import PUBLISHED, Published, Text

SECONDS = 60  # without an answer


def get(name: str, directory: Path, tell: Callable[[str], None]) -> list[Path]:
    """The files of `PUBLISHED[name]` in `directory`, checked; missing ones are fetched.

    No existing file is overwritten, and a file appears whole and checked or not at all.

    Raises:
      InputError: a file holds another text, or one cannot be fetched.
    """
    data = PUBLISHED[name]
    missing = []
    for file, text in data.files.items():
        path = directory / file
        if not os.path.lexists(path):  # a link to what is not mounted stays one
            missing.append(file)
        elif not _is(text, path, path.suffix):
            raise InputError(
                f"{path}: is not the {file} of {name}: move it away to have it fetched"
            )
    if missing:
        tell(f"fetching {', '.join(missing)} from {data.url}; {data.licence}")
        for file, packed in _fetched(data, missing):
            with publish(directory / file) as draft:
                draft.write_bytes(packed)
                if not _is(data.files[file], draft, Path(file).suffix):
                    raise InputError(f"{data.url}: what it serves as {file} is not that of {name}")
    return [directory / file for file in data.files]


def _is(text: Text, path: Path, packed: str) -> bool:
    digest, size = hashlib.sha256(), 0
    try:
        for part in unpacked_parts(str(path), path, packed):
            digest.update(part)
            size += len(part)
    except InputError:  # not a packed file
        return False
    return (digest.hexdigest(), size) == (text.sha256, text.size)


def _fetched(data: Published, files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each file's name and the bytes to store; an archive is fetched once."""
    if data.files[files[0]].member is None:
        for file in files:
            yield file, _fetch(data.url + file)
        return
    try:
        with zipfile.ZipFile(io.BytesIO(_fetch(data.url))) as archive:
            for file in files:
                yield file, lzma.compress(archive.read(data.files[file].member or ""))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{data.url}: is not the archive that it was ({error})") from None


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read()
    except OSError as error:
        raise InputError(f"cannot fetch {url}: {getattr(error, 'reason', error)}") from None
