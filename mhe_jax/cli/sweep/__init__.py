"""Many runs of one config: every combination of some values and seeds, one after the other.

    python train.py configs/X.py --sweep model.attention.kind=mha,sha --seeds 3 --workdir runs/sweep

Each run is a process of its own, `train.py` with the values of the combination, in a directory of
its own below the sweep's, named after the values: `kind=mha,seed=0`. So a sweep needs no state but
the runs: the same command skips those that are finished and resumes one that is not. Runs that
differ in nothing that a tokenizer depends on share it; the data cache is shared anyway.

WORKDIR/sweep.json says how each run ended. Nothing here imports jax: the runs need the devices.

plan.py      the runs of a command line        execution.py runs them
`report/results.py` reads and writes how they ended.
"""

from mhe_jax.cli.sweep.execution import run
from mhe_jax.cli.sweep.plan import is_sweep, parse

__all__ = ["is_sweep", "parse", "run"]
