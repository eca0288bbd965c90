"""Moves the best checkpoint of a run of before December 2026 to where it is read now.

    python experiments/robustness/old_checkpoints.py RUN...

Such a run kept its best parameters in `checkpoints_best/STEP`, beside `checkpoints/STEP`. Where the
run also kept that step whole, nothing needs to be done. Of a step that is newer than all whole ones
nothing is moved: the run goes on from the whole ones, and validates again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mhe_jax.training.checkpoint.store import steps_in


def main(runs: list[str]) -> None:
    for run in map(Path, runs):
        whole = steps_in(run / "checkpoints")
        for step, path in steps_in(run / "checkpoints_best").items():
            if step in whole or step > max(whole, default=0):
                print(f"{path}: stays")
                continue
            path.rename(run / "checkpoints" / str(step))
            print(f"{path}: is now {run / 'checkpoints' / str(step)}")


if __name__ == "__main__":
    main(sys.argv[1:])
