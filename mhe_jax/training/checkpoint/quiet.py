"""Silences errors that Orbax prints many times over and raises as well."""

import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any


def quiet_orbax() -> None:
    """For this process: of many reads or writes at once, the first that fails tells of it alone."""
    if not isinstance(sys.unraisablehook, _NotOfOrbax):
        sys.unraisablehook = _NotOfOrbax(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_no_left_over)
    logging.getLogger("absl").addFilter(_no_traceback)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class _NotOfOrbax:
    """The first that fails ends the loop of the others: each would say so."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        of_orbax = inspect.iscoroutine(unraisable.object)  # nobody else here has any
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


def _no_left_over(record: logging.LogRecord) -> bool:
    """Drops what asyncio says of reads and writes that were under way when the first failed."""
    message = record.getMessage().partition("\n")[0]
    return not message.endswith(
        ("exception was never retrieved", "was destroyed but it is pending!")
    )


def _no_traceback(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)
