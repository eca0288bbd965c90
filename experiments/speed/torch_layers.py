"""How fast exported attention is in PyTorch on a CPU: a layer of modeling_mhe.py beside MHA.

    python experiments/speed/torch_layers.py --out experiments/speed/records/torch_cpu.json

Whole layers, projections included, without biases, M = heads · head_features. MHA has one product
for queries, keys and values and `scaled_dot_product_attention`, with `is_causal` where nothing is
padded. With padding, the keys of every other row end at 3/4 T. A step of decoding appends a token
to a `DynamicCache` of transformers. Cases of as many threads take turns, a sample each a round.

    ms      median of the rounds, with the quartiles
    speed   time of MHA / time of the kind
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line, pytorch, reports, timing
from mhe_jax.cli.process import ask_for_huge_pages

LAYERS = "mha", "mva", "mhe_add"


def parse(arguments: list[str] | None):
    parser = command_line.PlainParser(__doc__)
    positive = command_line.positive
    parser.add_argument("--lengths", type=positive, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--cached", type=positive, default=1024, help="tokens before a step")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--head_features", type=positive, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args, left_out = parse(arguments), timing.LeftOut()
    about = reports.header(__file__, args.dtype, arguments)
    torch, _ = pytorch.with_device()
    torch.manual_seed(0)
    rows: dict[tuple, dict[str, Any]] = {}
    timed = [*cases(args)]
    for threads in args.threads:
        torch.set_num_threads(threads)
        part = f"{threads} thread{'s' * (threads > 1)}"
        for found in timing.measure(timed, args.rounds, left_out):
            where = {"part": part, "case": found.pop("case")}
            rows.setdefault((*where.values(),), where)[found.pop("layer")] = found
    note = f"{args.batch} rows, {args.heads} heads of {args.head_features}; {args.rounds} rounds"
    return reports.finish(args.out, about, COLUMNS, [*rows.values()], left_out, note)


def time_of(layer: str, row: dict) -> str:
    return f"{reports.milliseconds(row[layer])} ({reports.quartiles(row[layer])})"


def speed_of(layer: str, row: dict) -> str:
    return f"{row['mha']['median_ms'] / row[layer]['median_ms']:.2f}"


COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda row: row["case"],
    **{f"{layer} ms": functools.partial(time_of, layer) for layer in LAYERS},
    **{f"{layer} speed": functools.partial(speed_of, layer) for layer in LAYERS[1:]},
}


def cases(args) -> Iterator[timing.Case]:
    """Every layer in every setting."""
    for name in LAYERS:
        layer, calls = made(name, args), {}
        for length, padded in itertools.product(args.lengths, (False, True)):
            name_of = f"T = {length:,}, {'padded' if padded else 'causal'}"
            calls |= calls_of(layer, args, length, padded, name_of)
        calls[f"one token after {args.cached:,}"] = step(layer, args)
        for case, call in calls.items():
            yield timing.Case({"case": case, "layer": name}, call)


def made(layer: str, args) -> Callable:
    """A layer `(x, seen, cache=None) -> [B, T, M]`; `seen` None is causal."""
    import torch  # pyright: ignore[reportMissingImports]

    H, D = args.heads, args.head_features
    dtype = getattr(torch, args.dtype)
    if layer == "mha":
        inside, out = (torch.nn.Linear(H * D, n * H * D, False, dtype=dtype) for n in (3, 1))

        def mha(x, seen, cache=None):
            q, k, v = inside(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            if cache is not None:
                k, v = cache.update(k, v, 0)
            causal = seen is None and cache is None
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=causal
            )
            return out(found.transpose(1, 2).flatten(2))

        return mha
    code = pytorch.modeling()
    sizes = {"num_heads": H, "num_groups": 1, "head_dim": D, "score_dim": D, "use_bias": False}
    roles = {"decoder": {"kind": layer, **sizes}, "encoder": {"kind": layer, **sizes}}
    config = code.MHEConfig(hidden_size=H * D, attention=roles)
    decoder, encoder = (code.Attention(config, role, 0).to(dtype) for role in roles)

    def own(x, seen, cache=None):
        if seen is not None:
            return encoder(x, x, seen.expand(-1, -1, x.shape[1], -1))
        S = x.shape[1] + (cache.get_seq_length() if cache is not None else 0)
        seen = torch.ones(S, S, dtype=torch.bool).tril()[None, None, -x.shape[1] :]
        return decoder(x, x, seen.expand(len(x), 1, -1, -1), cache)

    return own


def calls_of(layer, args, length: int, padded: bool, name: str) -> dict[str, Callable[[], Any]]:
    import torch  # pyright: ignore[reportMissingImports]

    shape = args.batch, length, args.heads * args.head_features
    x, cotangent = (torch.randn(shape, dtype=getattr(torch, args.dtype)) for _ in range(2))
    lengths = torch.tensor([length, -(-length * 3 // 4)] * args.batch)[: args.batch]
    seen = (torch.arange(length) < lengths[:, None])[:, None, None] if padded else None
    wanted = x.clone().requires_grad_()

    def forward():
        with torch.no_grad():
            return layer(x, seen)

    def with_gradients():
        # Of the parameters too: they require them.
        return layer(wanted, seen).backward(cotangent)

    return {f"{name}, forward": forward, f"{name}, with gradients": with_gradients}


def step(layer, args) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    shape = args.batch, args.cached, args.heads * args.head_features
    x, cache = torch.randn(shape, dtype=getattr(torch, args.dtype)), DynamicCache()
    with torch.no_grad():
        layer(x, None, cache)

    def call():
        with torch.no_grad():
            found = layer(x[:, :1], None, cache)
        cache.crop(-1)
        return found

    return call


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
