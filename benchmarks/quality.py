"""Quality of the kinds on one small budget: WikiText-2, perplexity a token.

    python benchmarks/quality.py --data.directory data/wikitext-2            # about three hours
    python benchmarks/quality.py --workdir runs/quality --table              # what is there so far

Each run is `train.py configs/wikitext2_lm.py` (3 layers, width 128, 2,000 steps of 2,048 tokens)
with another attention. The learning rate is chosen for each case on seed 0 by the validation loss;
then the main cases run with three more seeds. A run that is done is not repeated, one that was
interrupted goes on, one that fails stands in the table as failed. A workdir is for one text and one
number of steps; others are refused. The last line is one JSON object.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEARNING_RATES = ("2e-3", "4e-3")
SEEDS = 4
MODEL = "--model.attention."

# Name -> flags of the attention. The first have four seeds, the others one.
MAIN = {
    "mha, 8 heads": ["kind", "mha"],
    "mha, 2 heads": ["kind", "mha", "num_heads", "2"],
    "mhe_mul": ["kind", "mhe_mul"],
    "mhe_add, 2 groups": ["kind", "mhe_add", "num_groups", "2"],
    "mhe_add, 2 score groups": ["kind", "mhe_add", "score_groups", "2"],
    "mva, scores 64 wide": ["kind", "mva", "score_features", "64"],
}
ONCE = {
    "sha": ["kind", "sha"],
    "mqa": ["kind", "mqa"],
    "mhe_add": ["kind", "mhe_add"],
}
# With mhe_mul's learning rate; 0.5 is the default.
INITS = {
    f"mhe_mul, init {stddev}": ["kind", "mhe_mul", "head_embedding_stddev", stddev]
    for stddev in ("0.02", "0.1", "1.0")
}


def main() -> None:
    args = parse()
    workdir = Path(args.workdir)
    if not args.table:
        sweep(workdir, args.directory, args.jobs, args.num_steps)
    print(table(workdir))
    print(json.dumps(results(workdir)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/quality", help="where the runs go")
    parser.add_argument(
        "--data.directory", dest="directory", default="data/wikitext-2", help="of the text"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--num_steps", type=int, help="shorter runs than the config's")
    parser.add_argument("--table", action="store_true", help="run nothing, show what is there")
    return parser.parse_args()


def sweep(workdir: Path, directory: str, jobs: int, num_steps: int | None) -> None:
    """All runs, in stages: seed 0 chooses the learning rate of what follows."""
    check(workdir, directory, num_steps)
    cases = MAIN | ONCE
    first = [(name, flags, rate, 0) for name, flags in cases.items() for rate in LEARNING_RATES]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def run_all(runs):
            list(pool.map(lambda one: run(workdir, directory, jobs, num_steps, *one), runs))

        run_all(first)
        chosen = {name: best_rate(workdir, name) for name in cases}
        inits = [(name, flags, chosen["mhe_mul"], 0) for name, flags in INITS.items()]
        seeds = [
            (name, flags, chosen[name], seed)
            for seed in range(1, SEEDS)
            for name, flags in MAIN.items()
        ]
        run_all([one for one in inits + seeds if one[2] is not None])


def check(workdir: Path, directory: str, num_steps: int | None) -> None:
    """Ends with one line where runs of other text or other steps are there, or half there."""
    asked = {"data.directory": os.path.abspath(directory), "num_steps": num_steps}
    file = workdir / "asked.json"
    if not file.exists() and not results(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asked) + "\n")
    found = json.loads(file.read_text()) if file.exists() else {}
    for name, value in asked.items():
        if name not in found or found[name] != value:
            was = found.get(name, "not known")
            sys.exit(f"error: {workdir}: {name} was {was}, is {value}: give another --workdir")


def run(workdir: Path, directory: str, jobs: int, num_steps, name, flags, rate, seed) -> None:
    """One training run, unless its result is there."""
    place = directory_of(workdir, name, rate, seed)
    done = place / "quality.json"
    if done.exists() and "error" not in json.loads(done.read_text()):
        return
    pairs = zip(flags[::2], flags[1::2], strict=True)
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/wikitext2_lm.py")]
    command += ["--workdir", str(place), "--data.directory", directory]
    command += ["--optimizer.learning_rate", rate, "--train.seed", str(seed)]
    command += [part for field, value in pairs for part in (MODEL + field, value)]
    command += ["--train.keep_checkpoints", "1"]
    if num_steps:
        command += ["--train.num_steps", str(num_steps)]
    environment = dict(os.environ)
    if jobs > 1:
        one_thread = "--xla_cpu_multi_thread_eigen=false"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {one_thread}".strip()
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "log.txt", "a") as log:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, check=False
        )
    if process.returncode == 0:
        result = json.loads(process.stdout.splitlines()[-1])
    else:
        result = {"error": f"exit status {process.returncode}, see {place / 'log.txt'}"}
    result |= {"case": name, "learning_rate": rate, "seed": seed}
    done.write_text(json.dumps(result) + "\n")
    score = result.get("validation_perplexity", result.get("error"))
    print(f"{name}, learning rate {rate}, seed {seed}: {score}", file=sys.stderr, flush=True)


def directory_of(workdir: Path, name: str, rate: str, seed: int) -> Path:
    return workdir / name.replace(", ", "-").replace(" ", "_") / f"{rate}-seed{seed}"


def results(workdir: Path) -> list[dict]:
    """The result of each finished or failed run."""
    return [json.loads(path.read_text()) for path in sorted(workdir.glob("*/*/quality.json"))]


def best_rate(workdir: Path, name: str) -> str | None:
    """The learning rate with the lowest validation loss on seed 0; None if all runs failed."""
    losses = {
        r["learning_rate"]: r["validation_loss"]
        for r in results(workdir)
        if r["case"] == name and r["seed"] == 0 and "validation_loss" in r
    }
    return min(losses, key=losses.__getitem__) if losses else None


def table(workdir: Path) -> str:
    """Validation perplexity of each case with its learning rate, mean and spread over seeds."""
    lines = [
        "| attention | attention parameters | learning rate | perplexity of each seed | mean "
        "| lowest to highest |",
        "|---|---:|---|---|---:|---|",
    ]
    found = results(workdir)
    for name in MAIN | ONCE | INITS:
        mine = [r for r in found if r["case"] == name]
        rate = best_rate(workdir, name)
        good = [r for r in mine if "error" not in r and r["learning_rate"] == rate]
        if not good:
            says = "failed" if mine else "not measured"
            lines.append(f"| {name} | | | {says} | | |")
            continue
        scores = [r["validation_perplexity"] for r in sorted(good, key=lambda r: r["seed"])]
        each = ", ".join(f"{score:.1f}" for score in scores)
        each += "".join(f", failed (seed {r['seed']})" for r in mine if "error" in r)
        parameters = f"{good[0]['parameters']['attention']:,}"
        spread = f"{min(scores):.1f} to {max(scores):.1f}" if len(scores) > 1 else ""
        mean = f"{statistics.mean(scores):.1f}"
        lines.append(f"| {name} | {parameters} | {rate} | {each} | {mean} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
