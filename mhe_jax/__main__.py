"""`mhe-jax COMMAND`, or `python -m mhe_jax COMMAND`; `--help` lists the commands."""

import signal
import sys


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line of this process, or these arguments."""
    # Ctrl-C while modules load ends without a traceback; run_entry_point then sets its own handler.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli import commands
    from mhe_jax.cli.process import run_entry_point

    given = sys.argv[1:] if arguments is None else arguments
    run_entry_point(lambda: commands.main(given))


if __name__ == "__main__":
    main()
