"""What tests of whole runs share."""

import jax
import numpy as np

from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG, METRICS
from mhe_jax.config.places import path_of
from mhe_jax.training import loop, tracking
from mhe_jax.training.checkpoint import restore_params
from mhe_jax.training.checkpoint.steps import steps_in as checkpoint_steps
from mhe_jax.training.sharding import make_mesh
from mhe_jax.training.state import abstract_params

# Sends these signals to itself once step STEP is read and, unless it is 0, step SAVED is on disk.
KILL = """
import os, time
from mhe_jax.training.meter import Meter

step, saved, *signals = {}
flush = Meter.flush

def flush_and_kill(self):
    done = self._pending and self._pending[0]
    flush(self)
    if done == step:
        while saved and not (self.tracker.workdir / "checkpoints" / str(saved)).exists():
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)

Meter.flush = flush_and_kill
"""


def train(config, count=1):
    return loop.train(config, jax.devices()[:count])


def logged(workdir):
    """The log, without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "goodput"}
        for line in tracking.read(path_of(workdir) / METRICS)
    ]


def steps_in(config):
    """The checkpoints of a run."""
    return [*checkpoint_steps(path_of(config.workdir) / "checkpoints")]


def params_of(workdir, which="best"):
    config = load_json(path_of(workdir) / CONFIG)
    mesh = make_mesh(config, jax.devices()[:1])
    return jax.device_get(restore_params(workdir, which, abstract_params(config, mesh))[0])


def assert_same(one, other):
    """To the bit."""
    jax.tree.map(np.testing.assert_array_equal, one, other)
