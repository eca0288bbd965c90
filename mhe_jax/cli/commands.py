"""`mhe-jax COMMAND`, or `python -m mhe_jax COMMAND`: every command by its name."""

import dataclasses
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax import __version__
from mhe_jax.cli import evaluate, sweep, transform
from mhe_jax.cli.arguments import parse_fields, parse_target, parse_train_arguments
from mhe_jax.cli.process import called, output
from mhe_jax.config import Comparison, Config, InputError, not_installed
from mhe_jax.config.fields import did_you_mean, nearest
from mhe_jax.config.files import TOKENIZER, files_of
from mhe_jax.config.loading import about_config, config_file, shipped_configs
from mhe_jax.config.places import check_scheme, path_of, scheme_of, source_path


class Command(NamedTuple):
    """What runs a command, how its line reads, and how many places it takes, least and most."""

    run: Callable[[list[str], list[str]], dict[str, Any] | None]
    usage: str
    least: int = 0
    most: int = 0


def main(arguments: Sequence[str]) -> None:
    """Calls the command that comes first with the arguments after it, and prints its result."""
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
        near = did_you_mean(nearest(name, list(COMMANDS)))
        raise InputError(f"{name}: takes one of {', '.join(COMMANDS)}{near}; --help explains them")
    else:
        if name == "eval" and rest[:1] in (["compare"], ["paper"]):
            name, *rest = rest
        result = COMMANDS[name].run(*split(name, rest))
        if result is not None:
            output(json.dumps(result) + "\n")


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
    every field. CONFIG is a file, or the name of a shipped one, which `configs` lists.

    --sweep and --seeds run every combination of values and seeds, one after the other;
    --evaluate scores each of these runs once it is trained.

    --compile_only --topology v5e:16x16 [--num_slices 2] [--search_batch] trains nothing: it
    compiles the train step for devices that need not be there, and says whether it fits.

    --distributed auto joins the processes of a pod or cluster; elsewhere give
    --coordinator HOST:PORT --num_processes N --process_id I. Either may add
    --process_timeout SECONDS; see docs/pods.md.
    """
    if sweep.is_sweep(options):
        found = sweep.run(sweep.parse([*places, *options]))
        output(json.dumps(found) + "\n")
        sys.exit(1 if found["failed"] else 0)
    # jax starts only once the arguments are right.
    target, options = parse_target(options)
    if target is not None:
        config = parse_train_arguments([*places, *options])
        from mhe_jax.analysis.ahead import compile_ahead

        return compile_ahead(config, target)
    from mhe_jax.training.distributed import joined, take_flags

    processes, options = take_flags(options)
    config = parse_train_arguments([*places, *options])
    if processes is None:  # one that ends alone is waited for by the others
        check_local_files(config)
    with joined(processes) as writes:
        from mhe_jax.evaluation import TranslatedSample
        from mhe_jax.training import loop

        result = loop.train(config, sample=TranslatedSample)
        return result if writes else None


def check_local_files(config: Config) -> None:
    """Raises InputError for a local file that is not there, before jax is loaded, which is slow."""
    fields = ["train", "validation"]
    if not (path_of(config.workdir) / TOKENIZER).exists():  # a run has its own
        fields.append("tokenizer")
    for field in fields:
        names = getattr(config.data, field) or ()
        for name in (names,) if isinstance(names, str) else names:
            if scheme_of(name) or scheme_of(config.data.directory) or ":" in name:
                continue
            for file in files_of(config.data.directory, name):
                path = source_path(config.data.directory, file)
                if not path.exists():
                    raise InputError(f"{path}: no such file (data.{field})")


def compare(paths: list[str], options: list[str]) -> dict[str, Any]:
    """Tables and plots of many runs, and of sweeps; as `eval.py compare`.

    `compare RUNS --help` explains every field.
    """
    comparison = parse_fields(Comparison(), options, "compare", "RUNS...")
    for library in ("pandas", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise not_installed(f"compare needs {library}", "report")
    from mhe_jax.report import report

    return report.compare(paths, comparison)


def paper(_: list[str], options: list[str]) -> dict[str, Any]:
    """The published tables beside our recomputed values; as `eval.py paper`."""
    if options:
        raise InputError(f"{called('paper')} takes no arguments, not {options[0]}")
    from mhe_jax.report.paper import tables

    text, summary = tables()
    output(f"{text}\n")
    return summary


def configs(places: list[str], options: list[str]) -> None:
    """The shipped experiments, and their files.

    Without arguments, lists them with a line each, and their variants; any command that takes a
    config takes such a name, with a variant as in `multi30k:small`. `show NAME` prints the file, to
    change it:

        configs show multi30k > mine.py
        train mine.py --workdir runs/mine
    """
    if options or len(places) == 1 or places[:1] not in ([], ["show"]):
        raise InputError(f"{' '.join(places + options)!r}: takes nothing, or show NAME")
    if places:
        return output(config_file(places[1])[0].read_text(encoding="utf-8"))
    width = max(map(len, shipped_configs()))
    for name in shipped_configs():
        about, variants = about_config(name)
        output(f"{name:{width}}  {about.partition(chr(10))[0]}\n")
        if variants:
            output(f"{'':{width}}  :{' :'.join(variants)}\n")


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
    from mhe_jax.data.published import PUBLISHED, get

    given = parse_fields(DataArguments(), options, "data", *places)
    if not places:
        width = max(map(len, PUBLISHED))
        for name, text in PUBLISHED.items():
            output(f"{name:{width}}  {text.about}; {text.licence}; {text.url}\n")
        some = "glue/TASK, super_glue/TASK, squad, wmt14_translate/de-en, wiki40b/en and others"
        output(f"{'TFDS':{width}}  {some}: any data set that it has\n")
        return None
    (name,) = places
    if name in PUBLISHED:
        check_scheme("--directory", given.directory or "", ())
        place = Path(given.directory or f"data/{name}").expanduser()
        files = get(name, place, lambda line: print(line, file=sys.stderr))
        found = {"directory": str(place), "files": [file.name for file in files]}
    elif given.directory is not None:
        raise InputError(f"--directory {given.directory}: {name} lies where TFDS keeps it")
    else:
        from mhe_jax.data import tfds_source  # slow to import

        try:
            found = tfds_source.prepare(name)
        except InputError as error:
            near = did_you_mean(nearest(name, list(PUBLISHED)))
            raise InputError(f"{error}{near}") from None
    return {"data": name, **found}


TRAIN = "CONFIG[:VARIANT] [--field value ...] [--sweep FIELD=A,B] [--seeds N] [--evaluate]"
COMMANDS = {
    "train": Command(train, TRAIN, 1, 1),
    "eval": Command(evaluate.main, evaluate.USAGE, 1, 1),
    "compare": Command(compare, "RUNS... [--out DIRECTORY] [--field value ...]", 1, sys.maxsize),
    "paper": Command(paper, ""),
    "configs": Command(configs, "[show NAME]", 0, 2),
    "data": Command(data, "[NAME [--directory DIR]]", 0, 1),
    "export": Command(transform.export, "RUN OUT --to FORMAT [--checkpoint best]", 2, 2),
    "convert": Command(transform.convert, "RUN NEW --kind KIND [--rows N] ...", 2, 2),
    "factorize": Command(transform.factorize, "RUN NEW [--attention N] [--mlp N] ...", 2, 2),
}
