"""The real train.py in processes of its own: killed, resumed, told to stop."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from whole_runs import KILL, assert_same, logged

pytestmark = pytest.mark.whole_run


@pytest.mark.parametrize("task", ["mlm", pytest.param("translation", marks=pytest.mark.slow)])
def test_kill_minus_nine_loses_nothing_that_was_saved(tiny, launch, finish, saved, tmp_path, task):
    """2N steps = N steps, kill -9, N steps: to the bit, with dropout, accumulation and EMA."""
    changes = {"optimizer.ema_decay": 0.9, "optimizer.accumulate_steps": 2, "train.num_steps": 8}
    if task == "translation":
        changes["data.length_buckets"] = (16,)  # one program to compile
    config = tiny(task, **changes)
    # One after the other: the second finds the programs of the first.
    code, out, err = finish(launch(config, tmp_path / "whole"))
    killed, _, killed_err = finish(launch(config, tmp_path / "killed", KILL.format("5, 4, 9")))
    assert (code, killed) == (0, -9), err + killed_err
    assert not (tmp_path / "killed" / "checkpoints" / "8").exists()
    resumed, again, err = finish(launch(config, tmp_path / "killed"))
    assert resumed == 0, err
    assert "4 of 8 steps are done" in err
    assert_same(*(saved(config, tmp_path / name) for name in ("whole", "killed")))
    results = [
        {k: v for k, v in json.loads(text.splitlines()[-1]).items() if "loss" in k or "best" in k}
        for text in (out, again)
    ]
    assert results[0] == results[1]
    assert logged(tmp_path / "whole") == logged(tmp_path / "killed")


def test_sigterm_exits_143(tiny, launch, finish, tmp_path):
    code, out, err = finish(launch(tiny("mlm"), tmp_path / "run", KILL.format("2, 0, 15")))
    assert code == 143, err
    assert out == ""
    assert "SIGTERM: stopped after step 3" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_importing_the_configs_room_loads_no_jax():
    """Arguments are parsed before jax starts, so that `jax.distributed` can still come first."""
    program = textwrap.dedent(
        """
        import sys
        import mhe_jax.cli.arguments, mhe_jax.cli.sweep, mhe_jax.training.distributed
        assert not any(name.split(".")[0] in ("jax", "orbax", "grain") for name in sys.modules)
        """
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
