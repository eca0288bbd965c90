"""Train steps with matrices as sums of Kronecker products beside the dense step, in one run.

    python benchmarks/kronecker.py
    python benchmarks/kronecker.py --config configs/shapeshifter.py:wmt --ranks 8/16/128

A rank A/M/E is `model.kronecker.attention`, `.mlp` and `.embedding`; each is timed with every way
to apply the factors. The batch has `rows` rows of `length` tokens, of each side in translation.
Overhead is the median step over the dense model's.
"""

import dataclasses
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import command_line, reports, steps, timing
from mhe_jax.attention import KINDS
from mhe_jax.config import Config, InputError, KroneckerConfig
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.config.rules import check

RANKS = ("2/4/32", "8/16/128", "16/32/256")
APPLY = typing.get_args(typing.get_type_hints(KroneckerConfig)["apply"])


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "configs/multi30k.py"))
    parser.add_argument("--kind", choices=KINDS, default="mha", help="of attention, in all models")
    parser.add_argument("--ranks", nargs="+", default=list(RANKS), metavar="A/M/E")
    parser.add_argument("--apply", nargs="+", choices=APPLY, default=list(APPLY))
    parser.add_argument("--rows", type=command_line.positive, default=64)
    parser.add_argument("--length", type=command_line.positive, default=32)
    parser.add_argument("--rounds", type=command_line.positive, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where the JSON goes")
    args = parser.parse_args(arguments)
    try:
        configs = configs_of(args)
    except InputError as error:
        parser.error(str(error))
    about = reports.header(__file__, configs["dense"].model.dtype, arguments)
    left_out = timing.LeftOut()
    cases = [steps.our_step(name, config, args.rows) for name, config in configs.items()]
    found = timing.measure(cases, args.rounds, left_out)
    (dense,) = (r["median_ms"] for r in found if r["case"] == "dense")
    for r in found:
        r["overhead"] = r["median_ms"] / dense - 1
        r["tokens_per_second"] = 1e3 * r["tokens"] / r["median_ms"]
    print(*reports.header_lines(about), sep="\n\n")
    print(f"\n{found[0]['tokens']:,} tokens a step, {args.rounds} rounds\n")
    print(reports.table(COLUMNS, found))
    print(*left_out.lines(), sep="\n")
    reports.save(args.out, {"header": about, "results": found, "left_out": left_out.reasons})
    return 0


COLUMNS = {
    "case": lambda r: r["case"],
    "parameters": lambda r: f"{r['parameters']['total']:,}",
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "overhead": lambda r: f"{r['overhead']:+.1%}",
    "memory MB": reports.megabytes,
}


def configs_of(args) -> dict[str, Config]:
    """The dense config, and that of each rank and way.

    Raises:
      InputError: a rank that is none, or a config that breaks a rule.
    """
    config = load_config(args.config)
    for field, value in {
        "data.sequence_length": args.length,
        "data.length_buckets": (),
        "data.tokens_per_batch": max(config.data.tokens_per_batch, 16 * args.length),
        "mesh.data": 1,
        "model.attention.kind": args.kind,
    }.items():
        config = set_field(config, field, value)
    found = {"dense": _with(config, KroneckerConfig())}
    for text in args.ranks:
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise InputError(f"--ranks has {text!r}: takes A/M/E, three whole numbers")
        attention, mlp, embedding = map(int, parts)
        ranks = KroneckerConfig(attention, mlp, embedding)
        for how in args.apply:
            found[f"{text} {how}"] = _with(config, dataclasses.replace(ranks, apply=how))
    for each in found.values():
        check(each)
    return found


def _with(config: Config, kronecker: KroneckerConfig) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, kronecker=kronecker))


if __name__ == "__main__":
    sys.exit(main())
