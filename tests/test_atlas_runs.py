"""What benchmarks/atlas.py runs, by a stand-in for train.py and eval.py."""

import json
import math
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from command_lines import parsed

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import atlas, atlas_tables, reports, workplace
from benchmarks.atlas_cases import LARGE, TASKS, Case, Stage, base_of
from mhe_jax.cli.sweep.plan import CONFIG, RESULT
from mhe_jax.config.fields import load_json, save_json

ROOT = Path(__file__).parents[1]
LOSSES = {1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.0, 8e-3: 2.3}
# Added to the loss of a kind.
WORSE = {"mha": 0.1, "sha": 0.3, "mhe_mul": 0.2, "gqa": 0.0, "mqa": 0.4}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """(command, run) of each call, which leaves what that command would."""
    found = []

    def stand_in(command, stdout, **_):
        _, program, *arguments = command
        if Path(program).name == "train.py":
            with workplace.PARSING:
                config = parsed(tuple(arguments))
            run, done = Path(config.workdir), "train"
            save_json(config, run / CONFIG)
            kind, rate = config.model.attention.kind, config.optimizer.learning_rate
            loss = LOSSES.get(rate, 3.0) + WORSE[kind] + config.train.seed / 100
            result = {"best_validation_loss": loss, "steps": config.train.num_steps}
            result |= {"best_step": 1, "parameters": {"total": 1}, "training_seconds": 360.0}
            (run / RESULT).write_text(json.dumps({**result, "device": "cpu", "jax": "0.0"}))
        else:
            run, done = Path(arguments[0]), "eval"
            seed = load_json(run / CONFIG).train.seed
            scores = {"perplexity_per_token": 40.0 + seed, "bleu": 30.0 + seed}
            (run / "eval_test.json").write_text(json.dumps(scores))
        found.append((done, f"{run.parent.name}/{run.name}"))
        return 0, {"train": 360.0, "eval": 36.0}[done]

    monkeypatch.setattr(workplace, "timed", stand_in)
    for module in (workplace, atlas):
        monkeypatch.setattr(module, "parse_train_arguments", lambda given: parsed(tuple(given)))
    stage(monkeypatch, "depth", ["mha", "mhe_mul", "gqa"])
    for task in TASKS:
        (tmp_path / "data" / atlas.SOURCES[task].data).mkdir(parents=True)
    return found


def test_the_first_rates_of_a_case_do_not_wait_for_each_other(calls, tmp_path, monkeypatch):
    """Three jobs train the three rates of one case at a time, and then its three seeds."""
    given, together = workplace.timed, threading.Barrier(3, timeout=60)

    def waits(command, stdout, **rest):
        if Path(command[1]).name == "train.py":
            together.wait()
        return given(command, stdout=stdout, **rest)

    monkeypatch.setattr(workplace, "timed", waits)
    monkeypatch.setitem(LOSSES, 2e-3, 1.9)  # is between the others
    stage(monkeypatch, "shape", ["mha"])
    assert run(tmp_path, monkeypatch, "--jobs", "3", task=LARGE) == 0
    assert {(line["rate"], line["seed"]) for line in lines_of(tmp_path, LARGE)} == {
        *((rate, 0) for rate in atlas.RATES[LARGE]),
        *(("2e-3", seed) for seed in (1, 2, 3)),
    }


def stage(monkeypatch, regime: str, names: list[str], best: int = 1) -> None:
    only = Stage([Case(regime, name) for name in names], best)
    monkeypatch.setattr(atlas, "stages", lambda task: [only])


def run(tmp_path, monkeypatch, *flags, task="lm") -> int:
    command = ["atlas.py", task, "--workdir", str(tmp_path), "--jobs", "1"]
    command += ["--data.directory", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", [*command, *flags])
    with pytest.raises(SystemExit) as stop:
        atlas.main()
    return int(stop.value.code or 0)


def lines_of(tmp_path, task="lm"):
    return json.loads((tmp_path / f"atlas/{task}.json").read_text())["lines"]


def test_the_rate_by_one_seed_and_the_score_by_three_others(calls, tmp_path, monkeypatch):
    """Fresh seeds of the control and of the best kind, `gqa`, not of `mhe_mul`."""
    assert run(tmp_path, monkeypatch) == 0
    searched = [
        ("train", f"depth/{name},{rate},seed=0")
        for name in ("mha", "mhe_mul", "gqa")
        for rate in ("2e-3", "4e-3", "8e-3")
    ]
    fresh = [
        (done, f"depth/{name},4e-3,seed={seed}")
        for name in ("mha", "gqa")
        for seed in "123"
        for done in ("train", "eval")
    ]
    assert calls == searched + fresh
    lines = lines_of(tmp_path)
    assert len(lines) == 9 + 6
    last = lines[-1]
    assert (last["regime"], last["name"], last["rate"], last["seed"]) == ("depth", "gqa", "4e-3", 3)
    assert last["perplexity_per_token"] == 43.0
    assert last["validation_loss"] == pytest.approx(2.03)
    assert last["hours"] == 0.11  # to train and to evaluate
    assert (last["steps"], last["cached"]) == (2000, 4 * 64)
    assert last["processor"] == reports.processor()
    config = load_json(tmp_path / "atlas/lm/depth/gqa,4e-3,seed=3" / CONFIG)
    assert (config.model.num_layers, config.model.mlp_features) == (4, 416)
    assert "perplexity_per_token" not in lines[0]  # the choosing seed never sees the test set


def test_a_record_goes_on_without_the_runs(calls, tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch) == 0
    shutil.rmtree(tmp_path / "atlas" / "lm")
    first = lines_of(tmp_path)
    before = len(calls)
    assert run(tmp_path, monkeypatch) == 0
    assert calls[before:] == []
    stage(monkeypatch, "depth", ["gqa", "mqa"])
    assert run(tmp_path, monkeypatch) == 0
    assert {name.split(",")[0] for _, name in calls[before:]} == {"depth/mqa"}
    assert lines_of(tmp_path)[: len(first)] == first


def test_the_search_has_a_quarter_of_the_steps(calls, tmp_path, monkeypatch):
    """And of the warm-up; 2 · 2,000 steps of the same FLOPs have the warm-up of 2,000."""
    stage(monkeypatch, "flops", ["mhe_mul"])
    base = base_of("lm")
    double = {"model.attention.kind": "mhe_mul", "train.num_steps": 2 * base.train.num_steps}
    monkeypatch.setattr(atlas, "models", lambda task: {"flops": {"mhe_mul": double}})
    assert run(tmp_path, monkeypatch) == 0
    lines = lines_of(tmp_path)
    assert [(line["seed"], line["steps"]) for line in lines] == [
        *[(0, 1000)] * 3,
        *((seed, 4000) for seed in (1, 2, 3)),
    ]
    warmups = [line["fields"].get("optimizer.warmup_steps") for line in lines]
    assert warmups == [100] * 3 + [None] * 3


def test_a_record_of_other_steps_is_refused(calls, tmp_path, monkeypatch, capsys):
    stage(monkeypatch, "depth", ["mha"])
    assert run(tmp_path, monkeypatch, "--steps", "40", "--budget", "0.35") == 0
    assert [line["steps"] for line in lines_of(tmp_path)] == [10, 10, 10, 40]
    for name, warmup in (("2e-3,seed=0", 1), ("4e-3,seed=1", 4)):
        config = load_json(tmp_path / f"atlas/lm/depth/mha,{name}" / CONFIG)
        assert config.optimizer.warmup_steps == warmup
    assert run(tmp_path, monkeypatch) == 2
    assert "lm.json was not measured with" in capsys.readouterr().err


def test_no_run_begins_once_the_budget_is_spent(calls, tmp_path, monkeypatch, capsys):
    """Each is 0.1 hours; a larger budget goes on."""
    assert run(tmp_path, monkeypatch, "--budget", "0.35") == 0
    assert len(calls) == 4
    assert "0.35 hours are spent" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, "--budget", "0.45") == 0
    assert len(calls) == 5


def test_the_best_rate_is_not_at_the_edge(calls, tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES, 8e-3, 1.5)
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 0
    trained = [name for done, name in calls if done == "train"]
    rates = [name.split(",")[1] for name in trained]
    assert rates == ["2e-3", "4e-3", "8e-3", "0.016", "8e-3", "8e-3", "8e-3"]


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ((3.0, 2.0, 1.9981, 2.1, 3.0), "2e-3"),
        ((3.0, 2.0, 1.9979, 2.1, 3.0), "4e-3"),
        ((3.0, 2.9, 2.8, 2.0, 1.9981, 3.0), "8e-3"),  # not 0.016, which is less as a text
    ],
)
def test_of_rates_in_a_tie_the_lowest(calls, tmp_path, monkeypatch, losses, rate):
    """Within 0.002 of the lowest loss; the table shows the seeds of that rate."""
    for power, loss in enumerate(losses):
        monkeypatch.setitem(LOSSES, 1e-3 * 2**power, loss)
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 0
    fresh = {line["rate"] for line in lines_of(tmp_path) if line["seed"]}
    assert fresh == {rate}
    found = atlas_tables.measured(lines_of(tmp_path), Case("depth", "gqa"))
    assert found is not None
    assert (found.rate, len(found.fresh)) == (rate, 3)
    assert found.search_loss == pytest.approx(losses[round(math.log2(float(rate) / 1e-3))])


def test_a_run_that_fails_is_recorded_and_not_tried_again(calls, tmp_path, monkeypatch):
    """The search takes it for the worst; a seed of it is left out."""
    given = workplace.timed

    def fails(command, stdout, **rest):
        if "8e-3" in str(command) or "gqa,4e-3,seed=2" in str(command):
            stdout.write("error: step 7: the loss is not finite\n")
            stdout.flush()
            calls.append(("failed", ""))
            return 1, 36.0
        return given(command, stdout=stdout, **rest)

    monkeypatch.setattr(workplace, "timed", fails)
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 0
    failed = [line for line in lines_of(tmp_path) if "failed" in line]
    assert [(line["rate"], line["seed"]) for line in failed] == [("8e-3", 0), ("4e-3", 2)]
    assert failed[0]["failed"] == "step 7: the loss is not finite"
    before = len(calls)
    assert run(tmp_path, monkeypatch) == 0
    assert len(calls) == before
    found = atlas_tables.measured(lines_of(tmp_path), Case("depth", "gqa"))
    assert found is not None
    assert [line["seed"] for line in found.fresh] == [1, 3]
    assert found.shown("perplexity_per_token", 2) == "42.00 ± 1.00 (2 seeds)"


def test_all_rates_fail(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "timed", lambda *_, **__: (1, 0.0))
    monkeypatch.setattr(Path, "read_text", read_of_log(Path.read_text))
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 0
    lines = lines_of(tmp_path)
    assert [line["rate"] for line in lines] == ["2e-3", "4e-3", "8e-3", "0.001"]
    assert atlas_tables.measured(lines, Case("depth", "gqa")) is None


def read_of_log(given):
    return lambda path, *args, **kw: "no" if path.suffix == ".log" else given(path, *args, **kw)


@pytest.mark.parametrize("status", [-9, 2])
def test_no_result_of_a_run_that_is_killed_or_refused(calls, tmp_path, monkeypatch, capsys, status):
    """2 is of wrong input, such as another process that trains there."""
    given = workplace.timed
    monkeypatch.setattr(workplace, "timed", lambda *_, **__: (status, 0.0))
    monkeypatch.setattr(Path, "read_text", read_of_log(Path.read_text))
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 1
    # Each rate once, and no search of what lacks some.
    assert capsys.readouterr().err.count(f"exit status {status}") == 3
    assert not (tmp_path / "atlas/lm.json").exists()
    monkeypatch.setattr(workplace, "timed", given)
    assert run(tmp_path, monkeypatch) == 0
    assert len(lines_of(tmp_path)) == 6


def test_what_is_killed_keeps_no_other_case_from_its_seeds(calls, tmp_path, monkeypatch):
    given = workplace.timed
    killed = {"mqa,4e-3,seed=0"}

    def dies(command, stdout, **rest):
        if any(name in str(command) for name in killed):
            stdout.write("killed\n")
            stdout.flush()
            return -9, 1.0
        return given(command, stdout=stdout, **rest)

    monkeypatch.setattr(workplace, "timed", dies)
    stage(monkeypatch, "depth", ["mqa", "gqa"])
    assert run(tmp_path, monkeypatch) == 1
    assert [(line["name"], line["seed"]) for line in lines_of(tmp_path) if line["seed"]] == [
        ("gqa", seed) for seed in (1, 2, 3)
    ]
    killed.clear()
    assert run(tmp_path, monkeypatch) == 0
    assert {(line["name"], line["rate"]) for line in lines_of(tmp_path)} >= {("mqa", "4e-3")}


def test_two_at_once_are_told(calls, tmp_path, monkeypatch, capsys):
    """Each would write a file of its own lines alone."""
    stage(monkeypatch, "depth", ["gqa"])
    with workplace.Record(tmp_path / "atlas/lm.json", {}):
        assert run(tmp_path, monkeypatch) == 2
    error = capsys.readouterr().err
    assert (
        error == f"error: {tmp_path}/atlas/lm.json: another process is measuring, and adds to it\n"
    )
    assert run(tmp_path, monkeypatch) == 0


@pytest.mark.parametrize(
    ("status", "last"), [(130, "stopped"), (-signal.SIGINT, ""), (1, "KeyboardInterrupt")]
)
def test_ctrl_c_ends_all(calls, tmp_path, monkeypatch, status, last):
    """By our status, by the signal, or while Python starts, which says so and ends with 1."""

    def interrupted(command, stdout, **_):
        calls.append(())
        stdout.write(f"Fatal Python error\n{last}\n")
        stdout.flush()
        return status, 0.0

    monkeypatch.setattr(workplace, "timed", interrupted)
    assert run(tmp_path, monkeypatch) == 130
    assert len(calls) == 1
    assert not (tmp_path / "atlas/lm.json").exists()


def test_a_signal_ends_all(calls, tmp_path, monkeypatch, struck):
    assert run(tmp_path, monkeypatch) == 130
    assert len(struck) == 1
    assert not (tmp_path / "atlas/lm.json").exists()


def test_data_that_is_not_there(calls, tmp_path, monkeypatch, capsys):
    shutil.rmtree(tmp_path / "data")
    assert run(tmp_path, monkeypatch) == 2
    assert "there is no" in capsys.readouterr().err
    assert calls == []


def test_runs_of_docs_records_stand_for_their_own(calls, tmp_path, monkeypatch):
    """Those of the same config alone: not of another shape, nor of seed 3, which has none."""
    monkeypatch.setitem(LOSSES, 2e-3, 1.9)
    stage(monkeypatch, "shape", ["mha"])
    assert run(tmp_path, monkeypatch, task="translation") == 0
    rates = ("1e-3", "2e-3", "4e-3")
    assert calls == [
        *(("train", f"shape/mha,{rate},seed=0") for rate in rates),
        *((done, "shape/mha,2e-3,seed=3") for done in ("train", "eval")),
    ]
    lines = lines_of(tmp_path, "translation")
    place = "docs/records/translation/mha,2e-3,seed=1"
    found = json.loads((ROOT / place / "eval_test.json").read_text())
    (line,) = [line for line in lines if line.get("from") == place]
    assert (line["bleu"], line["hours"], line["seed"]) == (found["bleu"], 0, 1)
    assert len(lines) == 3 + 3
    stage(monkeypatch, "depth", ["mha"])
    assert run(tmp_path, monkeypatch, task="translation") == 0
    assert not [
        line
        for line in lines_of(tmp_path, "translation")
        if line["regime"] == "depth" and "from" in line
    ]
