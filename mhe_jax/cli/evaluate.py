"""`eval.py RUN`: score a trained run, or translate or continue standard input with it.

`eval.py compare` and `eval.py paper` go to the files of these names.
"""

import json
import sys
from collections.abc import Sequence

from mhe_jax.cli import compare, paper
from mhe_jax.cli.arguments import parse_evaluation_arguments
from mhe_jax.cli.process import output
from mhe_jax.config import InputError


def main(arguments: Sequence[str]) -> None:
    """Ends with a line of results as JSON: on standard output, or error where that has text."""
    if arguments and arguments[0] in ("compare", "paper"):
        command = compare if arguments[0] == "compare" else paper
        return command.main(arguments[1:])
    # jax starts after the arguments are right.
    from mhe_jax.training.cluster.distributed import joined, take_flags

    processes, arguments = take_flags(arguments)
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
