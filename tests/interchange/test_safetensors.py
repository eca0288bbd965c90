"""Parameters by name: bit for bit those of the run, whatever reads them."""

import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, save_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.interchange import export
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors, write_tensors

pytest.importorskip("safetensors", reason="needs the extra `export`")

KINDS = {
    "mha": {},
    "mva": {},
    "mhe_add": {"model.attention.score_groups": 2},
    "gqa": {"model.attention.num_kv_heads": 2},
}


def same(one, other):
    one, other = flatten_dict(one), flatten_dict(other)
    assert list(one) == list(other)
    for path, array in one.items():
        assert array.dtype == other[path].dtype == np.float32
        np.testing.assert_array_equal(array, other[path], err_msg=str(path))


@pytest.mark.covering(1)
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["translation", "lm", "classification", "mlm"])
def test_the_export_is_a_run_with_the_same_parameters(run_of, load, tmp_path, task, kind, scanned):
    fields = {"model.attention.kind": kind, "model.scan_layers": scanned, **KINDS[kind]}
    run, out = run_of(task, **fields), tmp_path / "out"
    result = export(run, out, "safetensors")
    assert result["steps"] == [7]
    first, then = load(run), load(out)
    same(first.params, then.params)
    assert then.steps == [7]
    assert then.tokenizer.model == first.tokenizer.model
    assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(first.params))
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", WEIGHTS, "tokenizer.model",
    }  # fmt: skip
    tensors, _ = read_tensors(out / WEIGHTS)
    assert not any("layers" in name for name in tensors)
