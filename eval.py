"""Scores a trained run, or translates standard input with it; see `eval.py RUN --help`."""

import json
import sys

from mhe_jax.loading import parse_evaluation_arguments, run_entry_point


def main() -> None:
    """Ends with a line of results as JSON: on standard output, or error with `--translate`."""
    run, evaluation, translating = parse_evaluation_arguments(sys.argv[1:])
    # Imported here: jax starts slowly, and a typing error must not wait for it.
    from mhe_jax.evaluation import evaluate, input_lines, translate

    if not translating:
        print(json.dumps(evaluate(run, evaluation)))
        return

    def write(text: str) -> None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    lines = input_lines(sys.stdin.buffer)
    chunk = 1 if sys.stdin.isatty() else None
    print(json.dumps(translate(run, evaluation, lines, write, chunk=chunk)), file=sys.stderr)


if __name__ == "__main__":
    run_entry_point(main)
