"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains every field.

`--sweep model.attention.kind=mha,sha --seeds 3` trains every combination, one after the other.
The last line on standard output is one JSON object with the result; all else is on standard error.
"""

import json
import sys

from mhe_jax import sweep
from mhe_jax.loading import parse_train_arguments, run_entry_point


def main() -> None:
    if sweep.is_sweep(sys.argv[1:]):
        found = sweep.run(sweep.parse(sys.argv[1:]), __file__)
        print(sweep.table(found["runs"]), file=sys.stderr)
        print(json.dumps(found))
        sys.exit(1 if found["failed"] else 0)
    config = parse_train_arguments(sys.argv[1:])
    from mhe_jax.training.loop import train  # jax starts after the arguments are right

    print(json.dumps(train(config)))


if __name__ == "__main__":
    run_entry_point(main)
