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
KEYS = "keys that a token attends to (1024); for a causal model, half of a row's tokens"
TURNED = "with rotary positions: mla then has rotary features, mhe_add a score matrix a head"


def main(arguments: Sequence[str] | None = None) -> None:
    how = argparse.RawDescriptionHelpFormatter
    name = "python -m mhe_jax.attention.cost"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=how)
    parser.add_argument("rows", nargs="*", metavar="KIND[,FIELD=NUMBER...]", help=ROWS)
    parser.add_argument("--features", type=int, default=768, help="width M of the model (768)")
    parser.add_argument("--num_heads", type=int, default=12, help="H (12)")
    parser.add_argument("--keys", type=int, default=1024, help=KEYS)
    parser.add_argument("--rotary", action="store_true", help=TURNED)
    asked = parser.parse_args(arguments)
    M, H = asked.features, asked.num_heads
    rotary = Rotary() if asked.rotary else None
    mha = counts(make_attention("mha", num_heads=H, use_bias=False), M, asked.keys)
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in asked.rows or every(M, H):
        try:
            kind, *given = row.split(",")
            fields: dict[str, Any] = {"num_heads": H, "use_bias": False, "rotary": rotary}
            fields |= {name: ast.literal_eval(number) for name, number in map(field, given)}
            of_kind = make_attention(kind, **fields)
            jax.eval_shape(of_kind.init, jax.random.key(0), jnp.zeros((1, 1, M)))  # checks it
            parameters, cached, flops = counts(of_kind, M, asked.keys)
        except (TypeError, ValueError) as error:
            parser.error(f"{row}: {error}")
        of_mha = f"{100 * parameters / mha[0]:.0f} %", f"{100 * cached / mha[1]:.0f} %"
        numbers = f"{parameters:,}", of_mha[0], f"{cached:,}", of_mha[1], f"{flops / 1e6:.2f}"
        cells.append((row.replace(",", ", "), *numbers))
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


def field(text: str) -> list[str]:
    """The name and the number of FIELD=NUMBER."""
    if len(parts := text.split("=")) != 2:
        raise ValueError(f"{text!r} is not FIELD=NUMBER")
    return parts


def counts(of_kind: Attention, features: int, keys: int) -> tuple[int, int, int]:
    """Parameters, cached numbers and operations."""
    return (
        cost.parameters(of_kind, features),
        cost.cached_numbers(of_kind, features),
        cost.forward_flops(of_kind, features, keys),
    )


if __name__ == "__main__":
    main()
