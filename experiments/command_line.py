"""The flags that experiments share, and the kinds and forms that they name."""

import argparse
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mhe_jax.attention import KINDS, engines
from mhe_jax.config import FORMS_OF_KINDS, Form

# Fields that a kind is run with beside its forms, from the number of heads: more variants of a kind
# are more entries of its list.
VARIANTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "gqa": lambda heads: [{"num_kv_heads": _divisor(heads, at_most=heads // 3)}],
    "mfa": lambda heads: [{}, {"reuse_keys": True}],
    "gta": lambda heads: [{"num_kv_heads": _divisor(heads, at_most=heads // 4)}],
}
ENGINES = sorted({*engines.LADDER, *engines.SHARED})
# All that have a name.
FORMS = [form for form in typing.get_args(Form) if form != "auto"]


class PlainParser(argparse.ArgumentParser):
    """`--help` shows what the program says of itself."""

    def __init__(self, doc: str | None):
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=how, allow_abbrev=False)


class Parser(PlainParser):
    """The flags of a comparison of kinds and forms."""

    def __init__(self, doc: str | None, forms: Iterable[str] = FORMS, timed: bool = True):
        super().__init__(doc)
        self.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
        self.add_argument("--forms", nargs="+", choices=typing.get_args(Form), default=forms)
        self.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        if timed:
            self.add_argument("--rounds", type=positive, default=10, help="calls of each case")
        self.add_argument("--out", type=Path, metavar="FILE.json", help="where the JSON goes")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def variants(
    kinds: Iterable[str], forms: Iterable[str], num_heads: int
) -> dict[str, dict[str, Any]]:
    """`name -> fields`, fields of `AttentionConfig`: every kind in those of `forms` that it has.

    'auto', which every kind has, is the form that the kind takes by itself, and has no name.
    """
    found = {}
    for kind in kinds:
        for extra in VARIANTS[kind](num_heads) if kind in VARIANTS else [{}]:
            known = FORMS_OF_KINDS.get(kind, ())
            for form in [f for f in forms if f in known or f == "auto"] if known else ["auto"]:
                named = {} if form == "auto" else {"form": form}
                told = [f"{name}={value}" for name, value in extra.items()]
                found[" ".join([kind, *named.values(), *told])] = {"kind": kind, **extra, **named}
    return found


def _divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, max(at_most, 1) + 1) if number % n == 0)
