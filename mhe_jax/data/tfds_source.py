"""Data sets of TensorFlow Datasets, read without TensorFlow.

A data set prepared as `array_record` is read through TFDS; one prepared in TFDS's default format,
`tfrecord`, through `tfrecord.py`.
"""

import contextlib
import hashlib
import os
import re
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import tensorflow_datasets.text  # registers its data sets
import tensorflow_datasets.translate  # noqa: F401
from tensorflow_datasets.core import decode, naming, read_only_builder
from tensorflow_datasets.core.registered import DatasetNotFoundError

from mhe_jax.config import InputError
from mhe_jax.data.cache import DIGEST, VERSION, built_once, identity, key_of
from mhe_jax.data.index import flat
from mhe_jax.data.sources import Content
from mhe_jax.data.tfrecord import record_offsets

AT_ONCE = 128  # records that are read together for their sizes
NAME = re.compile(
    r"tfds:(?P<name>\w+(?:/[^:/]+)?(?::\d+\.\d+\.\d+)?):(?P<split>[^:/]+(?:\[.*\])?.*)"
)


def open_items(
    written: str, fields: tuple[str, ...], cache: Path
) -> tuple[Sequence[Any], Content, str, np.ndarray | None]:
    """The arguments of `Items` for the one or two texts of `tfds:NAME/CONFIG:SPLIT` in `fields`.

    NAME may carry a version (`tfds:wmt14_translate/de-en:1.0.0:train`), SPLIT a slice
    (`tfds:wmt14_translate/de-en:train[:90%]`); data is where TFDS keeps it ($TFDS_DATA_DIR).

    Raises:
      InputError: unknown data set, split or field, a broken file, or the data set is not prepared;
        nothing is ever downloaded.
    """
    builder, split = _open(written)
    features: Any = builder.info.features
    known = list(flat(features)) if hasattr(features, "keys") else []
    for field in fields:
        if field not in known:
            has = ", ".join(map(repr, known)) or "none with names"
            raise InputError(f"{written}: has no field {field!r}; it has {has} (data.fields)")
    rows = _rows(written, builder, split, cache)
    texts, key = _Texts(written, rows, fields), key_of(rows.content, fields)
    if len(fields) == 2:  # pairs are drawn by number
        return texts, "pair", key, None
    return texts, "text", key, rows.offsets()


def open_rows(written: str, cache: Path) -> Sequence[Any]:
    """The examples of `tfds:NAME/CONFIG:SPLIT` as TFDS gives them.

    Raises:
      InputError: as `open_items`.
    """
    builder, split = _open(written)
    return _rows(written, builder, split, cache)


def prepare(name: str) -> dict[str, Any]:
    """Prepares a data set unless that is done; returns its directory and its examples per split.

    It is written as `array_record`, which needs no TensorFlow; TFDS fetches the raw data.

    Raises:
      InputError: an unknown data set, or TFDS cannot prepare it here.
    """
    try:
        builder: Any = _prepared(name) or tfds.builder(name, file_format="array_record")
        if not builder.is_prepared():
            builder.download_and_prepare()
    except DatasetNotFoundError:
        raise InputError(f"{name}: TFDS knows no data set of this name, prepared or not") from None
    except Exception as error:  # each of its many data sets has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) and error.name == "apache_beam":
            reason = "it is made by Apache Beam, which is not installed here: see docs/pods.md"
        raise InputError(f"{name}: TFDS cannot prepare it: {reason[:300]}") from None
    splits = {split: info.num_examples for split, info in builder.info.splits.items()}
    return {"directory": str(builder.data_dir), "examples": splits}


def _open(written: str) -> tuple[Any, str]:
    """The builder of a prepared data set, and the split, checked to exist."""
    match = NAME.fullmatch(written)
    if match is None:
        raise InputError(f"{written}: must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:SPLIT")
    name, split = match["name"], match["split"]
    try:
        builder: Any = _prepared(name) or tfds.builder(name)
        prepared = builder.is_prepared()
    except DatasetNotFoundError:
        raise InputError(f"{written}: TFDS knows no data set {name!r}, prepared or not") from None
    except Exception as error:  # a dozen kinds: no such config, a broken directory
        reason = " ".join(str(error).split())
        raise InputError(f"{written}: TFDS cannot open {name!r}: {reason[:200]}") from None
    if not prepared:
        raise InputError(
            f"{written}: not prepared in {builder.data_dir}; mhe-jax data {name} prepares it"
        )
    try:
        found = builder.info.splits[split]
    except (KeyError, ValueError):
        has = ", ".join(builder.info.splits)
        raise InputError(f"{written}: has no split {split!r}; it has {has}") from None
    if not found.num_examples:
        raise InputError(f"{written}: is empty")
    return builder, split


def _prepared(name: str) -> Any:
    """The builder of a prepared data set, without its own code (SuperGLUE's needs TensorFlow)."""
    try:
        base, options = naming.parse_builder_name_kwargs(name)
        return read_only_builder.builder_from_files(str(base), **options)
    except Exception:  # not prepared, or not readable: its own code knows what to say
        return None


def _rows(written: str, builder: Any, split: str, cache: Path) -> Any:
    if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
        return _TensorFlowRecords(builder, split, cache)
    return _ArrayRecords(written, builder, split, cache)


class _ArrayRecords(Sequence):
    """The examples of a split in `array_record` files; `name` is for messages."""

    def __init__(self, name: str, builder: Any, split: str, cache: Path):
        self._name, self._features = name, builder.info.features
        raw = decode.DeserializeMethod.RAW_BYTES
        parts = builder.info.splits[split].file_instructions
        with self._told():
            self._records: Any = builder.as_data_source(split=split, deserialize_method=raw)
            files = [identity(Path(builder.data_dir) / part.filename) for part in parts]
            index = cache / "index" / f"{key_of('tfds', VERSION, split, files)}.int64"
            numbers = np.memmap(built_once(index, self._index), np.int64, "r")
        # Identifies these records.
        self._offsets, self.content = numbers[:-DIGEST], numbers[-DIGEST:].tolist()

    def _index(self, index: Path) -> None:
        """Reads the files once for the sizes of records, undecoded (9 µs per record of 3 kB)."""
        sizes, digest = array("q", [0]), hashlib.sha256()
        for start in range(0, len(self), AT_ONCE):
            for record in self._read(range(len(self))[start : start + AT_ONCE]):
                sizes.append(len(record))
                digest.update(record)
        offsets = np.cumsum(sizes).tobytes()
        digest.update(offsets)
        index.write_bytes(offsets + digest.digest())

    def _read(self, numbers: Sequence[int]) -> list[bytes]:
        with self._told():
            # Reading several at once uses threads, which is 15 times slower for one.
            one = len(numbers) == 1
            return [self._records[numbers[0]]] if one else self._records.__getitems__(numbers)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the library's errors about files into ours."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{self._name}: cannot be read: {reason[:200]}") from None

    def offsets(self) -> np.ndarray:
        """Sums of the sizes of the records, from 0: int64 [records + 1], mapped."""
        return self._offsets

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):
        return self._features.deserialize_example_np(self._read([index])[0])


class _Texts(Sequence):
    """Decodes the fields of a data set: TFDS gives bytes, its mock data str."""

    def __init__(self, name: str, rows: Any, fields: tuple[str, ...]):
        self._name, self._rows, self._fields = name, rows, fields

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        row = flat(self._rows[index])
        texts = tuple(self._text(row[field], field, index) for field in self._fields)
        return texts if len(texts) == 2 else texts[0]

    def _text(self, value: Any, field: str, index: int) -> str:
        value = value.item() if isinstance(value, np.ndarray | np.generic) else value
        if isinstance(value, str):
            return value
        if not isinstance(value, bytes):
            raise InputError(f"{self._name}: field {field!r} of item {index} is not text")
        return value.decode()


class _TensorFlowRecords(Sequence):
    """The examples of a split in tfrecord files."""

    def __init__(self, builder: Any, split: str, cache: Path):
        self._features = builder.info.features
        self._files, shards, spans = [], [], []
        # Identifies these records.
        self.content: list[Any] = []
        for part in builder.info.splits[split].file_instructions:
            path = Path(builder.data_dir) / part.filename
            ends, digest = record_offsets(path, cache)
            stop = len(ends) - 1 if part.take == -1 else part.skip + part.take
            if stop > len(ends) - 1:
                raise InputError(
                    f"{path}: has {len(ends) - 1:,} records, its data set says {stop:,} or more"
                )
            spans.append(np.stack([ends[part.skip : stop], ends[part.skip + 1 : stop + 1]], 1))
            shards.append(np.full(len(spans[-1]), len(self._files), np.int32))
            self.content.append((digest, part.skip, stop))
            self._files.append(os.open(path, os.O_RDONLY))
            weakref.finalize(self, os.close, self._files[-1])
        self._shards, self._spans = np.concatenate(shards), np.concatenate(spans)

    def offsets(self) -> np.ndarray:
        """Sums of the sizes of the records, from 0: int64 [records + 1]."""
        return np.concatenate([[0], np.cumsum(np.diff(self._spans))])

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index):
        start, stop = self._spans[index].tolist()
        record = os.pread(self._files[self._shards[index]], stop - start - 16, start + 12)
        return self._features.deserialize_example_np(record)
