"""How fast translations are decoded over the cache, and how big it is, for every kind.

    python experiments/speed/decode.py --dtype bfloat16 --batch 64 1024 --out gpu.json
    python experiments/speed/decode.py --kinds mha mhe_add mhe_mul --beams 1 --rounds 3
    python experiments/speed/decode.py --layers 2 --features 64 --heads 4 --mlp_features 128 \\
        --vocabulary 1000 --length 16 --batch 4 --rounds 2

The transformer of configs/wmt14.py with random parameters and sources, greedy (one beam) and
by beam search, on one device; a kind takes the form it chooses by itself, or each of --forms. Every
row runs to --length tokens: none ends before. A kind that fails at a batch is left out there. Cases
take turns, one decoding a round; encoding the sources is part.

    tokens/s   tokens of the best hypothesis of each row / the median
    speed      tokens/s over those of mha at the same batch and beams
    cache      bytes of keys and values of self-attention and of cross-attention, all layers and
               beams
    memory     temporaries and outputs, as the compiler counts them
"""

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from experiments import command_line, models, reports, timing
from mhe_jax.cli.process import ask_for_huge_pages
from mhe_jax.config import Config
from mhe_jax.data import BOS, EOS, NUM_SPECIAL, PAD
from mhe_jax.evaluation.decoding import beam_search, expand_to_beams, unrolled
from mhe_jax.model import EncoderDecoder


def parse(arguments: list[str] | None):
    parser = command_line.Parser(__doc__, forms=["auto"])
    parser.add_argument("--beams", type=command_line.positive, nargs="+", default=[1, 4])
    parser.add_argument(
        "--length", type=command_line.positive, default=64, help="tokens of an output"
    )
    parser.add_argument("--source_length", type=command_line.positive, help="else --length")
    parser.add_argument("--batch", type=command_line.positive, nargs="+", default=[1, 16])
    models.add_flags(parser)
    args = parser.parse_args(arguments)
    args.source_length = args.source_length or args.length
    longest = max(args.length, args.source_length)
    return args, models.experiment(parser, args, "translation", longest)


def main(arguments: list[str] | None = None) -> int:
    args, config = parse(arguments)
    about = reports.header(__file__, args.dtype, arguments)
    print(*reports.header_lines(about), sep="\n\n", end="\n\n")
    reports.finish(args.out, about, *measured(args, config))
    return 0


def measured(args, config: Config) -> tuple[list[dict], timing.LeftOut]:
    """Measures and prints; the rows, and what was left out."""
    left_out = timing.LeftOut()
    heads = config.model.attention.num_heads
    decoders = {
        name: Decoding(name, models.with_attention(config, fields), args)
        for name, fields in command_line.variants(args.kinds, args.forms, heads).items()
    }
    print(
        f"{models.shape_line(config)}; {args.source_length} source tokens to {args.length}; "
        f"{args.rounds} rounds"
    )
    results = []
    for beams, batch in itertools.product(args.beams, args.batch):
        results += (found := at_batch(decoders, batch, beams, args, left_out))
        if found:
            print(f"\n### {found[0]['search']}, {batch} rows\n")
            rows = sorted(found, key=lambda r: r["median_ms"])
            print(reports.table(COLUMNS, rows), flush=True)
    return results, left_out


COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"],
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "speed": lambda r: f"{r['speed']:.2f}" if r["speed"] else "-",
    "self cache KB": lambda r: f"{r['cache_bytes']['self'] / 1e3:,.1f}",
    "cross cache KB": lambda r: f"{r['cache_bytes']['cross'] / 1e3:,.1f}",
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
        shape = (batch, args.source_length)
        sources = jax.device_put(generator.integers(NUM_SPECIAL, vocabulary, shape, np.int32))
        if self.params is None:
            init = jax.jit(lambda key: model.init(key, sources[:1], sources[:1])["params"])
            self.params = init(jax.random.key(0))
        run = partial(decode, model, args.length, beams)
        compiled = jax.jit(run).lower(self.params, sources).compile()
        start = partial(start_cache, model, args.length)
        about = {
            "case": self.name,
            "search": "greedy" if beams == 1 else f"{beams} beams",
            "beams": beams,
            "batch": batch,
            "cache_bytes": cache_bytes(jax.eval_shape(start, self.params, sources), beams),
        }
        memory = timing.memory_of(compiled)
        return [timing.Case(about, lambda: compiled(self.params, sources), memory=memory)]


def start_cache(model: EncoderDecoder, length: int, params: Any, sources: jax.Array) -> dict:
    _, state = model.apply(
        {"params": params}, sources, length, method="start_cache", mutable=["cache"]
    )
    return flatten_dict(nn.unbox(state["cache"]))


def fixed_and_moving(leaves: dict) -> tuple[dict, dict]:
    """What cross-attention reads, the same for all beams of a row and never reordered; the rest."""
    fixed = {path: leaf for path, leaf in leaves.items() if "cross_attention" in path}
    return fixed, {path: leaf for path, leaf in leaves.items() if path not in fixed}


def decode_step(model: EncoderDecoder, params: Any, fixed: dict, moving: dict, tokens, positions):
    """Logits after `tokens`, and `moving` with them."""
    logits, state = model.apply(
        {"params": params, "cache": unflatten_dict({**fixed, **moving})},
        tokens,
        positions,
        method="decode_step",
        mutable=["cache"],
    )
    leaves = flatten_dict(state["cache"])
    return logits[:, 0], {path: leaves[path] for path in moving}


def decode(model: EncoderDecoder, length: int, beams: int, params: Any, sources: jax.Array):
    """As `mhe_jax.evaluation.translator` does it, for outputs that all have the same length."""
    model, params = unrolled(model, params)
    fixed, moving = fixed_and_moving(start_cache(model, length, params, sources))
    fixed = expand_to_beams(fixed, beams, model.cache_batch_axis)
    step = partial(decode_step, model, params, fixed)
    limits = jnp.full(sources.shape[:1], length, jnp.int32)
    return beam_search(
        step,
        moving,
        limits,
        max_length=length,
        beam_size=beams,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        forbidden_ids=(PAD, BOS, EOS),  # nothing ends before its time
        batch_axis=model.cache_batch_axis,
        early_stop=False,
    )


def cache_bytes(leaves: dict, beams: int) -> dict[str, int]:
    """Of keys and values only, not of the few numbers that count tokens."""
    sizes = {"self": 0, "cross": 0}
    for path, leaf in leaves.items():
        if path[-1].startswith("cached_"):
            role = "cross" if "cross_attention" in path else "self"
            sizes[role] += beams * math.prod(leaf.shape) * leaf.dtype.itemsize
    return sizes


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
