"""The rooms of the house: who may import whom, and what an import loads. Read by `ast`, not run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mhe_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# A file imports from its own room and from those before it.
ROOMS = [
    "config",
    "attention",
    "shapeshifter",
    "hashformers",
    "model",
    "data",
    "tasks",
    "training",
    "analysis",
    "evaluation",
    "report",
    "interchange",
    "__init__",  # what a user types first
    "cli",
    "__main__",
]

# Libraries that one file, or one package of files, imports; where it cannot be one, each of them.
HOMES = {
    "babel": "data/phrases.py",
    "filelock": "training/run/lock.py",
    "fsspec": "config/places.py",
    "google_crc32c": "training/checkpoint",
    "grain": "data/loader.py",
    "matplotlib": "training/curve.py",
    "num2words": "data/phrases.py",
    "orbax": "training/checkpoint",
    "rich": "training/tracking.py",
    "pydantic": "config/fields.py",
    "sacrebleu": "tasks/metrics.py",
    "scipy": "tasks/labelled/scores.py",
    "sentencepiece": "data/tokenizer.py",
    "sklearn": "tasks/labelled/scores.py",
    "tensorboardX": "training/metric_writers.py",
    "tensorflow_datasets": "data/tfds_source.py",
    "tyro": "cli/arguments.py",
    "wandb": "training/metric_writers.py",
}

# Names that say nothing about what is inside.
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: import by the full name"
            names.add(node.module)
            # `from mhe_jax import loading` and `from mhe_jax.data import phrases`
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    """Of a file outside of the package, its own name."""
    inside = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.relative_to(ROOT)
    return inside.parts[0].removesuffix(".py")


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_circle():
    """Among files, imports inside functions included."""
    files = {module_of(path): path for path in FILES}
    left = {name: imported(path) & set(files) - {name} for name, path in files.items()}
    for needs in left.values():
        # `from room import file` needs the file, and the room's `__init__.py` no more than any.
        needs -= {need.rpartition(".")[0] for need in needs}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert not left


def test_every_file_has_a_room():
    assert {room(path) for path in FILES} <= set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path):
    own = room(path)
    allowed = set(ROOMS[: ROOMS.index(own) + 1]) if own in ROOMS else set()
    theirs = {
        parts[1]
        for parts in (module.split(".") for module in imported(path))
        if parts[0] == "mhe_jax" and len(parts) > 1
    }
    assert theirs & set(ROOMS) <= allowed


def test_the_library_imports_no_experiment():
    assert not [name(p) for p in FILES if any(m.startswith("experiments") for m in imported(p))]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_one_file(library):
    users = {
        name(path)
        for path in FILES
        if any(module.split(".")[0] == library for module in imported(path))
    }
    named = HOMES[library]
    homes = {named} if isinstance(named, str) else {*named}
    within = {user: [home for home in homes if f"{user}/".startswith(f"{home}/")] for user in users}
    assert {home for found in within.values() for home in found} == homes
    assert all(within.values()), within


@pytest.mark.parametrize("entry", ["train.py", "eval.py", "mhe_jax/__main__.py"])
def test_entry_points_import_no_library(entry):
    tops = {module.split(".")[0] for module in imported(ROOT / entry)}
    assert tops <= {"signal", "sys", "mhe_jax"}


def test_nothing_imports_the_command_line_but_entry_points():
    users = {
        str(path.relative_to(ROOT))
        for path in [*FILES, *ROOT.glob("*.py")]
        if any(f"{module}.".startswith("mhe_jax.cli.") for module in imported(path))
        and room(path) != "cli"
    }
    assert users == {"train.py", "eval.py", "mhe_jax/__main__.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.name)
def test_configs_import_the_config_only(path):
    assert {module for module in imported(path) if module.count(".") < 2} <= {
        "dataclasses",
        "dataclasses.replace",
        "typing",
        "typing.Literal",
        "mhe_jax.config",
    }


def test_no_private_names_of_jax():
    users = {
        name(path)
        for path in FILES
        if any(module.startswith("jax._src") for module in imported(path))
    }
    assert not users


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_state_is_hidden_in_frozen_objects(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr == "__setattr__":
            pytest.fail(f"{path}:{node.lineno}: what a call decides is passed on as a value")


def test_no_room_without_a_meaning():
    python = [*FILES, *ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for path in python:
        assert not NAMELESS & {path.stem, path.parent.name}, path


def loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh Python after `code`."""
    code += "\nimport sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_package_loads_nothing():
    code = "import mhe_jax; assert mhe_jax.__all__ == ['InputError', 'load', 'make_attention']"
    assert not {"jax", "flax", "numpy"} & loaded_by(code)
    assert not {"jax", "flax", "numpy"} & loaded_by(f"{code}; mhe_jax.InputError('x')")


@pytest.mark.parametrize(
    "module", ["mhe_jax.attention", "mhe_jax; mhe_jax.make_attention('mha', num_heads=2)"]
)
def test_attention_loads_jax_and_flax_only(module):
    packages = loaded_by(f"import {module}")
    assert {"jax", "flax"} <= packages
    own = packages - loaded_by("import flax.linen")  # Flax itself loads rich
    assert not own & {*HOMES, "chex", "optax"}
    assert not packages & {"grain", "orbax", "sentencepiece", "tensorflow_datasets"}


@pytest.mark.parametrize(
    "arguments",
    [
        "train configs/demo.py --train.num_steps 3 --wrong",
        "train configs/demo.py --seeds 2 --wrong",
        "train configs/demo.py --compile_only --topology v5e:2x2 --wrong",
        "eval experiments/paper/records/warm/16 --wrong",
        "compare experiments/paper/records/warm --wrong",
        "factorize experiments/paper/records/warm/16 new --wrong",
        "export experiments/paper/records/warm/16 new --wrong",
    ],
)
def test_arguments_are_parsed_before_jax_is_loaded(arguments):
    code = f"""
from mhe_jax.cli.commands import main
from mhe_jax.config import InputError
try:
    main({arguments.split()!r})
except InputError as error:
    assert "unknown field --wrong" in str(error)
"""
    assert not {"jax", "flax", "numpy"} & loaded_by(code)
