"""Bytes that a GPU would move for one token of each row, without a GPU.

    python experiments/kernels_gpu/decode_bytes.py --dtype bfloat16 --out decode_bytes.json

One greedy step of the transformer that `decode.py` times, its cache updated in place, is compiled
ahead of time (extra `cuda`). Bytes are those that its kernels read and write, each of its operands
once (`traffic.py`). As there is no cuDNN either, no kind runs on the engine `cudnn`.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import command_line, models, reports
from experiments.kernels_gpu.traffic import traffic
from experiments.speed import decode
from mhe_jax.analysis.hlo import Program
from mhe_jax.attention import choices
from mhe_jax.attention.engines import recording
from mhe_jax.config import Config
from mhe_jax.evaluation import translator
from mhe_jax.model import EncoderDecoder

COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"],
    "runs as": lambda r: r["runs_as"],
    "MB moved": lambda r: f"{r['bytes'] / 1e6:,.0f}",
    "of caches": lambda r: f"{r['cache_bytes'] / 1e6:,.0f}",
    "of parameters": lambda r: f"{r['parameter_bytes'] / 1e6:,.0f}",
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.Parser(__doc__, forms=["auto"], timed=False)
    parser.add_argument("--topology", default="h200:1x1")
    parser.add_argument("--length", type=command_line.positive, default=128, help="of both caches")
    parser.add_argument("--rows", type=command_line.positive, nargs="+", default=[64, 1024])
    models.add_flags(parser)
    args = parser.parse_args(arguments)
    device = reports.ahead_of_time(parser, args.topology)
    config = models.experiment(parser, args, "translation", args.length)
    shape = f"{models.shape_line(config)}; {args.length} tokens; {args.dtype}"
    cuda = reports.version_of("nvidia-cuda-nvcc")
    about = reports.header_ahead(__file__, arguments, device, shape, cuda=cuda)
    variants = command_line.variants(args.kinds, args.forms, config.model.attention.num_heads)
    results = []
    for rows in args.rows:
        found = [
            {"case": name, "batch": rows}
            | measure(models.with_attention(config, fields), rows, args.length, device)
            for name, fields in variants.items()
        ]
        print(f"\n### {rows} rows\n\n{reports.table(COLUMNS, found)}", flush=True)
        results += found
    reports.save(args.out, {"header": about, "results": results})
    return 0


def measure(config: Config, rows: int, length: int, device: Any) -> dict:
    mesh = Mesh(np.array([device]), "all")
    model, whole = EncoderDecoder(config.model, right_padded=True), PartitionSpec()

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, whole))

    sources, tokens = (jax.ShapeDtypeStruct((rows, n), jnp.int32) for n in (length, 1))
    made = jax.eval_shape(model.init, jax.random.key(0), sources, sources)
    params = nn.unbox(made["params"])
    start = partial(translator.start, model, length=length)
    cross, own = jax.eval_shape(start, params, sources)
    given = params, cross, own, tokens, tokens
    step = jax.jit(partial(translator.step, model), donate_argnums=2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), recording():
        compiled = step.lower(*jax.tree.map(placed, given)).compile()
        runs_as = choices()[config.model.attention.kind]
    return {
        "runs_as": runs_as,
        "bytes": traffic(Program(compiled.as_text() or "")),
        "cache_bytes": sum(decode.cache_bytes(cross, own, 1).values()),
        "parameter_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
    }


if __name__ == "__main__":
    sys.exit(main())
