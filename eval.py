"""Scores a trained run, translates or continues standard input with it, or compares many runs.

See `eval.py --help`, `eval.py RUN --help` and `eval.py compare --help`.
"""

import json
import signal
import sys


def main() -> None:
    """Ends with a line of results as JSON: on standard output, or error where that has text."""
    # Imported when they are needed: jax starts slowly, and a typing error must not wait for it.
    from mhe_jax.cli.arguments import output, parse_compare_arguments, parse_evaluation_arguments
    from mhe_jax.config import InputError
    from mhe_jax.training.cluster.distributed import joined, take_flags

    command, *arguments = sys.argv[1:] or [""]
    if command == "paper":
        if arguments:
            raise InputError(f"eval.py paper takes no arguments, not {arguments[0]}")
        from mhe_jax.report import paper

        output(f"{paper.tables()}\n{json.dumps(paper.summary())}\n")
        return
    if command == "compare":
        paths, comparison = parse_compare_arguments(arguments)
        from mhe_jax.report import report

        output(json.dumps(report.compare(paths, comparison)) + "\n")
        return
    processes, arguments = take_flags(sys.argv[1:])
    run, evaluation, action = parse_evaluation_arguments(arguments)
    with joined(processes) as writes:
        from mhe_jax.evaluation import evaluate, generate, input_lines, translate, usable

        if action == "score":
            result = evaluate(run, evaluation)
            if writes:
                output(json.dumps(result) + "\n")
            return
        if sys.stdin is None:
            raise InputError("standard input is closed: takes the lines to read")
        keep = usable(run) if action == "translate" else None
        lines = input_lines(sys.stdin.buffer, keep=keep)
        chunk = 1 if sys.stdin.isatty() else None
        answer = translate if action == "translate" else generate
        print(json.dumps(answer(run, evaluation, lines, output, chunk=chunk)), file=sys.stderr)


if __name__ == "__main__":
    # Ctrl-C while modules load ends without a traceback; run_entry_point takes it back.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mhe_jax.cli.arguments import run_entry_point

    run_entry_point(main)
