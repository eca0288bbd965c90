"""The text of `lm_pass`: C sources of Linux 6.1, from Debian's package of them.

    apt-get download linux-source-6.1
    python experiments/atlas/linux_text.py linux-source-6.1_*.deb data/linux

Writes train.txt.xz, valid.txt.xz and test.txt.xz, whole files of the package's `.c` in the order of
their names, and tokenizer.model. The CRC of a file's name says where it goes: of 1,000 parts one is
for validation, one for the test, and `--parts` are for training.
"""

import contextlib
import lzma
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line
from experiments.atlas.cases import PASS, base_of
from experiments.atlas.sizes import changed
from mhe_jax.data import open_train, train_tokenizer

PARTS = 1_000


def sources(package: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each `.c` file within the archive within the package."""
    unpack = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(unpack, stdout=subprocess.PIPE) as dpkg,
        tarfile.open(fileobj=dpkg.stdout, mode="r|") as outer,
    ):
        archive = next(member for member in outer if member.name.endswith(".tar.xz"))
        with tarfile.open(fileobj=outer.extractfile(archive), mode="r|xz") as inner:
            for file in inner:
                if file.isfile() and file.name.endswith(".c"):
                    data = inner.extractfile(file)
                    assert data is not None
                    yield file.name, data.read().decode("utf-8", "replace")


def split_of(name: str, parts: int) -> str | None:
    part = zlib.crc32(name.encode()) % PARTS
    return {0: "valid", 1: "test"}.get(part, "train" if part < 2 + parts else None)


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parts", type=command_line.positive, default=500, help="for training")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    files = {n: args.directory / f"{n}.txt.xz" for n in ("train", "valid", "test")}
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(lzma.LZMAFile(file, "w")) for name, file in files.items()}
        for name, text in sources(args.package):
            if split := split_of(name, args.parts):
                out[split].write(f"{text.rstrip()}\n".encode())
    config = changed(base_of(PASS), {"data.directory": str(args.directory)})
    pieces = train_tokenizer(open_train(config), config.model.vocabulary_size)
    pieces.save(args.directory / "tokenizer.model")


if __name__ == "__main__":
    main()
