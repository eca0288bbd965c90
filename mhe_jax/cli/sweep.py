"""`train.py CONFIG --sweep FIELD=A,B --seeds N`: every combination, one process after the other.

Nothing here imports jax: the runs need the devices.
"""

import itertools
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax.cli.arguments import options_of, parse_train_arguments
from mhe_jax.config import Config, InputError
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import leaves, load_json, short_names, to_dict
from mhe_jax.config.files import CONFIG, RESULT, TOKENIZER, publish
from mhe_jax.config.places import check_scheme
from mhe_jax.report import read_result, read_sweep, save_sweep

# Fields that train.py takes from the data set of a labelled task, if they are not given.
OF_DATA = ("data.labels", "model.num_classes", "model.num_spans")


class Sweep(NamedTuple):
    """The runs by name, in their order, each with the arguments of train.py."""

    workdir: Path
    runs: dict[str, tuple[Config, list[str]]]
    evaluate: bool


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether a command line of train.py asks for a sweep."""
    names = {argument.partition("=")[0] for argument in arguments}
    return bool(names & {"--sweep", "--seeds"}) and not names & {"-h", "--help"}


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--evaluate] [...]`.

    Every combination with the first seed, then with the next; all are checked before any runs.

    Raises:
      InputError: a field, value or combination that is not allowed, or is there twice, or a workdir
        that holds a run itself.
    """
    config, *options = options_of([part for part in arguments if part != "--evaluate"])
    swept: dict[str, list[str]] = {}
    seeds, kept = "1", [*config]
    for flag, *values in ([*option[0].split("=", 1), *option[1:]] for option in options):
        if flag == "--seeds":
            seeds = " ".join(values)
        elif flag == "--sweep":
            for value in values or [""]:
                name, _, texts = value.partition("=")
                if not all([name, *texts.split(",")]):
                    raise InputError(f"--sweep is {value!r}: takes FIELD=VALUE,VALUE,...")
                swept.setdefault(name.replace("-", "_"), []).extend(texts.split(","))
        else:
            kept += [flag, *values]
    if not re.fullmatch("[1-9][0-9]{0,2}", seeds):
        raise InputError(f"--seeds is {seeds[:99]!r}: takes a whole number from 1 to 999")
    base, fields = parse_train_arguments(kept), [*swept, "train.seed"]
    check_scheme("workdir", base.workdir, ())  # the log of each run grows line by line
    workdir = Path(base.workdir if "--workdir" in kept else f"{base.workdir}-sweep")
    if (workdir / CONFIG).exists():
        raise InputError(f"{workdir} holds a run: a sweep needs a --workdir of its own")
    e, evaluate, runs = base.evaluation, "--evaluate" in arguments, {}
    if evaluate and not (e.sources or getattr(base.data, e.split)):
        raise InputError(f"--evaluate: data.{e.split} names nothing to score")
    numbers = map(str, range(base.train.seed, base.train.seed + int(seeds)))
    for seed, *values in itertools.product(numbers, *swept.values()):
        pairs = zip(fields, [*values, seed], strict=True)
        own = [*kept, *(part for field, value in pairs for part in (f"--{field}", value))]
        found = leaves(to_dict(parse_train_arguments(own)))
        told = (f"{short}={found[field]}" for field, short in short_names(fields).items())
        name = re.sub(r"[^\w.,=+-]", "_", ",".join(told))
        if name in runs:
            raise InputError(f"--sweep gives the run {name} twice")
        own += ["--workdir", str(workdir / name)]
        runs[name] = parse_train_arguments(own), own
    return Sweep(workdir, runs, evaluate)


def result_of(config: Config) -> dict[str, Any] | None:
    """What train.py left of a run; None until it is finished as its config says."""
    workdir = Path(config.workdir)
    try:
        result, ran = read_result(workdir / RESULT), leaves(to_dict(load_json(workdir / CONFIG)))
    except InputError:
        return None
    asked = leaves(to_dict(config))
    other = (name for name, value in asked.items() if ran[name] != value)
    same = all(name in OF_DATA and not asked[name] for name in other)
    return result if same and result.get("steps") == config.train.num_steps else None


def run(sweep: Sweep, command: Sequence[str]) -> dict[str, Any]:
    """Runs what is not finished, each run by `command ARGUMENTS`, and prints a table at the end.

    `command` ends in `train` or train.py; with `eval` or eval.py in its place it scores a run. A
    failed run is told with its reason, and the others go on. SIGINT, SIGTERM and SIGHUP are passed
    on to the run, which saves; then the sweep ends with status 128 + signal.

    Returns:
      What is also in sweep.json: `runs`, each with name, workdir, status, the reason of a failure
      and the result of a success; and how many are `done` and `failed`.

    Raises:
      InputError: the workdir cannot be made, or holds a sweep.json that is not one.
    """
    try:
        sweep.workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--workdir {sweep.workdir}: {error.strerror}") from None
    read_sweep(sweep.workdir)
    runs: list[dict[str, Any]] = []
    score = [*command[:-1], re.sub(r"train(?=(\.py)?$)", "eval", command[-1])]
    for name, (config, arguments) in sweep.runs.items():
        _note(f"[{len(runs) + 1} of {len(sweep.runs)}] {name}")
        workdir, reason = Path(config.workdir), None
        scores = workdir / f"eval_{result_name(config.evaluation)}.json"
        if result_of(config) is None:
            _share_tokenizer(config, sweep)
            reason = _call(workdir, [*command, *arguments])
        result = result_of(config)
        if sweep.evaluate and result and not reason and not scores.exists():
            reason = _call(workdir, [*score, str(workdir)])
        if result is None:
            reason = reason or f"left no {RESULT} that fits its config"
        told = {"status": "failed", "reason": reason} if reason else {"status": "done"}
        runs.append({"name": name, "workdir": str(workdir), **told, "result": result})
        save_sweep(sweep.workdir, runs)
    failed = sum(run["status"] == "failed" for run in runs)
    for run in runs:
        loss = (run["result"] or {}).get("best_validation_loss")
        told = "" if loss is None else f"best validation loss {loss:.4f}"
        _note(f"{run['name']}  {run['status']}  {run.get('reason', told)}")
    about = {"workdir": str(sweep.workdir), "done": len(runs) - failed, "failed": failed}
    return {**about, "runs": runs}


def _share_tokenizer(config: Config, sweep: Sweep) -> None:
    """Takes the tokenizer of another run that has the same text and vocabulary."""

    def depends_on(config: Config) -> tuple:
        model, begun = config.model, config.train.init_from
        return config.task, config.data, model.vocabulary_size, model.hashing, begun

    own = Path(config.workdir) / TOKENIZER
    own.parent.mkdir(parents=True, exist_ok=True)
    alike = (c for c, _ in sweep.runs.values() if depends_on(c) == depends_on(config))
    there = next(filter(Path.exists, (Path(c.workdir) / TOKENIZER for c in alike)), own)
    if there != own and not own.exists():
        with publish(own) as draft:
            shutil.copyfile(there, draft)


def _call(workdir: Path, command: Sequence[str]) -> str | None:
    """Runs one process, logged in `workdir`; returns why it failed, or None."""
    last, received = "", []
    # A process group of its own: Ctrl-C reaches it through us, once.
    how: dict[str, Any] = {"text": True, "errors": "replace", "process_group": 0}
    how |= dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    with (
        (workdir / "log.txt").open("a", encoding="utf-8") as log,
        subprocess.Popen(command, stderr=subprocess.PIPE, **how) as process,
    ):

        def forward(number: int, _: Any) -> None:
            received.append(number)
            process.send_signal(number)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # If ignored, as under `nohup`, it stays ignored.
        caught = [number for number in caught if signal.getsignal(number) != signal.SIG_IGN]
        old = {number: signal.signal(number, forward) for number in caught}
        for line in process.stderr or ():
            log.write(line)
            log.flush()
            _note(line.rstrip("\n"))
            last = line.strip() or last
    for number, handler in old.items():
        signal.signal(number, handler)
    if received:
        _note("the same command goes on from there")
        raise SystemExit(128 + received[0])
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    return (last.removeprefix("error: ") or "no word") if process.returncode else None


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
