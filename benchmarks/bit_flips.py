"""Flips bits of a checkpoint, one at a time, and looks whether anybody notices.

    python benchmarks/bit_flips.py                      # 200 bits of a small run's checkpoints
    python benchmarks/bit_flips.py --flips 1000 --seed 1
    python benchmarks/bit_flips.py --megabytes 400      # what checksums cost a save of this size

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
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.training.checkpoint import Checkpoints, checksums, restore_params
from mhe_jax.training.state import TrainState

OPTIMIZER = optax.adamw(0.1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, help="time saves of this many megabytes instead")
    parser.add_argument("--saves", type=int, default=7, help="saves to time, each way")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        if args.megabytes:
            print(json.dumps(cost(Path(directory), args.megabytes, args.saves)))
            return 0
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
    return [run / "checkpoints" / "2", run / "checkpoints_best" / "2"]


def save_run(run: Path, states: list[TrainState]) -> None:
    checkpoints = Checkpoints(run, keep=2)
    for step, state in enumerate(states, 1):
        meta = {"validation": {"loss": 1.0 / step}, "tokens": 100.0 * step}
        checkpoints.save_best(state.ema_params, step, meta)
        checkpoints.save(state, step, meta)
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
    checkpoints = Checkpoints(run, keep=2)
    try:
        state, meta = checkpoints.restore(abstract_of(states[0]))
    except InputError:
        return "refused"
    finally:
        checkpoints.close()
    step = int(state.step)
    if step not in (1, 2) or meta["tokens"] != 100.0 * step or not _equal(state, states[step - 1]):
        return "other"
    return "equal" if step == 2 else "older"


def cost(directory: Path, megabytes: int, saves: int) -> dict[str, Any]:
    """Medians, in seconds: of saves and of what a step waits, with and without checksums."""
    shape = (1000, round(megabytes * 1e6 / 4 / 9 / 1000))  # three arrays, and AdamW's two of each
    params = {name: jnp.zeros(shape) for name in "abc"}
    state = TrainState.create(params, OPTIMIZER, jax.random.key(0), False)
    noise = jax.random.normal(jax.random.key(1), shape)  # zeros would be packed
    state = jax.tree.map(lambda x: x + noise if x.shape == shape else x, state)
    seconds: dict[str, list[float]] = defaultdict(list)
    with _timed("_sums_of", seconds["checksums"]):
        for number in range(2 * saves + 2):  # the first of each way is not counted
            way, run = ("with", "without")[number % 2], directory / str(number)
            with _without_checksums() if number % 2 else contextlib.nullcontext():
                checkpoints = Checkpoints(run)
                if not number % 2:
                    seconds["checksums"].append(0.0)
                begin = time.perf_counter()
                checkpoints.save(state, 1, {})
                seconds[f"call_{way}"].append(time.perf_counter() - begin)
                seconds[f"longest_step_{way}"].append(_longest_step(checkpoints))
                seconds[f"save_{way}"].append(time.perf_counter() - begin)
                checkpoints.close()
            if number:
                shutil.rmtree(run)
    with _timed("verify", seconds["verifying"]):
        for _ in range(saves):
            seconds["verifying"].append(0.0)
            begin = time.perf_counter()
            Checkpoints(directory / "0").restore(abstract_of(state))
            seconds["restoring"].append(time.perf_counter() - begin)
    found = {name: statistics.median(of[1:]) for name, of in seconds.items()}
    share = found["checksums"] / found["save_without"]
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    numbers = {"megabytes": size / 1e6, "saves": saves, **found, "share": share}
    return {name: round(value, 3) for name, value in numbers.items()}


@contextlib.contextmanager
def _timed(name: str, seconds: list[float]) -> Iterator[None]:
    """Adds the time of each call of `checksums.NAME` to the last of `seconds`."""
    whole = getattr(checksums, name)

    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        found = whole(*arguments)
        seconds[-1] += time.perf_counter() - begin
        return found

    setattr(checksums, name, timed)
    yield
    setattr(checksums, name, whole)


def _longest_step(checkpoints: Checkpoints) -> float:
    """Of steps of Python and of the device until all is saved: how long one took at most."""
    step = jax.jit(lambda x: (x @ x) / jnp.linalg.norm(x))
    x, longest = jnp.eye(64) + 0.5, 0.0
    step(x).block_until_ready()
    waiting = threading.Thread(target=checkpoints.wait)
    waiting.start()
    while waiting.is_alive():
        begin = time.perf_counter()
        for _ in range(20):
            x = step(x).block_until_ready()
        longest = max(longest, time.perf_counter() - begin)
    return longest


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    whole = checksums.Arrays.async_save, checksums.Seal.__call__
    checksums.Arrays.async_save = ocp.StandardCheckpointHandler.async_save
    checksums.Seal.__call__ = lambda self: None
    yield
    checksums.Arrays.async_save, checksums.Seal.__call__ = whole


if __name__ == "__main__":
    sys.exit(main())
