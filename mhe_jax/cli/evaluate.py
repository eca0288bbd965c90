"""`eval.py RUN`: score a trained run, or translate or continue standard input with it.

`eval.py compare` and `eval.py paper` go to the files of these names.
"""

import codecs
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mhe_jax.cli import compare, paper
from mhe_jax.cli.arguments import parse_evaluation_arguments
from mhe_jax.cli.process import output
from mhe_jax.config import InputError
from mhe_jax.config.loading import load_json

# Bytes of standard input that are read at once; characters of a line that is kept whole, and of a
# piece of a tokenizer: those of ours have 16.
PART, LONGEST_LINE, LONGEST_PIECE = 1 << 16, 1 << 26, 1024


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
        from mhe_jax.evaluation import evaluate, generate, translate

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


def usable(workdir: Path) -> int:
    """Characters of a line that can matter to `translate`: no piece of a tokenizer holds more."""
    return LONGEST_PIECE * load_json(workdir / "config.json").model.max_length


def input_lines(
    file: BinaryIO, name: str = "standard input", *, keep: int | None = None
) -> Iterator[str]:
    """The lines of UTF-8 text: a line feed ends one, with or without a carriage return before it.

    Nothing else ends a line, so that as many come out as `wc -l` counts (and a last one without
    an end). A byte order mark at the beginning is dropped.

    Args:
      file: read in parts, however long its lines are.
      name: for messages.
      keep: about as many characters of a line come out; what follows is checked and dropped. None
        keeps all, of a line of at most `LONGEST_LINE` characters.

    Raises:
      InputError: a line is not UTF-8, or too long, naming it.
    """
    most, number = LONGEST_LINE if keep is None else keep, 0
    while part := file.readline(PART):
        number += 1
        if number == 1:
            part = part.removeprefix(b"\xef\xbb\xbf")
        decoder = codecs.getincrementaldecoder("utf-8")()
        texts, kept, read = [], 0, 0
        while True:
            # Half a character is left for the next part.
            before = read - len(decoder.getstate()[0])
            ended = part.endswith(b"\n") or not part
            try:
                text = decoder.decode(part, final=ended)
            except UnicodeDecodeError as error:
                place = before + error.start + 1
                raise InputError(f"{name}, line {number}: is not UTF-8 (byte {place})") from None
            # Of what is dropped one character says that the line is not blank.
            texts.append(text if kept <= most else text.strip()[:1] if _blank(texts) else "")
            kept, read = kept + len(text), read + len(part)
            if keep is None and kept > most:
                raise InputError(f"{name}, line {number}: has over {most:,} characters")
            if ended:
                break
            part = file.readline(PART)
        yield "".join(texts).removesuffix("\n").removesuffix("\r")


def _blank(texts: list[str]) -> bool:
    return not any(text.strip() for text in texts)
