"""Random draws: their seeds, and values drawn anew for each epoch."""

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Draw(enum.IntEnum):
    """The first number of a generator's seed, so that no two purposes share one."""

    BLOCK_ORDER = 0
    BLOCK_MASKS = 1
    PACKED_ORDER = 2
    PACKED_MASKS = 3
    SOURCE_ORDER = 4
    SPELLING = 5


class Epochs(Generic[T]):
    """`plan(epoch)`, computed once however many threads ask.

    The last two epochs are kept, since batches straddle them.

    >>> epochs = Epochs(lambda epoch: print("plan", epoch) or 10 * epoch)
    >>> epochs(1), epochs(1)
    plan 1
    (10, 10)
    """

    def __init__(self, plan: Callable[[int], T]):
        self._plan = plan
        self._known: OrderedDict[int, T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if epoch not in self._known:
                self._known[epoch] = self._plan(epoch)
                if len(self._known) > 2:
                    self._known.popitem(last=False)
            return self._known[epoch]
