"""How fast translations are decoded over the cache, and how big it is, for every kind.

    python experiments/speed/decode.py --dtype bfloat16 --batch 64 1024 --out gpu.json
    python experiments/speed/decode.py --kinds mha mhe_add mhe_mul --beams 1 --rounds 3

The transformer of configs/wmt14.py with random parameters and sources, greedy (one beam) and
by beam search, on one device; a kind takes the form it chooses by itself, or each of --forms. Every
row runs to --length tokens: none ends before. A kind that fails at a batch is left out there. Cases
take turns, one decoding a round; encoding the sources is part.

    tokens/s   tokens of the best hypothesis of each row / the median
    speed      tokens/s over those of mha at the same batch and beams
    cache      bytes of keys and values of self- and cross-attention, all layers and beams
    memory     temporaries and outputs, as the compiler counts them
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command_line, models, reports, timing
from mhe_jax.cli.process import ask_for_huge_pages
from mhe_jax.config import Config
from mhe_jax.data import NUM_SPECIAL
from mhe_jax.evaluation import translator
from mhe_jax.model import EncoderDecoder


def parse(arguments: list[str] | None):
    parser = command_line.Parser(__doc__, forms=["auto"])
    parser.add_argument("--beams", type=command_line.positive, nargs="+", default=[1, 4])
    parser.add_argument(
        "--length", type=command_line.positive, default=64, help="of sources and outputs"
    )
    parser.add_argument("--batch", type=command_line.positive, nargs="+", default=[1, 16])
    models.add_flags(parser)
    args = parser.parse_args(arguments)
    return args, models.experiment(parser, args, "translation", args.length)


def main(arguments: list[str] | None = None) -> int:
    args, config = parse(arguments)
    about = reports.header(__file__, args.dtype, arguments)
    note = f"{models.shape_line(config)}; {args.length} source tokens to as many"
    return reports.finish(args.out, about, COLUMNS, *measured(args, config), note)


def measured(args, config: Config) -> tuple[list[dict], timing.LeftOut]:
    """The rows, and what was left out."""
    results, left_out = [], timing.LeftOut()
    heads = config.model.attention.num_heads
    decoders = {
        name: Decoding(name, models.with_attention(config, fields), args)
        for name, fields in command_line.variants(args.kinds, args.forms, heads).items()
    }
    for beams, batch in itertools.product(args.beams, args.batch):
        results += at_batch(decoders, batch, beams, args, left_out)
    return results, left_out


COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"],
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "speed": lambda r: f"{r['speed']:.2f}" if r["speed"] else "-",
    "cache MB": lambda r: f"{sum(r['cache_bytes'].values()) / 1e6:,.1f}",
    "memory MB": reports.megabytes,
}


def at_batch(models, batch: int, beams: int, args, left_out: timing.LeftOut) -> list[dict]:
    """The results of all models at one batch size; a model that fails has none."""
    make = {
        f"{name}, {batch} rows": partial(model.case, batch, beams) for name, model in models.items()
    }
    found = timing.measure(timing.made(make, left_out), args.rounds, left_out)
    mha_ms = next((r["median_ms"] for r in found if r["case"] == "mha"), None)
    for r in found:
        r["tokens_per_second"] = 1e3 * batch * args.length / r["median_ms"]
        r["speed"] = mha_ms and mha_ms / r["median_ms"]
    return found


class Decoding:
    """A model with random parameters."""

    def __init__(self, name: str, config: Config, args):
        self.name, self.args, self.config = name, args, config
        self.model = EncoderDecoder(config.model, right_padded=True)
        self.params = None

    def case(self, batch: int, beams: int) -> list[timing.Case]:
        args, model = self.args, self.model
        generator = np.random.default_rng(0)
        vocabulary = self.config.model.vocabulary_size
        shape = (batch, args.length)
        sources = jax.device_put(generator.integers(NUM_SPECIAL, vocabulary, shape, np.int32))
        if self.params is None:
            init = jax.jit(lambda key: model.init(key, sources[:1], sources[:1])["params"])
            self.params = init(jax.random.key(0))
        run = partial(decode, model, args.length, beams)
        compiled = jax.jit(run).lower(self.params, sources).compile()
        start = partial(translator.start, model, length=args.length)
        cross, own = jax.eval_shape(start, self.params, sources)
        about = {
            "case": self.name,
            "search": "greedy" if beams == 1 else f"{beams} beams",
            "beams": beams,
            "batch": batch,
            "cache_bytes": cache_bytes(cross, own, beams),
        }
        memory = timing.memory_of(compiled)
        return [timing.Case(about, lambda: compiled(self.params, sources), memory=memory)]


def decode(model: EncoderDecoder, length: int, beams: int, params: Any, sources: jax.Array):
    """Outputs that all have the same length: none may end before."""
    limits = jnp.full(sources.shape[:1], length, jnp.int32)
    shape = {"max_length": length, "min_length": length, "beam_size": beams}
    return translator.search(model, params, sources, limits, **shape)


def cache_bytes(cross: dict, own: dict, beams: int) -> dict[str, int]:
    """Of keys and values only, not of the few numbers that count tokens."""
    return {
        role: sum(
            beams * leaf.size * leaf.dtype.itemsize
            for path, leaf in found.items()
            if path[-1].startswith("cached_")
        )
        for role, found in (("self", own), ("cross", cross))
    }


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
