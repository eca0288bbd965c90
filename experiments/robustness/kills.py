"""Kills processes of a job at random moments, starts it again, and compares what comes out.

    python experiments/robustness/kills.py                          # 50 kills, two processes
    python experiments/robustness/kills.py --kills 10 --processes 4 --seed 1

One run goes through without a kill. Others of the same config, with packed rows, accumulation and
an average, lose a random process a random time after a random step, every second one while a
checkpoint is being written, and every second one in the last third of the run; all processes of
the job must then end by themselves, and the job is started again. Final parameters, optimizer,
average and key must be equal to the first run's to the bit, and so must all that was logged.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).parents[2]))

import jax

from mhe_jax.config.fields import load_json
from mhe_jax.config.files import METRICS
from mhe_jax.tasks import TASKS
from mhe_jax.training import sharding, tracking
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of

PATIENCE = 20  # seconds after which a process that does not answer is given up by the others
# Of each run: small, with packed rows, accumulation and an average, saved often.
FLAGS = """
--model.vocabulary_size 300 --model.features 16 --model.mlp_features 24 --model.num_layers 1
--model.max_length 16 --model.attention.num_heads 2 --model.attention.dropout_rate 0.1
--data.train train.txt --data.validation validation.txt --data.test
--data.sequence_length 16 --data.batch_size 8 --data.packing True
--optimizer.warmup_steps 3 --optimizer.ema_decay 0.9 --optimizer.accumulate_steps 2
--train.eval_every 6 --train.checkpoint_every 4 --train.keep_checkpoints 2 --train.log_every 1
--evaluation.batch_size 8
"""
# train.py in a process that kills itself: KILL is the step, what to wait for, and how long after.
DRIVER = """
import json, os, runpy, sys, threading, time
from mhe_jax.training.meter import Meter

step, saving, delay = json.loads(os.environ["KILL"])
flush = Meter.flush

def kill(workdir):
    end = time.monotonic() + 5
    while saving and time.monotonic() < end and not list(workdir.glob("checkpoints*/*tmp*")):
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(os.getpid(), 9)

def flush_and_kill(self):
    done = self._pending and self._pending[0]
    flush(self)
    if done == step:
        threading.Thread(target=kill, args=(self.tracker.workdir,)).start()

Meter.flush = flush_and_kill
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="where runs go and stay; a temporary one by default")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(args.directory or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = measure(args, directory)
    print(json.dumps(found))
    return 0 if found["equal_runs"] == found["runs"] and not found["hung"] else 1


def measure(args: argparse.Namespace, directory: Path) -> dict:
    """Kills as often as asked, and finishes the last run."""
    draw = random.Random(args.seed)
    write_text(directory)
    begin = time.monotonic()
    lives(args, directory / "whole", None)
    wanted = contents(directory / "whole")
    found = dict.fromkeys(("kills", "while_saving", "last_third", "hung", "runs", "equal_runs"), 0)
    late = 2 * args.steps // 3
    while found["kills"] < args.kills:
        workdir = directory / f"run_{found['runs']}"
        while True:
            kill = None
            if step := next_step(args, found, last_step(workdir), late, draw):
                saving = found["kills"] % 2 == 1
                delay = draw.uniform(0, 0.02 if saving else 0.3)
                kill = draw.randrange(args.processes), (step, saving, delay)
            states = lives(args, workdir, kill)
            if all(state == 0 for state in states):
                break
            if kill is None or states[kill[0]] != -9:
                raise RuntimeError(f"{workdir}: processes ended with {states}")
            found["kills"] += 1
            found["while_saving"] += kill[1][1]
            reached = steps_done(workdir)
            found["last_third"] += reached > late
            found["hung"] += sum(state is None for state in states)
            print(f"kill {found['kills']}: process {kill[0]} after step {reached}, {states}")
        found["runs"] += 1
        equal = contents(workdir) == wanted
        found["equal_runs"] += equal
        print(f"{workdir.name}: {'equal' if equal else 'NOT EQUAL'}", flush=True)
    seconds = round(time.monotonic() - begin)
    return {"processes": args.processes, "seed": args.seed, **found, "seconds": seconds}


def next_step(args, found: dict, last: int, late: int, draw: random.Random) -> int | None:
    """After which step of a run that goes on from `last` to kill; None to let it finish.

    A few in the first two thirds, as many in the last, then the next run.
    """
    left, ahead = args.kills - found["kills"], found["kills"] - 2 * found["last_third"]
    if left and last < late and ahead < min(4, left):
        return last + draw.randint(1, 12)
    if left and ahead > 0 and max(last, late) < args.steps - 1:
        return draw.randint(max(last, late) + 1, args.steps - 1)
    return None


def lives(args: argparse.Namespace, workdir: Path, kill) -> list[int | None]:
    """The exit status of each process of a job; None for one that had to be ended from here."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    place, count = workdir.parent, args.processes
    command = ["configs/wikitext2_mlm.py", *FLAGS.split(), "--train.num_steps", str(args.steps)]
    command += ["--data.directory", str(place), "--data.cache_directory", str(place / "cache")]
    command += ["--workdir", str(workdir), "--coordinator", f"localhost:{port}"]
    command += ["--num_processes", str(count), "--process_timeout", str(PATIENCE)]
    processes = []
    for index in range(count):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_COMPILATION_CACHE_DIR": str(place / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "KILL": json.dumps(kill[1] if kill and kill[0] == index else [0, False, 0]),
        }
        own = [sys.executable, "-c", DRIVER, *command, "--process_id", str(index)]
        with (place / f"process_{index}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    own,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            )
    states: list[int | None] = []
    for process in processes:
        try:
            states.append(process.wait(timeout=12 * PATIENCE))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            states.append(None)
    return states


def write_text(directory: Path) -> None:
    """What the small masked language model reads."""
    draw = random.Random(0)
    words = ["one", "small", "dog", "runs", "over", "the", "green", "meadow", "and", "back"]
    for split, lines in (("train", 300), ("validation", 24)):
        text = "".join(" ".join(draw.choices(words, k=5)) + "\n" for _ in range(lines))
        (directory / f"{split}.txt").write_text(text, encoding="utf-8")


def last_step(workdir: Path) -> int:
    steps = (workdir / "checkpoints").glob("*")
    return max((int(path.name) for path in steps if path.name.isdecimal()), default=0)


def steps_done(workdir: Path) -> int:
    """Of the life that has just ended, as far as its log tells."""
    return max((line["step"] for line in tracking.read(workdir / METRICS)), default=0)


def contents(workdir: Path) -> tuple:
    """The bytes of the last state, and all that was computed on the way."""
    config = load_json(workdir / "config.json")
    mesh = sharding.make_mesh(config, jax.devices()[:1])
    model = TASKS[config.task].model(config.model)
    _, abstract = initializer_of(config, model, make_optimizer(config), mesh)
    checkpoints = Checkpoints(workdir)
    state, _ = checkpoints.restore(abstract)
    checkpoints.close()
    names = ("step", "split", "loss", "gradient_norm", "perplexity")
    logged = [[line.get(name) for name in names] for line in tracking.read(workdir / METRICS)]
    return [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(state))], logged


if __name__ == "__main__":
    sys.exit(main())
