"""Scores a trained run, translates or continues standard input with it, or compares many runs.

See `eval.py --help`, `eval.py RUN --help` and `eval.py compare --help`.
"""

import json
import sys

from mhe_jax.config import InputError
from mhe_jax.loading import (
    parse_compare_arguments,
    parse_evaluation_arguments,
    run_entry_point,
)


def main() -> None:
    """Ends with a line of results as JSON: on standard output, or error where that has text."""
    # Imported when they are needed: jax starts slowly, and a typing error must not wait for it.
    command, *arguments = sys.argv[1:] or [""]
    if command == "paper":
        if arguments:
            raise InputError(f"eval.py paper takes no arguments, not {arguments[0]}")
        from mhe_jax.evaluation import paper

        print(paper.tables())
        print(json.dumps(paper.summary()))
        return
    if command == "compare":
        paths, comparison = parse_compare_arguments(arguments)
        from mhe_jax.evaluation import report

        print(json.dumps(report.compare(paths, comparison)))
        return
    run, evaluation, action = parse_evaluation_arguments(sys.argv[1:])
    from mhe_jax.evaluation import evaluate, generate, input_lines, translate

    if action == "score":
        print(json.dumps(evaluate(run, evaluation)))
        return

    def write(text: str) -> None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    lines = input_lines(sys.stdin.buffer)
    chunk = 1 if sys.stdin.isatty() else None
    answer = translate if action == "translate" else generate
    print(json.dumps(answer(run, evaluation, lines, write, chunk=chunk)), file=sys.stderr)


if __name__ == "__main__":
    run_entry_point(main)
