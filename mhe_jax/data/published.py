"""Data sets that shipped configs read and TFDS does not have: their origin, and fetching them.

A file is identified by the SHA-256 of its text, however it is packed.
"""

import gzip
import hashlib
import io
import lzma
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mhe_jax.config import InputError
from mhe_jax.config.files import publish
from mhe_jax.data.cache import opened

SECONDS = 60  # without an answer


@dataclass(frozen=True)
class Text:
    """A file: the SHA-256 and size in bytes of its text, and its name in the archive, if in one."""

    sha256: str
    size: int
    member: str | None = None


@dataclass(frozen=True)
class Published:
    """A data set, and where its files are: `url` plus their names, or one archive of all."""

    about: str
    licence: str
    url: str
    files: dict[str, Text]


PUBLISHED = {
    "multi30k": Published(
        "29,000 captions of images, English and German (Elliott et al. 2016), test 2016",
        "the captions are for non-commercial research and education",
        "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/",
        {
            "train.en.gz": Text(
                "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6", 1801238
            ),
            "train.de.gz": Text(
                "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72", 2110398
            ),
            "val.en.gz": Text(
                "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227", 63297
            ),
            "val.de.gz": Text(
                "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660", 75981
            ),
            "test_2016_flickr.en.gz": Text(
                "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182", 62076
            ),
            "test_2016_flickr.de.gz": Text(
                "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16", 70649
            ),
        },
    ),
    "wikitext-2": Published(
        "2 million words of Wikipedia (Merity et al. 2016), words split by spaces",
        "CC BY-SA",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        {
            "train.txt.xz": Text(
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                10797148,
                "wikitext-2/wiki.train.tokens",
            ),
            "valid.txt.xz": Text(
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                1121681,
                "wikitext-2/wiki.valid.tokens",
            ),
            "test.txt.xz": Text(
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
                1256449,
                "wikitext-2/wiki.test.tokens",
            ),
        },
    ),
}


def hint(path: Path) -> str:
    """The end of a message about a missing file: how to get it; empty if it is not published."""
    name = path.parent.name
    known = name in PUBLISHED and path.name in PUBLISHED[name].files
    return f" (mhe-jax data {name} --directory {path.parent} gets it)" if known else ""


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
        elif not _is(text, path):
            raise InputError(
                f"{path}: is not the {file} of {name}: move it away to have it fetched"
            )
    if missing:
        tell(f"fetching {', '.join(missing)} from {data.url}; {data.licence}")
        for file, packed in _fetched(data, missing):
            with publish(directory / file) as draft:
                draft.write_bytes(packed)
                if not _is(data.files[file], draft):
                    raise InputError(f"{data.url}: what it serves as {file} is not that of {name}")
    return [directory / file for file in data.files]


def _is(text: Text, path: Path) -> bool:
    digest, size = hashlib.sha256(), 0
    try:
        with opened(path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
                size += len(part)
    except (gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error):  # not a packed file
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
