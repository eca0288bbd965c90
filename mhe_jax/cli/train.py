"""`train.py CONFIG`: train a config, run a sweep of it, or compile it for other devices."""

import json
import os
import sys

from mhe_jax.cli import sweep
from mhe_jax.cli.arguments import parse_target, parse_train_arguments
from mhe_jax.cli.process import output
from mhe_jax.config import Config, InputError
from mhe_jax.config.files import files_of
from mhe_jax.config.places import scheme_of

USAGE = "CONFIG[:VARIANT] [--field value ...] [--sweep FIELD=A,B] [--seeds N] [--evaluate]"


def main(places: list[str], options: list[str]) -> None:
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

        output(json.dumps(compile_ahead(config, target)) + "\n")
        return
    from mhe_jax.training.cluster.distributed import joined, take_flags

    processes, options = take_flags(options)
    config = parse_train_arguments([*places, *options])
    check_named_files(config)
    with joined(processes) as writes:
        from mhe_jax.evaluation import TranslatedSample
        from mhe_jax.training.loop import train

        result = train(config, sample=TranslatedSample)
        if writes:
            output(json.dumps(result) + "\n")


def check_named_files(config: Config) -> None:
    """Raises InputError for a local file that is not there, before jax is loaded, which is slow.

    What is in the files is checked later, and what is in a bucket or made by a library too.
    """
    data, place = config.data, os.path.expanduser(config.data.directory)
    for field in ("train", "validation", "tokenizer"):
        names = getattr(data, field) or ()
        for name in (names,) if isinstance(names, str) else names:
            if scheme_of(name) or scheme_of(place) or ":" in name:
                continue
            for file in files_of(place, name):
                path = os.path.join(place, os.path.expanduser(file))
                if not os.path.exists(path):
                    raise InputError(f"{path}: no such file (data.{field})")
