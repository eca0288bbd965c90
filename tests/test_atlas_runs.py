"""What benchmarks/atlas.py runs, by a stand-in for train.py and eval.py, and its tables."""

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from command_lines import parsed

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import atlas, atlas_cases, atlas_picture, atlas_tables, reports, sizes, workplace
from benchmarks.atlas_cases import LARGE, TASKS, Case, Stage, base_of, models
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.sweep.plan import CONFIG, RESULT
from mhe_jax.config.fields import load_json, save_json
from mhe_jax.config.files import METRICS
from mhe_jax.config.rules import check
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS as MODELS
from mhe_jax.tasks.cache import cached_numbers

ROOT = Path(__file__).parents[1]
LOSSES = {1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.0, 8e-3: 2.3}
# Added to the loss of a kind, and ms of a step for each layer.
WORSE = {"mha": 0.1, "sha": 0.3, "mhe_mul": 0.2, "gqa": 0.0, "mqa": 0.4}
SPEED = {"mha": 40, "sha": 20}


# Sizes


def described(task: str, fields: dict) -> dict[str, int]:
    """Counts of the parameters that the model really makes."""
    config = sizes.changed(base_of(task), fields)
    initialize = MODELS[config.task].initializer(MODELS[config.task].model(config.model), 2)
    return count_parameters(jax.eval_shape(initialize, jax.random.key(0)))


@pytest.mark.parametrize("task", TASKS)
def test_models_of_the_same_number_of_parameters(task):
    """By the closed form and by the model as it is made, to 1 % of MHA's."""
    wanted = described(task, models(task)["shape"]["mha"])["total"]
    for regime in ("depth", "width"):
        for name, fields in models(task)[regime].items():
            made = described(task, fields)["total"]
            assert made == sizes.parameters(sizes.changed(base_of(task), fields)), (regime, name)
            assert abs(made / wanted - 1) < 0.01, (regime, name)
            assert ("model.num_layers" in fields) == (regime == "depth")


@pytest.mark.parametrize("task", TASKS)
def test_closed_form_of_the_new_kinds(task):
    for name in atlas_cases.NEW:
        fields = models(task)["shape"][name]
        made = described(task, fields)["total"]
        assert made == sizes.parameters(sizes.changed(base_of(task), fields)), name


def test_depth_is_at_least_a_layer_more():
    """Of the language model with `mha` too, whose MLP pays for it; sides grow in turn."""
    base = base_of("lm")
    for name, fields in models("lm")["depth"].items():
        assert fields["model.num_layers"] == base.model.num_layers + 1
        assert fields["model.mlp_features"] < base.model.mlp_features, name
    fields = models("translation")["depth"]
    sides = {
        name: (own["model.num_layers"], own["model.num_decoder_layers"])
        for name, own in fields.items()
    }
    assert sides["mha"] == (3, 2)
    assert sides["mhe_add-2-groups"] == (3, 3)
    assert sides["sha"] == (4, 3)


def test_the_cache_of_all_layers():
    """2·M numbers a layer of `mha`, and as many again of its cross-attention; no encoder's."""
    deep = {task: models(task)["depth"]["mha"] for task in TASKS}
    assert cached_numbers(sizes.changed(base_of("lm"), deep["lm"])) == 4 * 256
    config = sizes.changed(base_of("translation"), deep["translation"])
    assert cached_numbers(config) == 2 * (512 + 512)


@pytest.mark.parametrize("task", TASKS)
def test_what_decides_has_at_most_half_of_the_cache(task):
    base = base_of(task)
    mha = cached_numbers(sizes.changed(base, models(task)["shape"]["mha"]))
    for regime in ("depth", "width"):
        for name, fields in models(task)[regime].items():
            if name != "mha":
                assert cached_numbers(sizes.changed(base, fields)) <= mha / 2, name


@pytest.mark.parametrize("task", TASKS)
def test_the_same_flops(task):
    base, mha = base_of(task), models(task)["shape"]["mha"]
    budget = base.train.num_steps * sizes.flops(sizes.changed(base, mha))
    for name, fields in models(task)["flops"].items():
        config = sizes.changed(base, fields)
        one = sizes.flops(config)
        assert abs(config.train.num_steps * one - budget) <= one / 2, name


@pytest.mark.parametrize("task", TASKS)
def test_every_case_is_a_config_and_has_its_stage(task):
    """No case is forgotten, none is planned twice, and train.py takes each."""
    planned = [case for stage in atlas_cases.stages(task) for case in stage.cases]
    every = [Case(regime, name) for regime, own in models(task).items() for name in own]
    assert sorted(planned) == sorted(every)
    assert set(atlas_tables.REGIMES) == set(models(task))
    base = base_of(task)
    for regime, name in every:
        if regime not in ("shape", "time"):
            assert (config := sizes.changed(base, models(task)[regime][name])) != base
            check(config)
    fields = list(models(task)["limits"].values())[-1]
    flags = [part for field, value in fields.items() for part in (f"--{field}", str(value))]
    path = ROOT / "configs" / atlas.SOURCES[task].config
    assert parse_train_arguments([str(path), *flags]) == sizes.changed(base, fields)


def test_the_larger_model():
    """Its cases are those of the language model; what it adds is in its config and its table."""
    larger, smaller = ({c for s in atlas_cases.stages(t) for c in s.cases} for t in (LARGE, "lm"))
    assert larger < smaller
    base = base_of(LARGE)
    check(base)
    m = base.model
    assert (m.features, m.num_layers, m.dtype) == (512, 8, "bfloat16")
    assert base.train.num_steps == atlas_cases.SOURCES[LARGE].steps
    wanted = described(LARGE, models(LARGE)["shape"]["mha"])["total"]
    for name in atlas_cases.NARROW:
        made = described(LARGE, models(LARGE)["width"][name])["total"]
        assert abs(made / wanted - 1) < 0.01
    table = atlas_tables.large([])
    names = ["mha", "mva", "mva-narrow, wider MLP", "mha-narrow, wider MLP"]
    assert [row[0] for row in table.rows][:4] == names
    assert {row[-1] for row in table.rows} == {"not measured"}


# Runs


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
            seconds = SPEED.get(kind, 30) * config.model.num_layers / 1000
            steps = [{"step": 1, "split": "train", "step_seconds_p50": seconds}]
            (run / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps))
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
    assert {line["step_seconds"] for line in lines_of(tmp_path, LARGE)} == {None}  # one device


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
    assert (last["steps"], last["step_seconds"], last["cached"]) == (2000, 0.12, 4 * 64)
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
    ("losses", "rate"), [((2.0, 1.9981, 2.1), "2e-3"), ((2.0, 1.9979, 2.1), "4e-3")]
)
def test_of_rates_in_a_tie_the_lowest(calls, tmp_path, monkeypatch, losses, rate):
    """Within 0.002 of the lowest loss; the table shows the seeds of that rate."""
    for each, loss in zip((2e-3, 4e-3, 8e-3), losses, strict=True):
        monkeypatch.setitem(LOSSES, each, loss)
    monkeypatch.setitem(LOSSES, 1e-3, 3.0)
    stage(monkeypatch, "depth", ["gqa"])
    assert run(tmp_path, monkeypatch) == 0
    fresh = {line["rate"] for line in lines_of(tmp_path) if line["seed"]}
    assert fresh == {rate}
    found = atlas_tables.measured(lines_of(tmp_path), Case("depth", "gqa"))
    assert found is not None
    assert (found.rate, len(found.fresh)) == (rate, 3)


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
    assert f"exit status {status}" in capsys.readouterr().err
    assert not (tmp_path / "atlas/lm.json").exists()
    monkeypatch.setattr(workplace, "timed", given)
    assert run(tmp_path, monkeypatch) == 0
    assert len(lines_of(tmp_path)) == 6


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


def test_steps_of_the_same_time(calls, tmp_path, monkeypatch, capsys):
    """By steps of 120 ms of `mha` and 60 ms of `sha`, which later times do not change."""
    stage(monkeypatch, "time", ["sha"])
    assert run(tmp_path, monkeypatch) == 1
    assert "no time of a step was measured on this processor" in capsys.readouterr().err
    stage(monkeypatch, "shape", ["mha"])
    assert run(tmp_path, monkeypatch) == 0
    stage(monkeypatch, "flops", ["sha"])
    assert run(tmp_path, monkeypatch) == 0
    stage(monkeypatch, "time", ["sha"])
    assert run(tmp_path, monkeypatch, "--budget", "1.35") == 0
    monkeypatch.setattr(atlas.Atlas, "step_seconds", lambda *_: 1.0)
    assert run(tmp_path, monkeypatch) == 0
    found = [line for line in lines_of(tmp_path) if line["regime"] == "time"]
    assert [line["steps"] for line in found] == [1000] * 3 + [4000] * 3
    assert {atlas.steps_of(line) for line in found} == {4000}


def test_processor_time_of_a_command():
    """Of its threads too; a command that waits takes none."""
    busy = """
import threading, time
def work():
    while time.thread_time() < 0.2: pass
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
time.sleep(2)
raise SystemExit(3)
"""
    status, seconds = workplace.timed([sys.executable, "-S", "-c", busy])
    assert status == 3
    assert 0.4 <= seconds < 2
    status, _ = workplace.timed([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert status == -9


WAITS = """
import os, pathlib, signal, sys, time
got, own = [], pathlib.Path(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
own.write_text("begun")
while not got:
    time.sleep(0.01)
time.sleep(0.3)  # one more would come meanwhile
own.write_text(f"{os.getpgrp() == os.getpid()} {got}")
sys.exit(128 + got[0])
"""


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_this_process_alone_ends_its_commands_once(tmp_path, number):
    """They have groups of their own, which a terminal's Ctrl-C does not reach; no other begins."""
    (tmp_path / "waits.py").write_text(WAITS)
    files = [tmp_path / f"{name}.txt" for name in "abcd"]

    def strike():
        while not all(file.exists() and file.read_text() for file in files[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def work():
        with workplace.Workplace(tmp_path, tmp_path, 2) as at, ThreadPoolExecutor(2) as pool:
            waits = str(tmp_path / "waits.py")
            list(pool.map(lambda file: at.call(file.with_suffix(""), waits, str(file)), files))

    before = signal.getsignal(number)
    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        work()
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert [file.read_text() for file in files[:2]] == [f"True [{int(passed)}]"] * 2
    assert not any(file.exists() for file in files[2:])
    assert signal.getsignal(number) == before


def test_a_signal_while_a_command_begins(tmp_path, monkeypatch):
    """Before it counts as one that runs."""
    (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
    given = subprocess.Popen

    def begin(*args, **kw):
        process = given(*args, **kw)
        signal.raise_signal(signal.SIGTERM)
        return process

    def work():
        with workplace.Workplace(tmp_path, tmp_path, 1) as at:
            at.call(tmp_path / "a", str(tmp_path / "waits.py"))

    monkeypatch.setattr(subprocess, "Popen", begin)
    with pytest.raises(KeyboardInterrupt):
        work()


def test_what_ignores_hang_ups_still_does(tmp_path):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with workplace.Workplace(tmp_path, tmp_path, 1) as at:
            signal.raise_signal(signal.SIGHUP)
            assert not at.interrupted
    finally:
        signal.signal(signal.SIGHUP, old)


# Tables


def lines(regime, name, losses, scores, rate="4e-3", score="perplexity_per_token"):
    """A search whose best rate is in the middle, and the fresh seeds."""
    who = {"regime": regime, "name": name, "rate": rate}
    edges = [
        {**who, "rate": other, "seed": 0, "validation_loss": 9.0} for other in ("2e-3", "8e-3")
    ]
    chosen = {**who, "seed": 0, "validation_loss": 1.0}
    fresh = [
        {
            **who,
            "seed": seed + 1,
            "validation_loss": loss,
            score: value,
            "step_seconds": 0.25,
            "processor": "this",
        }
        for seed, (loss, value) in enumerate(zip(losses, scores, strict=True))
    ]
    return [*edges, chosen, *fresh]


def test_rows():
    found = lines("depth", "gqa", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    # A seed at another rate, such as one that was best until a line was deleted, does not count.
    other = {**found[-1], "rate": "2e-3", "validation_loss": 9.0}
    table = atlas_tables.regime([*found, other], "lm", "depth")
    row = next(line for line in table.markdown().splitlines() if line.startswith("| gqa"))
    error = statistics.stdev([2.0, 2.1, 2.2]) / 3**0.5
    assert row.endswith(
        f"| 256 | 33 | 7.00 | 2,000 | 4e-3 | 1.000 | 2.100 ± {error:.3f} | 41.00 ± 0.58 | 250 |"
    )
    assert table.markdown().count("not measured") == 5 * 8
    # Times of another processor stand in no table beside those of the one that has most runs.
    other = [line | {"processor": "other", "step_seconds": 0.1} for line in found]
    table = atlas_tables.regime([*found, *other[-2:]], "lm", "depth")
    assert "| 250 |" in table.markdown()
    # A search that has not ended says nothing.
    table = atlas_tables.regime(found[1:], "lm", "depth")
    assert table.markdown().count("not measured") == 5 * 9


@pytest.mark.parametrize(
    ("bleu", "deep", "bar"),
    [
        ([36.0, 36.1, 36.2], [33.0, 33.1, 33.2], "yes"),
        # As good as the error allows; better than one `mha` and not than the other.
        ([33.2, 34.2, 35.2], [33.0, 33.1, 33.2], "no"),
        ([36.0, 36.1, 36.2], [37.0, 37.1, 37.2], "no"),
        ([], [33.0, 33.1, 33.2], "not measured"),
    ],
)
def test_the_bar(bleu, deep, bar):
    """Better than both `mha`, in both tasks, by more than two standard errors of the difference."""
    records = {
        "lm": [
            *lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1]),
            *lines("depth", "mha", [2.1, 2.11, 2.12], [1, 1, 1]),
            *lines("depth", "gqa", [1.9, 1.91, 1.92], [1, 1, 1]),
        ],
        "translation": [
            *lines("shape", "mha", [1, 1, 1], [33.4, 33.5, 33.6], score="bleu"),
            *lines("depth", "mha", [1, 1, 1], deep, score="bleu"),
            *lines("depth", "gqa", [1] * len(bleu), bleu, score="bleu"),
        ],
    }
    rows = {(row[0], row[1]): row[2:] for row in atlas_tables.decision(records).rows}
    loss, _, found = rows[atlas_tables.REGIMES["depth"], "gqa"]
    # (0.01 / √3) · √2 · 2
    assert loss == "+0.100 ± 0.016"
    assert found == bar
    assert rows[atlas_tables.REGIMES["depth"], "mqa"][2] == "not measured"


def test_a_picture():
    """Marks of what has its seeds, labels that are not in each other's way, the front."""
    mha = lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1])
    assert atlas_picture.picture(mha, "lm") is None
    one, other = ([1.90, 1.91, 1.92], [1.9001, 1.9101, 1.9201])  # closer than a line of text
    begun = lines("depth", "gqa", [], [])
    kinds = [*lines("depth", "sha", one, one), *lines("depth", "mqa", other, other)]
    wide = lines("width", "mva-narrow", other, other)
    found = atlas_picture.points([*mha, *wide], "lm")
    assert [(p.name, p.cached) for p in found] == [("mha", 768), ("mva-narrow, wider MLP", 360)]
    drawn = atlas_picture.picture([*mha, *kinds, *begun], "lm")
    assert drawn.count("<circle") == 3
    heights = {
        name: float(down)
        for down, name in re.findall(r'<text x="[\d.]+" y="([\d.]+)".*>(mha|sha|mqa)<', drawn)
    }
    assert heights["sha"] - heights["mqa"] == pytest.approx(atlas_picture.LINE, abs=0.1)
    # `sha` has the least cache and the least loss: nothing else is on the front.
    assert "stroke-dasharray" not in drawn
    found = atlas_picture.points([*mha, *kinds, *begun], "lm")
    assert [(p.name, p.cached) for p in found] == [("mha", 768), ("sha", 128), ("mqa", 128)]
    assert found[1].score == pytest.approx(1.91)
    assert found[1].error == pytest.approx(0.01 / 3**0.5)


def test_a_page_counts_the_runs_of_each_stage():
    """Three rates of each case, three seeds of controls and of the best; less what records have."""
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    for stages in zip(*map(atlas_cases.stages, TASKS), strict=True):
        counts = [" and ".join(dict.fromkeys(str(3 * len(each.cases)) for each in stages))]
        for task, each in zip(TASKS, stages, strict=True):
            controls = [case for case in each.cases if case.name in atlas_cases.CONTROLS]
            others = min(each.best, len(each.cases) - len(controls))
            there = [
                found
                for case in each.cases
                if (task, case.regime) == ("translation", "shape")
                for found in atlas.RECORDS.glob(f"{case.name},*seed=[{''.join(atlas.FRESH)}]")
            ]
            counts.append(3 * (len(controls) + others) - len(there))
        short, lm, translation = counts
        assert f" | {short} | {lm} | {translation} |" in page
    hours = "{lm:g} for the language model and {translation:g} for translation."
    assert hours.format(**atlas.HOURS) in " ".join(page.split())
    assert sum(atlas.HOURS[task] for task in TASKS) == 25


def test_a_page_has_the_tables_of_the_records():
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    for table in atlas_tables.tables(ROOT / "docs" / "records" / "atlas"):
        assert table.markdown() in page


def test_a_page_has_the_pictures_of_the_records():
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    for task in TASKS:
        drawn = atlas_picture.picture(atlas_tables.read(atlas_picture.RECORDS, task), task)
        file = atlas_picture.IMAGES / f"atlas-{task}.svg"
        assert (drawn is not None) == file.exists() == (f"images/{file.name}" in page)
        if drawn:
            assert file.read_text(encoding="utf-8") == drawn


def test_what_the_page_says_of_the_language_model_is_so():
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    record = atlas_tables.read(ROOT / "docs" / "records" / "atlas", "lm")
    kinds = ("mha", "sha", "mhe_add-2-groups", "gqa", "mqa", "gta")
    cases = {name: Case("depth", name) for name in kinds} | {"as it is": atlas_tables.MHA}
    found = {name: atlas_tables.measured(record, case) for name, case in cases.items()}
    means = {k: atlas_tables.with_error(m.values("validation_loss")) for k, m in found.items()}

    def told(one, other):
        difference = means[one][0] - means[other][0]
        return f"by {difference:.3f} ± {2 * math.hypot(means[one][1], means[other][1]):.3f}"

    assert f"worse than the deeper `mha` {told('sha', 'mha')}" in page
    assert f"is the same, {told('sha', 'mqa')}" in page
    assert f"better than `sha` {told('sha', 'mhe_add-2-groups')}" in page
    near = [means[name][0] for name in ("gqa", "gta", "mhe_add-2-groups", "mqa")]
    (whole, error), (deeper, other) = means["as it is"], means["mha"]
    losses = f"{whole:.3f} ± {error:.3f} and, deeper, {deeper:.3f} ± {other:.3f}"
    assert f"({min(near):.3f} to {max(near):.3f} against {losses})" in page
    for name in ("gqa", "gta", "mhe_add-2-groups", "mqa"):
        gain, errors = atlas_tables.gain(record, "lm", cases[name])
        assert -errors < gain < 0, name
    seconds = {name: min(m.values("step_seconds")) for name, m in found.items()}
    times = {name: f"{value / seconds['as it is']:.2f}" for name, value in seconds.items()}
    assert f"2 groups takes {times['mhe_add-2-groups']} times as long" in page
    slow = sorted(times[name] for name in ("gqa", "mqa", "gta"))
    assert f"take {slow[0]} to {slow[-1]} times as long" in page
    assert f"{sum(line['hours'] for line in record):.1f} of the 16 hours" in page


def apart(record, one: Case, other: Case) -> tuple[float, float]:
    """How much lower the validation loss of `one` is, and two standard errors of that."""
    (mean, error), (than, its) = (
        atlas_tables.with_error(atlas_tables.measured(record, case).values("validation_loss"))
        for case in (one, other)
    )
    return than - mean, 2 * math.hypot(error, its)


def test_what_the_page_says_of_groups_and_of_mva_is_so():
    pages = {
        path.stem: " ".join(path.read_text(encoding="utf-8").split())
        for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")
    }
    record = atlas_tables.read(ROOT / "docs" / "records" / "atlas", "lm")

    def found(name: str):
        return atlas_tables.measured(record, Case("shape", name))

    def shapes(name: str, other: str) -> tuple[float, float]:
        return apart(record, Case("shape", name), Case("shape", other))

    groups, scores = "mhe_add-2-groups", "mhe_add-2-score-groups"
    gain, error = shapes("mva", "mha")
    assert f"`mva` by {gain:.3f} ± {error:.3f} in validation loss and 4.1 %" in pages["atlas"]
    assert gain > error
    gain, error = shapes(scores, "mhe_add")
    assert f"do not help `mhe_add` ({gain:.3f} ± {error:.3f});" in pages["atlas"]
    assert gain < error
    gain, error = shapes(groups, "mhe_add")
    assert f"two groups do, by {gain:.3f} ± {error:.3f}, with twice its cache" in pages["atlas"]
    assert gain > error
    gain, error = shapes("mha", groups)
    assert f"told from `mha` ({gain:.3f} ± {error:.3f} worse)" in pages["atlas"]
    assert gain < error
    gain, error = shapes("mha", "gqa")
    assert gain < error
    said = ["{:.3f} ± {:.3f}".format(*shapes("mha", x)) for x in ("gqa", "mqa")]
    assert f"cannot be told from `mha` ({said[0]} worse, with 63 %" in pages["atlas"]
    assert f"and `mqa` is worse by {said[1]}." in pages["atlas"]
    gain, error = shapes("gqa", groups)
    assert f"cannot be told from it ({gain:.3f} ± {error:.3f} worse)" in pages["atlas"]
    assert gain < error
    better = [shapes("mqa", x) for x in ("mhe_add", "mhe_mul", "sha")]
    assert all(gain > error for gain, error in [*better, shapes("mha", "mqa")])
    assert (
        "better than they are by {:.3f} ± {:.3f} and {:.3f} ± {:.3f}, and than `sha` by {:.3f} ± "
        "{:.3f}.".format(*(number for pair in better for number in pair))
        in pages["atlas"]
    )
    mha, mqa = (statistics.fmean(found(x).values("perplexity_per_token")) for x in ("mha", "mqa"))
    assert f"`mqa` is {100 * (mqa / mha - 1):.1f} % worse than `mha` in" in pages["which_kind"]
    mha, mva = (statistics.fmean(found(x).values("perplexity_per_token")) for x in ("mha", "mva"))
    assert f"({mva:.2f} against {mha:.2f})" in pages["atlas"]
    assert f"{100 * (1 - mva / mha):.1f}" == "4.1"
    first = {x: found(x).fresh[0] for x in ("mha", "mva", groups, "gqa", "mqa", "mhe_add")}
    sizes = {x: row["parameters"]["attention"] for x, row in first.items()}
    shares = [f"{100 * sizes[x] / sizes['mha']:.0f}" for x in ("mva", groups)]
    caches = [f"{100 * first[x]['cached'] / first['mha']['cached']:.0f}" for x in ("mva", groups)]
    assert (shares, caches) == (["77", "44"], ["78", "25"])
    assert "gqa` and 71 % of its attention" in pages["atlas"]
    assert "and 61 % more attention parameters" in pages["atlas"]
    assert [sizes["gqa"] / sizes["mha"], sizes[groups] / sizes["gqa"]] == pytest.approx(
        [0.625, 0.71], abs=0.005
    )
    assert sizes["mqa"] / sizes["mhe_add"] == pytest.approx(1.61, abs=0.005)
    assert first["gqa"]["cached"] == first[groups]["cached"] == first["mha"]["cached"] / 4
    assert first["mqa"]["cached"] == first["mhe_add"]["cached"]
    assert "`mva` is better than `mha` with 8 heads by 4.1 % in perplexity" in pages["which_kind"]
    assert "`mva` is 4.1 % better than it in perplexity, with 77 % of its" in pages["README"]


def test_what_the_page_says_of_head_embeddings_is_so():
    page = " ".join((ROOT / "docs" / "atlas.md").read_text(encoding="utf-8").split())
    record = atlas_tables.read(ROOT / "docs" / "records" / "atlas", "lm")
    kinds = ("mha", "sha", "mhe_add", "mhe_mul")
    found = {name: atlas_tables.measured(record, Case("shape", name)) for name in kinds}
    scores = [atlas_tables.with_error(m.values("perplexity_per_token"))[0] for m in found.values()]

    def better(name, than):
        return apart(record, Case("shape", name), Case("shape", than))

    told = ["{:.3f} ± {:.3f}".format(*better(name, "sha")) for name in ("mhe_add", "mhe_mul")]
    assert f"`mhe_add` is better than `sha` by {told[0]} in" in page
    assert f"and `mhe_mul` by {told[1]} (" in page
    for name in ("mhe_add", "mhe_mul"):
        assert better(name, "sha")[0] > better(name, "sha")[1]
    gain, error = better("mhe_mul", "mhe_add")
    assert abs(gain) < error
    mha, sha, add, mul = (f"{score:.2f}" for score in scores)
    assert f"they have {add} and {mul}, `sha` {sha}, and `mha` {mha}, with 2.9 times" in page
    sizes = [m.fresh[0]["parameters"]["attention"] for m in found.values()]
    assert [f"{size / sizes[1]:.2f}" for size in sizes] == ["2.91", "1.00", "1.02", "1.02"]
    assert f"{sizes[0] / sizes[2]:.1f}" == "2.9"
    caches = [m.fresh[0]["cached"] for m in found.values()]
    assert caches == [8 * caches[1], *3 * caches[1:2]]
    worse = [f"{100 * (score / scores[0] - 1):.1f}" for score in scores]
    which = " ".join((ROOT / "docs" / "which_kind.md").read_text(encoding="utf-8").split())
    said = f"`sha` is {worse[1]} % worse in perplexity than `mha`, the MHE kinds "
    assert f"{said}{worse[3]} to {worse[2]} %" in which


def test_what_the_page_says_of_the_larger_model_is_so():
    page = " ".join((ROOT / "docs" / "atlas.md").read_text(encoding="utf-8").split())
    record = atlas_tables.read(ROOT / "docs" / "records" / "atlas", LARGE)
    cases = {case.name: case for case in atlas_cases.stages(LARGE)[0].cases}
    found = {name: atlas_tables.measured(record, case) for name, case in cases.items()}
    assert all(len(m.fresh) == 3 for m in found.values())
    assert {row["best_step"] for m in found.values() for row in m.fresh} == {1000}
    assert {row["device"] for m in found.values() for row in m.fresh} == {"NVIDIA H200"}

    def told(name, other, better=True):
        gain, error = apart(record, cases[name], cases[other])
        assert (gain > error) == better, (name, other)
        return f"{gain:.3f} ± {error:.3f}"

    scores = {k: statistics.fmean(m.values("perplexity_per_token")) for k, m in found.items()}
    said = f"it is better than `mha` by {told('mva', 'mha')} in validation loss, and in test "
    said += f"perplexity a token with {scores['mva']:.2f} against {scores['mha']:.2f}, with 75 %"
    assert said in page
    parameters = [found[name].fresh[0]["parameters"]["attention"] for name in ("mva", "mha")]
    assert parameters[0] / parameters[1] == pytest.approx(0.75, abs=0.005)
    caches = {k: m.fresh[0]["cached"] / found["mha"].fresh[0]["cached"] for k, m in found.items()}
    assert {k: f"{100 * share:.0f}" for k, share in caches.items()} == {
        "mha": "100",
        "mva": "76",
        "mva-narrow": "45",
        "mha-narrow": "50",
    }
    assert f"`mva-narrow` is better than `mha` by {told('mva-narrow', 'mha')}" in page
    assert f"better than `mha` too, by {told('mha-narrow', 'mha')}; it cannot" in page
    said = f"from `mva-narrow` ({told('mva-narrow', 'mha-narrow', better=False)} worse)"
    assert f"{said}, and is worse than `mva` by {told('mva', 'mha-narrow')}." in page
    seconds = {k: m.values("training_seconds") for k, m in found.items()}
    assert f"`mva` took {min(seconds['mva']):.0f} s" in page
    mha = f"{min(seconds['mha']):.0f} to {max(seconds['mha']):.0f} s"
    assert f"one of `mha` {mha}." in page
    percent = {k: f"{100 * (1 - score / scores['mha']):.1f} %" for k, score in scores.items()}
    which = " ".join((ROOT / "docs" / "which_kind.md").read_text(encoding="utf-8").split())
    said = f"better than `mha` by {percent['mva']} in perplexity, narrow `mva` with a wider MLP by "
    said += f"{percent['mva-narrow']} and narrow `mha` with a wider MLP by {percent['mha-narrow']}."
    assert said in which
    assert f"in a larger one, with heads of 64, {percent['mva']}." in which
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"`mva` is {percent['mva']} better than `mha` (`python benchmarks/atlas.py" in readme


def test_the_config_of_the_language_model_scores_what_its_page_says():
    """By three runs of the atlas, which are that config with other seeds."""
    runs = sorted((ROOT / "docs" / "records" / "atlas" / "lm" / "shape").glob("mhe_mul,8e-3,*"))
    for run in runs:
        config = load_json(run / CONFIG)
        assert sizes.changed(
            base_of("lm"), {"workdir": config.workdir, "train.seed": config.train.seed}
        ) == sizes.changed(config, {"data.directory": base_of("lm").data.directory})
    scores = [json.loads((run / "eval_test.json").read_text()) for run in runs]
    names = ("loss", "perplexity_per_token", "perplexity_per_word", "accuracy")
    nats, token, word, accuracy = (statistics.fmean(x[name] for x in scores) for name in names)
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    told = f"{nats:.3f} | {token:.1f} a token, {word:.1f} a word | {100 * accuracy:.1f} %"
    assert f"| `wikitext2_lm.py` | 994,048 | 7.2 min | {told} |" in page
    config = " ".join((ROOT / "configs" / "wikitext2_lm.py").read_text(encoding="utf-8").split())
    assert f"test perplexity {token:.1f} per token, and {word:.0f} per word" in config
    assert f"{nats:.3f} nats per token" in config


def test_what_the_page_says_of_narrow_values_and_of_two_heads_is_so():
    pages = {
        path.stem: " ".join(path.read_text(encoding="utf-8").split())
        for path in (ROOT / "docs/atlas.md", ROOT / "docs/which_kind.md", ROOT / "README.md")
    }
    record = atlas_tables.read(ROOT / "docs" / "records" / "atlas", "lm")
    cases = {
        "narrow": Case("width", "mva-narrow"),
        "mha": Case("shape", "mha"),
        "two": Case("limits", "mha, 2 heads"),
        "mva": Case("shape", "mva"),
    }
    found = {name: atlas_tables.measured(record, case) for name, case in cases.items()}
    assert all(len(m.fresh) == 3 for m in found.values())
    scores = {k: statistics.fmean(m.values("perplexity_per_token")) for k, m in found.items()}

    def told(name, other, better=True):
        gain, error = apart(record, cases[name], cases[other])
        assert (gain > error) == better, (name, other)
        return f"{gain:.3f} ± {error:.3f}"

    gain, error = atlas_tables.gain(record, "lm", cases["narrow"])
    assert gain > error
    said = f"by {gain:.3f} ± {error:.3f} in validation loss, and in test perplexity a token with "
    assert f"{said}{scores['narrow']:.2f} against {scores['mha']:.2f}." in pages["atlas"]
    assert f"better than `mha` with 2 heads, too, by {told('narrow', 'two')}." in pages["atlas"]
    said = told("narrow", "mva", better=False)
    assert f"cannot be told from each other ({said})" in pages["atlas"]
    assert f"better than with 8 by {told('two', 'mha')}, is worse than" in pages["atlas"]
    said = f"worse than `mva` by {told('mva', 'two')} ({scores['two']:.2f} in test"
    assert said in pages["atlas"]
    share = 100 * found["narrow"].fresh[0]["cached"] / found["mha"].fresh[0]["cached"]
    assert f"{share:.0f}" == "47"
    assert "**With as many parameters and 47 % of the cache**" in pages["atlas"]
    less = f"{100 * (1 - scores['narrow'] / scores['mha']):.1f} %"
    assert f"47 % of the cache and is better by {less} in" in pages["which_kind"]
    assert f"has 47 % of the cache and is {less} better than `mha`" in pages["README"]
    less = f"{100 * (1 - scores['mva'] / scores['two']):.1f} %"
    assert f"which is better than with 8, by {less}." in pages["which_kind"]
    fields = models("lm")["width"]["mva-narrow"]
    assert fields["model.mlp_features"] == 648
    assert fields["model.attention.score_features"] == 48
    assert fields["model.attention.qkv_features"] == 8 * 8
