"""The sources that `data.train`, `data.validation` and `data.test` name.

    what is written in `data.train`          an item is
    a.txt (any suffix but `NOT_TEXT`)        a line
    a.en, a.de                               the pair of lines with the same number
    a.tsv                                    a line; for translation its two columns
    a.jsonl                                  the strings in `data.fields`: one, or two
    tfds:NAME/CONFIG:SPLIT                   likewise
    demo:SPLIT                               a pair of the built-in phrases

Files may also be `.gz` or `.xz`. A line ends at a line feed, with or without a carriage return
before it; an item never contains its line's end. Rows of running text start evenly over the bytes
of lines and records, those of unnamed fields too: where these are long, some texts come more often.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.config.rules import training_sources
from mhe_jax.data.cache import key_of
from mhe_jax.data.index import Rule, file_format, file_path, open_lines
from mhe_jax.data.sources import (
    Content,
    Items,
    JsonLines,
    ParallelLines,
    Source,
    TabLines,
    TextLines,
)

# Files that users have and that hold no lines of text.
NOT_TEXT = {".csv", ".json", ".parquet", ".zip", ".bz2", ".zst", ".tar", ".pdf", ".docx", ".html"}


def open_source(
    written: Sequence[str],
    content: Content,
    *,
    fields: Sequence[str] = ("text",),
    directory: str = ".",
    cache: Path | None = None,
    option: str = "data",
) -> Source:
    """The source that `data.train`, `data.validation` or `data.test` names, checked whole.

    Args:
      written: one name, or two parallel files.
      content: `pair` for translation, else `text`.
      fields: names of the text fields in JSONL and TFDS.
      directory: where relative paths start.
      cache: where indices and unpacked files go; None is `cache_directory()`.
      option: how messages call `written`.

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
    paths = [file_path(directory, name) for name in written]
    formats = [file_format(path) for path in paths]
    cache = cache or cache_directory()
    for path, form in zip(paths, formats, strict=True):
        if not kinds and form in NOT_TEXT:
            raise InputError(
                f"{path}: {form} is not a form that is read here: takes lines of text, .tsv or "
                ".jsonl, each also as .gz or .xz"
            )
    if len(written) == 2:
        if kinds or {".tsv", ".jsonl"} & set(formats):
            raise InputError(f"{option}={','.join(written)}: only two text files can be parallel")
    elif kinds == ["demo"]:
        return _open_demo(written[0], content, option)
    elif kinds == ["tfds"]:
        from mhe_jax.data import tfds_source  # the only file that imports TFDS, and slow to import

        fields = _fields(fields, content, written[0])
        return Items(written[0], *tfds_source.open_items(written[0], fields, cache))
    if len(paths) == 2:
        source, target = (TextLines(open_lines(path, Rule(whole=True), cache)) for path in paths)
        return ParallelLines(source, target)
    if formats[0] == ".jsonl":
        fields = _fields(fields, content, str(paths[0]))
        return JsonLines(open_lines(paths[0], Rule(fields=fields), cache), fields)
    if formats[0] == ".tsv":
        pair = content == "pair"
        file = open_lines(paths[0], Rule(columns=2 if pair else 1, whole=pair), cache)
        return TabLines(file) if pair else TextLines(file)
    if content == "pair":
        raise InputError(
            f"{option}={written[0]}: translation needs two parallel text files, a .tsv, "
            "a .jsonl or a tfds: data set"
        )
    return TextLines(open_lines(paths[0], Rule(), cache))


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


def _fields(fields: Sequence[str], content: Content, name: str) -> tuple[str, ...]:
    """`fields`, when they are as many as the content has texts."""
    needed = 2 if content == "pair" else 1
    if len(fields) != needed or len(set(fields)) != needed:
        example = "('de', 'en'): source, target" if content == "pair" else "('text',)"
        raise InputError(f"data.fields={tuple(fields)}: {name} needs {needed}, such as {example}")
    return tuple(fields)


def _open_demo(name: str, content: Content, option: str) -> Source:
    if content != "pair":
        raise InputError(f"{option}={name}: holds pairs, for task=translation only")
    from mhe_jax.data import phrases  # needs the extra `demo`

    split: Any = name.partition(":")[2]
    pairs = phrases.pairs(split)
    return Items(name, pairs, "pair", key_of(name, pairs))
