"""Parameters, cache and operations of one attention sublayer, for each kind, without biases.

    python -m mhe_jax.attention.cost --features 768 --num_heads 12
    python -m mhe_jax.attention.cost mha gqa,num_kv_heads=6 mva,score_features=288,qkv_features=384

A row is a kind, with fields of its module after commas. Without rows: all kinds, `gqa` and `gta`
with a quarter of the heads for keys and values, the MHE kinds also with two groups. Scales of
norms are counted.
"""

import argparse
import ast
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax.attention import KINDS, Attention, Rotary, cost, make_attention

HEADINGS = ("kind", "parameters", "% of mha", "cached a token", "% of mha", "MFLOPs a token")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m mhe_jax.attention.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="KIND[,FIELD=NUMBER...]")
    parser.add_argument("--features", type=positive, default=768, help="width M of the model (768)")
    parser.add_argument("--num_heads", type=positive, default=12, help="H (12)")
    parser.add_argument(
        "--keys", type=positive, default=1024, help="keys that a token attends to (1024)"
    )
    parser.add_argument("--rotary", action="store_true", help="with rotary positions")
    asked = parser.parse_args(arguments)
    M, H = asked.features, asked.num_heads
    always: dict[str, Any] = {"num_heads": H, "use_bias": False}
    always |= {"rotary": Rotary()} if asked.rotary else {}
    mha = counts(make_attention("mha", **always), M, asked.keys)
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in asked.rows or every(H):
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
                f"{100 * parameters / mha[0]:.0f}",
                f"{cached:,}",
                f"{100 * cached / mha[1]:.0f}",
                f"{flops / 1e6:.2f}",
            )
        )
    print(f"M = {M:,}, H = {H:,}, {asked.keys:,} keys, no biases\n")
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        aligned = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join((f"{first:{widths[0]}}", *aligned)))


def every(H: int) -> list[str]:
    """A row of each kind, and of those with groups another."""
    few = f",num_kv_heads={H // 4 if H % 4 == 0 else 1}"
    rows = []
    for kind in KINDS:
        rows.append(kind + few * (kind in ("gqa", "gta")))
        if kind in ("mhe_add", "mhe_mul") and H % 2 == 0:
            rows.append(f"{kind},num_groups=2")
    return rows


def module(row: str, always: dict[str, Any]) -> Attention:
    """That of `KIND,FIELD=NUMBER,...`.

    Raises:
      ValueError: another form of row, an unknown kind or field, or no such number.
    """
    kind, *given = row.split(",")
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
