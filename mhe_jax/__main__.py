"""`mhe-jax COMMAND`, or `python -m mhe_jax COMMAND`; `--help` lists the commands."""

import signal
import sys


def main() -> None:
    """Runs the command line of this process."""
    # Ctrl-C while modules load ends without a traceback; run_entry_point then sets its own handler.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli.commands import main
    from mhe_jax.cli.process import run_entry_point

    run_entry_point(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    main()
