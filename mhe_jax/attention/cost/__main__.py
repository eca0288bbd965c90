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

from mhe_jax.attention import KINDS, Rotary, make_attention
from mhe_jax.attention.cost import cached_numbers, forward_flops, parameters

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
    fields: dict[str, Any] = {"num_heads": H, "use_bias": False}
    mha = make_attention("mha", **fields)
    whole = parameters(mha, M), cached_numbers(mha, M)
    fields["rotary"] = Rotary() if asked.rotary else None
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in asked.rows or every(M, H):
        try:
            kind, *given = row.split(",")
            own = {name: ast.literal_eval(number) for name, number in (f.split("=") for f in given)}
            of_kind = make_attention(kind, **(fields | own))
            jax.eval_shape(of_kind.init, jax.random.key(0), jnp.zeros((1, 1, M)))  # checks it
        except (TypeError, ValueError) as error:
            parser.error(f"{row}: {error}")
        counts = parameters(of_kind, M), cached_numbers(of_kind, M)
        numbers = [
            cell
            for count, all in zip(counts, whole, strict=True)
            for cell in (f"{count:,}", f"{100 * count / all:.0f} %")
        ]
        flops = forward_flops(of_kind, M, asked.keys)
        cells.append((row.replace(",", ", "), *numbers, f"{flops / 1e6:.2f}"))
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


if __name__ == "__main__":
    main()
