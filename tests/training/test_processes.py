"""The real train.py in processes of its own: killed, resumed, told to stop."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from mhe_jax.config.files import METRICS
from mhe_jax.training import tracking

pytestmark = pytest.mark.whole_run

# A signal of its own making once step STEP is read and step SAVED is on disk.
KILL = """
import os, time
from mhe_jax.training import tracking

step, saved, *signals = {}
advance = tracking.Tracker.advance

def advance_and_kill(self, done):
    advance(self, done)
    if done == step:
        while saved and not (self.workdir / "checkpoints" / str(saved)).exists():
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)

tracking.Tracker.advance = advance_and_kill
"""


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
    jax.tree.map(
        np.testing.assert_array_equal,
        saved(config, tmp_path / "whole"),
        saved(config, tmp_path / "killed"),
    )
    results = [
        {k: v for k, v in json.loads(text.splitlines()[-1]).items() if "loss" in k or "best" in k}
        for text in (out, again)
    ]
    assert results[0] == results[1]
    logs = [
        [
            {k: v for k, v in line.items() if "second" not in k and k != "goodput"}
            for line in tracking.read(tmp_path / name / METRICS)
        ]
        for name in ("whole", "killed")
    ]
    assert logs[0] == logs[1]


def test_sigterm_exits_143(tiny, launch, finish, tmp_path):
    code, out, err = finish(launch(tiny("mlm"), tmp_path / "run", KILL.format("2, 0, 15")))
    assert code == 143, err
    assert out == ""
    assert "SIGTERM: stopped after step 3" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


# A Ctrl-C when a module is about to be loaded.
CTRL_C = """
import signal

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("script", "module", "status"),
    [
        ("train.py", "mhe_jax.cli.arguments", -2),  # 130 to a shell
        ("train.py", "tyro", 130),
        ("eval.py", "mhe_jax.training.cluster.distributed", 130),
    ],
)
def test_ctrl_c_while_modules_load(tiny, launch, finish, tmp_path, script, module, status):
    process = launch(tiny("lm"), tmp_path / "run", CTRL_C.format(module), script=script)
    assert finish(process) == (status, "", "")


def test_importing_the_configs_room_loads_no_jax():
    """Arguments are parsed before jax starts, so that `jax.distributed` can still come first."""
    program = textwrap.dedent(
        """
        import sys
        import mhe_jax.cli.arguments, mhe_jax.cli.sweep, mhe_jax.training.cluster.distributed
        assert not any(name.split(".")[0] in ("jax", "orbax", "grain") for name in sys.modules)
        """
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
