"""Train: `python train.py configs/demo.py --workdir runs/demo`; `--help` explains every field.

With `--compile_only --topology v5e:16x16` it compiles for devices that need not be there instead;
`--sweep model.attention.kind=mha,sha --seeds 3` trains every combination, one after the other.
The last line on standard output is one JSON object with the result; the rest is on standard error.
"""

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while modules load ends without a traceback; run_entry_point then sets its own handler.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli.process import run_entry_point
    from mhe_jax.cli.train import main

    run_entry_point(lambda: main(sys.argv[1:], (sys.executable, __file__)))
