"""The sources that `data.train`, `data.validation` and `data.test` name.

    what is written in `data.train`          an item is
    a.txt (any suffix but `NOT_TEXT`)        a line
    a.en, a.de                               the pair of lines with the same number
    a.tsv                                    a line; for translation its two columns
    a.jsonl, a.parquet                       the strings in `data.fields`: one, or two
    a directory of `Dataset.save_to_disk`    likewise
    tfds:NAME/CONFIG:SPLIT                   likewise
    demo:SPLIT                               a pair of the built-in phrases

A pattern (`corpus/*.txt.gz`) or a directory is one source of all its files, in the order of their
names or of `state.json`. Files of lines may also be `.gz` or `.xz`. A line ends at a line feed,
with or without a carriage return before it; an item never contains its line's end. Rows of running
text start evenly over the bytes of lines and records, including JSON fields that `data.fields` does
not name: where these are long, some texts come more often.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.files import TABLES, cache_directory, file_format, files_of
from mhe_jax.config.places import source_path
from mhe_jax.config.rules import training_sources
from mhe_jax.data import columns
from mhe_jax.data.cache import key_of
from mhe_jax.data.index import Rule, open_lines
from mhe_jax.data.sources import (
    Column,
    Content,
    Items,
    ParallelLines,
    Records,
    Shards,
    Source,
    TextLines,
)

# Files that users often have, and that do not hold lines of text.
NOT_TEXT = {
    *(".csv", ".json", ".zip", ".bz2", ".zst", ".tar", ".pdf", ".docx", ".html", ".htm", ".xml"),
    *(".feather", ".ipynb", ".sgm", ".tmx", ".xlsx"),
}


def open_source(
    written: Sequence[str],
    content: Content,
    *,
    fields: Sequence[str] = ("text",),
    directory: str = ".",
    cache: Path | None = None,
    option: str = "data",
) -> Source:
    """The source that `data.train`, `data.validation` or `data.test` names, fully checked.

    Args:
      written: one name, or two parallel ones.
      content: `pair` for translation, else `text`.
      fields: names of the text fields in JSONL, Parquet, Arrow and TFDS.
      directory: where relative paths start.
      cache: where indices and unpacked files go; None is `cache_directory()`.
      option: the name of `written` in messages.

    Raises:
      InputError: one line that names the file, the line where there is one, and the reason.
    """
    written = tuple(written)
    if not written or not all(written):
        raise InputError(f"{option} is not set: it names the file or data set to read")
    if len(written) > (2 if content == "pair" else 1):
        allowed = "one source or two parallel files" if content == "pair" else "one source"
        raise InputError(f"{option} has {len(written)} names, allowed is {allowed}")
    kinds = [name.partition(":")[0] for name in written if name.startswith(("tfds:", "demo:"))]
    cache = cache or cache_directory()
    if kinds == ["demo"] and len(written) == 1:
        return _open_demo(written[0], content, option)
    if kinds == ["tfds"] and len(written) == 1:
        from mhe_jax.data import tfds_source  # the only file that imports TFDS, and slow to import

        fields = _fields(fields, content, written[0])
        return Items(written[0], *tfds_source.open_items(written[0], fields, cache))
    paths = [
        [source_path(directory, name) for name in files_of(directory, name)] for name in written
    ]
    formats = [_format(files) for files in paths]
    if len(paths) == 2:
        if kinds or TABLES & set(formats):
            raise InputError(f"{option}={','.join(written)}: only two text files can be parallel")
        if len(paths[0]) != len(paths[1]):
            raise InputError(
                f"{written[0]} names {len(paths[0]):,} files, {written[1]} names "
                f"{len(paths[1]):,}; parallel files have the same number"
            )
        sides = [[TextLines(open_lines(p, Rule(), cache)) for p in side] for side in paths]
        shards: list[Source] = list(map(ParallelLines, *sides))
    else:
        if formats[0] in TABLES - {".tsv"}:
            fields = _fields(fields, content, paths[0][0])
        elif formats[0] != ".tsv" and content == "pair":
            raise InputError(
                f"{option}={written[0]}: translation needs two parallel text files, a .tsv, "
                "a .jsonl, a .parquet or a tfds: data set"
            )
        shards = [_open_file(path, formats[0], content, tuple(fields), cache) for path in paths[0]]
    return shards[0] if len(shards) == 1 else Shards(" and ".join(written), shards)


def _open_file(
    path: Path, form: str, content: Content, fields: tuple[str, ...], cache: Path
) -> Source:
    if form in columns.SUFFIXES:
        texts = [Column(file) for file in columns.open_columns(path, fields, cache)]
        return ParallelLines(*texts) if content == "pair" else texts[0]
    if form == ".jsonl":
        return Records(open_lines(path, Rule(fields=fields), cache), fields)
    if form == ".tsv":
        if content == "text":
            return TextLines(open_lines(path, Rule(columns=1), cache))
        return Records(open_lines(path, Rule(columns=2), cache), None)
    return TextLines(open_lines(path, Rule(), cache))


def _format(paths: Sequence[Path]) -> str:
    """The one form of all files: a suffix in `TABLES`, or another for lines of text.

    Texts have one suffix, numbers apart: what lies beside them (a README) may be none.
    """
    forms = {}
    for path in paths:
        form = file_format(path)
        forms.setdefault(form if re.fullmatch(r"\.[a-z]\S*", form) else "", path)
    if len(forms) > 1:
        raise InputError(
            f"{' and '.join(map(str, forms.values()))} have different formats: name those of one "
            "by a pattern, such as *.txt"
        )
    (form,) = forms
    if form in NOT_TEXT:
        raise InputError(
            f"{forms[form]}: {form} is not a supported format: takes lines of text, .tsv or "
            ".jsonl, each also as .gz or .xz, .parquet, or a directory of `datasets`"
        )
    return form


def open_split(config: Config, split: str) -> Source:
    """The source of `train`, `validation` or `test` of an experiment.

    Raises:
      InputError: see `open_source`; or `train` has several sources, which `open_train` opens.
    """
    if split == "train" and config.data.train_weights:
        raise InputError("data.train has several sources (data.train_weights): name another split")
    return _open(config, split, getattr(config.data, split))


def open_train(config: Config) -> list[tuple[Source, float]]:
    """The training sources of an experiment, each with its weight."""
    return [
        (_open(config, "train", written), weight) for written, weight in training_sources(config)
    ]


def _open(config: Config, split: str, written: Sequence[str]) -> Source:
    return open_source(
        written,
        "pair" if config.facts.content == "pair" else "text",
        fields=config.data.fields,
        directory=config.data.directory,
        cache=cache_directory(config.data.cache_directory),
        option=f"data.{split}",
    )


def _fields(fields: Sequence[str], content: Content, name: Path | str) -> tuple[str, ...]:
    """`fields`, provided there are as many as the content has texts."""
    needed = 2 if content == "pair" else 1
    if len(fields) != needed or len(set(fields)) != needed:
        raise InputError(
            f"data.fields={tuple(fields)}: {name} needs {needed}, the names of its texts"
        )
    return tuple(fields)


def _open_demo(name: str, content: Content, option: str) -> Source:
    if content != "pair":
        raise InputError(f"{option}={name}: holds pairs, for task=translation only")
    from mhe_jax.data import phrases  # needs the extra `demo`

    split: Any = name.partition(":")[2]
    pairs = phrases.pairs(split)
    return Items(name, pairs, "pair", key_of(name, pairs))
