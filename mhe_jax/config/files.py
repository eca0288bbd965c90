"""Names of a run's files, the cache, and files that appear whole or not at all."""

import contextlib
import glob
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, check_scheme, source_path

# In the working directory of a run.
CONFIG, RESULT = "config.json", "result.json"
METRICS, TOKENIZER = "metrics.jsonl", "tokenizer.model"

# How text may be packed, formats with a reader in `data/readers.py`, and their other names.
PACKED = (".gz", ".xz")
TABLES = {".tsv", ".csv", ".jsonl", ".parquet", ".arrow", ".json"}
ALIASES = {".tab": ".tsv", ".pq": ".parquet", ".parq": ".parquet"}
ALIASES |= dict.fromkeys((".jsonlines", ".ndjson", ".ldjson", ".jl"), ".jsonl")


def cache_directory(configured: str | None = None) -> Path:
    """`configured`, else $MHE_JAX_CACHE, else ~/.cache/mhe_jax; created if missing."""
    given = configured or os.environ.get("MHE_JAX_CACHE") or "~/.cache/mhe_jax"
    check_scheme("data.cache_directory", given, ())
    try:
        path = Path(given).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no such home
        raise InputError(f"data.cache_directory={given}: {error}") from None
    return path


def file_format(path: PurePath) -> str:
    """`.tsv` for `a.tsv`, `A.TSV` and `a.tab.gz`: the suffix that says how to read the text.

    >>> file_format(PurePath("train.jsonl.xz")), file_format(PurePath("train.en"))
    ('.jsonl', '.en')
    """
    form = path.suffix.lower()
    form = PurePath(path.stem).suffix.lower() if form in PACKED else form
    return ALIASES.get(form, form)


def files_of(directory: str, name: str) -> list[str]:
    """The files that a source stands for, relative to `directory`; in a bucket, full names.

    A missing file stands for itself; a directory for its files except hidden ones (`.`, `_`) and
    backups (`~`), or for what the `state.json` of `datasets` names.
    """
    place = source_path(directory, name)
    in_bucket = isinstance(place, Bucket)
    whole = str(place) if in_bucket else name
    try:
        if place.is_dir():
            return [os.path.join(whole, file) for file in _files_in(place)]
        if place.is_file() or not glob.has_magic(whole):
            return [whole]
        if in_bucket:
            found = [str(path) for path in place.parent.glob(place.name)]
        else:
            root = os.path.expanduser(directory)
            matches = glob.iglob(os.path.expanduser(name), root_dir=root, recursive=True)
            found = [match for match in matches if not Path(root, match).is_dir()]
    except OSError as error:
        raise InputError(f"{place}: {error.strerror}") from None
    if not found:
        raise InputError(f"{place}: no file matches")
    return sorted(found)


def _files_in(directory: Path) -> list[str]:
    shown = sorted(path for path in directory.iterdir() if not re.match(r"[._]|.*~$", path.name))
    # A broken link is one: to open it fails, so no shard is left out unseen.
    files = [path.name for path in shown if not path.is_dir()]
    if "dataset_dict.json" in files:
        has = ", ".join(str(path) for path in shown if path.name not in files)
        raise InputError(f"{directory}: holds several splits: name one of {has}")
    if "state.json" in files:
        try:
            state = json.loads((directory / "state.json").read_bytes())
            files = [PurePath(file["filename"]).name for file in state["_data_files"]]
        except (ValueError, LookupError, TypeError):
            raise InputError(f"{directory / 'state.json'}: names no _data_files") from None
    if not files:
        raise InputError(f"{directory}: holds no files")
    return files


@contextlib.contextmanager
def publish(path: Path, *, is_directory: bool = False) -> Iterator[Path]:
    """A draft beside `path` that takes its name if the block succeeds, else vanishes.

    It is on the disk first: a machine that loses power may else keep the name of an empty file.
    A directory replaces none but an empty one.
    """
    in_bucket, start = isinstance(path, Bucket), f".{path.name}."
    beside = None if in_bucket else path.parent
    try:
        if beside is not None:
            beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=start, suffix=".tmp", dir=beside, ignore_cleanup_errors=True
        ) as room:
            draft = Path(room, path.name)
            if is_directory:
                draft.mkdir()
            yield draft
            if beside is None:
                path.write_bytes(draft.read_bytes())
                return
            for place in (draft, *draft.rglob("*")):
                _sync(place)
            draft.replace(path)
            _sync(beside)
    except OSError as error:
        # A full disk's error names no file; one that names another is of a file the block reads.
        named = str(error.filename or path)
        if named != str(path) and named != str(beside) and start not in named:
            raise
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems do not sync directories
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    with publish(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_new(path: Path, source: Path | None = None) -> None:
    """Raises InputError if something is at `path`, even a broken link, or if it is in `source`."""
    check_scheme("", str(path), ())
    if os.path.lexists(path):
        raise InputError(f"{path} is there already: takes a new directory")
    if source is not None and path.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{path} lies in {source}: takes a directory outside of it")
