"""Data sets that shipped configs read and TFDS does not have: their origin, and fetching them."""

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
TEST = "test_2016_flickr"


@dataclass(frozen=True)
class Published:
    """A data set, and where its files are: `url` plus their names, or one archive of all.

    `files` has the SHA-256 of each text, however it is packed; `members` their names in an archive.
    """

    about: str
    licence: str
    url: str
    files: dict[str, str]
    members: tuple[str, ...] = ()


PUBLISHED = {
    "multi30k": Published(
        "29,000 captions of images, English and German (Elliott et al. 2016), test 2016; 4 MB",
        "the captions are for non-commercial research and education",
        "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/",
        {
            "train.en.gz": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
            "train.de.gz": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
            "val.en.gz": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
            "val.de.gz": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
            f"{TEST}.en.gz": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
            f"{TEST}.de.gz": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
        },
    ),
    "wikitext-2": Published(
        "2 million words of Wikipedia (Merity et al. 2016), words split by spaces; 13 MB",
        "CC BY-SA",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        {
            "train.txt.xz": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid.txt.xz": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test.txt.xz": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
        tuple(f"wikitext-2/wiki.{split}.tokens" for split in ("train", "valid", "test")),
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
    for file in data.files:
        path = directory / file
        if not os.path.lexists(path):  # a link to what is not mounted stays one
            missing.append(file)
        elif _digest(path) != data.files[file]:
            raise InputError(
                f"{path}: is not the {file} of {name}: move it away to have it fetched"
            )
    if missing:
        tell(f"fetching {', '.join(missing)} from {data.url}; {data.licence}")
        for file, packed in _fetched(data, missing):
            with publish(directory / file) as draft:
                draft.write_bytes(packed)
                if _digest(draft) != data.files[file]:
                    raise InputError(f"{data.url}: what it serves as {file} is not that of {name}")
    return [directory / file for file in data.files]


def _digest(path: Path) -> str | None:
    """The SHA-256 of a text; None if it is not packed as it says."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error):
        return None


def _fetched(data: Published, files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each file's name and the bytes to store; an archive is fetched once."""
    if not data.members:
        for file in files:
            yield file, _fetch(data.url + file)
        return
    members = dict(zip(data.files, data.members, strict=True))
    try:
        with zipfile.ZipFile(io.BytesIO(_fetch(data.url))) as archive:
            for file in files:
                yield file, lzma.compress(archive.read(members[file]))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{data.url}: is not the archive that it was ({error})") from None


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read()
    except OSError as error:
        raise InputError(f"cannot fetch {url}: {getattr(error, 'reason', error)}") from None
