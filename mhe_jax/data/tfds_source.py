"""Data sets of TFDS, read without TensorFlow: they must be prepared as ArrayRecord."""

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
import tensorflow_datasets.text  # registers its data sets
import tensorflow_datasets.translate  # noqa: F401
from tensorflow_datasets.core import naming, read_only_builder

from mhe_jax.config import InputError
from mhe_jax.data.cache import identity

AT_ONCE = 128  # examples that are read together, in threads
NAME = re.compile(r"tfds:([^\[]+):([^:\[]+.*)")


def open_split(written: str) -> tuple[list[Any], Callable[[], Iterator[tuple[str, Any]]]]:
    """What changes with the files of `tfds:NAME/CONFIG:SPLIT`, and a reader of its examples.

    NAME may carry a version (`tfds:wmt14_translate/de-en:1.0.0:train`), SPLIT a slice
    (`tfds:wmt14_translate/de-en:train[:90%]`); data is where TFDS keeps it ($TFDS_DATA_DIR).
    Nothing is downloaded: InputError if it is not prepared as ArrayRecord.
    """
    match = NAME.fullmatch(written)
    if match is None:
        raise InputError(f"{written}: must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:SPLIT")
    name, split = match.groups()
    builder = _builder(name, written)
    form = builder.info.file_format
    if not builder.is_prepared() or form is not tfds.core.FileFormat.ARRAY_RECORD:
        raise InputError(
            f"{written}: not prepared in {builder.data_dir} as array_record; mhe-jax data {name} "
            "prepares it (what is there in another format: move it away)"
        )
    try:
        parts = builder.info.splits[split].file_instructions
    except (KeyError, ValueError):
        has = ", ".join(builder.info.splits)
        raise InputError(f"{written}: has no split {split!r}; it has {has}") from None

    def read() -> Iterator[tuple[str, Any]]:
        try:
            examples = builder.as_data_source(split=split)
            for start in range(0, len(examples), AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, len(examples)))
                for number, example in zip(numbers, examples.__getitems__(numbers), strict=True):
                    yield f"{written}: example {number}", plain(example)
        except (OSError, RuntimeError) as error:
            raise InputError(f"{written}: cannot be read: {_short(error)}") from None

    return [split, *(identity(Path(builder.data_dir) / part.filename) for part in parts)], read


def prepare(name: str) -> dict[str, Any]:
    """Prepares a data set unless that is done; returns its directory and its examples per split."""
    builder = _builder(name, name)
    try:
        if not builder.is_prepared():
            builder.download_and_prepare()
    except Exception as error:  # each of its many data sets has its own
        raise InputError(f"{name}: TFDS cannot prepare it: {_short(error)}") from None
    splits = {split: info.num_examples for split, info in builder.info.splits.items()}
    return {"directory": str(builder.data_dir), "examples": splits}


def _builder(name: str, where: str) -> Any:
    """The builder of a data set; of a prepared one, without its own code, which may need more."""
    with contextlib.suppress(Exception):  # not prepared, or its own code knows what to say
        base, options = naming.parse_builder_name_kwargs(name)
        return read_only_builder.builder_from_files(str(base), **options)
    try:
        return tfds.builder(name, file_format="array_record")
    except Exception as error:  # a dozen kinds: no such data set or config, a broken directory
        raise InputError(f"{where}: TFDS cannot open {name!r}: {_short(error)}") from None


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__


def plain(value: Any) -> Any:
    """A value of TFDS as JSON would give it."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.decode() if isinstance(value, bytes) else value
