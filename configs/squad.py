"""SQuAD 1.1 and 2.0: a small encoder tuned to find the span that answers a question.

    python train.py configs/wikitext2_mlm.py --model.max_length 384 --workdir runs/mlm384
    python train.py configs/squad.py --train.init_from runs/mlm384 --workdir runs/squad
    python eval.py runs/squad --split validation

Without a variant it is version 1.1; `configs/squad.py:v2` is 2.0. Files lie in data/squad as SQuAD
distributes them (train-v1.1.json, dev-v1.1.json), or where `--data.directory`, `--data.train`
and `--data.validation` say; `--data.train tfds:squad/v1.1:train` works too. There is no public
test set: the last command writes validation.predictions.json, {id: answer}. A context longer than a
row is read through windows, 128 tokens apart. In version 2.0 the result also has the best scores
over all no-answer thresholds, and those thresholds.

Expected time: not measured.
Expected score: not measured.

`configs/squad.py:local` is a tiny model on version 1.1.
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: Literal["", "v2", "local"] = "") -> Config:
    small = variant == "local"
    version = "v2.0" if variant == "v2" else "v1.1"
    num_steps = 10_000
    return Config(
        task="span",
        workdir=f"runs/squad-{version}",
        # With train.init_from the shape is that of the other run; the head, dropout rates and how
        # it is computed are these.
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,
            features=64 if small else 128,
            mlp_features=256 if small else 512,
            num_layers=1 if small else 3,
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if small else 8,
            ),
            max_length=384,
            dropout_rate=0.1,
        ),
        data=DataConfig(
            directory="data/squad",
            dataset="squad_v2" if variant == "v2" else "squad",
            train=(f"train-{version}.json",),
            validation=(f"dev-{version}.json",),
            test=(f"dev-{version}.json",),
            sequence_length=128 if small else 384,
            window_stride=32 if small else 128,
            question_length=32 if small else 64,
            batch_size=32,
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            schedule="linear",
            warmup_steps=20 if small else num_steps // 10,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=200 if small else num_steps,
            eval_every=100 if small else max(num_steps // 10, 50),
            checkpoint_every=100 if small else max(num_steps // 10, 50),
            keep_checkpoints=1,
        ),
        evaluation=EvaluationConfig(batch_size=128),
    )
