"""Sweeps: which runs there are, and what becomes of them; most by a stand-in for train.py."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
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
from mhe_jax.config import result_name
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
if does == "wrong":
    print("error: data.train: no such file", file=sys.stderr)
    sys.exit(2)
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


def names(found):
    return [Path(config.workdir).name for config, _ in found.runs]


def test_every_combination_by_seed(place):
    found = parse(
        place, *KINDS, "--sweep", "optimizer.learning-rate=1e-3,2e-03", "--seeds=2",
        "--train.num_steps", "7", "--train.seed", "4",
    )  # fmt: skip
    assert names(found) == [
        f"kind={kind},learning_rate={rate},seed={seed}"
        for seed in (4, 5)
        for kind in ("mha", "sha")
        for rate in (0.001, 0.002)
    ]
    last, _ = found.runs[-1]
    assert (last.model.attention.kind, last.optimizer.learning_rate) == ("sha", 0.002)
    assert (last.train.seed, last.train.num_steps) == (5, 7)
    assert last.workdir == str(place / "sweep" / names(found)[-1])


def test_names(place):
    swept = "model.dropout_rate=0.1", "model.attention.dropout_rate=0.2", "evaluation.seed=3"
    swept += "data.directory=some/where", "optimizer.learning_rate=1e-3,0.001"
    name = "model.dropout_rate=0.1,model.attention.dropout_rate=0.2,evaluation.seed=3"
    assert names(parse(place, "--sweep", *swept)) == [
        f"{name},directory=some_where,learning_rate=0.001,seed=0"
    ]
    assert sweep.parse([str(place / "tiny.py"), *KINDS]).workdir == Path("runs/tiny-sweep")


def test_a_field_that_only_the_swept_kind_has(place):
    [(config, _)] = parse(
        place, "--sweep", "model.attention.kind=gqa", "--model.attention.num_kv_heads", "2"
    ).runs
    assert (config.model.attention.kind, config.model.attention.num_kv_heads) == ("gqa", 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--sweep model.attention.kind=mha,foo", "model.attention.kind"),
        ("--sweep model.attention.kid=mha", "model.attention.kind"),
        ("--sweep model.attention.kind=mha,gqa", "num_kv_heads"),
        ("--sweep", "--sweep"),
        ("--sweep train.seed=1,2", "--seeds N"),
        ("--seeds 0", "--seeds.*0"),
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
    assert f"{SHA}/log.txt\ndone: validation loss 1.5\n" in capsys.readouterr().err
    assert run(place, *KINDS) == (found, [])
    _, calls = run(place, "--sweep", "model.attention.kind=sha,mqa", "--seeds", "2")
    assert calls == ["kind=mqa,seed=0", "kind=sha,seed=1", "kind=mqa,seed=1"]
    # A longer training is not finished, nor is what left a broken result or config.
    _, calls = run(place, *KINDS, "--train.num_steps", "9")
    assert calls == [MHA, SHA]
    for file, text in (("result.json", "[4]"), ("result.json", "{"), ("config.json", "{")):
        place.joinpath("sweep", SHA, file).write_text(text)
        assert run(place, *KINDS, "--train.num_steps", "9")[1] == [SHA]
    assert {each["name"] for each in read_sweep(place / "sweep")} == {
        MHA,
        SHA,
        "kind=mqa,seed=0",
        "kind=sha,seed=1",
        "kind=mqa,seed=1",
    }


@pytest.mark.parametrize(
    ("does", "reason"),
    [("error", "data.train: no good"), ("kill", "SIGKILL"), ("nothing", "result.json")],
)
def test_a_run_that_fails_is_told_and_tried_again_and_the_others_go_on(place, does, reason, capsys):
    found, calls = run(place, *KINDS, **{MHA: does})
    assert calls == [MHA, SHA]
    assert [each["status"] for each in found["runs"]] == ["failed", "done"]
    assert reason in found["runs"][0]["reason"]
    assert f"failed: {found['runs'][0]['reason']}" in capsys.readouterr().err
    assert read_sweep(place / "sweep") == found["runs"]
    assert run(place, *KINDS)[1] == [MHA]


def test_a_sweep_whose_first_two_runs_fail_alike_ends(place, capsys):
    found, calls = run(place, "--seeds", "2", *KINDS, **{MHA: "wrong", SHA: "wrong"})
    assert calls == [MHA, SHA]
    assert (found["failed"], len(found["runs"])) == (2, 2)
    assert "the first two failed alike" in capsys.readouterr().err
    # What is no wrong input may be a matter of the values, such as too little memory.
    for does in ("error", "kill"):
        found, _ = run(place, "--seeds", "2", *KINDS, **{MHA: does, SHA: does})
        assert (found["failed"], len(found["runs"])) == (2, 4)


def test_each_run_is_scored_after_it_is_trained(place):
    scored, longer = [*KINDS, "--evaluate"], ["--train.num_steps", "9"]
    does = {MHA: "error", f"eval/{SHA}": "error"}
    assert run(place, *scored, **does)[1] == [MHA, SHA, f"eval/{SHA}"]
    # What is trained already is scored; what cannot be scored is told, and the others go on.
    found, calls = run(place, *scored, **{f"eval/{SHA}": "error"})
    assert calls == [MHA, f"eval/{MHA}", f"eval/{SHA}"]
    assert [each["status"] for each in found["runs"]] == ["done", "failed"]
    assert [run(place, *scored)[1] for _ in range(2)] == [[f"eval/{SHA}"], []]
    # Scores of a shorter training are old; those of other sources have a name of their own.
    run(place, *KINDS, *longer)
    both = [f"eval/{MHA}", f"eval/{SHA}"]
    assert run(place, *scored, *longer)[1] == both
    longer += ["--evaluation.sources", "train.txt"]
    assert run(place, *scored, *longer)[1][1::2] == both
    assert run(place, *scored, *longer)[1] == []


def finished(name, **result):
    return {"name": name, "workdir": f"w/{name}", "status": "done", "result": result}


def test_a_scored_sweep_says_how_to_compare_its_runs(tmp_path):
    best = {"name": "kind=sha", "seeds": 1, "best_validation_loss": 1.5, "workdir": str(tmp_path)}
    found = {"best": best, "workdir": "my runs"}
    assert re.search(rf"to score it: .* eval {tmp_path}$", sweep.best_in_words(found))
    (tmp_path / "eval_test.json").touch()
    assert re.search(r"to compare all: .* compare 'my runs'$", sweep.best_in_words(found))


def test_the_best_has_the_best_mean_over_its_seeds(capsysbinary, monkeypatch):
    losses = {"kind=mha": [1.0, 3.0], "kind=sha": [1.5, 1.75], "kind=mqa": [0.5]}
    runs = [
        finished(f"{kind},seed={seed}", best_validation_loss=loss, steps=7)
        for kind, of in losses.items()
        for seed, loss in enumerate(of)
    ]
    runs.append({"name": "kind=mqa,seed=1", "workdir": "w", "status": "failed", "reason": "[r]"})
    runs[-1]["result"] = None
    best = sweep.best_of(runs)
    where = "w/kind=sha,seed=0"
    assert best == {"name": "kind=sha", "seeds": 2, "best_validation_loss": 1.625, "workdir": where}
    line = sweep.best_in_words({"best": best})
    assert re.search(rf"kind=sha, .*1\.625, .*2 seeds.* {where}; .* eval {where}$", line)
    scores = {f"seed={seed}": score for seed, score in enumerate([0.5, 0.75])}
    scored = [finished(name, best_validation_score=score) for name, score in scores.items()]
    best = sweep.best_of(scored)
    assert best == {"name": "", "seeds": 2, "best_validation_score": 0.625, "workdir": "w/seed=1"}
    line = sweep.best_in_words({"best": best})
    assert re.search(r"^best: validation score 0\.625, mean of 2 seeds, .* w/seed=1;", line)
    none = finished("seed=0", best_validation_loss=None, steps=7)
    assert sweep.best_of([*runs[-1:], none]) is None
    assert sweep.validated(none["result"]) == ""
    assert "no run" in sweep.best_in_words({"best": None})
    monkeypatch.setenv("COLUMNS", "200")
    sweep.show({"runs": runs})
    head, *rows = capsysbinary.readouterr().out.decode().splitlines()
    assert "best validation loss" in head
    assert rows[2].split() == ["kind=sha,seed=0", "done", "1.5", "7", "-"]
    assert rows[5].split() == ["kind=mqa,seed=1", "failed", "-", "-", "[r]"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_the_sweep(place, number):
    place.joinpath("does.json").write_text(json.dumps({MHA: "wait"}))
    code = (
        "import sys; from mhe_jax.cli import sweep, process; "
        "process.run_entry_point("
        "lambda: sweep.run(sweep.parse(sys.argv[2:]), [sys.executable, sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(place / "stand_in.py"), str(place / "tiny.py")]
    command += [*KINDS, "--workdir", str(place / "sweep")]
    log = place / "sweep" / MHA / "log.txt"
    with subprocess.Popen(command, cwd=ROOT) as process:
        while not log.exists() or "ready" not in log.read_text():
            time.sleep(0.05)
        process.send_signal(number)
    assert process.returncode == 128 + number
    assert f"stopped by {signal.SIGTERM:d}" in log.read_text()
    assert place.joinpath("calls.txt").read_text().split() == [MHA]
    assert run(place, *KINDS)[1] == [MHA, SHA]
    assert "ready" in log.read_text()  # still


def test_a_real_sweep_and_once_more(place):
    """What is finished is not touched; a mesh that is not there is found by the run itself."""
    command = [sys.executable, "train.py", str(place / "tiny.py"), *KINDS]
    sweeping = command[1:] = [*command[1:], "--workdir", str(place / "sweep")]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}

    def call(*more, **variables):
        done = subprocess.run(
            [*command, *more], capture_output=True, cwd=ROOT, env=environment | variables, text=True
        )
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    status, found = call()
    assert (status, found["done"], found["failed"]) == (0, 2, 0)
    told = [(each["result"]["steps"], each["result"]["kind"]) for each in found["runs"]]
    assert told == [(4, "mha"), (4, "sha")]
    assert len({path.read_bytes() for path in place.glob("sweep/*/tokenizer.model")}) == 1
    # Where jax is started for nothing, this ends it.
    assert call(JAX_PLATFORMS="nothing") == (0, found)
    command[1:] = ["eval.py", "compare", str(place / "sweep"), "--out", str(place / "report")]
    status, compared = call(JAX_PLATFORMS="nothing")
    assert (status, compared["runs"]["done"]) == (0, 2)
    command[1:] = sweeping
    status, found = call("--sweep", "mesh.data=77")
    assert (status, found["failed"]) == (1, 2)


def test_a_finished_run_of_a_labelled_task_is_seen(place):
    """What train.py saves has the labels and the head that follow from the data."""
    place.joinpath("own.tsv").write_text("said\tverdict\nyes it is\ttrue\nno\tfalse\n")
    arguments = [str(ROOT / "configs" / "finetune.py:local"), "--data.directory", str(place)]
    arguments += ["--data.train", "own.tsv", "--data.validation", "own.tsv"]
    arguments += ["--data.dataset", "own", "--data.fields", "said", "--data.label_field", "verdict"]
    found = sweep.parse([*arguments, "--seeds", "2", "--workdir", str(place / "sweep")])
    configs = [config for config, _ in found.runs]
    for config, steps in zip(configs, (200, 100), strict=True):
        workdir = Path(config.workdir)
        workdir.mkdir(parents=True)
        save_json(tasks.resolve(config), workdir / "config.json")
        workdir.joinpath("result.json").write_text(json.dumps({"steps": steps}))
    assert [sweep.result_of(config) for config in configs] == [{"steps": 200}, None]
    other = dataclasses.replace(configs[0].data, labels=("a", "b"))
    assert sweep.result_of(dataclasses.replace(configs[0], data=other)) is None
    assert load_json(Path(configs[0].workdir) / "config.json").data.labels
