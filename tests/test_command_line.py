"""Command lines and what they mean; every mistake is one line."""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhe_jax
from mhe_jax.cli import arguments as command_line
from mhe_jax.cli import commands, compare, convert, evaluate, export, factorize, train
from mhe_jax.config import Config, DataConfig, EvaluationConfig, InputError, KroneckerConfig
from mhe_jax.config.conversion import ConversionConfig
from mhe_jax.config.fields import hints_of, save_json, set_field
from mhe_jax.config.loading import load_config
from mhe_jax.interchange import FORMATS

ROOT = Path(__file__).parents[1]
CONFIG_FILE = """
from mhe_jax.config import Config, DataConfig


def get_config():
    return Config(task="lm", workdir="runs/full", data=DataConfig(train=("a.txt",)))
"""


def message(function, *arguments):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "language.py"
    path.write_text(CONFIG_FILE)
    return path


def test_train_arguments(config_file):
    arguments = "--model.attention.kind mhe_mul --optimizer.learning_rate=2e-3 --workdir w"
    config = command_line.parse_train_arguments(
        [str(config_file), *arguments.split(), "--data.train", "x y.txt"]
    )
    assert config.model.attention.kind == "mhe_mul"
    assert config.optimizer.learning_rate == 2e-3
    assert config.data.train == ("x y.txt",)
    assert config.workdir == "w"


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--data.validation a", "data.validation", ("a",)),
        ("--data.validation=a", "data.validation", ("a",)),
        ("--model.scan_layers True", "model.scan_layers", True),
        ("--optimizer.clip_norm None", "optimizer.clip_norm", None),
        ("--mesh.data -1", "mesh.data", -1),
        (
            "--model.attention_by_role.decoder.kind mqa",
            "model.attention_by_role.decoder.kind",
            "mqa",
        ),
        ("--train.num-steps 7", "train.num_steps", 7),
    ],
)
def test_an_override_changes_its_field_only(config_file, arguments, name, value):
    config = command_line.parse_train_arguments([str(config_file), *arguments.split()])
    assert config == set_field(load_config(str(config_file)), name, value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "--model.attention.kin mha",
            "unknown field --model.attention.kin; did you mean --model.attention.kind",
        ),
        ("--kind mha", "unknown field --kind; did you mean --model.attention.kind"),
        ("--lr 1", "unknown field --lr; did you mean --optimizer.learning_rate?"),
        ("--zzz 1", "unknown field --zzz; --help lists all"),
        (
            "--model.attention.kind mhx",
            "--model.attention.kind is 'mhx': takes one of mha, sha, mqa, gqa, skv, el, mhe_add, "
            "mhe_mul",
        ),
        ("--model.attention.kind mhe_mull", "mla, tpa; did you mean mhe_mul"),
        ("--data.batch_size=1.5", "--data.batch_size is '1.5': takes a whole number"),
        ("--data.batch_size", "--data.batch_size has no value: takes a whole number"),
        ("--train.num_steps 5 6", "--train.num_steps is '5 6': takes a whole number"),
        ("--model.remat yes", "--model.remat is 'yes': takes True or False"),
        (
            "--data.length_buckets 8 x",
            "--data.length_buckets is '8 x': takes any number of whole numbers",
        ),
        ("--optimizer.clip_norm x", "--optimizer.clip_norm is 'x': takes a number or None"),
        ("extra", "cannot place 'extra': every value follows its --dotted.field"),
        ("--data.batch_size 8 --model.attention.num_heads 5", "must divide model.features=512"),
    ],
)
def test_train_mistakes(config_file, capsys, arguments, complaint):
    arguments = [str(config_file), *arguments.split()]
    assert complaint in message(command_line.parse_train_arguments, arguments)
    assert capsys.readouterr() == ("", "")


def test_train_usage(capsys):
    assert "usage: train.py CONFIG" in message(command_line.parse_train_arguments, [])
    assert "usage: train.py CONFIG" in message(
        command_line.parse_train_arguments, ["--workdir", "w"]
    )
    with pytest.raises(SystemExit) as stop:
        command_line.parse_train_arguments(["--help"])
    assert stop.value.code == 0
    assert "usage: train.py CONFIG" in capsys.readouterr().out


def test_train_help_has_every_field_with_the_configs_defaults(config_file, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.parse_train_arguments([str(config_file), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in hints_of(Config):
        assert f"--{name} " in text
    assert "runs/full" in text
    assert "Updates in all." in text


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", "Übt auf a.txt."), ("ascii", "?bt auf")])
def test_help_of_a_config_begins_with_its_docstring(config_file, encoding, line):
    """Which says where its data come from."""
    text = config_file.read_text(encoding="utf-8")
    config_file.write_text(f'"""Übt auf a.txt."""\n{text}', encoding="utf-8")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(terminal), pytest.raises(SystemExit):
        command_line.parse_train_arguments([f"{config_file}", "--help"])
    terminal.flush()
    assert line in terminal.buffer.getvalue().decode(encoding).splitlines()[2]


@pytest.fixture
def run_directory(tmp_path):
    run = tmp_path / "runs" / "mul"
    run.mkdir(parents=True)
    data = DataConfig(train=("a.txt",), validation=("b.txt",))
    config = Config("lm", str(run), data=data, evaluation=EvaluationConfig(beam_size=3))
    save_json(config, run / "config.json")
    return run


def test_evaluation_arguments(run_directory):
    found, evaluation, action = evaluate.parse([str(run_directory)])
    assert (found, evaluation, action) == (run_directory, EvaluationConfig(beam_size=3), "score")
    arguments = f"{run_directory} --translate --length_penalty 1".split()
    _, evaluation, action = evaluate.parse(arguments)
    assert evaluation == EvaluationConfig(beam_size=3, length_penalty=1.0)
    assert action == "translate"
    _, evaluation, _ = evaluate.parse([str(run_directory), "--split", "validation"])
    assert evaluation == EvaluationConfig(split="validation", beam_size=3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--splt test", "unknown field --splt; did you mean --split"),
        ("--split train", "--split is 'train': takes one of validation, test"),
        ("--translate yes", "--translate is 'yes': takes no value"),
        ("--checkpoint newest", "evaluation.checkpoint is 'newest': takes best, last or a step"),
        ("--average_checkpoints 2", "needs evaluation.checkpoint last, not best"),
        ("--translate --generate", "--translate and --generate: give only one"),
        ("--translate --sources a b", "--sources is given with --translate, which reads standard"),
        ("--predict --split test", "--split is given with --predict, which reads standard"),
        ("--generate 3", "--generate is '3': takes no value"),
        ("--stride 129", "evaluation.stride is 129: at most data.sequence_length=128"),
        ("--stride 0", "evaluation.stride is 0: takes 1 or more"),
        ("--top_k 3", "evaluation.top_k is 3: needs evaluation.temperature above 0"),
        ("--temperature 1 --top_p 1.5", "evaluation.top_p is 1.5: takes a number above 0, at most"),
    ],
)
def test_evaluation_mistakes(run_directory, arguments, complaint):
    arguments = [str(run_directory), *arguments.split()]
    assert complaint in message(evaluate.parse, arguments)


def test_evaluation_usage(run_directory, capsys):
    assert "usage: eval.py RUN" in message(evaluate.parse, [])
    assert "usage: eval.py RUN" in message(evaluate.parse, ["--split", "test"])
    near = message(evaluate.parse, [str(run_directory.with_name("mull"))])
    assert near.startswith("no run at")
    assert str(run_directory) in near
    (run_directory / "config.json").unlink()
    assert "has no config.json" in message(evaluate.parse, [str(run_directory)])
    of_runs = run_directory / "runs"
    (of_runs / "one").mkdir(parents=True)
    (of_runs / "one" / "config.json").touch()
    told = message(evaluate.parse, [str(of_runs)])
    assert told.endswith(f"it has no config.json; did you mean {of_runs / 'one'}?")
    with pytest.raises(SystemExit) as stop:
        evaluate.parse(["--help"])
    assert stop.value.code == 0
    assert "usage: eval.py RUN" in capsys.readouterr().out


def test_evaluation_help(run_directory, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate.parse([str(run_directory), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in ("--translate", *(f"--{f.name} " for f in dataclasses.fields(EvaluationConfig))):
        assert name in text


@pytest.mark.parametrize(
    "script",
    [
        *("train", "eval", "compare", "paper", "convert", "factorize", "export"),
        *("explained", "conversion", "format", "all"),
    ],
)
def test_help_is_ascii(config_file, run_directory, script):
    """A terminal may show nothing else."""
    parse, arguments = {
        "train": (command_line.parse_train_arguments, [str(config_file)]),
        "eval": (evaluate.parse, [str(run_directory)]),
        "compare": (compare.parse, []),
        "factorize": (factorize.parse, []),
        "convert": (convert.parse, []),
        "conversion": (convert.parse, ["run", "new"]),
        "explained": (factorize.parse, ["run", "new"]),
        "export": (export.parse, []),
        "format": (export.parse, ["run", "out"]),
        "paper": (commands.main, ["paper"]),
        "all": (commands.main, []),
    }[script]
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(terminal), pytest.raises(SystemExit) as stop:
        parse([*arguments, "--help"])
    assert stop.value.code == 0
    terminal.flush()
    assert b"usage: " in terminal.buffer.getvalue()


def test_factorize_arguments():
    arguments = ["runs/a", "runs/b", "--attention", "8", "--mlp=16"]
    assert factorize.parse(arguments) == (
        Path("runs/a"),
        Path("runs/b"),
        KroneckerConfig(attention=8, mlp=16),
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run", "two directories come first; usage: python -m mhe_jax factorize RUN NEW"),
        ("run --mlp 2", "two directories come first; usage: "),
        ("run new --mlp many", "--mlp is 'many': takes a whole number or None"),
        ("run new --mpl 2", "unknown field --mpl; did you mean --mlp"),
    ],
)
def test_factorize_mistakes(arguments, complaint):
    assert complaint in message(factorize.parse, arguments.split())


def test_convert_arguments():
    arguments = ["runs/a", "runs/b", "--kind", "gqa", "--num_kv_heads=2", "--rows", "0"]
    assert convert.parse(arguments) == (
        Path("runs/a"),
        Path("runs/b"),
        ConversionConfig(kind="gqa", num_kv_heads=2, rows=0),
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run", "two directories come first; usage: python -m mhe_jax convert RUN NEW"),
        ("run --kind mqa", "two directories come first; usage: "),
        ("run new --kind mhe_mull", "--kind is 'mhe_mull': takes one of mha, sha, "),
        ("run new --kind mhe_mull", ", tpa; did you mean mhe_mul"),
        ("run new --kind=mhe_mull", ", tpa; did you mean mhe_mul"),
        ("run new --kind=mva --score_features many", "--score_features is 'many': takes a whole"),
        ("run new --kin mqa", "unknown field --kin; did you mean --kind"),
    ],
)
def test_convert_mistakes(arguments, complaint):
    assert complaint in message(convert.parse, arguments.split())


def test_export_arguments():
    arguments = ["runs/a", "out", "--to", "ctranslate2", "--checkpoint=last"]
    assert export.parse(arguments) == (
        Path("runs/a"),
        Path("out"),
        export.ExportArguments(to="ctranslate2", checkpoint="last"),
    )


def test_export_gets_all_that_was_given(monkeypatch, capsys):
    told = {}
    monkeypatch.setattr(export, "export", lambda *_, **given: told.update(given) or {})
    arguments = "run out --to stablehlo --checkpoint last --average_checkpoints 2"
    export.main(arguments.split())
    assert told == {"checkpoint": "last", "average_checkpoints": 2}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run", "two directories come first; usage: python -m mhe_jax export RUN OUT --to"),
        ("run --to safetensors", "two directories come first; usage: "),
        ("run out", "no format is given: takes --to safetensors or huggingface or ctranslate2"),
        ("run out --too stablehlo", "unknown field --too; did you mean --to"),
        ("run out --to stablehlo --average_checkpoints few", "--average_checkpoints is 'few': "),
    ],
)
def test_export_mistakes(arguments, complaint):
    assert complaint in message(export.parse, arguments.split())


@pytest.mark.parametrize("command", [convert, export, factorize])
def test_help_is_no_second_directory_and_nothing_is_none(command, capsys):
    """`export $RUN $OUT` of names that are not set has done nothing: it does not end well."""
    assert "two directories come first; usage: " in message(command.parse, [])
    with pytest.raises(SystemExit, match="^0$"):
        command.parse(["runs/a", "--help"])
    assert capsys.readouterr().out.startswith("usage: ")


def test_help_of_export_lists_the_formats(capsys):
    with pytest.raises(SystemExit):
        export.parse(["--help"])
    text = capsys.readouterr().out
    for name, form in FORMATS.items():
        assert re.search(rf"\n    {name} +{re.escape(form.summary)}\n", text)


@pytest.mark.parametrize("command", [convert, export, factorize])
def test_help_names_the_command_as_it_was_called(command, capsys, monkeypatch):
    """With braces of its own in no text: it is filled in."""
    name = command.__name__.rpartition(".")[2]
    for program, called in {
        "/bin/mhe-jax": f"mhe-jax {name}",
        "mhe_jax/__main__.py": f"python -m mhe_jax {name}",
    }.items():
        monkeypatch.setattr(sys, "argv", [program, name])
        with pytest.raises(SystemExit):
            command.parse(["--help"])
        text = capsys.readouterr().out
        assert text.startswith(f"usage: {called} R")
        assert f"`{called} R" in text
        assert program == "/bin/mhe-jax" or "mhe-jax" not in text
        assert program != "/bin/mhe-jax" or "python" not in text
        assert f"usage: {called} R" in message(command.parse, ["run"])


# Commands by name


def test_every_command_has_its_name(capsys):
    with pytest.raises(SystemExit) as stop:
        commands.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in commands.COMMANDS:
        assert f"\n  {name} " in text
    with pytest.raises(SystemExit) as stop:
        commands.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"mhe_jax {mhe_jax.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "no command given: takes one of train, eval, compare, paper, "),
        ("", "; usage: python -m mhe_jax COMMAND [arguments]; --help says what each does"),
        ("tran configs/demo.py", "no command tran: takes one of train, "),
        ("tran configs/demo.py", "; did you mean train?"),
        ("--workdir runs/a", "no command --workdir: takes one of train, "),
        ("train", "no config given; usage: train.py CONFIG"),
        ("eval", "no run given; usage: eval.py RUN"),
        ("compare", "no runs given; usage: eval.py compare RUNS"),
        ("eval compare", "no runs given; usage: eval.py compare RUNS"),
        ("paper now", "eval.py paper takes no arguments, not now"),
        ("eval paper now", "eval.py paper takes no arguments, not now"),
        ("factorize run", "two directories come first; usage: python -m mhe_jax factorize"),
    ],
)
def test_a_command_gets_the_arguments_behind_its_name(arguments, complaint):
    assert complaint in message(commands.main, arguments.split())


def start(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_commands_run_by_name():
    status, out, err = start("-m", "mhe_jax", "paper")
    assert (status, err) == (0, "")
    json.loads(out.splitlines()[-1])
    assert start("eval.py", "paper") == (status, out, err)
    status, out, err = start("-m", "mhe_jax", "tran")
    assert (status, out) == (2, "")
    assert err.startswith("error: no command tran")
    assert err.count("\n") == 1


@pytest.mark.parametrize("start_again", [(), (("python", "train.py"),)], ids=["module", "script"])
def test_a_sweep_starts_its_runs_as_it_was_started(monkeypatch, config_file, start_again):
    calls = []
    outcome = {"runs": [], "failed": 1}
    monkeypatch.setattr(train.sweep, "run", lambda plan, command: calls.append(command) or outcome)
    with pytest.raises(SystemExit) as stop:
        train.main([str(config_file), "--seeds", "2"], *start_again)
    assert stop.value.code == 1
    module = (sys.executable, "-m", "mhe_jax", "train")
    assert calls == [*(start_again or [module])]
    if not start_again:
        assert start(*module[1:], "--help")[1].startswith("usage: python -m mhe_jax train CONFIG")
