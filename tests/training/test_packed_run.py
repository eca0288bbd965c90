"""A run on packed rows of several sources, and its resumption."""

import jax
import numpy as np
import pytest

from mhe_jax.config.fields import set_field
from mhe_jax.training import loop

pytestmark = pytest.mark.whole_run


@pytest.mark.parametrize("task", [pytest.param("mlm", marks=pytest.mark.rest), "translation"])
def test_packed_rows_of_a_mixture_resume_exactly(tiny, saved, tmp_path, task, capsys):
    train = ("train.en", "train.de") if task == "translation" else ("train.en",)
    changes = {
        "data.packing": True,
        "data.train": (*train, *train[::-1]) if task == "translation" else (*train, "train.de"),
        "data.train_weights": (1.0, 2.0),
        "data.length_buckets": (),
        "train.num_steps": 4,
        "train.eval_every": 4,
    }
    whole = tiny(task, **changes)
    result = loop.train(whole, jax.devices()[:1])
    assert np.isfinite(result["validation_loss"])
    assert "33.33% " in capsys.readouterr().err
    parts = set_field(whole, "workdir", str(tmp_path / "parts"))
    for steps in (2, 4):
        loop.train(set_field(parts, "train.num_steps", steps), jax.devices()[:1])
    jax.tree.map(np.testing.assert_array_equal, saved(whole), saved(parts))
