"""Long texts in parts that are read and tokenized one by one."""

import os
from collections.abc import Iterator

PIECE = 1024  # bytes that are read and tokenized at once
WINDOW = 128  # bytes in which a cut looks for a space


class FilePart:
    """Some bytes of an open file, read when sliced."""

    def __init__(self, file: int, start: int, stop: int):
        self._file, self._start, self._stop = file, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return os.pread(self._file, max(0, stop - start), self._start + start)


Bytes = bytes | FilePart


def _cut(data: Bytes, near: int, lowest: int) -> tuple[int, int]:
    """Where the bytes before `near` end and those after begin: around a space if one is close.

    The start of a text is as good as a space. Without a space the cut is between two characters.
    """
    start = max(lowest, near - WINDOW)
    window = data[start : near + 1]
    space = window.rfind(b" ")
    if space >= 0:
        return start + space, start + space + 1
    if start == 0 == lowest:
        return 0, 0
    while near > start and 0x80 <= window[near - start] < 0xC0:
        near -= 1
    return near, near


def pieces(data: Bytes, fraction: float = 0.0) -> Iterator[str]:
    """A text in parts of at most `PIECE` bytes, from about `fraction` of it on.

    Texts are cut at a space, which is dropped since a tokenizer puts one before each text; without
    a space within `WINDOW` bytes they are cut between two characters. No part depends on how many
    others are read.

    >>> list(pieces(b"a b"))
    ['a b']
    """
    start = _cut(data, int(fraction * len(data)), 0)[1] if fraction and len(data) else 0
    while len(data) - start > PIECE:
        stop, following = _cut(data, start + PIECE, start + 1)
        yield data[start:stop].decode()
        start = following
    yield data[start : len(data)].decode()
