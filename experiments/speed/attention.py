"""How fast and how lean attention is: every kind, form and engine, beside the peers there are.

    python experiments/speed/attention.py --lengths 512 1024 --rounds 20 --out cpu.json
    python experiments/speed/attention.py --dtype bfloat16 --tokens 16384 --calls 10 --out gpu.json

From queries, keys and values to the heads' outputs, as the kind's engine is called, forward and
with gradients of all inputs; B = tokens / T, M = heads · head_features. Kinds whose engine is
called with the same shapes share a row. Cases take turns, one sample each a round.

    median        of the rounds, with the quartiles
    speed         time of the fastest peer / time of this row
    memory        temporaries and outputs, as the compiler counts them: not what a library that it
                  calls takes for itself
    of peak       FLOP/s over that of a big matrix product in the same type and the same run; 2 for
                  each multiply-add of the row's own algorithm (scores and sums), half of it where
                  causal, and three times that with gradients
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room on a GPU

import flax.linen as nn
import jax

from experiments import command_line, reports, timing
from experiments.speed import peers
from mhe_jax.attention import Mask, engines, make_attention
from mhe_jax.cli.process import ask_for_huge_pages


def parse(arguments: list[str] | None):
    parser = command_line.Parser(__doc__)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", type=command_line.positive, default=2048, help="B · T")
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--engines", nargs="+", choices=command_line.ENGINES, metavar="ENGINE")
    parser.add_argument(
        "--calls", type=command_line.positive, help="of a sample, else 5 ms of them"
    )
    args = parser.parse_args(arguments)
    for length in args.lengths:
        if args.tokens % length:
            parser.error(f"--tokens {args.tokens} must be a multiple of --lengths {length}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    left_out = timing.LeftOut()
    cases = [*timing.peak_cases(args.dtype), timing.empty_case()]
    for length in args.lengths:
        cases += core_cases(args, length, left_out)
    results = timing.measure(cases, args.rounds, left_out, args.calls)
    peak, (empty, *results) = reports.split_peak(results)
    reports.beside_peers(results)
    note = (
        f"{args.tokens} tokens a batch, {args.heads} heads of {args.head_features}"
        f"{', causal' if args.causal else ''}; {args.rounds} rounds of {args.calls or 'enough'} "
        f"call(s); {reports.peak_line(peak)}; "
        f"an empty call takes {reports.milliseconds(empty)} ms"
    )
    about = reports.header(__file__, args.dtype, arguments)
    more = {"peak": peak, "empty": empty}
    return reports.finish(args.out, about, COLUMNS, results, left_out, note, **more)


COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"] + (" (peer)" if r["peer"] else ""),
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "speed": lambda r: f"{r['speed']:.2f}" if r["speed"] else "-",
    "memory MB": reports.megabytes,
    "of peak": lambda r: f"{r['of_peak']:.1%}",
}


def attention_cases(args) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every kind, form and engine."""
    for name, fields in command_line.variants(args.kinds, args.forms, args.heads).items():
        ladder = engines.OF_FORMS.get(fields.get("form", ""), engines.LADDER)
        for engine in (name for name in reversed(ladder) if name in (args.engines or ladder)):
            module = make_attention(
                **fields,
                engine=engine,
                num_heads=args.heads,
                use_bias=False,
                dtype=args.dtype,
                force_fp32_for_softmax=True,
            )
            yield f"{name} {engine}", module


def core_cases(args, length: int, left_out: timing.LeftOut) -> list[timing.Case]:
    found: dict[Any, tuple[dict, Callable, list, float]] = {}
    for name, module in attention_cases(args):
        try:
            function, arrays, shapes, flops = core_of(module, args, length)
        except ValueError as error:
            left_out.add(name, error)
            continue
        about = {"length": length, "case": name, "cases": [name], "peer": False}
        if shapes in found:
            known = found[shapes][0]
            known["case"] = f"{name.removesuffix(module.engine).strip()}, {known['case']}"
            known["cases"].append(name)
        else:
            found[shapes] = about, function, arrays, flops

    def compiled(given):
        about, function, arrays, flops = given
        keys = jax.random.split(jax.random.key(0), len(arrays))
        inputs = tuple(peers.draw(key, array) for key, array in zip(keys, arrays, strict=True))
        return peers.jax_cases(about, function, inputs, flops)

    def of_peer(name):
        about = {"length": length, "case": name, "cases": [name], "peer": True}
        return peers.PEERS[name](about, args, length)

    makes = {given[0]["case"]: functools.partial(compiled, given) for given in found.values()}
    makes |= {name: functools.partial(of_peer, name) for name in peers.PEERS}
    return timing.made(makes, left_out)


def core_of(module: nn.Module, args, length: int) -> tuple[Callable, list, Any, float]:
    """How `module` calls its engine: a function of arrays, their shapes, a name for both, FLOPs."""
    calls, original = [], engines.attend

    def record(*given, **named):
        calls.append(inspect.signature(original).bind(*given, **named).arguments)
        return original(*given, **named)

    # The library has no hook here, and needs none but for this.
    engines.attend = record
    try:
        jax.eval_shape(lambda key, x: module.init(key, x), jax.random.key(0), inputs(args, length))
    finally:
        engines.attend = original
    (given,) = calls
    arrays = {k: jax.typeof(v) for k, v in given.items() if isinstance(v, jax.Array)}
    given = {k: v for k, v in given.items() if k not in arrays}
    given["mask"] = Mask.causal() if args.causal else Mask()

    def core(*values):
        return original(**dict(zip(arrays, values, strict=True)), **given)[0]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays.values()]
    form = given["form"] if given["form"] in engines.OF_FORMS else ""
    same = form, given["engine"], tuple((s.shape, s.dtype) for s in shapes)
    flops = peers.core_flops({k: a.shape for k, a in arrays.items()}, args.causal)
    return core, shapes, same, flops


def inputs(args, length: int) -> jax.ShapeDtypeStruct:
    shape = (args.tokens // length, length, args.heads * args.head_features)
    return jax.ShapeDtypeStruct(shape, args.dtype)


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
