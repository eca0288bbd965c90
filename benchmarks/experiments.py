"""The experiments of docs/experiments.md: every run of each, with the scores it is told by.

    python benchmarks/experiments.py translation
    python benchmarks/experiments.py encoders
    python benchmarks/experiments.py hashes
    python benchmarks/experiments.py matrices     # starts from runs of translation
    python eval.py compare runs/translation --choose optimizer.learning_rate --out report

Data lies in data/multi30k, data/wikitext-2, data/glue/SST-2 and data/glue/CoLA, or below another
`--data.directory`. Each run is a `train.py` or `eval.py` with the flags below, on one core unless
`--jobs 1`. A run that is done is not repeated, one that was interrupted goes on. Where one fails
its case ends, the other cases go on, and the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import timing
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.sweep import plan
from mhe_jax.config import InputError
from mhe_jax.config.files import write_whole
from mhe_jax.data import open_train, train_tokenizer
from mhe_jax.tasks import of

ROOT = Path(__file__).parents[1]
# A command line is parsed in one thread at a time, and standard error is caught meanwhile.
PARSING = threading.Lock()

SEEDS = ("0", "1", "2")
RATES = ("1e-3", "2e-3", "4e-3")
MULTI30K = ("multi30k.py:small", "multi30k")
MLM = ("wikitext2_mlm.py", "wikitext-2")
# Fields of `model.attention`; those of mva take half the width of the model for its scores.
TRANSLATION = {
    "mha": {"kind": "mha"},
    "mhe_mul": {"kind": "mhe_mul"},
    "mhe_add": {"kind": "mhe_add"},
    "mva": {"kind": "mva", "score_features": "128"},
    "sha": {"kind": "sha"},
    "mqa": {"kind": "mqa"},
    "gqa": {"kind": "gqa", "num_kv_heads": "2"},
    "skv": {"kind": "skv"},
    "el": {"kind": "el"},
    "mhe_add-2-groups": {"kind": "mhe_add", "num_groups": "2"},
    "mhe_add-2-score-groups": {"kind": "mhe_add", "score_groups": "2"},
}
SEVERAL_SEEDS = ("mha", "mhe_mul", "mhe_add", "mhe_add-2-groups", "mva", "sha")
ENCODERS = {name: TRANSLATION[name] for name in ("mha", "mhe_mul", "mhe_add", "sha", "mqa")}
ENCODERS["mva"] = {"kind": "mva", "score_features": "64"}
# Neighbours, which tell most, are found much sooner than by learned positions.
POSITIONS = ("--model.positions", "sinusoidal")
# Each task's config, its data, and its files as they are distributed.
TASKS = {
    "sst2": ("glue.py:sst2", "glue/SST-2", ["train.tsv.xz"], ["dev.tsv.xz"]),
    "cola": (
        "glue.py:cola",
        "glue/CoLA",
        ["in_domain_train.tsv.xz"],
        ["in_domain_dev.tsv.xz", "out_of_domain_dev.tsv.xz"],
    ),
}
TASK_STEPS = {"sst2": "2000", "cola": "1600"}
# Of the encoders; in those of WikiText-2 alone words of reviews fall to pieces.
VOCABULARY_SIZE = 8000
HASHES = ("md_emb", "md_pool", "md_add", "md_proj", "lsh_emb", "lsh_pool", "lsh_add", "lsh_proj")
NOISE = ("0.1", "0.2")
# Terms in attention, MLP and embedding.
RANKS = ("2-4-32", "8-16-128", "16-32-256")
WARM_RANKS = ("16", "32", "64", "128", "1000")


class Failed(Exception):
    """A command ended with another exit status than 0, for a reason of one line."""

    def __init__(self, run: Path, status: int, reason: str, log: Path):
        super().__init__(f"{run}: exit status {status}: {reason} (see {log})")
        self.status, self.reason = status, reason


class Workplace:
    """Calls train.py and eval.py for runs below one directory, unless they are done."""

    def __init__(self, directory: Path, data: Path, jobs: int):
        self.directory, self.data = directory, data
        self.locks: dict[Path, threading.Lock] = defaultdict(threading.Lock)  # one case a run
        self.interrupted = False
        self.environment = dict(os.environ)
        if jobs > 1:
            self.environment["NPROC"] = "1"  # threads of XLA on a CPU

    def train(self, name: str, config: str, data: str, *flags: str) -> Path:
        """The finished run `name` of configs/`config` with the data in `data`."""
        run = self.directory / name
        arguments = self.arguments(config, data, "--workdir", str(run), *flags)
        with PARSING:
            asked = plan.PlannedRun(name, parse_train_arguments(arguments), arguments, {})
        with self.locks[run]:
            if asked.result() is None:
                self.call(run, str(ROOT / "train.py"), *arguments)
        return run

    def arguments(self, config: str, data: str, *flags: str) -> list[str]:
        directory = str(self.data / data)
        return [str(ROOT / "configs" / config), "--data.directory", directory, *flags]

    def evaluate(self, run: Path, what: str, *flags: str, name: str = "") -> None:
        """Leaves the scores of a run in eval_WHAT.json, where WHAT begins with the split.

        With `name` they move from there to a file of that name.
        """
        scores = run / f"eval_{what}.json"
        with self.locks[run]:
            if not (kept := run / (name or scores.name)).exists():
                split = what.partition("_")[0]
                trust = "--trust", str(self.data)
                self.call(run, str(ROOT / "eval.py"), str(run), "--split", split, *trust, *flags)
                scores.rename(kept)

    def call(self, run: Path, *command: str) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        note(f"{run}: {'factorize' if command[0] == '-m' else Path(command[0]).name}")
        log = run.with_name(f"{run.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            status = subprocess.call(
                [sys.executable, *command], stdout=output, stderr=output, env=self.environment
            )
        if status == 130:  # Ctrl-C reaches the run as well, which saves
            self.interrupted = True
            raise KeyboardInterrupt
        if status:
            reason = log.read_text().rstrip().rpartition("\n")[2].removeprefix("error: ")
            raise Failed(run, status, reason, log)


class Record:
    """A file of lines, one for each run: with it alone, and without the runs, all goes on.

    Args:
      about: what all lines have in common, and must have in a file that is there.

    Raises:
      InputError: the file is of something else.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about
        self.lines: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        if not path.exists():
            return
        found = json.loads(path.read_text())
        if not about.items() <= found.items():
            raise InputError(f"{path} is not of {about}: move it away to measure anew")
        self.lines = found["lines"]

    def add(self, *lines: dict[str, Any]) -> None:
        with self.lock:
            self.lines = [*self.lines, *lines]
            about = json.dumps(self.about).removesuffix("}")
            each = ",\n".join(json.dumps(line) for line in self.lines)
            write_whole(self.path, f'{about}, "lines": [\n{each}\n]}}\n')


def add_flags(parser: timing.PlainParser, each: str) -> None:
    """The flags of a `Workplace`; `each` is what goes side by side."""
    parser.add_argument("--workdir", type=Path, default=Path("runs"), help="where the runs go")
    parser.add_argument("--data.directory", dest="directory", type=Path, default=Path("data"))
    parser.add_argument("--jobs", type=timing.positive, default=2, help=f"{each} at a time")


def note(line: str) -> None:
    with PARSING:
        print(line, file=sys.stderr, flush=True)


def attention(fields: dict[str, str]) -> list[str]:
    return [part for name, value in fields.items() for part in (f"--model.attention.{name}", value)]


def loss(run: Path) -> float:
    return json.loads((run / plan.RESULT).read_text())["best_validation_loss"]


def best_rate(rates: Iterable[str], loss: Callable[[str], float]) -> str:
    """The learning rate of the lowest loss.

    One that is the lowest or highest of those tried is halved or doubled, until it is neither.
    """
    losses: dict[str, float] = {}
    new = tuple(rates)
    while True:
        losses |= {rate: loss(rate) for rate in new}
        best = min(losses, key=losses.__getitem__)
        if not (factor := beyond(losses, best)):
            return best
        new = (f"{float(best) * factor:g}",)


def beyond(rates: Iterable[str], best: str) -> float | None:
    """By what `best` is to be multiplied where it is the lowest or highest, else None."""
    rates = sorted(rates, key=float)
    return {rates[0]: 0.5, rates[-1]: 2.0}.get(best)


def translation(at: Workplace, name: str, seeds: tuple[str, ...] = SEEDS[:1]) -> tuple[Path, str]:
    """One attention: the learning rate by validation loss of the first seed, then the others.

    Returns the run of the first seed at that rate, and the rate.
    """

    def run(rate: str, seed: str) -> Path:
        flags = ["--optimizer.learning_rate", rate, "--train.seed", seed]
        where = f"translation/{name},{rate},seed={seed}"
        return at.train(where, *MULTI30K, *attention(TRANSLATION[name]), *flags)

    runs = {rate: run(rate, SEEDS[0]) for rate in RATES}
    rate = min(runs, key=lambda rate: loss(runs[rate]))
    for seed in seeds:
        at.evaluate(run(rate, seed), "test")
    return runs[rate], rate


def of_task(task: str) -> list[str]:
    """Config, data and files."""
    config, data, training, validation = TASKS[task]
    files = ["--data.train", *training, "--data.validation", *validation, "--data.test"]
    return [config, data, *files]


def misspelt(rate: str) -> str:
    """How eval.py calls the validation split with this share of its words misspelt, by seed 0."""
    return f"validation_misspelt_{rate}_0"


def tune(at: Workplace, name: str, task: str, *flags: str, noise: tuple[str, ...] = ()) -> None:
    """A task's run and its scores, also where words are misspelt."""
    run = at.train(name, *of_task(task), "--train.num_steps", TASK_STEPS[task], *flags)
    for rate in noise:
        at.evaluate(run, misspelt(rate), "--spelling_noise", rate)
    at.evaluate(run, "validation")


def pieces(at: Workplace) -> Path:
    """A tokenizer of the training texts of WikiText-2 and of the tasks."""
    path = at.directory / "mlm" / "tokenizer.model"
    with at.locks[path]:
        if not path.exists():
            note(f"{path}: train_tokenizer")
            with PARSING:
                wikitext, *configs = [
                    parse_train_arguments(at.arguments(*one)) for one in (MLM, *map(of_task, TASKS))
                ]
            texts = [(of(config).text(config), 1.0) for config in configs]
            train_tokenizer([*open_train(wikitext), *texts], VOCABULARY_SIZE).save(path)
    return path


def encoder(at: Workplace, name: str) -> None:
    """One attention: MLM, then each task from it with all seeds, and from nothing with one."""
    tokenizer = pieces(at).resolve()
    shape = (*attention(ENCODERS[name]), *POSITIONS)
    shape += ("--model.vocabulary_size", str(VOCABULARY_SIZE))

    def shape_from(data: str) -> tuple[str, ...]:
        # From the data to the run, so that a record holds wherever both lie together.
        there = os.path.relpath(tokenizer, (at.data / data).resolve())
        return (*shape, "--data.tokenizer", there)

    start = at.train(f"mlm/{name}", *MLM, *shape_from(MLM[1]))
    at.evaluate(start, "test")
    for task in TASKS:
        for seed in SEEDS:
            flags = ("--train.init_from", str(start), "--train.seed", seed)
            tune(at, f"{task}/{name},seed={seed}", task, *flags)
        tune(at, f"{task}/{name},nothing,seed=0", task, *shape_from(TASKS[task][1]))


def hashed(at: Workplace, name: str) -> None:
    """One embedding: pre-training with context and without, tasks, and tasks misspelt."""
    embedding = ["--model.hashing", name]
    if name == "pieces":
        embedding = ["--model.hashing", "None", "--model.vocabulary_size", "4000"]
    # A table learns nothing of rare words by large steps.
    rate = "5e-4" if name.endswith("_emb") else "2e-3"
    flags = [*embedding, "--optimizer.learning_rate", rate]
    start = at.train(f"hashes/{name}", "hashformer.py", "wikitext-2", *flags)
    flags += ["--model.context", "token"]
    alone = at.train(f"hashes/{name},alone", "hashformer.py", "wikitext-2", *flags)
    for run in (start, alone):
        at.evaluate(run, "test")
    for task in TASKS:
        tune(at, f"{task}-hashes/{name}", task, "--train.init_from", str(start), noise=NOISE)


def matrices(at: Workplace, name: str) -> None:
    """Multi30k with factors, at the learning rate of the dense `mha` or `mhe_mul`."""
    kind = "mhe_mul" if name.endswith("mhe_mul") else "mha"
    _, rate = translation(at, kind)
    terms = zip(("attention", "mlp", "embedding"), name.partition(",")[0].split("-"), strict=True)
    flags = [part for role, rank in terms for part in (f"--model.kronecker.{role}", rank)]
    flags += ["--optimizer.learning_rate", rate, *attention(TRANSLATION[kind])]
    at.evaluate(at.train(f"matrices/{name}", *MULTI30K, *flags), "test")


def warm(at: Workplace, rank: str) -> None:
    """The dense `mha` factorized at one rank, its embeddings left alone; then trained a little."""
    dense, _ = translation(at, "mha")
    run, terms = at.directory / f"warm/{rank}", ("--attention", rank, "--mlp", rank)
    if not (run / plan.CONFIG).exists():
        at.call(run, "-m", "mhe_jax", "factorize", str(dense), str(run), *terms)
    at.evaluate(run, "test", "--checkpoint", "last", name="before.json")
    flags = ["--train.num_steps", "300", "--optimizer.warmup_steps", "30"]
    flags += ["--optimizer.learning_rate", "5e-4", *attention(TRANSLATION["mha"])]
    flags += [part for role in terms[::2] for part in (f"--model.kronecker.{role[2:]}", rank)]
    at.evaluate(at.train(f"warm/{rank}", *MULTI30K, *flags), "test")


Case = Callable[[Workplace], object]
# By experiment: what runs side by side.
CASES: dict[str, list[Case]] = {
    "translation": [
        *(partial(translation, name=name, seeds=SEEDS) for name in SEVERAL_SEEDS),
        *(partial(translation, name=name) for name in TRANSLATION if name not in SEVERAL_SEEDS),
    ],
    "encoders": [partial(encoder, name=name) for name in ENCODERS],
    "hashes": [partial(hashed, name=name) for name in ("pieces", *HASHES)],
    "matrices": [
        *(partial(matrices, name=name) for name in (*RANKS, "8-16-128,mhe_mul")),
        *(partial(warm, rank=rank) for rank in WARM_RANKS),
    ],
}


def main() -> None:
    args = parse()
    at = Workplace(args.workdir, args.directory, args.jobs)

    def succeeds(case: Case) -> bool:
        try:
            case(at)
        except (Failed, InputError) as error:
            note(f"error: {error}")
            return False
        return True

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            done = list(pool.map(succeeds, CASES[args.experiment]))
    except KeyboardInterrupt:
        note("stopped; the same command goes on")
        sys.exit(130)
    sys.exit(not all(done))


def parse() -> argparse.Namespace:
    parser = timing.PlainParser(__doc__)
    parser.add_argument("experiment", choices=CASES)
    add_flags(parser, "cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
