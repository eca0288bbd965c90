"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains more.

The last line on standard output is one JSON object with the result; the rest is on standard error.
"""

import sys

if __name__ == "__main__":
    from mhe_jax.__main__ import main

    main(["train", *sys.argv[1:]])
