"""Tests of experiments run as those of the library do: see tests/conftest.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "attention"))]
pytest_plugins = ["tests.conftest"]


def pytest_ignore_collect(collection_path):
    """Programs have no doctests, and set what a process may set once."""
    path = collection_path
    return True if path.suffix == ".py" and not path.name.startswith("test_") else None
