"""Data sets of TFDS, read without TensorFlow: they must be prepared as ArrayRecord."""

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import tensorflow_datasets.text  # registers its data sets
import tensorflow_datasets.translate  # noqa: F401
from tensorflow_datasets.core import naming, read_only_builder
from tensorflow_datasets.core.registered import DatasetNotFoundError

from mhe_jax.config import InputError
from mhe_jax.data.cache import identity

AT_ONCE = 128  # examples that are read together, in threads
NAME = re.compile(
    r"tfds:(?P<name>\w+(?:/[^:/]+)?(?::\d+\.\d+\.\d+)?):(?P<split>[^:/]+(?:\[.*\])?.*)"
)


def open_split(
    written: str,
) -> tuple[Sequence[Any], Callable[[], Iterator[tuple[str, dict[str, Any]]]]]:
    """What changes with the files of `tfds:NAME/CONFIG:SPLIT`, and a reader of its examples.

    NAME may carry a version (`tfds:wmt14_translate/de-en:1.0.0:train`), SPLIT a slice
    (`tfds:wmt14_translate/de-en:train[:90%]`); data is where TFDS keeps it ($TFDS_DATA_DIR).
    Nothing is downloaded: InputError if it is not prepared as ArrayRecord.
    """
    builder, split = _open(written)
    parts = builder.info.splits[split].file_instructions
    files = [Path(builder.data_dir) / part.filename for part in parts]

    def read() -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            examples = builder.as_data_source(split=split)
            for start in range(0, len(examples), AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, len(examples)))
                for number, example in zip(numbers, examples.__getitems__(numbers), strict=True):
                    yield f"{written}: example {number}", plain(example)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{written}: cannot be read: {reason[:200]}") from None

    try:
        return [split, *map(identity, files)], read
    except OSError as error:
        raise InputError(f"{written}: {error.filename}: {error.strerror}") from None


def prepare(name: str) -> dict[str, Any]:
    """Prepares a data set unless that is done; returns its directory and its examples per split.

    It is written as ArrayRecord, which needs no TensorFlow; TFDS fetches the raw data.
    """
    builder = _builder(name, name)
    try:
        if not builder.is_prepared():
            builder.download_and_prepare()
    except Exception as error:  # each of its many data sets has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError) and error.name == "apache_beam":
            reason = "it is made by Apache Beam, which is not installed here: see docs/pods.md"
        raise InputError(f"{name}: TFDS cannot prepare it: {reason[:300]}") from None
    splits = {split: info.num_examples for split, info in builder.info.splits.items()}
    return {"directory": str(builder.data_dir), "examples": splits}


def _builder(name: str, where: str) -> Any:
    """The builder of a data set; of a prepared one, without its own code, which may need more."""
    with contextlib.suppress(Exception):  # not prepared, or its own code knows what to say
        base, options = naming.parse_builder_name_kwargs(name)
        return read_only_builder.builder_from_files(str(base), **options)
    try:
        return tfds.builder(name, file_format="array_record")
    except DatasetNotFoundError:
        raise InputError(f"{where}: TFDS knows no data set {name!r}, prepared or not") from None
    except Exception as error:  # a dozen kinds: no such config, a broken directory
        reason = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise InputError(f"{where}: TFDS cannot open {name!r}: {reason}") from None


def _open(written: str) -> tuple[Any, str]:
    """The builder of a prepared data set, and the split, checked to exist."""
    match = NAME.fullmatch(written)
    if match is None:
        raise InputError(f"{written}: must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:SPLIT")
    name, split = match["name"], match["split"]
    builder = _builder(name, written)
    told = f"{written}: not prepared in {builder.data_dir}"
    if not builder.is_prepared():
        raise InputError(f"{told}; mhe-jax data {name} prepares it")
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise InputError(
            f"{told} as array_record, but as {builder.info.file_format.value}: move it away, and "
            f"mhe-jax data {name} prepares it anew"
        )
    try:
        found = builder.info.splits[split]
    except (KeyError, ValueError):
        has = ", ".join(builder.info.splits)
        raise InputError(f"{written}: has no split {split!r}; it has {has}") from None
    if not found.num_examples:
        raise InputError(f"{written}: is empty")
    return builder, split


def plain(value: Any) -> Any:
    """A value of TFDS as JSON would give it."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.decode() if isinstance(value, bytes) else value
