"""`python -m mhe_jax demo RUN`: what a run of configs/demo.py has learned, after `eval.py RUN`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import InputError
from mhe_jax.config.places import path_of

# Phrases to show: some of the test, as far apart as possible, and some wrong ones.
SHOWN, WRONG = 6, 2


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Shows what a run of the demo has learned, and fails where that is too little."""

    # Required BLEU on the test.
    bleu: float = 0.0
    # Required exact matches, in percent.
    exact_match: float = 0.0


def main(arguments: Sequence[str]) -> None:
    """Prints translations of the test, and the scores; exit status 1 if they are too low."""
    run, wanted = parse(arguments)
    from mhe_jax.data.phrases import pairs
    from mhe_jax.report import read_result

    scores, hypotheses = read_result(run / "eval_test.json"), run / "test.hypotheses.txt"
    if not scores or not hypotheses.is_file():
        raise InputError(f"{run}: was not evaluated: first run `{called('eval')} {run}`")
    lines = hypotheses.read_text(encoding="utf-8").split("\n")[:-1]
    phrases = pairs("test")
    if scores.get("sources") != ["demo:test"] or len(lines) != len(phrases):
        raise InputError(f"{run}: was not evaluated on demo:test")
    output("\n" + examples(phrases, lines))
    output(
        f"\n{scores['bleu']:.1f} BLEU and {scores['exact_match']:.1f} % exact match on phrases "
        f"that are not in training (at least {wanted.bleu:g} and {wanted.exact_match:g} are "
        "required)\n"
    )
    if scores["bleu"] < wanted.bleu or scores["exact_match"] < wanted.exact_match:
        sys.exit(1)


def parse(arguments: Sequence[str]) -> tuple[Path, Wanted]:
    """The run and the required scores, of `demo RUN [--bleu N] [--exact_match N]`.

    Raises:
      InputError: no run, or a field or value that is not allowed.
    """
    command = called("demo")
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise InputError(f"no run given; usage: {command} RUN [--bleu N] [--exact_match N]")
    helps = arguments[0].startswith("-")
    run, options = ("RUN", arguments) if helps else (arguments[0], arguments[1:])
    return path_of(run), parse_fields(Wanted, Wanted(), options, f"{command} {run}")


def examples(phrases: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    """Phrases with their translations; a wrong one has a mark, and the right one below it.

    Phrases at equal distances in the test, right ones first; then more wrong ones.
    """
    wrong = [number for number, line in enumerate(lines) if line.strip() != phrases[number][1]]
    spread = [number * len(lines) // SHOWN for number in range(SHOWN)]
    spread.sort(key=lambda number: number in wrong)
    more = [number for number in wrong if number not in spread][:WRONG]
    text = ""
    for number in (*spread, *more):
        english, german = phrases[number]
        text += f"{english}\n"
        if number in wrong:
            text += f"  ✗ {lines[number]}\n    right: {german}\n"
        else:
            text += f"    {lines[number]}\n"
    return text
