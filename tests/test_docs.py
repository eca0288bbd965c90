"""Every command of README, docs and the configs' docstrings is understood, and runs.

All are parsed as their programs parse them, in the order in which a reader types them: a run that a
command names must have been made by one before. Those of the demo really run, with a tiny budget;
so do the others, on files of the right form that are made here, among the slow tests.
"""

import ast
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from labelled_files import FILES
from pyarrow import parquet
from test_configs import CONFIGS, EACH, load

from mhe_jax.cli import commands, compare, convert, evaluate, export, factorize, sweep
from mhe_jax.cli.arguments import (
    parse_target,
    parse_train_arguments,
)
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import load_json, save_json
from mhe_jax.config.loading import load_config
from mhe_jax.data.published import PUBLISHED
from mhe_jax.interchange import FORMATS
from mhe_jax.training.cluster.distributed import take_flags

ROOT = Path(__file__).parents[1]
# In the order of the site, in which they are read.
NAVIGATION = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}" for name in NAVIGATION if (ROOT / "docs" / name).exists()),
]
DOCSTRINGS = [f"configs/{path.name}" for path in CONFIGS]
PROGRAM = re.compile(r"python (?:train\.py|eval\.py|-m mhe_jax)(?= )")
TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
# What stands for a name that the reader fills in.
FILLED_IN = {"CONFIG": "configs/demo.py", "DIR": "runs/of-the-reader", "RUN": "runs/demo"}
# Why a command is parsed and does not run here, by what it contains.
NOT_RUN = {
    "data": "tests/data/test_getting.py fetches",
    "--help": "tests/test_command_line.py reads it",
    "--sweep": "tests/test_sweep.py starts a process for each run",
    "--compile_only": "tests/training/test_ahead.py compiles for devices that need not be there",
    "--distributed": "needs a cluster; tests/training/test_processes.py starts processes",
    "--coordinator": "needs a second process; tests/training/test_processes.py starts two",
}


# The commands of a text


def text_of(name: str) -> str:
    """A page, or the docstring of a config."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or "" if name.endswith(".py") else text


def shell_lines(text: str) -> Iterator[str]:
    """Lines of fenced and indented blocks, and what stands between backticks elsewhere."""
    prose, fenced = [], False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line
        else:
            prose.append(line)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", "\n".join(prose)))


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line of shell, those in quotes for another shell too."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if PROGRAM.search(word):
            yield from simple_commands(word)
        elif set(word) <= set(";|&<>()"):
            yield words
            words = []
        else:
            words.append(word)


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command of `python -m mhe_jax` or make, its arguments) in order; shell loops as one."""
    for line in shell_lines(text):
        if not PROGRAM.search(line) and not line.lstrip().startswith("make "):
            continue
        for words in simple_commands(line):
            words = [FILLED_IN.get(word, word).replace("$PWD", os.getcwd()) for word in words]
            program = " ".join(words[:2])
            if words[:1] == ["make"]:
                yield "make", words[1:]
            elif "python" in words and words[-1] != "python":
                program, *arguments = words[words.index("python") + 1 :]
                name = {"train.py": "train", "eval.py": "eval", "-m": "mhe_jax"}.get(program)
                if name == "mhe_jax" and arguments[:1] == ["mhe_jax"]:
                    name, *arguments = arguments[1:]
                if name in commands.COMMANDS:
                    loop = re.search(r"for (\w+) in (\S+);", line)
                    yield name, [as_in_the_loop(word, loop) for word in arguments]


def as_in_the_loop(word: str, loop: re.Match | None) -> str:
    """`$run` of `for run in runs/*/` is the first that there is, if there is any."""
    if loop is None or word != f"${loop[1]}":
        return word
    return str(min(Path().glob(loop[2]), default=word))


def flag(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


# What they mean


def clone(place: Path) -> Path:
    """Makes of `place` a clone without runs and data."""
    for name in ("configs", "docs"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty clone, in which everything is started."""
    monkeypatch.chdir(clone(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # `--compile_only` sets it
    return tmp_path


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """What is wrong in each text, read one after the other, when every config has a run."""
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone(tmp_path_factory.mktemp("clone")))
        patch.setenv("JAX_PLATFORMS", "cpu")
        for param in EACH:
            leave(load(*param.values))
        for name in [*DOCSTRINGS, *PAGES]:
            found[name] = []
            for command, arguments in commands_of(text_of(name)):
                try:
                    understand(command, arguments)
                except (InputError, SystemExit) as error:
                    found[name].append(f"{spelled(command, arguments)}: {error}")
    return found


def leave(config: Config) -> None:
    save_json(config, Path(config.workdir) / "config.json")


def understand(command: str, arguments: list[str]) -> None:
    """Parses a command as its program does; a run that it would make gets its config.

    Raises:
      InputError: it is wrong, or reads what there is not.
    """
    if command == "make":
        if arguments[0] not in TARGETS:
            raise InputError(f"no target {arguments[0]} in the Makefile")
    elif "--help" in arguments:
        assert arguments[0] == "--help" or load_config(arguments[0])
    elif command == "train" and sweep.is_sweep(arguments):
        for run in sweep.parse(arguments).runs:
            leave(run.config)
    elif command == "train":
        target, rest = parse_target(arguments)
        config = parse_train_arguments(take_flags(rest)[1])
        if target is None and not config.workdir.startswith("/"):
            leave(config)
    elif command == "data":
        if arguments and arguments[0] not in PUBLISHED and "/" not in arguments[0]:  # of TFDS
            raise InputError(f"no text {arguments[0]}")
    elif command == "factorize":
        run, new, kronecker = factorize.parse(arguments)
        config = load_json(run / "config.json")
        model = dataclasses.replace(config.model, kronecker=kronecker)
        leave(dataclasses.replace(config, model=model, workdir=str(new)))
    elif command == "export":
        run, out, given = export.parse(arguments)
        config = load_json(run / "config.json")
        if given.to == "safetensors":
            leave(dataclasses.replace(config, workdir=str(out)))
        elif given.to not in FORMATS:
            raise InputError(f"no format {given.to}")
    elif command == "convert":
        run, new, wanted = convert.parse(arguments)
        if wanted.kind is None:  # a model of transformers, which is not here
            return leave(dataclasses.replace(load_config("configs/bert_base.py"), workdir=str(new)))
        config = load_json(run / "config.json")
        fields = {k: v for k, v in vars(wanted).items() if k != "rows"}
        attention = dataclasses.replace(config.model.attention, **fields)
        model = dataclasses.replace(config.model, attention=attention)
        leave(dataclasses.replace(config, model=model, workdir=str(new)))
    elif "compare" in (command, *arguments[:1]):
        for path in compare.parse(arguments[command == "eval" :])[0]:
            if not Path(path).exists():
                raise InputError(f"no runs at {path}")
    elif "paper" in (command, *arguments[:1]):
        assert arguments in ([], ["paper"])
    else:
        evaluate.parse(take_flags(arguments)[1])


def spelled(command: str, arguments: list[str]) -> str:
    return shlex.join([command, *arguments])


@pytest.mark.parametrize("name", [*PAGES, *DOCSTRINGS])
def test_every_command_is_understood(name, mistakes):
    assert not mistakes[name]


@pytest.mark.parametrize("name", [*PAGES, *DOCSTRINGS])
def test_no_command_is_missed(name):
    """As many are read as a plain search finds; and every config has one."""
    text = text_of(name)
    found = [command for command, _ in commands_of(text) if command != "make"]
    assert len(found) == len(PROGRAM.findall(text))
    assert found or name.endswith(".md")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("    python train.py configs/demo.py --train.steps 3", "unknown field --train.steps"),
        ("`python eval.py\nruns/demo --splt test`", "unknown field --splt"),
        ("```\npython train.py configs/damo.py\n```", "no config file configs/damo.py"),
        ("    cd x && python eval.py runs/of-nobody  # a word", "no run at runs/of-nobody"),
        ("    python -m mhe_jax factorize runs/demo new --mpl 3", "unknown field --mpl"),
        ("    python -m mhe_jax export runs/demo out --to onnx", "no format onnx"),
        ("    ssh host 'python train.py configs/demo.py --lr 1'", "unknown field --lr"),
        ("    python eval.py compare docs/recards", "no runs at docs/recards"),
        ("    make deme", "no target deme"),
    ],
)
def test_a_wrong_command_is_told(text, complaint, place):
    leave(load_config("configs/demo.py"))
    ((command, arguments),) = commands_of(text)
    with pytest.raises(InputError, match=complaint):
        understand(command, arguments)


# The walks of CONTRIBUTING

STOPS = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "CONTRIBUTING.md").read_text())


def test_the_walks_have_their_stops():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Five walks\n")[2]
    walks = text.split("\n**")[1:]
    assert len(walks) == 5
    assert all(len(re.findall(r"^- `[\w/]+\.py: [\w.]+`: \w", walk, re.M)) > 5 for walk in walks)
    assert text.count("\n- ") == text.count("\n- `")


@pytest.mark.parametrize(("file", "name"), STOPS, ids=lambda part: part)
def test_a_stop_of_a_walk_is_there(file, name):
    """A function, class or method of this name is defined in this file."""
    scope: ast.AST = ast.parse((ROOT / "mhe_jax" / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
        )


# Code of attention, which needs no run


@pytest.mark.parametrize(("name", "count"), [("README.md", 1), ("docs/your_model.md", 4)])
def test_the_code_of_attention_runs(name, count):
    """One piece after the other, in the same names."""
    pieces = re.findall(r"^```python\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)
    pieces = [
        piece for piece in pieces if "mhe_jax.attention" in piece or "make_attention" in piece
    ]
    assert len(pieces) == count
    names: dict = {}
    for piece in pieces:
        exec(compile(piece, name, "exec"), names)


# What they do

# Added to a command of `train`: two steps of a small model, which leave one checkpoint.
BUDGET = (
    "--train.num_steps 2 --train.log_every 1 --data.lsh_pieces 400 "
    "--evaluation.average_checkpoints 1"
)
SMALL = (
    "--model.features 32 --model.mlp_features 32 --model.num_layers 1 --model.num_decoder_layers 1 "
    "--model.attention.num_heads 2 --model.vocabulary_size 400"
)
SYLLABLES = ["ka", "lo", "mi", "nu", "pe", "ra", "so"]


def with_budget(command: str, arguments: list[str]) -> list[str]:
    """The arguments of the same command, which then takes seconds."""
    if command == "train":
        own = {part for part in arguments if part.startswith("--")}
        small = [] if "--train.init_from" in own else SMALL.split()
        if (flag(arguments, "--model.hashing") or "").startswith("md_"):
            small = small[:-2]
        extra = [*BUDGET.split(), *small]
        pairs = [extra[i : i + 2] for i in range(0, len(extra), 2) if extra[i] not in own]
        arguments = [*arguments, *(part for pair in pairs for part in pair)]
    elif arguments[:1] == ["compare"]:
        arguments = [*arguments, "--lengths", "16"]
    elif arguments[:1] != ["paper"] and command == "eval":
        arguments = [*arguments, "--beam_size", "2", "--extra_length", "2"]
    return arguments


def content_of(config: Config, name: str, count: int) -> bytes:
    """A file of the form that the config reads under this name."""
    plain = name.removesuffix(".gz").removesuffix(".xz")
    words = ["".join(three) for three in itertools.product(SYLLABLES, repeat=3)]
    lines = [" ".join(words[i * k % len(words)] for k in range(1, 9)) for i in range(1, count)]
    data = config.data
    if data.dataset != "own":
        stem = "train" if "train" in name else "test" if "test" in name else "dev"
        files = {Path(file).stem: text for file, text in FILES[data.dataset].items()}
        text = files.get(stem) or files.get("val") or files["dev"]
        if stem != "test" and plain.endswith(".tsv"):
            head, *rows = text.splitlines()
            text = "\n".join([head, *rows * 16]) + "\n"
    elif config.task == "classification":
        head = "\t".join([*data.fields, data.label_field])
        rows = (f"{line}\t{line}\t{'ab'[i % 2]}" for i, line in enumerate(lines))
        text = "\n".join([head, *rows])
    elif plain.endswith(".parquet"):
        out = io.BytesIO()
        parquet.write_table(pyarrow.table(dict.fromkeys(data.fields, lines)), out)
        return out.getvalue()
    elif plain.endswith(".jsonl"):
        text = "\n".join(json.dumps(dict.fromkeys(data.fields, line)) for line in lines)
    else:
        tab = "\t" if plain.endswith(".tsv") else None
        text = "\n".join(line if tab is None else f"{line}{tab}{line}" for line in lines) + "\n"
    pack = gzip.compress if name.endswith(".gz") else lzma.compress if name != plain else bytes
    return pack(text.encode())


def leave_data(config: Config) -> str | None:
    """Makes the files that a run reads; else why they cannot be made."""
    data = config.data
    names = {*data.train, *data.validation, *data.test}
    if any(name.startswith("tfds:") for name in names):
        return "reads a TFDS data set; tests/data/test_tfds.py reads small ones"
    for name in sorted(name for name in names if not name.startswith("demo:")):
        path = Path(data.directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(content_of(config, name, 400))
    return None


def why_not(command: str, arguments: list[str]) -> str | None:
    """Why a command cannot run here; else its data is made, and it can."""
    for part in (command, *arguments):
        if part in NOT_RUN:
            return NOT_RUN[part]
    if command == "train":
        reads = flag(arguments, "--train.init_from")
    else:
        reads = next((part for part in arguments if part not in ("compare", "paper")), None)
    if reads is not None and not Path(reads).exists():
        return f"no command that ran makes {reads}"
    return leave_data(parse_train_arguments(arguments)) if command == "train" else None


def run_all(name: str, monkeypatch, capfdbinary) -> list[str]:
    """Runs the commands of a text but `make`, which calls others; returns why some cannot."""
    reasons = []
    for command, arguments in commands_of(text_of(name)):
        why = None if command == "make" else why_not(command, arguments)
        if why:
            reasons.append(f"{spelled(command, arguments)}: {why}")
        if why or command == "make":
            continue
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"half past nine\n")))
        capfdbinary.readouterr()
        commands.main([command, *with_budget(command, arguments)])
        out, err = capfdbinary.readouterr()
        lines = err if {"--translate", "--generate", "--predict"} & {*arguments} else out
        json.loads(lines.splitlines()[-1])
    return reasons


@pytest.mark.whole_run
def test_the_commands_of_the_demo_run(place, monkeypatch, capfdbinary):
    assert not run_all("configs/demo.py", monkeypatch, capfdbinary)
    assert (place / "runs/demo/eval_test.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAGES, *(n for n in DOCSTRINGS if n != "configs/demo.py")])
def test_the_commands_run(name, place, monkeypatch, capfdbinary):
    reasons = run_all(name, monkeypatch, capfdbinary)
    if reasons:
        pytest.skip(f"{len(reasons)} commands are only parsed: {'; '.join(reasons)}")
