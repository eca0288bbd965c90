"""`train.py CONFIG`: train a config, run a sweep of it, or compile it for other devices.

With `--compile_only --topology v5e:16x16` it compiles for devices that need not be there;
`--sweep model.attention.kind=mha,sha --seeds 3` trains every combination, one after the other.
"""

import json
import os
import sys
from collections.abc import Sequence

from mhe_jax.cli import sweep
from mhe_jax.cli.arguments import parse_target, parse_train_arguments
from mhe_jax.cli.process import output
from mhe_jax.config import Config, InputError
from mhe_jax.config.files import files_of
from mhe_jax.config.places import scheme_of

AS_MODULE = (sys.executable, "-m", "mhe_jax", "train")


def main(arguments: Sequence[str], command: Sequence[str] = AS_MODULE) -> None:
    """Trains, and ends with a line of JSON on standard output; the rest goes to standard error.

    Args:
      arguments: of the command line, without the program's name.
      command: what starts one run of a sweep; the arguments of the run follow it.
    """
    if sweep.is_sweep(arguments):
        found = sweep.run(sweep.parse(arguments), command)
        output(json.dumps(found) + "\n")
        sys.exit(1 if found["failed"] else 0)
    # jax starts only once the arguments are right.
    target, arguments = parse_target(arguments)
    if target is not None:
        config = parse_train_arguments(arguments)
        from mhe_jax.analysis.ahead import compile_ahead

        output(json.dumps(compile_ahead(config, target)) + "\n")
        return
    from mhe_jax.training.cluster.distributed import joined, take_flags

    processes, arguments = take_flags(arguments)
    config = parse_train_arguments(arguments)
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
