"""Random calls, flipped bits and kills, a few of each."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.robustness import bit_flips, fuzz, kills


def test_fuzz(capsys):
    assert fuzz.main(["--calls", "3", "--seed", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["calls"], found["failed"]) == (3, 0)
    assert found["worst"] <= 1


def test_fuzz_sees_a_program_that_is_wrong(monkeypatch):
    case = next(case for case in fuzz.CASES if str(case) == "mha")
    program = fuzz.Program(case, "causal", jnp.float32, (2, 5, 7))
    run, plain = program.runs

    def wrong(*given):
        output, gradients = run(*given)
        return output * 1.01, gradients

    call = program.drawn(np.random.default_rng(0), 1.0, 1.0, 1.0, spread=10.0)
    assert program.check(*call)[1] == ""
    program.runs = jax.jit(wrong), plain
    assert program.check(*call)[1].startswith("[0] errs by")


def test_bit_flips(capsys):
    assert bit_flips.main(["--flips", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other"] == 0
    assert found["refused"] + found["older"] + found["equal"] == 3 * 6


@pytest.mark.slow  # and only where nothing else is at work: what does not answer is given up
def test_kills(capsys):
    assert kills.main(["--kills", "1", "--steps", "12"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["kills"], found["hung"]) == (1, 0)
    assert found["runs"] == found["equal_runs"] > 0
