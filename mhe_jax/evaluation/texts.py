"""The texts given to a run: checked, and taken some at a time.

One text gives one result, a list a list. An iterator gives an iterator, in order, that reads only a
few batches ahead: it may be endless.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from mhe_jax.config import InputError

A = TypeVar("A")

# Batches that are read at once, to be sorted by length; only one before the first answer.
BATCHES_AHEAD = 4


def answers(
    texts: Any,
    check: Callable[[Any, str], Any],
    answer: Callable[[list[Any]], Any],
    batch_size: int,
) -> Any:
    """The result of `answer` for each of the texts, in order; for one text, its own.

    `check(text, where)` gives a text as `answer` takes it, or raises; `where` reads like texts[3].
    """
    if isinstance(texts, str | dict):  # one, or one record
        return answer([check(texts, "texts")])[0]
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        found = type(texts).__name__
        raise InputError(f"takes a text, a list of texts or an iterator of them, not {found}")
    checked = (check(text, f"texts[{number}]") for number, text in enumerate(texts))
    if not isinstance(texts, Iterator):
        return answer(list(checked))
    return itertools.chain.from_iterable(map(answer, chunks(checked, batch_size)))


def chunks(items: Iterable[A], batch: int, chunk: int | None = None) -> Iterator[list[A]]:
    """Lists of some items at a time; those before a bad item still come out before its error."""
    iterator = iter(items)
    sizes = itertools.chain([chunk or batch], itertools.repeat(chunk or BATCHES_AHEAD * batch))
    failure = None
    while failure is None:
        found: list[A] = []
        try:
            found.extend(itertools.islice(iterator, next(sizes)))
        except InputError as error:
            failure = error
        if found:
            yield found
        elif failure is None:
            return
    raise failure


def text_of(text: Any, where: str, end: str = "\n") -> str:
    """A text, without the `end` of its line."""
    if not isinstance(text, str):
        raise InputError(f"{where} is of type {type(text).__name__}: takes a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half a surrogate pair") from None
    return text.removesuffix(end)
