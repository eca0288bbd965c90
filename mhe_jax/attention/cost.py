"""What attention costs, for each kind: parameters, cached numbers, operations.

    python -m mhe_jax.attention.cost --features 768 --num_heads 12
    python -m mhe_jax.attention.cost mha gqa,num_kv_heads=6 mva,score_features=288,qkv_features=384
    python -m mhe_jax.attention.cost --features 4096 --num_heads 32 --layers 32 --rotary

Counts are those of one layer, or of all `--layers`. Parameters are without biases, and with the
scales of norms. "MB of 32k" is the cache of 32,768 tokens, 2 bytes a number. Operations are those
of the forward pass of one token, each kind in its cheapest form: `mva`, and without rotary
positions `mhe_add`, with one score matrix for all heads. On a GPU `auto` may take another: then
`mhe_add` costs what `mhe_mul` does.
"""

import argparse
import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from mhe_jax.attention import KINDS, Attention, Rotary, make_attention
from mhe_jax.attention.projection import Projection

HEADINGS = "parameters", "of mha", "cached a token", "of mha", "MB of 32k", "forward MFLOPs a token"
LINE = "{:40} {:>14} {:>6} {:>14} {:>6} {:>9} {:>22}"
# The cache of 32,768 tokens, in numbers of 16 bits.
CACHE = 2 * 32_768
ROWS = """\
kinds, with fields of their modules after commas; without, all kinds, those with key and value heads
of their own number with a quarter of the heads"""
KEYS = "keys that a token attends to (1024); for a causal model, half of a row's tokens"
TURNED = "with rotary positions: mla then has rotary features, mhe_add a score matrix a head"
# Of a module whose numbers are counted: they do not depend on these.
PLAIN = {"engine": "auto", "dropout_rate": 0.0, "decode": True, "normalize_qk": False}
PLAIN["projection"] = Projection


def parameters(module: Attention, features: int) -> int:
    """Parameters of one sublayer: projections, their biases if any, tables and scales.

    `features` is the width M of its input. Kronecker products count as the matrices that they stand
    for. The scales of `normalize_qk` are left out.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> parameters(make_attention("mhe_mul", num_heads=12, use_bias=False), features=768)
      739584
    """
    return sum(leaf.size for leaf in jax.tree.leaves(_shapes(module, features)["params"]))


def cached_numbers(module: Attention, features: int) -> int:
    """Numbers that the cache holds for each token.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> [cached_numbers(make_attention(k, num_heads=12), 768) for k in ("mhe_mul", "mha")]
      [128, 1536]
    """
    cache = _shapes(module, features)["cache"]
    return sum(leaf.size for name, leaf in cache.items() if name.startswith("cached_"))


def forward_flops(module: Attention, features: int, keys: int) -> int:
    """Operations of the forward pass for one token that attends to `keys` keys (mean, if masked).

    Two for each multiply-add of the projections, and of the core for each key. `mva`, and MHE-Add
    where it can, count in the form `shared`, and with `decode`, `mla` and `tpa` count in the form
    for one query. Rotation is negligible and left out. The backward pass is twice that.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> forward_flops(make_attention("mha", num_heads=12), features=768, keys=512)
      6291456
    """
    scored, weighted, mixed = module.core((module.qkv_features or features) // module.num_heads)
    kernels: dict[Any, Any] = flatten_dict(dict(_shapes(module, features)["params"]))
    of_token = sum(leaf.size for path, leaf in kernels.items() if path[-1] == "kernel") + mixed
    return 2 * (of_token + keys * (scored + weighted))


def _shapes(module: Attention, features: int) -> dict[str, Any]:
    """Parameters and cache of one token, as shapes."""
    own = {field.name for field in dataclasses.fields(module)}
    module = module.clone(**{name: value for name, value in PLAIN.items() if name in own})
    x = jax.ShapeDtypeStruct((1, 1, features), jnp.float32)
    with nn.logical_axis_rules(()):
        return jax.eval_shape(module.init, jax.random.key(0), x)


def main(arguments: Sequence[str] | None = None) -> None:
    how = argparse.RawDescriptionHelpFormatter
    name = "python -m mhe_jax.attention.cost"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=how)
    parser.add_argument("rows", nargs="*", metavar="KIND[,FIELD=NUMBER...]", help=ROWS)
    parser.add_argument("--features", type=int, default=768, help="width M of the model (768)")
    parser.add_argument("--num_heads", type=int, default=12, help="H (12)")
    parser.add_argument("--layers", type=int, default=1, help="that are counted (1)")
    parser.add_argument("--keys", type=int, default=1024, help=KEYS)
    parser.add_argument("--rotary", action="store_true", help=TURNED)
    asked = parser.parse_args(arguments)
    M, H = asked.features, asked.num_heads
    few = f",num_kv_heads={H // 4 if H % 4 == 0 else 1}"
    every = [
        kind + few * (getattr(module, "num_kv_heads", 1) is None) for kind, module in KINDS.items()
    ]

    def counts(row: str) -> tuple[int, ...]:
        kind, *given = row.split(",")
        fields = {"num_heads": H, "use_bias": False, "rotary": Rotary() if asked.rotary else None}
        for name, _, number in (field.partition("=") for field in given):
            fields[name] = ast.literal_eval(number)
        module = make_attention(kind, **fields)
        flops = forward_flops(module, M, asked.keys)
        each = parameters(module, M), cached_numbers(module, M), flops
        return tuple(asked.layers * count for count in each)

    layers = f"{asked.layers} layers" if asked.layers > 1 else "one layer"
    print(f"{layers}: M = {M:,}, H = {H:,}, {asked.keys:,} keys, no biases\n")
    print(LINE.format("kind", *HEADINGS))
    for row in asked.rows or every:
        try:
            (made, cached, flops), mha = counts(row), counts("mha")
        except SyntaxError:
            parser.error(f"{row}: takes KIND,FIELD=NUMBER,...")
        except (TypeError, ValueError) as error:
            parser.error(f"{row}: {error}")
        shares = f"{made / mha[0]:.0%}", f"{cached / mha[1]:.0%}"
        megabytes, operations = f"{CACHE * cached / 1e6:,.0f}", f"{flops / 1e6:,.2f}"
        numbers = f"{made:,}", shares[0], f"{cached:,}", shares[1], megabytes, operations
        print(LINE.format(row, *numbers))


if __name__ == "__main__":
    main()
