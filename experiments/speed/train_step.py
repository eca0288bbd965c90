"""How fast whole train steps are: model, loss, gradients and optimizer, for every kind and form.

    python experiments/speed/train_step.py --dtype bfloat16 --batch 32 --out gpu.json
    python experiments/speed/train_step.py --tasks mlm --batch 4 --rounds 5 --kinds mha mhe_add

    mlm           the encoder of configs/bert_base.py
    translation   the transformer of configs/wmt14.py

Random tokens without padding, one device, the configs' own optimizer, clipping and dropout. Beside
our kinds stand the same model with `flax.linen.MultiHeadDotProductAttention`, and of mlm, where
PyTorch and transformers are installed, Hugging Face's BERT, its head at the masked tokens alone,
with SDPA, autocast to --dtype, eager and with the loss by `torch.compile`. Cases take turns, a step
a round; each holds its train state all the while, 12 bytes a parameter: --kinds and --forms make it
fewer.

    tokens/s      input tokens of a step (translation: source and target) / the median
    speed         time of the fastest peer / time of this row
    MFU           FLOP/s of the formula that is printed, over that of a big matrix product in the
                  same type and the same run
    memory        temporaries and outputs (the whole train state), as the compiler counts them
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room on a GPU

from experiments import command_line, models, reports, timing
from experiments.speed import steps
from mhe_jax.cli.process import ask_for_huge_pages
from mhe_jax.config import Config
from mhe_jax.tasks.cost import FORMULA


def parse(arguments: list[str] | None):
    parser = command_line.Parser(__doc__)
    tasks = list(models.CONFIGS)
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--length", type=command_line.positive, help="T, else the config's")
    parser.add_argument("--batch", type=command_line.positive, default=8, help="rows B")
    models.add_flags(parser)
    args = parser.parse_args(arguments)
    configs = {task: models.experiment(parser, args, task, args.length) for task in args.tasks}
    return args, configs


def main(arguments: list[str] | None = None) -> int:
    args, configs = parse(arguments)
    left_out, peaks, results, notes = timing.LeftOut(), {}, [], [FORMULA]
    for task, config in configs.items():
        cases = timing.peak_cases(args.dtype) + timing.made(programs(config, args), left_out)
        peaks[task], found = reports.split_peak(timing.measure(cases, args.rounds, left_out))
        cases.clear()
        for row in found:
            row["tokens_per_second"] = 1e3 * row["tokens"] / row["median_ms"]
        results += found
        shape = f"T = {config.data.sequence_length}; {models.shape_line(config)}; {args.batch} rows"
        notes.append(f"{task}: {shape}, {args.rounds} rounds; {reports.peak_line(peaks[task])}")
    reports.beside_peers(results)
    about = reports.header(__file__, args.dtype, arguments)
    return reports.finish(args.out, about, COLUMNS, results, left_out, *notes, peak=peaks)


COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"] + (" (peer)" if r["peer"] else ""),
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "speed": lambda r: f"{r['speed']:.2f}" if r["speed"] else "-",
    "MFU": lambda r: f"{r['of_peak']:.1%}",
    "memory MB": reports.megabytes,
    "parameters": lambda r: f"{r['parameters']['total']:,}",
}


def programs(config: Config, args) -> dict[str, Callable[[], list[timing.Case]]]:
    """How to make each case of a task."""
    made: dict[str, Callable[[], list[timing.Case]]] = {}
    heads = config.model.attention.num_heads
    for name, fields in command_line.variants(args.kinds, args.forms, heads).items():
        ours = models.with_attention(config, fields)
        made[name] = functools.partial(steps.our_step, name, ours, args.batch)
    mha = models.with_attention(config, {"kind": "mha"})
    with_flax = {"peer": True, "layers": steps.flax_layers}
    made[steps.FLAX] = functools.partial(steps.our_step, steps.FLAX, mha, args.batch, **with_flax)
    for compiled in (False, True) if config.task == "mlm" else ():
        name = f"Hugging Face BERT, SDPA{', compiled' if compiled else ''}"
        made[name] = functools.partial(steps.hugging_face_step, name, mha, args.batch, compiled)
    return made


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
