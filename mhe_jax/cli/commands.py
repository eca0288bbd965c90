"""`mhe-jax COMMAND`, or `python -m mhe_jax COMMAND`: every command by its name."""

import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mhe_jax import __version__
from mhe_jax.cli import runs, sweep
from mhe_jax.cli.arguments import parse_fields, parse_target, parse_train_arguments
from mhe_jax.cli.process import called, output, output_table, say_that_jax_starts
from mhe_jax.config import Comparison, Config, InputError, not_installed
from mhe_jax.config.fields import leaves
from mhe_jax.config.files import TOKENIZER, files_of
from mhe_jax.config.loading import about_config, config_file, shipped_configs
from mhe_jax.config.places import check_scheme, path_of, scheme_of, source_path

# Columns of the page that `compare` shows on a terminal, beside the score.
COMPARED = "± over seeds", "minus mha", "± 2 SE", "against mha"
COMPARED += ("parameters", "in attention", "cached numbers a token", "best validation loss")

# Fields of `data` that name the files that training reads.
TRAINED_ON = "train", "validation", "tokenizer"


def main(arguments: Sequence[str]) -> None:
    name, *rest = arguments or ["no command"]
    if name in ("-h", "--help"):
        print(f"usage: {called('COMMAND')} [arguments]\n")
        for command, (run, *_) in COMMANDS.items():
            summary, *_ = (inspect.getdoc(run) or "").splitlines()
            print(f"  {command:9}  {summary}")
        print(f"\n`{called('COMMAND')} --help` explains one.")
    elif name == "--version":
        print(f"mhe_jax {__version__}")
    elif name not in COMMANDS:
        raise InputError(f"{name}: takes one of {', '.join(COMMANDS)}; --help explains them")
    else:
        if name == "eval" and rest[:1] == ["compare"]:
            name, *rest = rest
        result = COMMANDS[name][0](*split(name, rest))
        if result is not None:
            tell(result)


def tell(result: dict[str, Any], show: Callable[[dict[str, Any]], None] | None = None) -> None:
    """A line of JSON; on a terminal what `show` writes, or a line for each number and text."""
    if not sys.stdout.isatty():
        return output(json.dumps(result) + "\n")
    if show is not None:
        return show(result)
    for name, value in leaves(result).items():
        shown = value if isinstance(value, str) else json.dumps(value)
        shown = f"{value:.6g}" if isinstance(value, float) else shown
        output(f"{name:32} {shown}\n")
    return None


def split(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The places and the options of a command; help without the places explains it, and exits."""
    run, usage, least, most = COMMANDS[name]
    first = next((i for i, part in enumerate(arguments) if part.startswith("-")), len(arguments))
    places, options = list(arguments[:first]), list(arguments[first:])
    usage = f"usage: {called(name)} {usage}"
    if len(places) < max(least, 1) and options[:1] in (["-h"], ["--help"]):
        print(f"{usage}\n\n{inspect.getdoc(run)}")
        raise SystemExit(0)
    if not least <= len(places) <= most:
        raise InputError(f"{' '.join(places) or 'nothing'} is given; {usage}")
    return places, options


def train(places: list[str], options: list[str]) -> dict[str, Any] | None:
    """Trains a config, or a sweep of it.

    It goes on where an earlier run of the same --workdir stopped. `train CONFIG --help` explains
    the fields that most people change, `--help all` every one, `--help WORD` those about
    something. CONFIG is a file, the name of a shipped one, which `configs` lists, or the directory
    of a run: `train runs/demo` goes on with it.

    --sweep and --seeds run every combination of values and seeds, one after the other;
    --evaluate scores each of these runs once it is trained.

    --compile_only --topology v5e:16x16 [--num_slices 2] [--search_batch] trains nothing: it
    compiles the train step for devices that need not be there, and says whether it fits.

    --distributed auto joins the processes of a pod or cluster; elsewhere give
    --coordinator HOST:PORT --num_processes N --process_id I. Either may add
    --process_timeout SECONDS; see docs/pods.md.
    """
    if any(option.partition("=")[0] in ("--sweep", "--seeds") for option in options):
        planned = sweep.parse([*places, *options])
        for config, _ in planned.runs:
            scored = config.evaluation
            own = planned.evaluate and not scored.sources
            check_local_files(config, *TRAINED_ON, *[scored.split] * own)
        found = sweep.run(planned)
        tell(found, sweep.show)
        print(sweep.best_in_words(found), file=sys.stderr)
        sys.exit(1 if found["failed"] else 0)
    if "--evaluate" in options:
        raise InputError("--evaluate goes with --sweep or --seeds; `eval` scores one run")
    # jax starts only once the arguments are right.
    target, options = parse_target(options)
    if target is not None:
        config = parse_train_arguments([*places, *options])
        from mhe_jax.analysis.ahead import compile_ahead

        return compile_ahead(config, target)
    say_that_jax_starts()
    from mhe_jax.training.distributed import joined, take_flags

    processes, options = take_flags(options)
    config = parse_train_arguments([*places, *options])
    check_local_files(config, *TRAINED_ON)
    with joined(processes) as writes:
        if writes:
            note_missing_test(config)
        from mhe_jax.evaluation import TranslatedSample
        from mhe_jax.training import loop

        result = loop.train(config, sample=TranslatedSample)
        return result if writes else None


def note_missing_test(config: Config) -> None:
    try:
        check_local_files(config, "test")
    except InputError as error:
        print(f"note: {error}; only `eval` needs it", file=sys.stderr)


def check_local_files(config: Config, *fields: str) -> None:
    """Raises InputError for a local file that is not there, before jax is loaded, which is slow."""
    data = config.data
    for field in fields:
        names = (data.tokenizer,) if field == "tokenizer" else getattr(data, field)
        if field == "tokenizer" and (path_of(config.workdir) / TOKENIZER).exists():
            continue  # a run has its own
        for name in names:
            if not name or ":" in name or scheme_of(data.directory):
                continue
            where = f"(data.{field}, in data.directory={data.directory})"
            try:
                paths = [
                    source_path(data.directory, file) for file in files_of(data.directory, name)
                ]
            except InputError as error:
                raise InputError(f"{error} {where}") from None
            for path in paths:
                if not path.exists():
                    known = Path(data.directory).parts[:1] == ("data",)
                    fetch = f"; `{called('data')}` fetches what shipped configs read" * known
                    raise InputError(f"{path}: no such file {where}{fetch}")


def compare(paths: list[str], options: list[str]) -> None:
    """Tables and plots of many runs, and of sweeps; as `eval.py compare`.

    `compare RUNS --help` explains every field.
    """
    comparison = parse_fields(Comparison(), options, "compare", "RUNS...")
    os.environ["JAX_PLATFORMS"] = "cpu"  # it counts shapes, and leaves an accelerator alone
    try:
        from mhe_jax.report import report
    except ModuleNotFoundError as error:
        raise not_installed(f"compare needs {error.name}", "report") from None
    tell(report.compare(paths, comparison), _show_comparison)


def _show_comparison(found: dict[str, Any]) -> None:
    for section in found["sections"]:
        names = ("attention", "seeds", section["metric"].replace("_", " "), *COMPARED)
        rows = [{n: row[n] for n in names if n in row} for row in section["groups"]]
        output(f"{section['title']}\n")
        output_table(rows or [{"attention": "no run is finished"}])
        # Those on ratios are about columns that only the page has.
        notes = (note for note in section["notes"] if "PRR" not in note)
        output("".join(f"{note}\n" for note in notes) + "\n")
    counts = ", ".join(f"{count} {status}" for status, count in found["runs"].items() if count)
    output(f"runs: {counts}; the whole table, with pictures: {found['out']}/report.html\n")


def configs(places: list[str], options: list[str]) -> None:
    """The shipped experiments: what each trains, how long that takes, and its variants.

    Any command that takes a config takes such a name, with a variant as in `multi30k:small`.
    `show NAME` prints the file, to change it:

        configs show multi30k > mine.py
        train mine.py --workdir runs/mine
    """
    if options or len(places) == 1 or places[:1] not in ([], ["show"]):
        raise InputError(f"{' '.join(places + options)!r}: takes nothing, or show NAME")
    if places:
        return output(config_file(places[1])[0].read_text(encoding="utf-8"))
    for name in shipped_configs():
        about, variants = about_config(name)
        (time,) = re.findall(r"^Expected time: ([^(.;,]*[^(.;,\s])", about, re.MULTILINE)
        names = " ".join(f":{variant}" for variant in variants)
        output(f"{name:15} {about.partition(chr(10))[0]} Time: {time}. {names}\n")


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """Gets the text of this name."""

    # Where its files are, or will be; None: data/NAME.
    directory: str | None = None


def data(places: list[str], options: list[str]) -> dict[str, Any] | None:
    """The texts that configs read: where they come from, and fetching them.

    Without arguments, lists what there is. With a name, checks the files of a text in its
    directory, fetches those that are missing, and says what is where; or prepares a data set of
    TFDS, where TFDS keeps them ($TFDS_DATA_DIR, else ~/tensorflow_datasets):

        data multi30k
        data glue/rte                 # then --data.train tfds:glue/rte:train

    Nothing that is there is written over. The last line is one JSON object.
    """
    from mhe_jax.data.cache import PUBLISHED, get

    given = parse_fields(DataArguments(), options, "data", *places)
    if not places:
        for name, text in PUBLISHED.items():
            output(f"{name:15} {text.about}; {text.licence}; {text.url}\n")
        return output("others are data sets of TFDS, such as glue/TASK, squad or wiki40b/en\n")
    (name,) = places
    if name in PUBLISHED:
        check_scheme("--directory", given.directory or "", ())
        place = Path(given.directory or f"data/{name}").expanduser()
        files = get(name, place, lambda line: print(line, file=sys.stderr))
        return {"data": name, "directory": str(place), "files": [file.name for file in files]}
    if given.directory is not None:
        raise InputError(f"--directory {given.directory}: {name} lies where TFDS keeps it")
    from mhe_jax.data import tfds_source  # slow to import

    return {"data": name, **tfds_source.prepare(name)}


TRAIN = "CONFIG[:VARIANT] [--field value ...] [--sweep FIELD=A,B] [--seeds N] [--evaluate]"
EVAL = "RUN [--field value ...] [--translate | --generate | --predict]"
# What runs a command, how its line reads, and how many places it takes, least and most.
COMMANDS: dict[str, tuple[Callable[[list[str], list[str]], Any], str, int, int]] = {
    "train": (train, TRAIN, 1, 1),
    "eval": (runs.evaluate, EVAL, 1, 1),
    "compare": (compare, "RUNS... [--out DIRECTORY] [--field value ...]", 1, sys.maxsize),
    "configs": (configs, "[show NAME]", 0, 2),
    "data": (data, "[NAME [--directory DIR]]", 0, 1),
    "export": (runs.export, "RUN OUT --to FORMAT [--checkpoint best]", 2, 2),
    "convert": (runs.convert, "RUN NEW --kind KIND [--rows N] ...", 2, 2),
    "factorize": (runs.factorize, "RUN NEW [--attention N] [--mlp N] ...", 2, 2),
}
