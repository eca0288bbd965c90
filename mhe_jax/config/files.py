"""Names of a run's files, the cache, and files that appear whole or not at all."""

import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket, check_scheme, source_path

# In the working directory of a run.
CONFIG, RESULT = "config.json", "result.json"
METRICS, TOKENIZER = "metrics.jsonl", "tokenizer.model"

# How text may be packed, formats that hold pairs or texts in named fields, and their other names.
PACKED = (".gz", ".xz")
TABLES = {".tsv", ".jsonl", ".parquet", ".arrow"}
ALIASES = {".tab": ".tsv", ".pq": ".parquet", ".parq": ".parquet"}
ALIASES |= dict.fromkeys((".jsonlines", ".ndjson", ".ldjson", ".jl"), ".jsonl")


def cache_directory(configured: str | None = None) -> Path:
    """`configured`, else $MHE_JAX_CACHE, else ~/.cache/mhe_jax; created if missing.

    Raises:
      InputError: it cannot be made or written.
    """
    named = os.environ.get("MHE_JAX_CACHE")
    field = "MHE_JAX_CACHE" if named and not configured else "data.cache_directory"
    given = configured or named or "~/.cache/mhe_jax"
    check_scheme(field, given, ())
    path = Path(os.path.expanduser(given))
    if path.parts[0].startswith("~"):
        raise InputError(f"{field}={path}: there is no such home directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{field}={path}: {error.strerror}") from None
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

    Files in a bucket have full names.

    A file stands for itself, and so does a missing one. A directory stands for all its files except
    hidden ones, those that begin with `_`, backups (`~`) and caches of `datasets`; a data set saved
    by `datasets`, for what its `state.json` names. Otherwise a pattern (`*`, `?`, `[..]`, `**` for
    any depth) stands for all files that match, caches apart.

    Raises:
      InputError: a directory or pattern that holds no file, or a broken `state.json`.
    """
    place = source_path(directory, name)
    if isinstance(place, Bucket):
        return _files_in_bucket(place)
    directory = os.path.expanduser(directory)
    path = str(Path(directory, os.path.expanduser(name)))
    if os.path.isdir(path):
        found = [os.path.join(name, file) for file in _files_in(Path(path), _entries(path))]
    elif glob.has_magic(name) and not os.path.lexists(path):
        matches = glob.iglob(os.path.expanduser(name), root_dir=directory, recursive=True)
        matches = _without_caches(name, matches)
        found = sorted(match for match in matches if _is_file(os.path.join(directory, match)))
        if not found:
            raise InputError(f"{path}: no file matches")
    else:
        found = [name]
    return found


def _is_file(path: str) -> bool:
    """Whether it is a file, or a broken link: opening it fails, so no shard is left out unseen."""
    return os.path.isfile(path) or not os.path.exists(path)


def _entries(directory: str) -> dict[str, bool]:
    """The names in a directory, and whether each is a file."""
    try:
        return {entry.name: _is_file(entry.path) for entry in os.scandir(directory)}
    except OSError as error:
        raise InputError(f"{directory}: {error.strerror}") from None


def _files_in_bucket(place: Bucket) -> list[str]:
    try:
        if place.is_dir():
            there = {path.name: path.is_file() for path in place.iterdir()}
            return [str(place / name) for name in _files_in(place, there)]
        if not glob.has_magic(str(place)) or place.is_file():
            return [str(place)]
        found = _without_caches(str(place), [str(path) for path in place.matches()])
    except OSError as error:
        raise InputError(f"{place}: {error.strerror}") from None
    if not found:
        raise InputError(f"{place}: no file matches")
    return found


def _without_caches(pattern: str, names: Iterable[str]) -> list[str]:
    """Without what `datasets` leaves beside data, unless the pattern itself names it."""
    asked = "cache-" in PurePath(pattern).name
    return [x for x in names if asked or not re.fullmatch(r"(.*/)?cache-[^/]*\.arrow", x)]


def _files_in(directory: Path | Bucket, entries: dict[str, bool]) -> list[str]:
    names = sorted(name for name in entries if not re.match(r"[._]|.*~$|cache-.*\.arrow$", name))
    files = [name for name in names if entries[name]]
    if "dataset_dict.json" in files:
        has = ", ".join(str(directory / name) for name in names if not entries[name])
        raise InputError(f"{directory}: holds several splits: name one of {has}")
    if "state.json" in files and any(re.search(r"\.arrow$|^dataset_info\.", f) for f in files):
        return _saved_files(directory / "state.json")
    if not files:
        raise InputError(f"{directory}: holds no files")
    return files


def _saved_files(path: Path | Bucket) -> list[str]:
    """The files of `Dataset.save_to_disk` that hold data, by its `state.json`."""
    try:
        read = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        state = json.loads(read)
        names = [file["filename"] for file in state["_data_files"]]
        plain = all(re.fullmatch(r"[\w. -]+\.arrow", name) for name in names)
        if names and plain and not any(state[key] for key in state if key.startswith("_indices")):
            return names
    takes = "takes .arrow files beside it under _data_files, and no indices (flatten_indices())"
    raise InputError(f"{path}: {takes}")


@contextlib.contextmanager
def publish(path: Path, *, with_size: bool = False) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds, and vanishes if it fails.

    Nobody ever sees half a file, and of two processes that build the same one, both are right.
    The contents reach the disk before the name: otherwise a machine that loses power may keep the
    name of an empty file. With `with_size` the name ends in `.` and the size. A file for a bucket
    lies in a local directory until then.

    Raises:
      InputError: it cannot be written.
    """
    if isinstance(path, Bucket):
        with tempfile.TemporaryDirectory() as drafts:
            yield (draft := Path(drafts, path.name))
            try:
                path.write_bytes(draft.read_bytes())
            except OSError as error:
                raise InputError(f"cannot write {path}: {error.strerror}") from error
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
        _sync(temporary)
        if with_size:
            path = path.with_name(f"{path.name}.{temporary.stat().st_size}")
        temporary.replace(path)
        # Some file systems do not sync directories.
        with contextlib.suppress(OSError):
            _sync(path.parent)
    except OSError as error:
        # A full disk's error names no file; one that names another is of a file the block reads.
        if temporary is None or error.filename in (None, str(temporary)):
            # numpy says how much it wrote, but not why it stopped.
            reason = error.strerror or f"{error}; is the disk full?"
            raise InputError(f"cannot write {path}: {reason}") from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_new(path: Path, source: Path | None = None) -> None:
    """Raises InputError if something is at `path`, even a broken link, or if it is in `source`."""
    check_scheme("", str(path), ())
    if os.path.lexists(path):
        raise InputError(f"{path} is there already: takes a new directory")
    if source is not None and path.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{path} lies in {source}: takes a directory outside of it")


@contextlib.contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` if the block succeeds, and vanishes if it fails.

    It lies beside `path`, or further up if that has no parent yet. As with `publish`, the contents
    reach the disk before the name.

    Raises:
      InputError: `path` is there already, or cannot be written.
    """
    check_new(path)
    temporary = None
    try:
        above = next(place for place in path.absolute().parents if place.exists())
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=above))
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes what only its owner reads
        for place, _, names in os.walk(temporary):
            for name in names:
                _sync(Path(place, name))
            with contextlib.suppress(OSError):  # some file systems do not sync directories
                _sync(Path(place))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(path)
        with contextlib.suppress(OSError):
            _sync(path.parent)
    except OSError as error:
        name = str(error.filename or "")
        if temporary is None or not name or name.startswith(str(temporary)):
            reason = error.strerror or f"{error}; is the disk full?"
            raise InputError(f"cannot write {path}: {reason}") from error
        raise
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file that appears whole or not at all.

    Raises:
      InputError: it cannot be written.
    """
    with publish(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
