"""Scores a trained run, translates, continues or labels standard input, or compares many runs.

See `eval.py --help`, `eval.py RUN --help` and `eval.py compare --help`.
"""

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while modules load ends without a traceback; run_entry_point then sets its own handler.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli.evaluate import main
    from mhe_jax.cli.process import run_entry_point

    run_entry_point(lambda: main(sys.argv[1:]))
