"""Flips bits of a checkpoint, one at a time, and looks whether anybody notices.

    python experiments/robustness/bit_flips.py    # 200 bits of a small run
    python experiments/robustness/bit_flips.py --flips 1000 --seed 1

Half of the bits lie in files drawn uniformly, the other half at places drawn uniformly from all
bytes. With each there are three loads: of the newest checkpoint and of the best for evaluation, and
by a run that goes on. What comes out is refused with a reason, or is the checkpoint before it, or
equals what was saved; `other` counts what does not, and must be 0.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mhe_jax.config import InputError
from mhe_jax.training.checkpoint import Checkpoints, restore_params
from mhe_jax.training.state import TrainState

OPTIMIZER = optax.adamw(0.1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        found = flip_bits(Path(directory), args.flips, args.seed)
    print(json.dumps(found))
    return 1 if found["other"] else 0


def flip_bits(directory: Path, flips: int, seed: int) -> dict[str, int]:
    """How often each outcome came, of `flips` bits and three ways to load."""
    draw, whole = random.Random(seed), directory / "whole"
    states = [small_state(value) for value in (1.0, 2.0)]
    save_run(whole, states)
    files = sorted(p for name in newest_of(whole) for p in name.rglob("*") if p.is_file())
    sizes = [path.stat().st_size for path in files]
    found = Counter(refused=0, older=0, equal=0, other=0)
    for number in range(flips):
        weights = None if number % 2 else sizes
        while not (path := draw.choices(files, weights)[0]).stat().st_size:
            pass
        run = directory / "run"
        shutil.copytree(whole, run)
        damaged = run / path.relative_to(whole)
        content = bytearray(damaged.read_bytes())
        place = draw.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        damaged.write_bytes(content)
        for outcome in (*_evaluated(run, states), _went_on(run, states)):
            found[outcome] += 1
            if outcome == "other":
                print(f"bit {place} of {path.relative_to(whole)}: other weights", file=sys.stderr)
        shutil.rmtree(run)
    return {"flips": flips, "seed": seed, "files": len(files), **found}


def newest_of(run: Path) -> list[Path]:
    return [run / "checkpoints" / "2"]


def save_run(run: Path, states: list[TrainState]) -> None:
    checkpoints = Checkpoints(run, keep=2)
    for step, state in enumerate(states, 1):
        scored = {"validated_step": step, "validation": {"loss": 1.0 / step}}
        checkpoints.save(state, step, {**scored, "tokens": 100.0 * step})
    checkpoints.close()


def small_state(value: float) -> TrainState:
    draw = np.random.default_rng(round(value))
    params = {name: draw.normal(size=size) for name, size in {"a": (7, 11), "b": (13,)}.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = TrainState.create(params, OPTIMIZER, jax.random.key(round(value)), True)
    return state.replace(
        step=jnp.asarray(round(value), jnp.int32),
        ema_params=jax.tree.map(lambda x: x + 0.5, params),
    )


def abstract_of(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def _equal(one: Any, other: Any) -> bool:
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *jax.device_get((one, other)))
    return all(jax.tree.leaves(same))


def _evaluated(run: Path, states: list[TrainState]) -> list[str]:
    outcomes = []
    for which in ("last", "best"):
        try:
            params, steps = restore_params(run, which, abstract_of(states[0]).params)
        except InputError:
            outcomes.append("refused")
            continue
        outcomes.append("equal" if _equal(params, states[steps[0] - 1].ema_params) else "other")
    return outcomes


def _went_on(run: Path, states: list[TrainState]) -> str:
    try:
        checkpoints = Checkpoints(run, keep=2)
        with contextlib.closing(checkpoints):
            state, meta = checkpoints.restore(abstract_of(states[0]))
    except InputError:
        return "refused"
    step = int(state.step)
    if step not in (1, 2) or meta["tokens"] != 100.0 * step or not _equal(state, states[step - 1]):
        return "other"
    return "equal" if step == 2 else "older"


if __name__ == "__main__":
    sys.exit(main())
