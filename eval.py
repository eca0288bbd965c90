"""Scores a trained run, translates, continues or labels standard input, or compares many runs.

See `eval.py --help`, `eval.py RUN --help` and `eval.py compare --help`.
"""

import sys

if __name__ == "__main__":
    from mhe_jax.__main__ import main

    main(["eval", *sys.argv[1:]])
