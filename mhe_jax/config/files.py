"""Names of a run's files, the cache, and files that appear whole or not at all."""

import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, check_scheme, source_path

# In the working directory of a run.
CONFIG, RESULT = "config.json", "result.json"
METRICS, TOKENIZER = "metrics.jsonl", "tokenizer.model"

# How text may be packed, formats that hold pairs or texts in named fields, and their other names.
PACKED = (".gz", ".xz")
TABLES = {".tsv", ".csv", ".jsonl", ".parquet", ".arrow"}
CACHE_OF_DATASETS = r"cache-[^/]*\.arrow"
HIDDEN = rf"[._]|.*~$|{CACHE_OF_DATASETS}$"
ALIASES = {".tab": ".tsv", ".pq": ".parquet", ".parq": ".parquet"}
ALIASES |= dict.fromkeys((".jsonlines", ".ndjson", ".ldjson", ".jl"), ".jsonl")


def cache_directory(configured: str | None = None) -> Path:
    """`configured`, else $MHE_JAX_CACHE, else ~/.cache/mhe_jax; created if missing."""
    named = os.environ.get("MHE_JAX_CACHE")
    field = "MHE_JAX_CACHE" if named and not configured else "data.cache_directory"
    given = configured or named or "~/.cache/mhe_jax"
    check_scheme(field, given, ())
    try:
        path = Path(given).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no such home
        raise InputError(f"{field}={given}: {getattr(error, 'strerror', error)}") from None
    if not os.access(path, os.W_OK):
        raise InputError(f"{field}={path}: not writable")
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
    """The files that the name of a source stands for, relative to `directory` like the name.

    Files in a bucket have full names. A file stands for itself, and so does a missing one. A
    directory stands for all its files except hidden ones, those that begin with `_`, backups (`~`)
    and caches of `datasets`; a data set saved by `datasets`, for what its `state.json` names.
    Otherwise a pattern (`*`, `?`, `[..]`, `**` for any depth) stands for all files that match.

    Raises:
      InputError: a directory or pattern that holds no file, or a broken `state.json`.
    """
    place = source_path(directory, name)
    bucket = place if isinstance(place, Bucket) else None
    whole = str(bucket or name)
    try:
        if place.is_dir():
            return [os.path.join(whole, file) for file in _files_in(place)]
        there = place.is_file() if bucket else os.path.lexists(place)
        if there or not glob.has_magic(whole):
            return [whole]
        if bucket:
            found = [str(path) for path in bucket.matches()]
        else:
            root = os.path.expanduser(directory)
            matches = glob.iglob(os.path.expanduser(name), root_dir=root, recursive=True)
            found = [match for match in matches if _is_file(Path(root, match))]
    except OSError as error:
        raise InputError(f"{place}: {error.strerror}") from None
    # Without what `datasets` leaves beside data, unless the pattern itself names it.
    if "cache-" not in PurePath(name).name:
        found = [path for path in found if not re.fullmatch(rf"(.*/)?{CACHE_OF_DATASETS}", path)]
    if not found:
        raise InputError(f"{place}: no file matches")
    return sorted(found)


def _is_file(path: Path) -> bool:
    """Whether it is a file, or a broken link: opening it fails, so no shard is left out unseen."""
    return path.is_file() or not path.exists()


def _files_in(directory: Path) -> list[str]:
    shown = sorted(p for p in directory.iterdir() if not re.match(HIDDEN, p.name))
    files = [path.name for path in shown if _is_file(path)]
    if "dataset_dict.json" in files:
        has = ", ".join(str(path) for path in shown if path.name not in files)
        raise InputError(f"{directory}: holds several splits: name one of {has}")
    if "state.json" in files:
        return _saved_files(directory / "state.json")
    if not files:
        raise InputError(f"{directory}: holds no files")
    return files


def _saved_files(path: Path) -> list[str]:
    """The files of `Dataset.save_to_disk` that hold data, by its `state.json`."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        state = json.loads(path.read_bytes())
        names = [file["filename"] for file in state["_data_files"]]
        plain = all(re.fullmatch(r"[\w. -]+\.arrow", name) for name in names)
        if names and plain and not state.get("_indices_files"):
            return names
    takes = "takes .arrow files beside it under _data_files, and no indices (flatten_indices())"
    raise InputError(f"{path}: {takes}")


@contextlib.contextmanager
def publish(path: Path, *, with_size: bool = False, is_directory: bool = False) -> Iterator[Path]:
    """A draft that becomes the file `path` if the block succeeds, and vanishes if it fails.

    Nobody ever sees half a file, and its contents reach the disk before its name: else a machine
    that loses power may keep the name of an empty file. With `with_size` the name ends in `.` and
    the size; with `is_directory` it is a directory. The draft lies beside `path`, or further up if
    that has no parent yet; of a file for a bucket it is local.

    Raises:
      InputError: it cannot be written.
    """
    room = None
    try:
        if isinstance(path, Bucket):
            above = None
        else:
            above = next(place for place in path.absolute().parents if place.exists())
        room = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=above)
        draft = Path(room, path.name)
        if is_directory:
            draft.mkdir()
        yield draft
        if isinstance(path, Bucket):
            path.write_bytes(draft.read_bytes())
            return
        for place in (draft, *draft.rglob("*")):
            _sync(place)
        if with_size:
            path = path.with_name(f"{path.name}.{draft.stat().st_size}")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        # A full disk's error names no file; one that names another is of a file the block reads.
        named = str(error.filename or path)
        if room is None or named == str(path) or named.startswith(room):
            # numpy says how much it wrote, but not why it stopped.
            reason = error.strerror or f"{error}; is the disk full?"
            raise InputError(f"cannot write {path}: {reason}") from error
        raise
    finally:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)


def check_new(path: Path, source: Path | None = None) -> None:
    """Raises InputError if something is at `path`, even a broken link, or if it is in `source`."""
    check_scheme("", str(path), ())
    if os.path.lexists(path):
        raise InputError(f"{path} is there already: takes a new directory")
    if source is not None and path.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{path} lies in {source}: takes a directory outside of it")


@contextlib.contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """`publish` of a directory; InputError if something is at `path` already."""
    check_new(path)
    with publish(path, is_directory=True) as draft:
        yield draft


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
    """`publish` of a text file."""
    with publish(path) as draft:
        draft.write_text(text, encoding="utf-8")
