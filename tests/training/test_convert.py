"""A trained run with another attention: scored, trained further, or refused with a reason."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import params_of, train

from mhe_jax.config import ConversionConfig, InputError
from mhe_jax.config.fields import load_json, save_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.interchange.uptraining import (
    _converted,
    activations,
    convert,
    sublayers,
    text_batches,
)
from mhe_jax.training.from_run import read_run
from mhe_jax.training.sharding import make_mesh

pytestmark = pytest.mark.whole_run

TARGETS = {
    "mha": {},
    "sha": {},
    "mqa": {},
    "gqa": {"num_kv_heads": 2},
    "mhe_add": {"num_groups": 2},
    "mhe_mul": {},
    "mva": {"score_features": 3},
}
MHA = {"model.attention.kind": "mha", "model.attention.num_heads": 4}
# Layers scanned or not, layers before or after their norm, biases or not: each at least once.
SOURCES = {
    "mlm": {**MHA, "model.norm_position": "post", "model.num_layers": 2},
    "lm": {
        **MHA,
        "model.num_layers": 2,
        "model.scan_layers": True,
        "model.attention.use_bias": True,
        "data.packing": True,
    },
    "translation": {**MHA, "optimizer.ema_decay": 0.9},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the trained runs of all tests lie."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture
def source(tiny, place):
    """`source(task)`: the config of a finished run."""

    def make(task, **changes):
        fields = {"train.num_steps": 30, "optimizer.learning_rate": 1e-2, **SOURCES[task]}
        pair = task == "translation"
        fields["data.test"] = ("validation.en", "validation.de") if pair else ("validation.en",)
        config = tiny(task, **{**fields, **changes}, workdir=str(place / task))
        if not (place / task / "result.json").exists():
            train(config)
        return config

    return make


def wanted(kind, rows=24, **fields):
    return ConversionConfig(kind=kind, rows=rows, **fields)


def loss(run, which):
    config = load_json(Path(run) / "config.json")
    return evaluate(Path(run), dataclasses.replace(config.evaluation, checkpoint=which))["loss"]


def seldom(kind):
    """`rest` for kinds that go in and out by the way of another."""
    return pytest.param(kind, marks=pytest.mark.rest) if kind in ("sha", "mqa") else kind


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [seldom(kind) for kind in TARGETS])
@pytest.mark.parametrize("task", SOURCES)
def test_every_kind_of_every_task(source, tmp_path, task, kind):
    config, new = source(task), tmp_path / "new"
    found = convert(config.workdir, new, wanted(kind, **TARGETS[kind]))
    saved = load_json(new / "config.json")
    assert saved.model.attention.kind == kind
    biased = bool(config.model.attention.use_bias)
    assert (found["use_bias"], saved.model.attention.use_bias) == (biased, biased)
    assert len(found["errors"]) == {"mlm": 2, "lm": 2, "translation": 3}[task]
    for error in found["errors"].values():
        assert error["after"] <= error["before"] + 1e-6
        assert error["after"] < (1e-5 if kind == "mha" else 1)
    if kind not in ("mha", "mva"):
        assert found["attention_after"] < found["attention_before"]
    assert np.isfinite(jax.tree.leaves(params_of(new))[0]).all()
    if kind == "mha" and task != "translation":
        assert loss(new, "last") == pytest.approx(loss(config.workdir, "best"), rel=1e-5)


def test_a_run_goes_on_where_it_is_and_another_starts_from_it(source, tmp_path):
    config, new = source("lm"), tmp_path / "new"
    convert(config.workdir, new, wanted("gqa", num_kv_heads=2))
    after, saved = loss(new, "last"), load_json(new / "config.json")
    then = dataclasses.replace(saved, workdir=str(tmp_path / "then"))
    still = {"train.num_steps": 1, "optimizer.learning_rate": 1e-30, "train.init_from": str(new)}
    for field, value in still.items():
        then = set_field(then, field, value)
    train(then)
    assert loss(then.workdir, "best") == pytest.approx(after, rel=1e-4)
    assert train(set_field(saved, "train.num_steps", 1))["steps"] == 1


def test_without_rows_no_text_is_read(source, tmp_path):
    config = source("mlm")
    gone = tmp_path / "gone"
    copy_with(config, gone, data=dataclasses.replace(config.data, directory="nowhere"))
    found = convert(gone, tmp_path / "new", wanted("mqa", rows=0))
    assert list(found["errors"].values()) == [{"before": None, "after": None}] * 2
    with pytest.raises(InputError, match="nowhere"):
        convert(gone, tmp_path / "other", wanted("mqa"))
    assert not (tmp_path / "other").exists()


def copy_with(config, where, **parts):
    """The run of `config` in another place, its config changed."""
    where.mkdir()
    for file in Path(config.workdir).iterdir():
        (where / file.name).symlink_to(file)
    (where / "config.json").unlink()
    save_json(dataclasses.replace(config, **parts), where / "config.json")


def test_biases_are_made_where_only_they_keep_what_heads_do(tiny, tmp_path):
    config = tiny("mlm", **{"model.attention.kind": "mhe_add", "model.attention.form": "folded"})
    train(config)
    found = convert(config.workdir, tmp_path / "new", wanted("mha"))
    saved = load_json(tmp_path / "new" / "config.json")
    assert found["use_bias"]
    assert (saved.model.attention.form, saved.model.attention.use_bias) == (None, True)
    assert max(error["after"] for error in found["errors"].values()) < 1e-5


@pytest.mark.parametrize(("kind", "rate"), [("mha", 1.0), ("mhe_mul", 10.0)])
def test_settings_that_only_the_old_kind_takes_do_not_stay(tiny, tmp_path, kind, rate):
    fields = {
        "model.attention.kind": "mhe_add",
        "model.attention.engine": "pallas",
        "model.attention_by_role.decoder.engine": "mosaic",
        "optimizer.head_embedding_rate": 10.0,
    }
    new = _converted(tiny("lm", **fields), tmp_path / "new", wanted(kind))
    assert new.optimizer.head_embedding_rate == rate
    assert (new.model.attention_for("decoder").engine, new.model.attention.engine) == ("auto",) * 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"kind": None}, "--kind is not set"),
        ({"kind": "gqa"}, "num_kv_heads is not set: a divisor of num_heads=4"),
        ({"kind": "gqa", "num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"kind": "mla"}, "--kind is mla.*mha, sha"),
        ({"kind": "mqa", "num_groups": 2}, "num_groups is 2: kinds mhe_add, mhe_mul, mva, coll"),
        ({"kind": "mhx"}, "--kind is mhx"),
    ],
)
def test_what_is_not_allowed_is_said(source, tmp_path, how, said):
    config = source("mlm")
    with pytest.raises(InputError, match=said) as caught:
        convert(config.workdir, tmp_path / "new", wanted(**how))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model.kronecker.attention", 2, "is factorized: takes a run with dense attention"),
        ("model.attention.kind", "mla", "mla is not made into other .*: a norm lies between"),
        ("model.attention.normalize_qk", True, "normalize_qk has a LayerNorm"),
        ("model.positions", "rotary", "model.positions is 'rotary' in .*: takes a run with"),
    ],
)
def test_what_cannot_be_converted_is_said(tiny, tmp_path, field, value, said):
    config = tiny("mlm", **{field: value}, workdir=str(tmp_path / "run"))
    Path(config.workdir).mkdir()
    save_json(config, Path(config.workdir) / "config.json")
    with pytest.raises(InputError, match=said):
        convert(config.workdir, tmp_path / "new", wanted("mqa"))


def test_nothing_is_made_of_a_run_without_checkpoints(source, tiny, tmp_path):
    config = source("mlm")
    empty = tiny("mlm", workdir=str(tmp_path / "empty"))
    copy_with(config, tmp_path / "empty", workdir=empty.workdir)
    (tmp_path / "empty" / "checkpoints").unlink()
    with pytest.raises(InputError, match="has no checkpoint"):
        convert(empty.workdir, tmp_path / "new", wanted("mqa"))
    assert not (tmp_path / "new").exists()


def test_rows_are_of_what_counts(source):
    """Padding is left out of what is fitted on."""
    config = source("translation")
    params, _, tokenizer = read_run(config.workdir, config, make_mesh(config, jax.devices()[:1]))
    params = jax.device_get(params)
    batches = text_batches(config, tokenizer, 20)
    sides = {
        ("encoder", "layer_0", "self_attention"): "source",
        ("decoder", "layer_0", "self_attention"): "target",
        ("decoder", "layer_0", "cross_attention"): "target",
    }
    assert sublayers(params) == [*sides]
    for path, side in sides.items():
        found = activations(config, params, batches, path)
        for a, batch in zip(found, batches, strict=True):
            np.testing.assert_array_equal(a.valid, batch[side] != 0)
            assert a.output.shape == (*batch[side].shape, 16)
            assert (a.key is None) == (path[-1] == "self_attention")
