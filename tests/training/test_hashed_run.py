"""Runs of hashed words: they learn, resume, are scored, and are tuned."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from whole_runs import assert_same, logged, params_of, train

from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.training.from_run import check_init_from

pytestmark = pytest.mark.whole_run


@pytest.fixture
def hashed(tiny):
    """`hashed(hashing, **changes)`: pre-training of a second or two."""

    def make(hashing="md_proj", **changes):
        fields = {
            "model.hashing": hashing,
            "model.vocabulary_size": 505,
            "data.lsh_pieces": 300,
            "data.corruption_rate": 0.2,
            **changes,
        }
        return tiny("shuffle_random", **fields)

    return make


def test_a_run_resumes_and_is_scored(hashed, tmp_path):
    config = hashed("lsh_pool", **{"optimizer.ema_decay": 0.9})
    result = train(config)
    assert result["task"] == "shuffle_random"
    assert math.isfinite(result["best_validation_loss"])
    assert Path(config.workdir, "tokenizer.model").exists()
    # The same in two parts, bit for bit.
    parts = dataclasses.replace(config, workdir=str(tmp_path / "parts"))
    train(set_field(parts, "train.num_steps", 4))
    train(parts)
    assert_same(*(params_of(one.workdir, "last") for one in (config, parts)))
    # Without its pieces a run is no longer what it was.
    model = Path(parts.workdir, "tokenizer.model")
    model.rename(model.with_suffix(".gone"))
    with pytest.raises(InputError, match="tokenizer.model: no such file"):
        train(parts)
    evaluation = dataclasses.replace(config.evaluation, split="validation")
    found = evaluate(config.workdir, evaluation, devices=jax.devices()[:1])
    # What is validated is the average, and it is what is scored.
    lines = [line for line in logged(config.workdir) if line["split"] == "validation"]
    (best,) = (line for line in lines if [line["step"]] == found["steps"])
    for name in ("loss", "accuracy", "auc"):
        assert found[name] == pytest.approx(best[name], rel=1e-5)
        assert 0 < found[name] < 3
    assert json.loads(json.dumps(found)) == found


def test_mlm_over_buckets(tiny):
    config = tiny("mlm", **{"model.hashing": "md_emb", "model.vocabulary_size": 505})
    result = train(set_field(config, "train.num_steps", 2))
    assert 5 < result["best_validation_loss"] < 7
    # There is no file to lose: the run goes on.
    assert train(config)["steps"] == 6
    assert not Path(config.workdir, "tokenizer.model").exists()


def test_it_is_tuned(hashed, tiny, tmp_path):
    """From the encoder and, with LSH, the pieces of a pre-trained run."""
    kronecker = {"model.kronecker.attention": 2, "model.kronecker.mlp": 2}
    run = hashed("lsh_add", **kronecker)
    train(run)
    lines = ["text\tlabel"] + [f"{'small' if i % 2 else 'big'} dog {i}\t{i % 2}" for i in range(40)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    config = tiny(
        "classification",
        **{
            "train.init_from": run.workdir,
            "data.directory": str(tmp_path),
            "data.train": ("train.tsv",),
            "data.validation": ("dev.tsv",),
            "data.test": ("dev.tsv",),
            "data.length_buckets": (16,),
            "workdir": str(tmp_path / "tuned"),
            "train.num_steps": 1,
            "optimizer.learning_rate": 1e-30,
            "optimizer.weight_decay": 0.0,
            "model.vocabulary_size": 505,
        },
    )
    with pytest.raises(
        InputError, match="model.hashing is None: must be 'lsh_add', as in train.init_from="
    ):
        check_init_from(config)
    config = dataclasses.replace(config, model=run.model)
    result = train(config)
    assert 0 <= result["best_validation"]["accuracy"] <= 100
    theirs, ours = (params_of(one.workdir, "last") for one in (run, config))
    for name in ("embeddings", "encoder"):
        assert_same(ours[name], theirs[name])
    found = evaluate(config.workdir, config.evaluation, devices=jax.devices()[:1])
    assert found["examples"] == 40
    # Misspelt texts are scored beside the others, the same every time.
    noisy = dataclasses.replace(config.evaluation, spelling_noise=0.5, seed=3)
    first, again = (evaluate(config.workdir, noisy, devices=jax.devices()[:1]) for _ in range(2))
    assert first["loss"] == again["loss"] != found["loss"]
    for name in ("eval_test.json", "eval_test_misspelt_0.5_3.json"):
        assert json.loads(Path(config.workdir, name).read_text())["examples"] == 40
