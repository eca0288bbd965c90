"""Commands on trained runs: eval scores or reads lines; export, convert and factorize make files.

jax starts only once the arguments are right.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from mhe_jax import interchange
from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import output, say_that_jax_starts
from mhe_jax.config import ConversionConfig, EvaluationConfig, InputError, KroneckerConfig
from mhe_jax.config.files import METRICS, RESULT
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.report import read_result

ACTIONS = ("translate", "generate", "predict")


def evaluate(places: list[str], options: list[str]) -> dict[str, Any] | None:
    """Scores a run, or translates, continues or labels text with it.

    RUN is the --workdir of a training run. `eval RUN --help` explains every field. With an action
    it reads lines of standard input, and the JSON of the result goes to standard error.

    --distributed auto joins the processes of a pod or cluster, as of `train`.
    """
    say_that_jax_starts()
    from mhe_jax.training.distributed import joined, take_flags

    (name,), (processes, options) = places, take_flags(options)
    evaluation, action = parse_evaluation(name, options)
    run = path_of(name)
    with joined(processes) as writes:
        from mhe_jax.evaluation import answer_lines, evaluate

        steps = config_of(run).train.num_steps
        trained = (run / METRICS).exists()
        if writes and trained and read_result(run / RESULT).get("steps") != steps:
            print(f"note: the run in {run} has not trained {steps:,} steps yet", file=sys.stderr)
        if action is None:
            result = evaluate(run, evaluation)
            return result if writes else None
        lines, chunk = input_lines(sys.stdin.buffer), 1 if sys.stdin.isatty() else None
        summary = answer_lines(action, run, evaluation, lines, output, chunk=chunk)
        print(json.dumps(summary), file=sys.stderr)
        return None


@dataclasses.dataclass(frozen=True)
class _EvaluationArguments(EvaluationConfig):
    """Scores a trained run, or translates, continues or labels standard input with it."""

    # Translate the lines of standard input to standard output instead of scoring.
    translate: bool = False
    # Continue the lines of standard input to standard output instead of scoring.
    generate: bool = False
    # Label the lines of standard input, texts with tabs between them, instead of scoring.
    predict: bool = False


def parse_evaluation(run: str, options: list[str]) -> tuple[EvaluationConfig, str | None]:
    """The settings and one of `ACTIONS`; what is not given is as in the run's config."""
    config = config_of(run)
    default = _EvaluationArguments(**dataclasses.asdict(config.evaluation))
    values = dataclasses.asdict(parse_fields(default, options, "eval", run, bare_flags=True))
    given = [action for action in ACTIONS if values.pop(action)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(f'--{action}' for action in given)}: give only one")
    evaluation = EvaluationConfig(**values)
    check(dataclasses.replace(config, evaluation=evaluation), trains=False)
    for name in ("sources", "split"):
        if given and values[name] != getattr(default, name):
            raise InputError(f"--{name} is given with --{given[0]}, which reads standard input")
    return evaluation, given[0] if given else None


def input_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of UTF-8 text, as many as `wc -l` counts, without a byte order mark.

    Nothing but a line feed ends a line, with or without a carriage return before it.
    """
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.start + 1
            raise InputError(f"standard input, line {number}: is not UTF-8 (byte {byte})") from None
        yield text.removesuffix("\n").removesuffix("\r")


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Writes a trained run as files that other programs read."""

    # The format, one of those that `export --help` lists.
    to: str = ""
    # `best` on the validation split, `last`, or a step number; None: evaluation.checkpoint.
    checkpoint: str | None = None
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); None likewise.
    average_checkpoints: int | None = None


def export(places: list[str], options: list[str]) -> dict[str, Any]:
    given = parse_fields(ExportArguments(), options, "export", *places)
    return interchange.export(*places, **dataclasses.asdict(given))


FORMATS = "\n".join(f"    {name:12}  {said}" for name, said in interchange.FORMATS.items())
export.__doc__ = f"""A trained run as files that other programs read.

OUT is a new directory with RUN's best parameters in one of these formats:

{FORMATS}

What a format cannot hold is refused with the reason.
`export RUN OUT --help` explains every field; docs/export.md has examples.
"""


def convert(places: list[str], options: list[str]) -> dict[str, Any]:
    """A trained run with another attention, or a transformers model as a run.

    NEW is RUN with each attention sublayer replaced by the closest one of KIND. Evaluate it, or
    train it further for a part of the steps that RUN took (uptraining).

        convert RUN NEW --kind gqa --num_kv_heads 2
        train CONFIG ... --train.init_from NEW --workdir NEWER

    It is fitted on 1,000 rows of RUN's training text, or on `--rows N`; `--rows 0` needs no text.
    The result has the relative error (Frobenius) of each sublayer's output on those rows, before
    and after the fit. `convert RUN NEW --help` explains every field.

        convert SOURCE NEW

    makes a run of a transformers model, from the weights and the tokenizer.json in the directory
    SOURCE. Another attention is a second step: `convert` of that run, with a --kind.
    """
    wanted = parse_fields(ConversionConfig(), options, "convert", *places)
    run, new = map(path_of, places)
    from mhe_jax.interchange import uptraining
    from mhe_jax.interchange.huggingface.reading import is_foreign, make_run

    if is_foreign(run):
        if wanted != ConversionConfig():
            first = f"first `convert {run} NEW`, then `convert NEW` with --kind"
            raise InputError(f"{run} is not a run yet: {first}")
        return make_run(run, new)
    return uptraining.convert(run, new, wanted)


def factorize(places: list[str], options: list[str]) -> dict[str, Any]:
    """A trained run with matrices of fewer parameters.

    NEW is RUN with its matrices as sums of Kronecker products with the given numbers of terms.
    Evaluate it, or train it further by RUN's command with NEW as --workdir and these terms.

        factorize RUN NEW --attention 8 --mlp 16 --embedding 128
        train CONFIG ... --workdir NEW --model.kronecker.attention 8 ...

    The result has the relative error (Frobenius) of each matrix. `factorize RUN NEW --help`
    explains every field.
    """
    terms = parse_fields(KroneckerConfig(), options, "factorize", *places)
    run, new = map(path_of, places)
    from mhe_jax.training import from_run

    return from_run.factorize(run, new, terms)
