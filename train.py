"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains every field.

The last line on standard output is one JSON object with the result; all else is on standard error.
"""

import json
import sys

from mhe_jax.loading import parse_train_arguments, run_entry_point


def main() -> None:
    config = parse_train_arguments(sys.argv[1:])
    from mhe_jax.training.loop import train  # jax starts after the arguments are right

    print(json.dumps(train(config)))


if __name__ == "__main__":
    run_entry_point(main)
