"""SuperGLUE without ReCoRD: a small encoder tuned on one of its tasks.

    python train.py configs/wikitext2_mlm.py --model.max_length 512 --workdir runs/mlm512
    python train.py configs/superglue.py:boolq --train.init_from runs/mlm512 --workdir runs/boolq
    python eval.py runs/boolq --split validation
    python eval.py runs/boolq

The task is the variant; without one it is boolq. Files lie in data/superglue/BoolQ and so on as
SuperGLUE distributes them (train.jsonl, val.jsonl, test.jsonl), or where `--data.directory`,
`--data.train`, `--data.validation` and `--data.test` say; tfds:super_glue/boolq:train works too.
The last command writes test.predictions.jsonl for SuperGLUE's site. COPA's choices are scored as
pairs with the premise; WiC and WSC read the vectors of the words in question. ReCoRD, whose
answers are entities marked in a passage, is not here.

Expected time: not measured.
Expected score: not measured.

`configs/superglue.py:local` is a tiny model on boolq.
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

# Where SuperGLUE keeps a task, the longest row, and how many steps of 32 rows to train.
TASKS = {
    "boolq": ("BoolQ", 256, 3000),
    "cb": ("CB", 256, 200),
    "copa": ("COPA", 64, 300),
    "multirc": ("MultiRC", 512, 8000),
    "rte": ("RTE", 256, 800),
    "wic": ("WiC", 128, 1600),
    "wsc": ("WSC", 128, 300),
}
Variant = Literal["", "boolq", "cb", "copa", "multirc", "rte", "wic", "wsc", "local"]


def get_config(variant: Variant = "") -> Config:
    small = variant == "local"
    name = "boolq" if variant in ("", "local") else variant
    directory, length, num_steps = TASKS[name]
    return Config(
        task="multiple_choice" if name == "copa" else "classification",
        workdir=f"runs/superglue-{name}",
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
            max_length=512,
            dropout_rate=0.1,
        ),
        data=DataConfig(
            directory=f"data/superglue/{directory}",
            dataset="superglue_rte" if name == "rte" else name,
            train=("train.jsonl",),
            validation=("val.jsonl",),
            test=("test.jsonl",),
            sequence_length=64 if small else length,
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
