"""Code of the pages runs, and the notebooks run from their first cell to the last.

Their code cells run as one script, in an empty directory: no kernel has to be installed for that.
A line that begins with `!` goes to a shell, as in a notebook.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def script(path: Path) -> str:
    code = ("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")
    lines = "\n\n".join(code).splitlines()
    return "\n".join(
        re.sub(r"^!(.*)$", lambda found: f"subprocess.run({found[1]!r}, shell=True, check=True)", s)
        for s in lines
    )


@pytest.mark.parametrize(("name", "count"), [("README.md", 1), ("docs/your_model.md", 4)])
def test_the_code_of_attention_runs(name, count):
    """One piece after the other, in the same names."""
    pieces = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / name).read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    pieces = [piece for piece in pieces if re.search("mhe_jax.attention|make_attention", piece)]
    assert len(pieces) == count
    names: dict = {}
    for piece in pieces:
        exec(compile(piece, name, "exec"), names)


@pytest.mark.whole_run
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """With a tenth of its training steps, where it trains."""
    run(script(path).replace("num_steps 400", "num_steps 40"), tmp_path)


@pytest.mark.slow
def test_what_is_served_is_what_is_translated(tmp_path):
    told = run(script(ROOT / "docs" / "notebooks" / "train_translate_export.ipynb"), tmp_path)
    assert re.findall(r"^(True|False) \w", told, re.MULTILINE) == ["True"] * 3


def run(code: str, place: Path) -> str:
    (place / "cells.py").write_text(code, encoding="utf-8")
    flags = os.environ["XLA_FLAGS"].split()
    environment = {
        **os.environ,
        # Of one device, as where notebooks run.
        "XLA_FLAGS": " ".join(flag for flag in flags if "device_count" not in flag),
        "MPLBACKEND": "agg",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
