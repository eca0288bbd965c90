"""Texts, and pairs of texts, in order: what `data.train`, `data.validation` and `data.test` name.

    a.txt, any file of lines    each line
    a.en, a.de                  for translation: the lines with the same number
    a.jsonl, tfds:..., ...      the texts in `data.fields`: one, or two

A source is read whole when it is first opened: checked, counted, and named by its content. What was
found is kept in the cache for as long as no file changes.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mhe_jax.config import Config, DataConfig, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.config.rules import training_sources
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.readers import NAMELESS, READERS, Source, Values, open_records

Content = Literal["text", "pair"]
Item = tuple[str, ...]  # one text, or two
VERSION = 6  # of what is kept


@dataclass(frozen=True)
class Text:
    """Items in order, one text or two each; `key` is another if any is, wherever they lie."""

    name: str
    read: Callable[[], Iterable[Item | None]]  # None for an item that has no text
    key: str
    num_items: int
    num_empty: int
    size: int  # of all texts, in bytes of UTF-8
    sides: int  # texts of an item

    @classmethod
    def of(cls, name: str, items: Sequence[Item]) -> "Text":
        """The text that a sequence holds."""
        return cls(name, lambda: items, **survey(name, items))

    def __len__(self) -> int:
        return self.num_items

    def __str__(self) -> str:
        left = f" ({self.num_empty:,} without text left out)" if self.num_empty else ""
        return f"{self.name}: {self.num_items:,} items{left}"

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self.read() if item is not None)


def survey(name: str, items: Iterable[Item | None]) -> dict[str, Any]:
    """What a `Text` says of its items."""
    digest, count, empty, size, sides, blank = hashlib.sha256(), 0, 0, 0, 0, True
    for item in items:
        if item is None:
            empty += 1
            continue
        count, sides = count + 1, len(item)
        for text in item:
            data = text.encode()
            digest.update(len(data).to_bytes(8) + data)
            size += len(data)
            blank = blank and not text.strip()
    if blank:
        raise InputError(f"{name}: has no text")
    counts = {"num_items": count, "num_empty": empty, "size": size, "sides": sides}
    return counts | {"key": digest.hexdigest()[:32]}


def open_source(
    written: Sequence[str], content: Content, data: DataConfig | None = None, option: str = "data"
) -> Text:
    """The text that one name, or two parallel ones, stand for, fully checked.

    `option` is the field of `written` in messages. InputError names the file, the place and why.
    """
    data, sides = data or DataConfig(), 2 if content == "pair" else 1
    name, given = " and ".join(written), f"{option}={','.join(written)}"
    if not all(written or [""]):
        raise InputError(f"{option} is not set: it names the file or data set to read")
    if len(written) > sides:
        raise InputError(f"{given}: has {len(written)} names, takes at most {sides}")
    # Nobody has named two fields.
    fields = NAMELESS[1] if sides == 2 and data.fields == NAMELESS[0] else data.fields
    cache = cache_directory(data.cache_directory)
    sources = [open_records(one, fields, data.directory, cache) for one in written]
    is_table = any(source.form == "tfds" or source.form in READERS for source in sources)
    if sides == 2 and is_table == (len(sources) == 2):
        raise InputError(
            f"{given}: translation needs two parallel text files, or one table of two columns "
            "(.tsv, .csv, .jsonl, .parquet) or tfds: data set"
        )
    fields = fields if is_table else NAMELESS[0]
    if is_table and (len(fields) != sides or len({*fields}) != sides):
        raise InputError(f"data.fields is {fields}: {name} needs {sides}, the names of its texts")

    def read() -> Iterator[Item | None]:
        records = (_item(where, values, fields) for where, values in sources[0].read())
        items = _parallel(*sources) if len(sources) == 2 else records
        return itertools.islice(items, data.max_examples)

    def build(draft: Path) -> None:
        draft.write_text(json.dumps(survey(name, read())))

    identities = [source.identity for source in sources]
    key = key_of(VERSION, content, fields, data.max_examples, *identities)
    found = json.loads(built_once(cache / "texts" / key, build).read_text())
    return Text(name, read, **found)


def _item(where: str, values: Values, fields: Sequence[str]) -> Item | None:
    """The texts of a record; None if one, or what it is a field of, is null."""
    texts = []
    for field in fields:
        around = itertools.accumulate(field.split("."), "{}.{}".format)
        text = values.get(field)
        if field not in values and not any(values.get(name, "") is None for name in around):
            has = ", ".join(map(repr, values)) or "none"
            raise InputError(f"{where}: has no field {field!r}; it has {has} (data.fields)")
        if not isinstance(text, str | None):
            raise InputError(f"{where}: field {field!r} is not text (data.fields)")
        texts.append(text)
    return None if None in texts else tuple(texts)


def _parallel(one: Source, other: Source) -> Iterator[Item]:
    """The lines of two sources with the same number."""
    for number, (first, second) in enumerate(itertools.zip_longest(one.read(), other.read())):
        if not (first and second):
            more, fewer = (one, other) if first else (other, one)
            raise InputError(
                f"{more.name} has more lines than {fewer.name}, which has {number:,}; parallel "
                "files have the same number"
            )
        yield first[1]["text"], second[1]["text"]


def open_split(config: Config, split: str) -> Text:
    """The text of `train` (if it is one source), `validation` or `test` of an experiment."""
    if split == "train" and config.data.train_weights:
        raise InputError("data.train has several sources (data.train_weights): name another split")
    return _open(config, split, getattr(config.data, split))


def open_train(config: Config) -> list[tuple[Text, float]]:
    """The training texts of an experiment, each with its weight."""
    return [(_open(config, "train", names), weight) for names, weight in training_sources(config)]


def _open(config: Config, split: str, written: Sequence[str]) -> Text:
    content = "pair" if config.facts.content == "pair" else "text"
    return open_source(written, content, config.data, f"data.{split}")
