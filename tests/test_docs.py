"""Every command of README, docs and the configs' docstrings is understood by its program.

They are parsed in the order in which a reader types them: a run that a command names must have been
made by one before.
"""

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_configs import CONFIGS, EACH, load

from mhe_jax.cli import commands, runs, sweep
from mhe_jax.cli.arguments import parse_fields, parse_target, parse_train_arguments
from mhe_jax.config import Comparison, Config, ConversionConfig, InputError, KroneckerConfig
from mhe_jax.config.fields import load_json, save_json
from mhe_jax.config.loading import load_config
from mhe_jax.training.distributed import take_flags

ROOT = Path(__file__).parents[1]
# In the order of the site, in which they are read.
NAVIGATION = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [f"docs/{name}" for name in NAVIGATION if (ROOT / "docs" / name).exists()]
DOCSTRINGS = [f"configs/{path.name}" for path in CONFIGS]
PROGRAM = re.compile(r"python (?:train\.py|eval\.py|-m mhe_jax)(?= )")
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
# What stands for a name that the reader fills in.
FILLED_IN = {"CONFIG": "configs/demo.py", "DIR": "runs/of-the-reader", "RUN": "runs/demo"}
# Commands that make a run of another, and what they take.
MAKING = {
    "factorize": KroneckerConfig,
    "export": runs.ExportArguments,
    "convert": ConversionConfig,
}


def text_of(name: str) -> str:
    """A page, or the docstring of a config."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or "" if name.endswith(".py") else text


def lines_of(text: str) -> Iterator[str]:
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
    """(command of `python -m mhe_jax` or make, its arguments) in order."""
    for line in lines_of(text):
        if not PROGRAM.search(line) and not line.lstrip().startswith("make "):
            continue
        for words in simple_commands(line):
            # `$run` of a loop over runs is one of them.
            words = ["runs/demo" if w == "$run" else FILLED_IN.get(w, w) for w in words]
            if words[:1] == ["make"]:
                yield "make", words[1:]
            elif "python" in words and words[-1] != "python":
                program, *arguments = words[words.index("python") + 1 :]
                name = {"train.py": "train", "eval.py": "eval"}.get(program)
                if arguments[:1] == ["mhe_jax"]:
                    name, *arguments = arguments[1:]
                if name in commands.COMMANDS:
                    yield name, arguments


def leave(config: Config) -> None:
    save_json(config, Path(config.workdir) / "config.json")


def understand(command: str, arguments: list[str]) -> None:
    """Parses a command as its program does; a run that it would make gets its config.

    Raises:
      InputError, AssertionError: it is wrong, or reads what there is not.
    """
    if command == "make":
        assert arguments[0] in TARGETS
        return
    if command == "eval" and arguments[0] == "compare":
        command, *arguments = arguments
    if "--help" in arguments:
        return
    places, options = commands.split(command, arguments)
    if command == "train" and {"--sweep", "--seeds"} & {*options}:
        for run, _ in sweep.parse(arguments).runs:
            leave(run)
    elif command == "train":
        target, rest = parse_target(options)
        config = parse_train_arguments([*places, *take_flags(rest)[1]])
        if target is None and not config.workdir.startswith(("/", "$")):
            leave(config)
    elif command in MAKING:
        run, new = map(Path, places)
        wanted = parse_fields(MAKING[command](), options, command, *places)
        foreign = wanted == ConversionConfig()  # which is not here
        config = load_config("configs/bert_base.py") if foreign else load_json(run / "config.json")
        leave(dataclasses.replace(config, workdir=str(new)))
    elif command == "compare":
        mine = [path for path in places if path.startswith(("runs/", "experiments/"))]
        assert all(Path(path).exists() for path in mine)
        parse_fields(Comparison(), options, command)
    elif command == "eval":
        runs.parse_evaluation(places[0], take_flags(options)[1])


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """What is wrong in each text, read one after the other, when every config has a run."""
    found: dict[str, list[str]] = {}
    place = tmp_path_factory.mktemp("clone")
    for name in ("configs", "docs", "experiments"):
        (place / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("JAX_PLATFORMS", "cpu")  # `--compile_only` sets it
        for param in EACH:
            leave(load(*param.values))
        for name in [*DOCSTRINGS, *PAGES]:
            found[name] = []
            for command, arguments in commands_of(text_of(name)):
                try:
                    understand(command, arguments)
                except (InputError, SystemExit, AssertionError) as error:
                    found[name].append(f"{shlex.join([command, *arguments])}: {error}")
    return found


@pytest.mark.parametrize("name", [*PAGES, *DOCSTRINGS])
def test_every_command_is_understood(name, mistakes):
    """And as many are read as a plain search finds; every config has one."""
    text = text_of(name)
    found = [command for command, _ in commands_of(text) if command != "make"]
    assert len(found) == len(PROGRAM.findall(text))
    assert found or name.endswith(".md")
    assert not mistakes[name]
