"""Command lines and what they mean. What they may not say: tests/test_bad_inputs.py."""

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mhe_jax import interchange
from mhe_jax.cli import arguments as command_line
from mhe_jax.cli import commands, runs
from mhe_jax.config import (
    Comparison,
    Config,
    ConversionConfig,
    DataConfig,
    EvaluationConfig,
    InputError,
    KroneckerConfig,
)
from mhe_jax.config.fields import leaves, save_json, set_field, to_dict, value_of
from mhe_jax.config.loading import load_config
from mhe_jax.interchange import uptraining
from mhe_jax.report import report
from mhe_jax.training import from_run

ROOT = Path(__file__).parents[1]
CONFIG_FILE = '''"""Übt auf a.txt."""
from mhe_jax.config import Config, DataConfig


def get_config():
    return Config(task="lm", workdir="runs/full", data=DataConfig(train=("a.txt",)))
'''


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "language.py"
    path.write_text(CONFIG_FILE, encoding="utf-8")
    return str(path)


@pytest.fixture
def run_directory(tmp_path):
    run = tmp_path / "runs" / "mul"
    run.mkdir(parents=True)
    data = DataConfig(train=("a.txt",), validation=("b.txt",))
    config = Config("lm", str(run), data=data, evaluation=EvaluationConfig(beam_size=3))
    save_json(config, run / "config.json")
    return run


OVERRIDES = {
    "": {},
    "--task translation --data.train a b": {"task": "translation", "data.train": ("a", "b")},
    "--optimizer.clip_norm None --optimizer.learning_rate=2e-3": {
        "optimizer.clip_norm": None,
        "optimizer.learning_rate": 0.002,
    },
    "--mesh.data -1 --train.num-steps 7": {"mesh.data": -1, "train.num_steps": 7},
    "--model.attention_by_role.decoder.kind mqa --model.scan_layers True": {
        "model.attention_by_role.decoder.kind": "mqa",
        "model.scan_layers": True,
    },
}


@pytest.mark.parametrize(("arguments", "values"), OVERRIDES.items())
def test_an_override_changes_its_field_only(config_file, arguments, values):
    config = load_config(config_file)
    for name, value in values.items():
        config = set_field(config, name, value)
    assert command_line.parse_train_arguments([config_file, *arguments.split()]) == config


def test_a_run_goes_on_by_its_directory(config_file, tmp_path):
    """With its own config, and the fields that are given; wherever it lies now."""
    workdir = str(tmp_path / "run")
    config = command_line.parse_train_arguments([config_file, "--workdir", workdir])
    (tmp_path / "moved").mkdir()
    save_json(config, tmp_path / "moved/config.json")
    moved = set_field(config, "workdir", str(tmp_path / "moved"))
    longer = set_field(moved, "train.num_steps", 7)
    given = [str(tmp_path / "moved"), "--train.num_steps", "7"]
    assert command_line.parse_train_arguments(given) == longer


def test_a_run_that_starts_from_another_has_its_shape(config_file, run_directory):
    taken = {
        "task": "mlm",
        "model.features": 64,
        "model.activation": "relu",
        "model.attention.kind": "mhe_mul",
        "model.attention_by_role.encoder.num_heads": 4,
        "model.kronecker.mlp": 2,
    }
    # How it is computed and regularized, and its head, stay its own.
    own = {
        "model.attention.form": "folded",
        "model.attention.engine": "blocked",
        "model.attention.dropout_rate": 0.3,
        "model.attention_by_role.encoder.dropout_rate": 0.2,
        "model.attention_by_role.encoder.form": "folded",
        "model.dropout_rate": 0.4,
        "model.kronecker.apply": "factored",
        "model.dtype": "bfloat16",
        "model.remat": True,
        "model.scan_layers": True,
        "model.num_classes": 7,
        "model.num_spans": 1,
        "model.pooling": "mean",
        "train.num_steps": 77,
    }
    ours = theirs = load_config(config_file)
    for name, value in (taken | own).items():
        theirs = set_field(theirs, name, value)
    save_json(theirs, run_directory / "config.json")
    given = ["--task", "mlm", "--train.init_from", str(run_directory), "--workdir", "none"]
    found = command_line.parse_train_arguments([config_file, *given])
    for name, value in taken.items():
        assert value_of(found, name) == value, name
    for name in own:
        assert value_of(found, name) == value_of(ours, name), name


def test_evaluation_arguments(run_directory):
    run, asked = str(run_directory), EvaluationConfig(beam_size=3)
    assert runs.parse_evaluation(run, []) == (asked, None)
    found = runs.parse_evaluation(run, ["--translate", "--length_penalty", "1"])
    assert found == (dataclasses.replace(asked, length_penalty=1.0), "translate")
    found = runs.parse_evaluation(run, ["--split", "validation"])
    assert found == (dataclasses.replace(asked, split="validation"), None)


BOTH = (Path("runs/a"), Path("runs/b"))
WANTED = ConversionConfig(kind="gqa", num_kv_heads=2, rows=0)
CALLS = {
    "compare a b/c --out o --choose x y": [
        ["a", "b/c"],
        Comparison(out="o", choose=("x", "y")),
    ],
    "factorize runs/a runs/b --attention 8 --mlp=16": [
        *BOTH,
        KroneckerConfig(attention=8, mlp=16),
    ],
    "convert runs/a runs/b --kind gqa --num_kv_heads=2 --rows 0": [*BOTH, WANTED],
    "export runs/a runs/b --to stablehlo --checkpoint=last --average_checkpoints 2": [
        *("runs/a", "runs/b", ("to", "stablehlo")),
        *(("checkpoint", "last"), ("average_checkpoints", 2)),
    ],
}


@pytest.mark.parametrize("line", CALLS)
def test_what_a_command_gets(monkeypatch, capfdbinary, line):
    calls = []

    def called(*places, **given):
        calls.append([*places, *given.items()])
        return {"errors": {}}

    rooms = {"compare": report, "factorize": from_run, "convert": uptraining, "export": interchange}
    for name, room in rooms.items():
        monkeypatch.setattr(room, name, called)
    commands.main(line.split())
    assert calls == [CALLS[line]]
    assert json.loads(capfdbinary.readouterr().out) == {"errors": {}}


# Help


def help_of(config_file, capfdbinary, *words):
    with pytest.raises(SystemExit) as stop:
        commands.main(["train", config_file, "--help", *words])
    assert not stop.value.code
    return capfdbinary.readouterr().out.decode()


def test_help_has_every_field_with_its_comment_and_the_configs_default(config_file, capfdbinary):
    text = help_of(config_file, capfdbinary, "all")
    for name in leaves(to_dict(Config())):
        assert f"--{name} " in text
    for comment in ("runs/full", "Updates in all.", "Number of query heads H.", "Übt auf a.txt."):
        assert comment in text
    assert "----" not in text


def test_help_has_few_fields_or_those_about_a_word(config_file, capfdbinary):
    short = help_of(config_file, capfdbinary)
    assert re.findall(r"^--([\w.]+)", short, re.MULTILINE) == command_line.FIRST.split()
    assert len(command_line.FIRST.split()) == short.count("(default: ")
    assert "Übt auf a.txt." in short
    found = re.findall(r"^--([\w.]+)", help_of(config_file, capfdbinary, "ROTARY"), re.MULTILINE)
    assert {"model.positions", "model.rotary_base"} <= {*found}
    assert "workdir" not in found
    with pytest.raises(InputError, match="--help nosuch: no field"):
        commands.main(["train", config_file, "--help", "nosuch"])


def test_a_missing_file_says_where_it_was_looked_for(tmp_path, monkeypatch, capsys):
    """Of the test, which `eval` reads alone, it is a note."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    config = set_field(load_config("multi30k"), "data.directory", str(tmp_path))
    for field in ("train", "validation"):
        config = set_field(config, f"data.{field}", ["a.txt"])
    commands.check_local_files(config, *commands.TRAINED_ON)
    commands.note_missing_test(set_field(config, "data.test", ["b.txt"]))
    note = capsys.readouterr().err
    where = rf"\(data\.test, in data\.directory={tmp_path}\)"
    assert re.match(rf"note: {tmp_path}/b\.txt: no such file {where}; only `eval`", note)
    for name, reason in (("c.txt", "no such file"), ("*.de", "no file matches")):
        missing = set_field(config, "data.train", ["a.txt", name])
        with pytest.raises(InputError, match=rf"{reason} \(data\.train, in .*\)$"):
            commands.check_local_files(missing, *commands.TRAINED_ON)
    with pytest.raises(InputError, match="data` fetches what shipped configs read"):
        commands.check_local_files(load_config("multi30k"), "train")


def test_eval_says_that_a_run_is_not_finished(run_directory, capsys, monkeypatch):
    monkeypatch.setattr("mhe_jax.evaluation.evaluate", lambda run, evaluation: {})
    (run_directory / "metrics.jsonl").write_text("")
    commands.main(["eval", str(run_directory)])
    assert "has not trained" in capsys.readouterr().err
    for steps in (load_config(str(run_directory)).train.num_steps, 1):
        (run_directory / "result.json").write_text(json.dumps({"steps": steps}))
        commands.main(["eval", str(run_directory)])
        assert ("has not trained" in capsys.readouterr().err) == (steps == 1)


def test_a_result_is_json_for_programs_and_lines_for_people(capfdbinary, monkeypatch):
    result = {"task": "lm", "parameters": {"total": 7}, "loss": 1.23456789, "changed": []}
    commands.tell(result)
    assert json.loads(capfdbinary.readouterr().out) == result
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    commands.tell(result)
    told = [line.split() for line in capfdbinary.readouterr().out.decode().splitlines()]
    wanted = [["task", "lm"], ["parameters.total", "7"], ["loss", "1.23457"], ["changed", "[]"]]
    assert told == wanted


def test_a_comparison_is_a_table_on_a_terminal(run_directory, capfdbinary, monkeypatch, tmp_path):
    found = {"parameters": {"total": 70_000, "attention": 9_000}}
    config = load_config(str(run_directory))
    sha = tmp_path / "runs" / "before"
    sha.mkdir()
    save_json(set_field(config, "model.attention.kind", "sha"), sha / "config.json")
    for place, loss in ((sha, 1.25), (run_directory, 1.5)):
        result = {"steps": config.train.num_steps, **found, "best_validation_loss": loss}
        (place / "result.json").write_text(json.dumps(result))
    monkeypatch.setattr(report, "pictures", lambda section: {})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    command = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    commands.main(command)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    _, head, row, *_, last = lines
    cells = dict(zip(re.split("  +", head.strip()), re.split("  +", row.strip()), strict=True))
    assert (cells["attention"], config.model.attention.kind) == ("sha", "mha")
    assert (cells["parameters"], cells["in attention"]) == ("70,000", "9,000")
    assert (cells["best validation loss"], cells["seeds"]) == ("1.25", "1")
    assert (cells["minus mha"], cells["against mha"]) == ("-0.25", "one seed")
    assert int(cells["cached numbers a token"].replace(",", "")) > 0
    assert str(tmp_path / "out" / "report.html") in last
    (run_directory / "result.json").unlink()
    commands.main(command)
    assert "1 not finished" in capfdbinary.readouterr().out.decode()


def test_a_complaint_is_as_short_where_standard_output_is_not_utf_8(config_file, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    with pytest.raises(InputError) as caught:
        command_line.parse_train_arguments([config_file, "--model.heads", "4"])
    assert re.fullmatch(
        r"unknown field --model\.heads; did you mean --model[^-]*(, --[^-]*)*", str(caught.value)
    )


# Commands by name


def start(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_commands_run_by_name():
    demo = (ROOT / "configs" / "demo.py").read_text(encoding="utf-8")
    assert start("-m", "mhe_jax", "configs", "show", "demo") == (0, demo, "")
    for command in (["-m", "mhe_jax", "tran"], ["eval.py", "compare"]):
        status, out, err = start(*command)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert re.match(f"error: .*({command[-1]}|train)", err)
