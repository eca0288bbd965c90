"""`benchmarks/gpu_kernels.py`: every step on a CPU; what hangs; calls are made, and compared."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import gpu_kernels, gpu_programs
from benchmarks.gpu_kernels import Step
from benchmarks.gpu_programs import Comparison, Program

SHAPE = [jax.ShapeDtypeStruct((3, 5), jnp.float32)]


@pytest.mark.whole_run
@pytest.mark.timeout(1800)
def test_every_step_runs_without_a_gpu_and_once(tmp_path, capsys):
    arguments = ["--smoke", "--minutes", "25", "--out", str(tmp_path)]
    assert gpu_kernels.main(arguments) == 0
    found = json.loads((tmp_path / "kernels.json").read_text())["results"]
    assert not [row for row in found if row.get("wrong")]
    assert {row["case"].partition(":")[0] for row in found} == set(gpu_kernels.STEPS)
    for row in found:  # what needs a GPU says so
        assert {"left_out", "runs", "engines", "content"} & set(row)
    text = capsys.readouterr().out
    assert "mha cudnn, mqa cudnn: needs a GPU" in text
    assert "kernels | not measured |" in text
    assert "| random, calls | 4 calls, 0 of 2 cases wrong |" in text
    before = (tmp_path / "kernels.jsonl").read_text()
    assert gpu_kernels.main(arguments) == 0
    assert (tmp_path / "kernels.jsonl").read_text() == before


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Stands in for steps: what their processes do, and the call that runs them all."""
    path, programs = tmp_path / "kernels.jsonl", {}
    write = "import json, sys, time; file = open(sys.argv[1], 'a')\n"
    write += "def line(**row): file.write(json.dumps(row) + '\\n'); file.flush()\n"
    write += "def done(case): line(begun=case); line(case=case, seconds=1.0)\n"
    write += "known = open(sys.argv[1]).read()\n"

    def child(name, args):
        return [sys.executable, "-c", write + programs[name], str(path)]

    monkeypatch.setattr(gpu_kernels, "child", child)
    monkeypatch.setattr(gpu_kernels, "clocks", lambda: None)

    def run(minutes="1", **given):
        programs.update(given)
        monkeypatch.setattr(gpu_kernels, "STEPS", {name: Step(1, dict) for name in programs})
        status = gpu_kernels.main(["--smoke", "--minutes", minutes, "--out", str(tmp_path)])
        return status, [json.loads(line) for line in path.read_text().splitlines()[1:]]

    return run


HANGS = "line(begun='a: x'); time.sleep(60)"


def test_a_step_that_hangs_is_killed_and_told_and_goes_on_without_the_case(steps, capsys):
    once = f"if 'a: x' in known: done('a: y')\nelse: {HANGS}"
    status, rows = steps(a=once, b="done('b: x')")
    assert status == 1
    ended = [(row["ended"], row["how"]) for row in rows if "ended" in row]
    assert ended == [("a", "hung, or was not done in 3 s"), ("b", "done"), ("a", "done")]
    cases = {row["case"]: row.get("wrong") for row in rows if "seconds" in row}
    assert cases == {"a: x": ["hung, or was not done in 3 s"], "b: x": None, "a: y": None}
    assert "a: x: hung, or was not done in 3 s" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "how"), [(HANGS, "hung, "), ("sys.exit(3)", "died with ")])
def test_a_step_that_never_ends_well_is_tried_twice(program, how, steps):
    for _ in range(2):
        status, rows = steps(a=program)
        assert status == 1
        assert [row["how"][: len(how)] for row in rows if "ended" in row] == [how] * 2


def test_a_step_without_time_is_left_for_the_next_call(steps, capsys):
    assert steps(minutes="0", a="done('a: x')") == (0, [])
    assert "steps left: a" in capsys.readouterr().out
    status, rows = steps(a="done('a: x')")
    assert (status, rows[-1]) == (0, {"ended": "a", "how": "done"})


def test_all_calls_of_a_chain_are_made():
    """None is left out, nor shared with another, though only a number of the last is read."""
    calls = []

    def count(x):
        calls.append(1)
        return np.float32(x)

    def function(x, y):
        return jax.pure_callback(count, y, y), x

    sets = [(jnp.ones((2, 3)), jnp.ones(5)) for _ in range(3)]
    jax.block_until_ready(jax.jit(lambda s: gpu_programs.chained(function, 7, s))(sets))
    assert len(calls) == 21


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (1.2, True), (float("nan"), True)])
def test_a_program_that_differs_from_the_truth_is_named(factor, wrong):
    programs = [
        Program("one", jnp.sin, SHAPE, 7.0, run, lambda x: factor * jnp.sin(x))
        for run in (gpu_programs.FORWARD, gpu_programs.GRADIENTS)
    ]
    comparison = Comparison(True, programs)
    with ThreadPoolExecutor() as pool:
        comparison.begin(pool)
    found = comparison()
    assert [row["flops"] for row in found["results"]] == [7.0, 21.0]
    assert len(found["wrong"]) == (2 if wrong else 0)
