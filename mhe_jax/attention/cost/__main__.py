"""Counts parameters, cache and operations of one layer of attention, for each kind.

    python -m mhe_jax.attention.cost --features 768 --num_heads 12
    python -m mhe_jax.attention.cost mha gqa,num_kv_heads=6 mva,score_features=288,qkv_features=384

Parameters are without biases, and with the scales of norms. Operations are those of the forward
pass of one token, each kind in its cheapest form: `mva`, and without rotary positions `mhe_add`,
with one score matrix for all heads. On a GPU `auto` may take another: then `mhe_add` costs what
`mhe_mul` does.
"""

import argparse
import ast
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax.attention import KINDS, Attention, Rotary, cost, make_attention

HEADINGS = ("kind", "parameters", "of mha", "cached a token", "of mha", "forward MFLOPs a token")
ROWS = """\
kinds, with fields of their modules after commas; without, all kinds, gqa and gta with a quarter of
the heads for keys and values, MHE kinds also with two groups, and mva also with scores half as wide
as the model"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m mhe_jax.attention.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="KIND[,FIELD=NUMBER...]", help=ROWS)
    parser.add_argument("--features", type=positive, default=768, help="width M of the model (768)")
    parser.add_argument("--num_heads", type=positive, default=12, help="H (12)")
    keys = "keys that a token attends to (1024); for a causal model, half of a row's tokens"
    parser.add_argument("--keys", type=positive, default=1024, help=keys)
    rotary = "with rotary positions: mla then has rotary features, mhe_add a score matrix a head"
    parser.add_argument("--rotary", action="store_true", help=rotary)
    asked = parser.parse_args(arguments)
    M, H = asked.features, asked.num_heads
    always: dict[str, Any] = {"num_heads": H, "use_bias": False}
    always |= {"rotary": Rotary()} if asked.rotary else {}
    mha = counts(make_attention("mha", **always), M, asked.keys)
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in asked.rows or every(M, H):
        try:
            of_kind = module(row, always)
            jax.eval_shape(of_kind.init, jax.random.key(0), jnp.zeros((1, 1, M)))  # checks it
            parameters, cached, flops = counts(of_kind, M, asked.keys)
        except (TypeError, ValueError) as error:
            parser.error(f"{row}: {error}")
        cells.append(
            (
                row.replace(",", ", "),
                f"{parameters:,}",
                f"{100 * parameters / mha[0]:.0f} %",
                f"{cached:,}",
                f"{100 * cached / mha[1]:.0f} %",
                f"{flops / 1e6:.2f}",
            )
        )
    print(f"one layer: M = {M:,}, H = {H:,}, {asked.keys:,} keys, no biases\n")
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        aligned = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join((f"{first:{widths[0]}}", *aligned)))


def every(M: int, H: int) -> list[str]:
    """A row of each kind, and others of `mva` and the MHE kinds."""
    few = f",num_kv_heads={H // 4 if H % 4 == 0 else 1}"
    rows = []
    for kind in KINDS:
        rows.append(kind + few * (kind in ("gqa", "gta")))
        if kind in ("mhe_add", "mhe_mul") and H % 2 == 0:
            rows.append(f"{kind},num_groups=2")
        if kind == "mva":
            rows.append(f"{kind},score_features={max(1, M // 2)}")
    return rows


def module(row: str, always: dict[str, Any]) -> Attention:
    """That of `KIND,FIELD=NUMBER,...`.

    Raises:
      ValueError: another form of row, an unknown kind or field, or no such number.
    """
    kind, *given = row.split(",")
    if "=" in kind:
        raise ValueError("a field stands after its kind and a comma, as in mha,num_heads=4")
    fields = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            fields[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"{each!r} is not FIELD=NUMBER") from None
    made = make_attention(kind, **always | fields)
    for name in fields:
        if made.__dataclass_fields__[name].type not in (int, int | None, bool):
            raise ValueError(f"{name} is not a number")
    return made


def counts(of_kind: Attention, features: int, keys: int) -> tuple[int, int, int]:
    """Parameters, cached numbers and operations."""
    return (
        cost.parameters(of_kind, features),
        cost.cached_numbers(of_kind, features),
        cost.forward_flops(of_kind, features, keys),
    )


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
