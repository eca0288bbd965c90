"""Sweeps: which runs there are, and what becomes of them; most by a stand-in for train.py."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mhe_jax import tasks
from mhe_jax.cli import sweep
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, save_json
from mhe_jax.report import read_sweep

pytestmark = pytest.mark.whole_run

ROOT = Path(__file__).parent.parent
CONFIG = """
from mhe_jax.config import *

def get_config():
    return Config(
        task="lm",
        workdir="runs/tiny",
        model=ModelConfig(vocabulary_size=300, features=16, mlp_features=16, num_layers=1,
                          attention=AttentionConfig(num_heads=2), max_length=16),
        data=DataConfig(directory={directory!r}, train=("train.txt",), validation=("train.txt",),
                        sequence_length=16, batch_size=8, cache_directory={directory!r}),
        train=TrainConfig(num_steps=4, checkpoint_every=1, eval_batches=1, log_every=1),
        evaluation=EvaluationConfig(batch_size=8, split="validation"),
    )
"""
# Leaves what train or eval leaves, a line a call in calls.txt, and does what does.json says.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import load_json, save_json

here, stopped = Path(__file__).parent, []
for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(caught, lambda number, _: stopped.append(number))
command, *given = sys.argv[1:]
scores = command == "eval"
config = None if scores else parse_train_arguments(given)
workdir = Path(given[0] if scores else config.workdir)
name = "eval/" * scores + workdir.name
with open(here / "calls.txt", "a") as calls:
    calls.write(name + "\\n")
does = json.loads((here / "does.json").read_text()).get(name)
if config:
    save_json(config, workdir / "config.json")
if does == "error":
    sys.exit("a line before\\nerror: data.train: no good")
if does == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "wait":
    print("ready", file=sys.stderr, flush=True)
    while not stopped:
        time.sleep(0.01)
    time.sleep(0.2)
    print("stopped by", *stopped, file=sys.stderr, flush=True)
    sys.exit(128 + stopped[0])
if scores:
    name = result_name(load_json(workdir / "config.json").evaluation)
    (workdir / f"eval_{name}.json").write_text("{}")
elif does != "nothing":
    result = {"steps": config.train.num_steps, "best_validation_loss": 1.5}
    (workdir / "result.json").write_text(json.dumps(result))
"""
KINDS = "--sweep", "model.attention.kind=mha,sha"
MHA, SHA = "kind=mha,seed=0", "kind=sha,seed=0"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tmp_path.joinpath("tiny.py").write_text(CONFIG.format(directory=str(tmp_path)))
    tmp_path.joinpath("train.txt").write_text("a red cat runs over the small green hill\n" * 40)
    tmp_path.joinpath("stand_in.py").write_text(STAND_IN)
    tmp_path.joinpath("does.json").write_text("{}")
    return tmp_path


def parse(place, *arguments):
    return sweep.parse([str(place / "tiny.py"), *arguments, "--workdir", str(place / "sweep")])


def run(place, *arguments, **does):
    """What the sweep of `arguments` returns, and what it called."""
    place.joinpath("does.json").write_text(json.dumps(does))
    place.joinpath("calls.txt").write_text("")
    found = sweep.run(parse(place, *arguments), [sys.executable, str(place / "stand_in.py")])
    return found, place.joinpath("calls.txt").read_text().split()


def test_every_combination_by_seed(place):
    found = parse(
        place, *KINDS, "--sweep", "optimizer.learning_rate=1e-3,2e-03", "--seeds=2",
        "--train.num_steps", "7", "--train.seed", "4",
    )  # fmt: skip
    assert list(found.runs) == [
        f"kind={kind},learning_rate={rate},seed={seed}"
        for seed in (4, 5)
        for kind in ("mha", "sha")
        for rate in (0.001, 0.002)
    ]
    name, (last, _) = list(found.runs.items())[-1]
    assert (last.model.attention.kind, last.optimizer.learning_rate) == ("sha", 0.002)
    assert (last.train.seed, last.train.num_steps) == (5, 7)
    assert last.workdir == str(place / "sweep" / name)


def test_names(place):
    both = "model.dropout_rate=0.1", "model.attention.dropout_rate=0.2"
    (name,) = parse(place, "--sweep", *both).runs
    assert name == "model.dropout_rate=0.1,model.attention.dropout_rate=0.2,seed=0"
    (name,) = parse(place, "--sweep", "evaluation.seed=3").runs
    assert name == "evaluation.seed=3,seed=0"
    (name,) = parse(place, "--sweep", "data.directory=some/where").runs
    assert name == "directory=some_where,seed=0"
    assert sweep.parse([str(place / "tiny.py"), *KINDS]).workdir == Path("runs/tiny-sweep")
    assert sweep.is_sweep(["--sweep", "a=b"])
    assert sweep.is_sweep(["--seeds=3"])
    assert not sweep.is_sweep(["--train.seed", "3"])
    assert not sweep.is_sweep(["--seeds", "3", "--help"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--sweep model.attention.kind=mha,foo", "model.attention.kind"),
        ("--sweep model.attention.kid=mha", "model.attention.kind"),
        ("--sweep optimizer.learning_rate=1e-3,0.001", "learning_rate=0.001,seed=0 twice"),
        ("--sweep model.attention.kind=mha,gqa", "num_kv_heads"),
        ("--sweep", "--sweep"),
        ("--seeds 0", "--seeds is 0"),
        ("--seeds 2 --evaluate --evaluation.split test", "data.test"),
    ],
)
def test_mistakes_are_found_before_the_first_run(place, arguments, named):
    with pytest.raises(InputError, match=named):
        parse(place, *arguments.split())
    assert not (place / "sweep").exists()


def test_finished_runs_are_not_repeated_and_later_ones_are_added(place, capsys):
    found, calls = run(place, *KINDS)
    assert calls == [MHA, SHA]
    assert (found["done"], found["failed"]) == (2, 0)
    assert found["runs"][0]["result"]["best_validation_loss"] == 1.5
    assert f"{SHA}  done  best validation loss 1.5000" in capsys.readouterr().err
    assert run(place, *KINDS) == (found, [])
    _, calls = run(place, "--sweep", "model.attention.kind=sha,mqa", "--seeds", "2")
    assert calls == ["kind=mqa,seed=0", "kind=sha,seed=1", "kind=mqa,seed=1"]
    # A longer training is not finished, nor is what left a broken result or config.
    _, calls = run(place, *KINDS, "--train.num_steps", "9")
    assert calls == [MHA, SHA]
    for file, text in (("result.json", "[4]"), ("result.json", "{"), ("config.json", "{")):
        place.joinpath("sweep", SHA, file).write_text(text)
        assert run(place, *KINDS, "--train.num_steps", "9")[1] == [SHA]
    names = [each["name"] for each in read_sweep(place / "sweep")]
    assert set(names) == {MHA, SHA, "kind=mqa,seed=0", "kind=sha,seed=1", "kind=mqa,seed=1"}


@pytest.mark.parametrize(
    ("does", "reason"),
    [("error", "data.train: no good"), ("kill", "SIGKILL"), ("nothing", "result.json")],
)
def test_a_run_that_fails_is_told_and_tried_again_and_the_others_go_on(place, does, reason, capsys):
    found, calls = run(place, *KINDS, **{MHA: does})
    assert calls == [MHA, SHA]
    assert [each["status"] for each in found["runs"]] == ["failed", "done"]
    assert reason in found["runs"][0]["reason"]
    assert f"{MHA}  failed  {found['runs'][0]['reason']}" in capsys.readouterr().err
    assert read_sweep(place / "sweep") == found["runs"]
    assert run(place, *KINDS)[1] == [MHA]


def test_each_run_is_scored_after_it_is_trained(place):
    does = {MHA: "error", f"eval/{SHA}": "error"}
    assert run(place, *KINDS, "--evaluate", **does)[1] == [MHA, SHA, f"eval/{SHA}"]
    # What is trained already is scored; what cannot be scored is told, and the others go on.
    found, calls = run(place, *KINDS, "--evaluate", **{f"eval/{SHA}": "error"})
    assert calls == [MHA, f"eval/{MHA}", f"eval/{SHA}"]
    assert [each["status"] for each in found["runs"]] == ["done", "failed"]
    assert run(place, *KINDS, "--evaluate")[1] == [f"eval/{SHA}"]
    assert run(place, *KINDS, "--evaluate")[1] == []
    # Scores of a shorter training are old.
    run(place, *KINDS, "--train.num_steps", "9")
    longer = [*KINDS, "--evaluate", "--train.num_steps", "9"]
    assert run(place, *longer)[1] == [f"eval/{MHA}", f"eval/{SHA}"]
    # Scores of other sources have a name of their own.
    longer += ["--evaluation.sources", "train.txt"]
    assert run(place, *longer)[1][1::2] == [f"eval/{MHA}", f"eval/{SHA}"]
    assert run(place, *longer)[1] == []


def test_a_signal_ends_the_run_and_the_sweep(place):
    """SIGTERM; SIGINT ends the real one below."""
    place.joinpath("does.json").write_text(json.dumps({MHA: "wait"}))
    code = (
        "import sys; from mhe_jax.cli import sweep, process; "
        "process.run_entry_point("
        "lambda: sweep.run(sweep.parse(sys.argv[2:]), [sys.executable, sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(place / "stand_in.py"), str(place / "tiny.py")]
    command += [*KINDS, "--workdir", str(place / "sweep")]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.strip())
            if line.strip() == "ready":
                process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"stopped by {signal.SIGTERM:d}" in lines
    assert place.joinpath("calls.txt").read_text().split() == [MHA]
    assert run(place, *KINDS)[1] == [MHA, SHA]
    assert "ready" in place.joinpath("sweep", MHA, "log.txt").read_text()  # still


def test_a_real_sweep_goes_on_where_it_was_interrupted(place):
    """The half run goes on from its step, the finished one is not touched."""
    command = [sys.executable, "train.py", str(place / "tiny.py"), *KINDS]
    command += ["--workdir", str(place / "sweep")]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    options = {"cwd": ROOT, "env": environment, "text": True}
    # The first run waits at its third step until it is interrupted: its steps are many.
    many = ["--train.num_steps", "100000", "--train.eval_every", "100000"]
    many += ["--train.checkpoint_every", "100000"]
    with subprocess.Popen([*command, *many], stderr=subprocess.PIPE, **options) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    half = place / "sweep" / MHA
    (step,) = (int(path.name) for path in half.glob("checkpoints/*") if path.name.isdecimal())
    assert step >= 3
    assert not (half / "result.json").exists()
    # Now to the end, a few steps on.
    last = [*command, "--train.num_steps", str(step + 2)]
    done = subprocess.run(last, capture_output=True, check=True, **options)
    assert f"{step} of {step + 2} steps are done" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["done"], found["failed"]) == (2, 0)
    told = [(each["result"]["steps"], each["result"]["kind"]) for each in found["runs"]]
    assert told == [(step + 2, "mha"), (step + 2, "sha")]
    assert len({path.read_bytes() for path in place.glob("sweep/*/tokenizer.model")}) == 1
    # Where jax is started for nothing, this ends it.
    options["env"] = {**environment, "JAX_PLATFORMS": "nothing"}
    again = subprocess.run(last, capture_output=True, check=True, **options)
    assert json.loads(again.stdout.splitlines()[-1]) == found
    # A mesh that is not there is found by the run itself: exit status 1.
    last += ["--sweep", "mesh.data=77"]
    failed = subprocess.run(last, capture_output=True, check=False, **options)
    assert failed.returncode == 1
    assert json.loads(failed.stdout.splitlines()[-1])["failed"] == 2


def test_a_finished_run_of_a_labelled_task_is_seen(place):
    """What train.py saves has the labels and the head that follow from the data."""
    place.joinpath("own.tsv").write_text("said\tverdict\nyes it is\ttrue\nno\tfalse\n")
    arguments = [str(ROOT / "configs" / "finetune.py:local"), "--data.directory", str(place)]
    arguments += ["--data.train", "own.tsv", "--data.validation", "own.tsv"]
    arguments += ["--data.dataset", "own", "--data.fields", "said", "--data.label_field", "verdict"]
    found = sweep.parse([*arguments, "--seeds", "2", "--workdir", str(place / "sweep")])
    configs = [config for config, _ in found.runs.values()]
    for config, steps in zip(configs, (200, 100), strict=True):
        workdir = Path(config.workdir)
        workdir.mkdir(parents=True)
        save_json(tasks.resolve(config), workdir / "config.json")
        workdir.joinpath("result.json").write_text(json.dumps({"steps": steps}))
    assert [sweep.result_of(config) for config in configs] == [{"steps": 200}, None]
    other = dataclasses.replace(configs[0].data, labels=("a", "b"))
    assert sweep.result_of(dataclasses.replace(configs[0], data=other)) is None
    assert load_json(Path(configs[0].workdir) / "config.json").data.labels
