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
from mhe_jax.cli.sweep import execution
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import load_json, save_json
from mhe_jax.report.results import read_sweep, sweep_table

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
        evaluation=EvaluationConfig(batch_size=8),
    )
"""
# Leaves what train.py leaves, one line a call in calls.txt, and does what `does.json` says.
STAND_IN = """
import json, signal, sys, time
from pathlib import Path
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.process import run_entry_point
from mhe_jax.config.fields import save_json
from mhe_jax.config import Config, InputError

def main():
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append("SIGINT"))
    signal.signal(signal.SIGTERM, lambda *_: stopped.append("SIGTERM"))
    config = parse_train_arguments(sys.argv[1:])
    here, workdir = Path(__file__).parent, Path(config.workdir)
    with open(here / "calls.txt", "a") as calls:
        calls.write(workdir.name + "\\n")
    does = json.loads((here / "does.json").read_text()).get(workdir.name)
    save_json(config, workdir / "config.json")
    if not (workdir / "tokenizer.model").exists():
        (workdir / "tokenizer.model").write_text(workdir.name)
    if does == "error":
        raise InputError("data.train: | is\\nno good")
    if does == "crash":
        print("a line before", file=sys.stderr)
        raise RuntimeError("out of paper")
    if does == "kill":
        import os
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "wait":
        print("ready", file=sys.stderr, flush=True)
        while not stopped:
            time.sleep(0.01)
        time.sleep(0.3)
        print("stopped by " + " ".join(stopped), file=sys.stderr, flush=True)
        sys.exit(128 + getattr(signal, stopped[0]))
    if does != "nothing":
        result = {"steps": config.train.num_steps, "best_validation_loss": 1.5,
                  "training_seconds": 2.0}
        (workdir / "result.json").write_text(json.dumps(result))
    if does == "late":
        raise InputError("cannot draw the curve")

run_entry_point(main)
"""


@pytest.fixture
def place(tmp_path):
    tmp_path.joinpath("tiny.py").write_text(CONFIG.format(directory=str(tmp_path)))
    tmp_path.joinpath("train.txt").write_text("a red cat runs over the small green hill\n" * 40)
    tmp_path.joinpath("stand_in.py").write_text(STAND_IN)
    tmp_path.joinpath("does.json").write_text("{}")
    return tmp_path


def parse(place, *arguments):
    workdir = ["--workdir", str(place / "sweep")]
    return sweep.parse([str(place / "tiny.py"), *arguments, *workdir])


def run(place, *arguments, **does):
    """What the sweep of `arguments` returns, and the runs that it called."""
    place.joinpath("does.json").write_text(json.dumps(does))
    place.joinpath("calls.txt").write_text("")
    found = sweep.run(parse(place, *arguments), [sys.executable, str(place / "stand_in.py")])
    return found, place.joinpath("calls.txt").read_text().split()


KINDS = "--sweep", "model.attention.kind=mha,sha"
MHA, SHA = "kind=mha,seed=0", "kind=sha,seed=0"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


# Which runs there are.


def test_every_combination_by_seed(place):
    found = parse(
        place, *KINDS, "--sweep", "optimizer.learning_rate=1e-3,2e-03", "--seeds=2",
        "--train.num_steps", "7",
    )  # fmt: skip
    assert [one.name for one in found.runs] == [
        f"kind={kind},learning_rate={rate},seed={seed}"
        for seed in (0, 1)
        for kind in ("mha", "sha")
        for rate in (0.001, 0.002)
    ]
    last = found.runs[-1]
    assert last.config.model.attention.kind == "sha"
    assert last.config.optimizer.learning_rate == 0.002
    assert last.config.train.seed == 1
    assert last.config.train.num_steps == 7
    assert last.workdir == place / "sweep" / last.name
    assert last.values == {
        "model.attention.kind": "sha",
        "optimizer.learning_rate": 0.002,
        "train.seed": 1,
    }


def test_names(place):
    both = "model.dropout_rate=0.1", "model.attention.dropout_rate=0.2"
    (one,) = parse(place, "--sweep", *both).runs
    assert one.name == "model.dropout_rate=0.1,model.attention.dropout_rate=0.2,seed=0"
    (one,) = parse(place, "--sweep", "data.directory=some/where", "--train.seed", "4").runs
    assert one.name == "directory=some_where,seed=4"
    names = [one.name for one in parse(place, "--sweep", "optimizer.clip_norm=None,1").runs]
    assert names == ["clip_norm=None,seed=0", "clip_norm=1.0,seed=0"]
    assert [one.name for one in parse(place, "--seeds", "2").runs] == ["seed=0", "seed=1"]
    assert sweep.parse([str(place / "tiny.py"), *KINDS]).workdir == Path("runs/tiny-sweep")


def test_what_asks_for_a_sweep():
    assert sweep.is_sweep(["c.py", "--sweep", "a=b"])
    assert sweep.is_sweep(["c.py", "--seeds=3"])
    assert not sweep.is_sweep(["c.py", "--train.seed", "3"])
    assert not sweep.is_sweep(["c.py", "--seeds", "3", "--help"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--sweep model.attention.kind=mha,foo", "--model.attention.kind is 'foo': takes one of"),
        ("--sweep model.attention.kid=mha", "unknown field model.attention.kid; did you mean"),
        ("--sweep model.attention.kind=mha,mha", "gives the run kind=mha,seed=0 twice"),
        ("--sweep optimizer.learning_rate=1e-3,0.001", "gives the run learning_rate=0.001,seed=0"),
        ("--sweep model.attention.kind=mha,gqa", "num_kv_heads is not set: kind gqa needs"),
        ("--sweep model.attention.kind=mha --model.attention.kind sha", "swept too: give only one"),
        ("--sweep train.seed=1,2", "--sweep train.seed: --seeds does that"),
        ("--sweep data.train=a,b", "--sweep data.train: takes fields of one value"),
        ("--sweep model.attention.kind", "takes FIELD=VALUE,VALUE,..."),
        ("--sweep model.attention.kind=mha,", "takes FIELD=VALUE,VALUE,..."),
        ("--sweep train.num_steps=1 --sweep train.num_steps=2", "train.num_steps is given twice"),
        ("--sweep", "--sweep has no value"),
        ("--seeds 0", "--seeds is '0': takes a whole number from 1"),
        ("--seeds two", "--seeds is 'two'"),
        ("--seeds 1001", "--seeds is '1001': takes a whole number from 1 to 1000"),
        ("--seeds " + "9" * 5000, "--seeds is '999"),
        ("--seeds 2 --compile_only --topology v5e:2x2", "--compile_only goes with one run"),
        ("--seeds 2 --distributed auto", "--distributed goes with one run"),
        ("--sweep train.num_steps=1,0", "train.num_steps is 0: takes 1 or more"),
        ("--seeds 2 --train.num_step 3", "unknown field --train.num_step; did you mean"),
    ],
)
def test_mistakes_are_found_before_the_first_run(place, arguments, complaint):
    with pytest.raises(InputError) as caught:
        parse(place, *arguments.split())
    assert complaint in str(caught.value)
    assert not (place / "sweep").exists()


def test_the_directory_of_a_run_is_refused(place):
    place.joinpath("sweep").mkdir()
    place.joinpath("sweep/config.json").write_text("{}")
    with pytest.raises(InputError, match="sweep holds a run"):
        parse(place, *KINDS)


# What becomes of them.


def test_finished_runs_are_not_repeated_and_later_ones_are_added(place):
    found, calls = run(place, *KINDS)
    assert calls == [MHA, SHA]
    assert (found["done"], found["failed"]) == (2, 0)
    assert found["runs"][0]["result"]["best_validation_loss"] == 1.5
    again, calls = run(place, *KINDS)
    assert calls == []
    assert again == found
    _, calls = run(place, "--sweep", "model.attention.kind=sha,mqa", "--seeds", "2")
    assert calls == ["kind=mqa,seed=0", "kind=sha,seed=1", "kind=mqa,seed=1"]
    # A longer training is not finished.
    _, calls = run(place, *KINDS, "--train.num_steps", "9")
    assert calls == [MHA, SHA]
    names = [each["name"] for each in read_sweep(place / "sweep")]
    assert set(names) == {MHA, SHA, "kind=mqa,seed=0", "kind=sha,seed=1", "kind=mqa,seed=1"}


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("error", "data.train: | is no good"),
        ("crash", "RuntimeError: out of paper"),
        ("kill", "ended by SIGKILL"),
        ("nothing", "left no result.json that fits its config"),
        ("late", "cannot draw the curve"),
    ],
)
def test_a_run_that_fails_stands_in_the_table_and_the_others_go_on(place, does, reason):
    found, calls = run(place, *KINDS, **{MHA: does})
    assert calls == [MHA, SHA]
    assert [each["status"] for each in found["runs"]] == ["failed", "done"]
    assert found["runs"][0]["reason"] == reason
    assert f"| {MHA} | failed: {reason.replace('|', '/')} |" in sweep_table(found["runs"])
    assert read_sweep(place / "sweep") == found["runs"]
    # It is tried again, the other is not; what has left a result is finished after all.
    found, calls = run(place, *KINDS)
    assert (calls, found["failed"]) == ([] if does == "late" else [MHA], 0)


SCORER = """
import json, sys
from pathlib import Path
here, workdir = Path(__file__).parent, Path(sys.argv[1])
with open(here / "calls.txt", "a") as calls:
    calls.write("eval/" + workdir.name + "\\n")
if json.loads((here / "does.json").read_text()).get("eval/" + workdir.name) == "error":
    sys.exit("error: no room")
(workdir / "eval_validation.json").write_text("{}")
"""


def test_each_run_is_scored_after_it_is_trained(place):
    place.joinpath("train_in.py").write_text(STAND_IN)
    place.joinpath("eval_in.py").write_text(SCORER)
    split = "--evaluation.split", "validation"

    def called(*arguments, **does):
        place.joinpath("does.json").write_text(json.dumps(does))
        place.joinpath("calls.txt").write_text("")
        planned = parse(place, *KINDS, *split, *arguments)
        found = sweep.run(planned, [sys.executable, str(place / "train_in.py")])
        told = [(each["status"], each.get("reason")) for each in found["runs"]]
        return told, place.joinpath("calls.txt").read_text().split()

    done = ("done", None)
    told, calls = called(**{MHA: "crash"})
    assert calls == [MHA, SHA]
    # What is trained already is scored; what cannot be scored is told, and the others go on.
    told, calls = called("--evaluate", **{MHA: "crash", f"eval/{SHA}": "error"})
    assert calls == [MHA, f"eval/{SHA}"]
    assert [status for status, _ in told] == ["failed", "failed"]
    assert "no room" in told[1][1]
    assert called("--evaluate") == ([done, done], [MHA, f"eval/{MHA}", f"eval/{SHA}"])
    assert called("--evaluate") == ([done, done], [])
    with pytest.raises(InputError, match="data.test"):
        parse(place, *KINDS, "--evaluate")


def test_tokenizers_are_shared_where_they_must_be_the_same(place):
    run(place, *KINDS, "--sweep", "model.vocabulary_size=300,400", "--seeds", "2")
    owners = {path.parent.name: path.read_text() for path in place.glob("sweep/*/tokenizer.model")}
    assert len(owners) == 8
    for name, owner in owners.items():
        size = "300" if "size=300" in name else "400"
        assert owner == f"kind=mha,vocabulary_size={size},seed=0"


def test_what_a_tokenizer_depends_on():
    """How training text is found and read; the pieces; and whose tokenizer it is to be."""
    read = {"task", "data.directory", "data.train", "data.train_weights", "data.fields"}
    labelled = {"data.dataset", "data.label_field", "data.labels"}
    pieces = {"model.vocabulary_size", "model.hashing"}
    given = {"data.tokenizer", "data.lsh_pieces", "train.init_from"}
    assert set(execution._of_tokenizer(Config(task="lm"))) == read | labelled | pieces | given


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_ends_the_sweep(place, number):
    place.joinpath("does.json").write_text(json.dumps({MHA: "wait"}))
    code = (
        "import sys; from mhe_jax.cli import sweep, process; "
        "process.run_entry_point("
        "lambda: sweep.run(sweep.parse(sys.argv[2:]), [sys.executable, sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(place / "stand_in.py"), str(place / "tiny.py")]
    command += [*KINDS, "--workdir", str(place / "sweep")]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=place) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.strip())
            if line.strip() == "ready":
                process.send_signal(number)
    assert process.returncode == 128 + number
    passed = "SIGTERM" if number == signal.SIGHUP else number.name
    assert f"stopped by {passed}" in lines
    assert lines[-1] == "the same command goes on from there"
    assert place.joinpath("calls.txt").read_text().split() == [MHA]
    assert [each["status"] for each in read_sweep(place / "sweep")] == ["not run", "not run"]
    # The log of the run has its lines.
    assert "ready" in place.joinpath("sweep", MHA, "log.txt").read_text()
    _, calls = run(place, *KINDS)
    assert calls == [MHA, SHA]


def test_a_real_sweep_goes_on_where_it_was_interrupted(place):
    """The half run goes on from its step, the finished one is not touched."""
    command = [sys.executable, "train.py", str(place / "tiny.py"), *KINDS]
    command += ["--workdir", str(place / "sweep")]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    options = {"cwd": ROOT, "env": environment, "text": True}
    # The second run waits at its first step until it is interrupted: its steps are many.
    many = [*command, "--train.num_steps", "100000", "--train.eval_every", "100000"]
    first = [*many, "--train.checkpoint_every", "100000"]
    with subprocess.Popen(first, stderr=subprocess.PIPE, **options) as process:
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
    results = [each["result"] for each in found["runs"]]
    assert [r["steps"] for r in results] == [step + 2] * 2
    assert [r["kind"] for r in results] == ["mha", "sha"]
    models = {path.read_bytes() for path in place.glob("sweep/*/tokenizer.model")}
    assert len(models) == 1
    # Where jax is started for nothing, this ends it.
    options["env"] = {**environment, "JAX_PLATFORMS": "nothing"}
    again = subprocess.run(last, capture_output=True, check=True, **options)
    assert json.loads(again.stdout.splitlines()[-1]) == found
    assert "is finished" in again.stderr
    assert load_json(half / "config.json").train.num_steps == step + 2


def test_the_exit_status_says_that_a_run_failed(place):
    """A device mesh that is not there is found by the run itself."""
    command = [
        sys.executable,
        "train.py",
        str(place / "tiny.py"),
        "--workdir",
        str(place / "sweep"),
    ]
    done = subprocess.run(
        [*command, "--sweep", "mesh.data=77"],
        cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert "mesh.data" in found["runs"][0]["reason"]
    assert "| failed: " in done.stderr


def test_a_finished_run_of_a_labelled_task_is_seen(place):
    """What train.py saves has the labels and the head that follow from the data."""
    place.joinpath("own.tsv").write_text("said\tverdict\nyes it is\ttrue\nno\tfalse\n")
    arguments = [str(ROOT / "configs" / "glue.py:local"), "--data.directory", str(place)]
    arguments += ["--data.train", "own.tsv", "--data.validation", "own.tsv"]
    arguments += ["--data.dataset", "own", "--data.fields", "said", "--data.label_field", "verdict"]
    found = sweep.parse([*arguments, "--seeds", "2", "--workdir", str(place / "sweep")])
    for run, steps in zip(found.runs, (200, 100), strict=True):
        run.workdir.mkdir(parents=True)
        save_json(tasks.resolve(run.config), run.workdir / "config.json")
        run.workdir.joinpath("result.json").write_text(json.dumps({"steps": steps}))
    assert [run.result() for run in found.runs] == [{"steps": 200}, None]
    first = found.runs[0]
    other = dataclasses.replace(
        first.config, data=dataclasses.replace(first.config.data, labels=("a", "b"))
    )
    assert dataclasses.replace(first, config=other).result() is None


def test_the_result_of_before_a_run_was_lengthened_is_none(place):
    """train.py saves the longer config first, and result.json at the end."""
    run(place, *KINDS)
    (mha, sha) = parse(place, *KINDS, "--train.num_steps", "9").runs
    for one in (mha, sha):
        save_json(one.config, one.workdir / "config.json")
    assert (mha.result(), sha.result()) == (None, None)
    result = {"steps": 9, "best_validation_loss": 1.25}
    mha.workdir.joinpath("result.json").write_text(json.dumps(result))
    assert (mha.result(), sha.result()) == (result, None)


@pytest.mark.parametrize(
    "text", ["", "[4]", '{"steps": "4"}', '{"steps": 4, "best_validation_loss": "low"}', "[" * 9999]
)
def test_a_result_that_is_none_is_made_again(place, text):
    run(place, *KINDS)
    place.joinpath("sweep", SHA, "result.json").write_text(text)
    found, calls = run(place, *KINDS)
    assert calls == [SHA]
    assert found["done"] == 2
    assert f"| {SHA} | done | loss 1.5000 | 2.0 |" in sweep_table(found["runs"])


@pytest.mark.parametrize("text", [None, "", "[4]", '{"task": 3}'])
def test_a_result_beside_a_damaged_config_is_none(place, text):
    run(place, *KINDS)
    config = place / "sweep" / SHA / "config.json"
    config.unlink() if text is None else config.write_text(text)
    mha, sha = parse(place, *KINDS).runs
    assert mha.result() is not None
    assert sha.result() is None


class Sent(list):
    """In the place of a process: the signals that it got."""

    send_signal = list.append


def test_a_hang_up_that_is_ignored_stays_so():
    """As under nohup."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with execution._Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.usefixtures("hang_ups")
def test_signals_before_and_between_runs_reach_the_next_and_the_first_counts():
    with execution._Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        signals.attach(sent := Sent())
        assert sent == [signal.SIGTERM, signal.SIGINT]  # a hang-up means the same to a run
        signal.raise_signal(signal.SIGINT)
        assert sent[2:] == [signal.SIGINT]
    assert signals.received == signal.SIGHUP


def test_a_run_that_ends_without_a_word_is_told_by_its_status(tmp_path):
    with execution._Signals() as signals:
        for code, told in (("raise SystemExit(3)", "exit status 3"), ("pass", None)):
            assert execution._call(tmp_path, [sys.executable, "-c", code], signals) == told
