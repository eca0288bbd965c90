"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains every field.

The last line on standard output is one JSON object with the result; all else is on standard error.
"""

import json
import sys

from mhe_jax.loading import parse_train_arguments, run_entry_point
from mhe_jax.training.distributed import joined, take_flags


def main() -> None:
    processes, arguments = take_flags(sys.argv[1:])
    config = parse_train_arguments(arguments)
    with joined(processes) as writes:
        from mhe_jax.training.loop import train  # jax starts after the arguments are right

        result = train(config)
        if writes:
            print(json.dumps(result))


if __name__ == "__main__":
    run_entry_point(main)
