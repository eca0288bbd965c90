"""Texts, and pairs of texts, in order: what `data.train`, `data.validation` and `data.test` name.

    a.txt, any file of lines                 each line
    a.en, a.de                               for translation: the lines with the same number
    a.jsonl, a.tsv, a.csv, a.parquet, ...    the texts in `data.fields`: one, or two
    tfds:NAME/CONFIG:SPLIT                   likewise
    demo:SPLIT                               the pairs of the demo

A source is read whole when it is first opened: checked, counted, and named by its content. What was
found is kept in the cache for as long as no file changes.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mhe_jax.config import Config, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.config.rules import training_sources
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.readers import NAMELESS, READERS, Source, Values, open_records

Content = Literal["text", "pair"]
Item = tuple[str, ...]  # one text, or two
VERSION = 5  # of what is kept


class Text:
    """Items in order, one text or two each; `key` is another if any is, wherever they lie."""

    def __init__(self, name: str, read: Callable[[], Iterable[Item | None]], found: dict[str, Any]):
        self.name, self._read = name, read
        self.key: str = found["key"]
        self.num_items, self.num_empty = found["items"], found["empty"]
        self.size: int = found["bytes"]  # of all texts, in UTF-8
        self.sides: int = found["sides"]  # texts of an item

    @classmethod
    def of(cls, name: str, items: Sequence[Item]) -> "Text":
        """The text that a sequence holds."""
        return cls(name, lambda: items, survey(name, items))

    def __len__(self) -> int:
        return self.num_items

    def __str__(self) -> str:
        left = f" ({self.num_empty:,} without text left out)" if self.num_empty else ""
        return f"{self.name}: {self.num_items:,} items{left}"

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self._read() if item is not None)


def survey(name: str, items: Iterable[Item | None]) -> dict[str, Any]:
    """How many items there are, of how many bytes, and a key of all; None has no text."""
    digest, count, size, sides, empty, blank = hashlib.sha256(), 0, 0, 0, 0, True
    for item in items:
        count, empty = count + (item is not None), empty + (item is None)
        sides = len(item) if item else sides
        for text in item or ():
            data = text.encode()
            digest.update(len(data).to_bytes(8) + data)
            size += len(data)
            blank = blank and not text.strip()
    if blank:
        raise InputError(f"{name}: has no text")
    counts = {"items": count, "empty": empty, "bytes": size, "sides": sides}
    return counts | {"key": digest.hexdigest()[:32]}


def open_source(
    written: Sequence[str],
    content: Content,
    *,
    fields: Sequence[str] = ("text",),
    directory: str = ".",
    cache: Path | None = None,
    option: str = "data",
    most: int | None = None,
) -> Text:
    """The text that one name, or two parallel ones, stand for, fully checked.

    `fields` are the names of the one or two texts in tables; `option` is that of `written` in
    messages. `most` takes the first so many items. InputError names the file, the place and why.
    """
    sides = 2 if content == "pair" else 1
    if not all(written or [""]):
        raise InputError(f"{option} is not set: it names the file or data set to read")
    if len(written) > sides:
        parallel = " or two parallel files" * (sides == 2)
        raise InputError(f"{option} has {len(written)} names, allowed is one source{parallel}")
    cache, name = cache or cache_directory(), " and ".join(written)
    if sides == 2 and tuple(fields) == ("text",):
        fields = NAMELESS[1]  # nobody has named two
    sources = [open_records(one, fields, directory, cache) for one in written]
    tables = [source.form == "tfds" or source.form in READERS for source in sources]
    if len(sources) == 2 and any(tables):
        raise InputError(f"{option}={','.join(written)}: only two text files can be parallel")
    if len(sources) < sides and not all(tables):
        raise InputError(
            f"{option}={name}: translation needs two parallel text files, a table of two columns "
            "(.tsv, .csv, .jsonl, .parquet) or a tfds: data set"
        )
    fields = tuple(fields) if any(tables) else ("text",)
    if any(tables) and (len(fields) != sides or len({*fields}) != sides):
        raise InputError(f"data.fields is {fields}: {name} needs {sides}, the names of its texts")

    def read() -> Iterator[Item | None]:
        if len(sources) == 2:
            items = _parallel(*sources)
        else:
            items = (_item(where, values, fields) for where, values in sources[0].read())
        return itertools.islice(items, most)

    def build(draft: Path) -> None:
        draft.write_text(json.dumps(survey(name, read())))

    key = key_of(VERSION, content, fields, most, *(source.identity for source in sources))
    found = json.loads(built_once(cache / "texts" / key, build).read_text())
    return Text(name, read, found)


def _item(where: str, values: Values, fields: Sequence[str]) -> Item | None:
    """The texts of a record; None if one is null."""
    texts = []
    for field in fields:
        above = (field.rsplit(".", count)[0] for count in range(field.count(".") + 1))
        found = next((name for name in above if name in values), None)
        text = values[found] if found else ""
        if found is None or (found != field and text is not None):
            has = ", ".join(map(repr, values)) or "none"
            raise InputError(f"{where}: has no field {field!r}; it has {has} (data.fields)")
        if not isinstance(text, str | None):
            raise InputError(f"{where}: field {field!r} is not text (data.fields)")
        texts.append(text)
    return None if None in texts else tuple(texts)


def _parallel(*sources: Source) -> Iterator[Item]:
    """The lines of two sources with the same number."""
    numbers = [0, 0]

    def lines(side: int) -> Iterator[str]:
        for _, values in sources[side].read():
            numbers[side] += 1
            yield values["text"]

    for item in itertools.zip_longest(lines(0), lines(1)):
        if None in item:
            more = numbers.index(max(numbers))
            raise InputError(
                f"{sources[more].name} has more lines than {sources[1 - more].name}, which has "
                f"{min(numbers):,}; parallel files have the same number"
            )
        yield item


def open_split(config: Config, split: str) -> Text:
    """The text of `train` (if it is one source), `validation` or `test` of an experiment."""
    if split == "train" and config.data.train_weights:
        raise InputError("data.train has several sources (data.train_weights): name another split")
    return _open(config, split, getattr(config.data, split))


def open_train(config: Config) -> list[tuple[Text, float]]:
    """The training texts of an experiment, each with its weight."""
    named = training_sources(config)
    return [(_open(config, "train", written), weight) for written, weight in named]


def _open(config: Config, split: str, written: Sequence[str]) -> Text:
    data = config.data
    return open_source(
        written,
        "pair" if config.facts.content == "pair" else "text",
        fields=data.fields,
        directory=data.directory,
        cache=cache_directory(data.cache_directory),
        option=f"data.{split}",
        most=data.max_examples,
    )
