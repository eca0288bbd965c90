"""Finished runs side by side. Here, read without jax or pandas, is what runs and sweeps leave."""

import json
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.files import write_whole

SWEEP = "sweep.json"


def read_result(path: Path) -> dict[str, Any]:
    """Reads result.json, eval_SPLIT.json or sweep.json, {} where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a result: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: not a result: takes an object")
    return found


def read_sweep(workdir: Path) -> list[dict[str, Any]]:
    """The runs of sweep.json: name, status, and what else a sweep tells of them."""
    return read_result(workdir / SWEEP).get("runs", [])


def save_sweep(workdir: Path, runs: list[dict[str, Any]]) -> None:
    """Writes sweep.json; runs of earlier sweeps in the same place stay in it."""
    known = {each["name"]: each for each in (*read_sweep(workdir), *runs)}
    write_whole(workdir / SWEEP, json.dumps({"runs": list(known.values())}, indent=1) + "\n")
