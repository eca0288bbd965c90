"""Tiny runs with random parameters, as `train.py` leaves them, to be exported."""

import random
from pathlib import Path

import jax
import optax
from random_parameters import random_parameters

from mhe_jax import tasks
from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from mhe_jax.config.fields import save_json, set_field
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.rules import check
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.checkpoint.tensors import WEIGHTS, by_name, write_tensors
from mhe_jax.training.state import TrainState

# Fields without which a kind cannot be made, and others of it.
KINDS = {
    **{kind: {} for kind in ("mha", "sha", "mqa", "skv", "el", "mhe_add", "mhe_mul")},
    "gqa": {"num_kv_heads": 2},
    "gta": {"num_kv_heads": 2},
    "mva": {"score_features": 3},
    "collaborative": {"score_features": 3},
}
WORDS = ["red", "green", "cat", "dog", "bird", "runs", "sleeps", "the", "a", "small", "big", "old"]


def write_texts(directory):
    """`lines.txt`, `pairs.tsv` and `labels.tsv`."""
    draw = random.Random(0)

    def sentence():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))

    directory.joinpath("lines.txt").write_text("".join(f"{sentence()}\n" for _ in range(60)))
    pairs = [f"{sentence()}\t{sentence()}\n" for _ in range(23)]
    directory.joinpath("pairs.tsv").write_text("".join(pairs))
    labels = [f"{sentence()}\t{'xy'[i % 2]}\n" for i in range(23)]
    directory.joinpath("labels.tsv").write_text("text\tlabel\n" + "".join(labels))


def tiny_config(task, texts, workdir, **fields):
    """A config of widths that all differ, but for `fields`, which are named as in a command."""
    names = {"translation": "pairs.tsv", "classification": "labels.tsv"}
    name = names.get(task, "lines.txt")
    config = Config(
        task=task,
        workdir=str(workdir),
        model=ModelConfig(
            vocabulary_size=304,
            features=24,
            mlp_features=28,
            num_layers=2,
            attention=AttentionConfig(num_heads=4),
            max_length=20,
            dropout_rate=0.0,
        ),
        data=DataConfig(
            directory=str(texts),
            train=(name,),
            validation=(name,),
            test=(name,),
            sequence_length=16,
            batch_size=8,
            length_buckets=(16,) if task in names else (),
            tokens_per_batch=256,
            cache_directory=str(texts / "cache"),
            dataset="own",
        ),
        optimizer=OptimizerConfig(warmup_steps=1),
        train=TrainConfig(num_steps=2, checkpoint_every=1, log_every=1),
        evaluation=EvaluationConfig(batch_size=8, beam_size=3, extra_length=6, length_penalty=0.0),
    )
    for field, value in fields.items():
        config = set_field(config, field, value)
    return config


def save_run(config, seed=3, change=None, orbax=False):
    """Leaves config, tokenizer and parameters, of step 7, in the workdir.

    They are in `model.safetensors`, which is quick, or with `orbax` the best checkpoint.
    `change(params)` may set some of them first, in place.
    """
    config = tasks.resolve(config)
    check(config)
    workdir = Path(config.workdir)
    workdir.mkdir(parents=True)
    tokenizer = tasks.make_tokenizer(config, workdir / TOKENIZER)
    save_json(config, workdir / "config.json")
    task = tasks.of(config)
    initialize = task.initializer(task.model(config.model), config.data.sequence_length)
    params = random_parameters(initialize, seed)
    if change is not None:
        change(params)
    if orbax:
        checkpoints = Checkpoints(workdir)
        meta = {"validated_step": 7, "validation": {"loss": 1.0}, "tokenizer": tokenizer.key}
        state = TrainState.create(params, optax.identity(), jax.random.key(0), False)
        checkpoints.save(state, 7, meta)
        checkpoints.close()
    else:
        about = {"steps": "[7]", "tokenizer": tokenizer.key}
        write_tensors(workdir / WEIGHTS, by_name(params), about)
    return workdir
