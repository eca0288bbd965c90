"""Text columns of Parquet files, and of data sets that the library `datasets` has saved.

A column is copied once into the cache: its texts one after the other, with an index like that of
lines. From then on it is read like a text file, without the library that reads the original.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.config.files import file_format, publish
from mhe_jax.data.cache import DIGEST, VERSION, built_once, drop_earlier, identity, key_of
from mhe_jax.data.index import LineFile, flat, real_file

SUFFIXES = (".parquet", ".arrow")
ROWS = 1024  # copied per batch


def open_columns(path: Path, fields: Sequence[str], cache: Path) -> list[LineFile]:
    """The texts of each of `fields`, copied and checked unless that was done before.

    Raises:
      InputError: one line that names the file, the field and row if any, and the reason.
    """
    return [_column(path, field, cache) for field in fields]


def _column(path: Path, field: str, cache: Path) -> LineFile:
    # The link's name tells the format; the name of a blob in a content-addressed store does not.
    name, form, path = str(path), file_format(path), real_file(path, cache)
    try:
        key = key_of(VERSION, "column", *identity(path), field)
        copy = cache / "unpacked" / key_of(str(path), field) / key
        index = cache / "index" / f"{key}.int64"
        built = built_once(index, lambda draft: _copy(name, path, form, field, copy, draft))
        numbers = np.memmap(built, np.int64, "r")
        texts = copy.with_name(f"{copy.name}.{numbers[-DIGEST - 1]}")
        drop_earlier(texts)
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
    return LineFile(name, texts, numbers[:-DIGEST], key_of(numbers[-DIGEST:].tolist(), "column"))


def _copy(name: str, path: Path, form: str, field: str, copy: Path, index: Path) -> None:
    """Writes the texts to `copy`, and where each begins to `index`, with the SHA-256 of all."""
    digest, end, rows, blank = hashlib.sha256(), 0, 0, True
    with publish(copy, with_size=True) as draft, draft.open("wb") as out, index.open("wb") as at:
        for array in _column_parts(name, path, form, field):
            with _told(name, form):
                starts, data = _texts(f"{name}:row ", field, array, rows)
            blank = blank and not bool((np.frombuffer(data, np.uint8) > ord(" ")).any())
            out.write(data)
            at.write((starts[:-1] + end).tobytes())
            # The same bytes cut at other places are other texts.
            digest.update(np.diff(starts).tobytes())
            digest.update(data)
            end, rows = end + len(data), rows + len(array)
        if blank:
            raise InputError(f"{name}: has no text in {field}")
        at.write(np.int64(end).tobytes())
        at.write(digest.digest())


def _texts(where: str, field: str, array: Any, rows: int) -> tuple[np.ndarray, memoryview]:
    """Where each text of an Arrow array begins, and the end, from 0; and the bytes of all texts."""
    import pyarrow

    if array.null_count:
        number = array.is_null().to_pylist().index(True)
        raise InputError(f"{where}{rows + number + 1}: field {field!r} is empty (null)")
    array.validate(full=True)  # reading past the end of the buffer would crash the process
    _, offsets, data = array.cast(pyarrow.large_string()).buffers()
    starts = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    data = memoryview(data if data is not None else b"")
    return starts - starts[0], data[starts[0] : starts[-1]]


def _column_parts(name: str, path: Path, form: str, field: str) -> Iterator[Any]:
    """A column as Arrow arrays, one after the other."""
    from pyarrow import Table

    with _told(name, form):
        schema, batches = _opened(path, form, [field])
        _check_field(name, field, schema)
        for batch in batches:
            if len(batch):
                rows = Table.from_batches([batch])
                yield (rows if field in schema.names else _flat(rows)).column(field).chunk(0)


def _opened(path: Path, form: str, fields: list[str] | None = None) -> tuple[Any, Any]:
    """The schema, and the batches one by one; of a Parquet file only `fields` are read."""
    from pyarrow import ipc, memory_map, parquet

    if form == ".parquet":
        # No pre-buffering: it would keep all that was read of the file in memory until the end.
        file = parquet.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        )
        return file.schema_arrow, file.iter_batches(ROWS, columns=fields, use_threads=False)
    stream = ipc.open_stream(memory_map(str(path)))
    return stream.schema, stream


@contextlib.contextmanager
def _told(name: str, form: str) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        what = "a Parquet file" if form == ".parquet" else "an Arrow stream"
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: is not {what}, or is damaged ({reason})") from None


def rows_of(path: Path, cache: Path, *, named: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place of each row, for messages, and its values by field, nested ones too, as in JSON.

    A class that `datasets` has stored as a number stays a number; with `named` it becomes its name,
    or None if it is -1, the mark of no label.

    Raises:
      InputError: the file is not there or cannot be read.
    """
    name, form, path = str(path), file_format(path), real_file(path, cache)
    with _told(name, form):
        schema, batches = _opened(path, form)
        classes = _classes(schema) if named else {}
        numbers = itertools.count(1)
        for batch in batches:
            for values in batch.to_pylist():
                where = f"{name}:row {next(numbers)}"
                values |= flat(values)
                for field in classes.keys() & values.keys():
                    if values[field] in range(len(classes[field])):
                        values[field] = classes[field][values[field]]
                    elif values[field] == -1:
                        values[field] = None
                yield where, values


def _classes(schema: Any) -> dict[str, list[str]]:
    """Class names in order, for each field that `datasets` knows to hold classes."""
    try:
        known = flat(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
        fields = [name.removesuffix("._type") for name in known if known[name] == "ClassLabel"]
        return {field: list(map(str, known[f"{field}.names"])) for field in fields}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _check_field(name: str, field: str, schema: Any) -> None:
    from pyarrow import types

    if field not in schema.names:
        schema = _flat(schema.empty_table()).schema
    if schema.names.count(field) > 1:
        raise InputError(f"{name}: has several fields {field!r} (data.fields)")
    if field not in schema.names:
        has = ", ".join(map(repr, schema.names)) or "none"
        raise InputError(f"{name}: has no field {field!r}; it has {has} (data.fields)")
    kind = schema.field(field).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise InputError(f"{name}: field {field!r} is {kind}, not text (data.fields)")


def _flat(rows: Any) -> Any:
    """The rows with the fields of structs as columns, under names that dots join."""
    from pyarrow import types

    while any(map(types.is_struct, rows.schema.types)):
        rows = rows.flatten()
    return rows
