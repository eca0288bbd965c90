"""Values drawn anew for each epoch, held for the last two, since batches straddle them."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Epochs(Generic[T]):
    """`plan(epoch)`, computed once however many threads ask.

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
