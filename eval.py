"""Scores a trained run, or translates standard input with it; see `eval.py RUN --help`."""

import json
import sys

from mhe_jax.loading import parse_evaluation_arguments, run_entry_point
from mhe_jax.training.distributed import joined, take_flags


def main() -> None:
    """Ends with a line of results as JSON: on standard output, or error with `--translate`."""
    processes, arguments = take_flags(sys.argv[1:])
    run, evaluation, translating = parse_evaluation_arguments(arguments)
    with joined(processes) as writes:
        # Imported here: jax starts slowly, and a typing error must not wait for it.
        from mhe_jax.evaluation import evaluate, input_lines, translate

        if not translating:
            result = evaluate(run, evaluation)
            if writes:
                print(json.dumps(result))
            return

        def write(text: str) -> None:
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()

        lines = input_lines(sys.stdin.buffer)
        chunk = 1 if sys.stdin.isatty() else None
        print(json.dumps(translate(run, evaluation, lines, write, chunk=chunk)), file=sys.stderr)


if __name__ == "__main__":
    run_entry_point(main)
