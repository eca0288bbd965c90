"""The next batch goes to the devices while a step runs."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def feed(batches: Iterable[Any], put: Callable[[Any], T]) -> Generator[T, None, None]:
    """`put(batch)` of each in order, and one ahead: a thread puts batch n + 1 while n is used.

    So at most two batches are on the devices. What `batches` or `put` raise comes where its batch
    would have; close the iterator before `batches`.
    """
    iterator, end = iter(batches), object()

    def next_batch() -> Any:
        rows = next(iterator, end)
        return end if rows is end else put(rows)

    with ThreadPoolExecutor(1, "feed") as thread:
        ahead = thread.submit(next_batch)
        while (batch := ahead.result()) is not end:
            ahead = thread.submit(next_batch)
            yield batch
