"""Files that are made or fetched once and kept: under a name that says what they are of, or, of the
published data sets that shipped configs read and TFDS does not have, in a directory of the user's.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax.config import InputError
from mhe_jax.config.files import publish
from mhe_jax.config.places import Bucket

SECONDS = 60  # without an answer
TEST = "test_2016_flickr"


def key_of(*parts: object) -> str:
    """A short name for what `parts` (anything JSON can hold) describe."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def key_of_all(parts: Iterable[object]) -> str:
    """`key_of` for more parts than should be in memory as JSON at once."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()[:32]


def identity(path: Path) -> tuple[str | int, ...]:
    """Values of which at least one changes whenever the file does."""
    stat = path.stat()  # `cp -p` and others set the modification time back, not the change time
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, where `build` writes it into a draft unless it is there; InputError if it cannot."""
    if not path.exists():
        with publish(path) as draft:
            build(draft)
    return path


def local_copy(path: Path, cache: Path) -> Path:
    """The copy of an object, fetched once and again if it has changed; a local file is its own."""
    if not isinstance(path, Bucket):
        return path
    try:
        about = path.info()
        version = about["size"], str(about.get("generation") or about["ETag"])
        return built_once(cache / "fetched" / key_of(str(path), *version), path.fetch)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def opened(path: Path) -> Any:
    """The bytes of a file, unpacked; the name of a cached copy does not tell how it is packed."""
    with path.open("rb") as file:
        head = file.read(6)
    unpack: Any = gzip.open if head[:2] == b"\x1f\x8b" else open
    return (lzma.open if head == b"\xfd7zXZ\0" else unpack)(path, "rb")


class Published(NamedTuple):
    """A data set, and where its files are: `url` plus their names, or one archive of all."""

    about: str
    licence: str
    url: str
    files: dict[str, str]  # the SHA-256 of each text, however it is packed
    members: tuple[str, ...] = ()  # their names in an archive


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


def get(name: str, directory: Path, tell: Callable[[str], None]) -> list[Path]:
    """The files of `PUBLISHED[name]` in `directory`, checked; missing ones are fetched, whole and
    checked or not at all. No existing file is overwritten.
    """
    data, paths = PUBLISHED[name], [directory / file for file in PUBLISHED[name].files]
    # A link to what is not mounted stays one.
    missing = [path for path in paths if not os.path.lexists(path)]
    for path in paths:
        if path not in missing and _digest(path) != data.files[path.name]:
            raise InputError(
                f"{path}: is not the {path.name} of {name}: move it away to have it fetched"
            )
    if missing:
        names = ", ".join(path.name for path in missing)
        tell(f"fetching {names} from {data.url}; {data.licence}")
        archive = _fetch(data.url) if data.members else b""
        for path in missing:
            with publish(path) as draft:
                draft.write_bytes(_fetched(data, archive, path.name))
                if _digest(draft) != data.files[path.name]:
                    raise InputError(f"{data.url}: its {path.name} is not that of {name}")
    return paths


def _digest(path: Path) -> str | None:
    """The SHA-256 of a text; None if it is not packed as it says."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error):
        return None


def _fetched(data: Published, archive: bytes, file: str) -> bytes:
    """What to store as a file."""
    if not data.members:
        return _fetch(data.url + file)
    try:
        members = zipfile.ZipFile(io.BytesIO(archive))
    except zipfile.BadZipFile as error:
        raise InputError(f"{data.url}: {error}") from None
    return lzma.compress(members.read(data.members[[*data.files].index(file)]))


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read()
    except OSError as error:
        raise InputError(f"cannot fetch {url}: {getattr(error, 'reason', error)}") from None
