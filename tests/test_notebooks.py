"""Code of the pages runs, and the notebooks run from their first cell to the last.

Their code cells run as one script, in an empty directory: no kernel has to be installed for that.
A line that begins with `!` goes to a shell, as in a notebook.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mhe_jax.config.fields import leaves

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def script(path: Path) -> str:
    """Each cell begins with a form feed, and the value of its last expression is printed."""
    head = "def show(value): value is None or print(repr(value))"
    return "\n".join([head, *(script_of("".join(c["source"])) for c in code_cells(path))])


def script_of(cell: str) -> str:
    command = r"subprocess.run({!r}, shell=True).check_returncode()"
    code = re.sub(r"^!(.*)$", lambda found: command.format(found[1]), cell, flags=re.MULTILINE)
    last = ast.parse(code).body[-1]
    if isinstance(last, ast.Expr) and not code.endswith(";"):
        before = code.splitlines()[: last.lineno - 1]
        code = "\n".join([*before, f"show({ast.unparse(last)})"])
    return f"print('\\f')\n{code}"


def printed(cell: dict) -> str:
    """Text that a cell has as its output, without that of its errors."""
    outputs = [out for out in cell["outputs"] if out.get("name") != "stderr"]
    texts = [out.get("text") or out.get("data", {}).get("text/plain", []) for out in outputs]
    return "".join("".join(text) + "\n" for text in texts if "<Figure" not in "".join(text))


def shape(text: str) -> list[str]:
    """Words, with one number in place of all."""
    return re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]\d+)?", "0", text).split()


def names(text: str) -> list[str]:
    """Those of results: of lines that are JSON, and of the lines that a terminal gets instead."""
    found = re.findall(r"^([\w.]+)  +\S", text, re.MULTILINE)
    for line in text.splitlines():
        found += leaves(json.loads(line)) if line.startswith('{"') else ()
    return found


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
def test_a_notebook_runs_and_says_what_it_did(path, tmp_path):
    """All but numbers; where it trains, a tenth of the steps, and the names in its results.

    Times are not kept.
    """
    code = script(path)
    found = run(code.replace("num_steps 400", "num_steps 40"), tmp_path).split("\f\n")[1:]
    kept = [printed(cell) for cell in code_cells(path)]
    what = names if "num_steps" in code else shape
    pairs = zip(code_cells(path), found, kept, strict=True)
    for cell, *texts in pairs if any(kept) else ():
        fresh, had = map(what, texts)
        assert fresh == had or "perf_counter" in str(cell["source"]), fresh


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_have_nothing_of_a_machine(path):
    for cell in code_cells(path):
        assert not re.search(r"""[\s"'=]/\w|\\u001b""", json.dumps(cell["outputs"]))
        assert all(out.get("name") != "stderr" for out in cell["outputs"])


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
        "PYTHONUNBUFFERED": "1",  # what a command says comes after what was said before it
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
