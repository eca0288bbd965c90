"""The rooms of the house: who may import whom, and what an import loads. Read by `ast`, not run."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
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
    "filelock": "training/resume.py",
    "fsspec": "config/places.py",
    "google_crc32c": "training/checkpoint",
    "matplotlib": "report/pictures.py",
    "orbax": "training/checkpoint",
    "pydantic": "config/fields.py",
    "sacrebleu": "tasks/metrics.py",
    "scipy": "tasks/metrics.py",
    "sentencepiece": "data/tokenizer.py",
    "sklearn": "tasks/metrics.py",
    "tensorboardX": "training/tracking.py",
    "tensorflow_datasets": "data/tfds_source.py",
    "tyro": "cli/arguments.py",
    "wandb": "training/tracking.py",
}


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: import by the full name"
            names.add(node.module)
            # `from mhe_jax import loading` and `from mhe_jax.data import rows`
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def users_of(wanted: Callable[[str], bool]) -> set[str]:
    """The files of the package that import a module that is wanted."""
    return {name(path) for path in FILES if any(map(wanted, imported(path)))}


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


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path):
    parts = [module.split(".") for module in imported(path)]
    theirs = {rest[0] for top, *rest in parts if top == "mhe_jax" and rest} & set(ROOMS)
    assert theirs <= set(ROOMS[: ROOMS.index(room(path)) + 1])


def test_the_library_imports_no_experiment():
    assert not [name(p) for p in FILES if any(m.startswith("experiments") for m in imported(p))]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_one_file(library):
    users = users_of(lambda module: module.split(".")[0] == library)
    assert users
    assert all(f"{user}/".startswith(f"{HOMES[library]}/") for user in users), users


@pytest.mark.parametrize("entry", ["train.py", "eval.py", "mhe_jax/__main__.py"])
def test_entry_points_import_no_library(entry):
    tops = {module.split(".")[0] for module in imported(ROOT / entry)}
    assert tops <= {"signal", "sys", "mhe_jax"}


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
    assert not users_of(lambda module: module.startswith("jax._src"))


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
    "module",
    [
        "mhe_jax.attention",
        "mhe_jax.attention.nnx",
        "mhe_jax; mhe_jax.make_attention('mha', num_heads=2)",
    ],
)
def test_attention_loads_jax_and_flax_only(module):
    packages = loaded_by(f"import {module}")
    assert {"jax", "flax"} <= packages
    of_flax = "import flax.linen" + ", flax.nnx" * module.endswith("nnx")  # which load more
    assert not (packages - loaded_by(of_flax)) & {*HOMES, "chex", "optax"}
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
