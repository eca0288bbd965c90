"""A small encoder tuned on a task of GLUE, SuperGLUE or SQuAD, pre-trained or from scratch.

    python -m mhe_jax data glue/sst2
    python train.py configs/wikitext2_mlm.py --workdir runs/mlm
    python train.py configs/finetune.py:sst2 --train.init_from runs/mlm --workdir runs/sst2
    python eval.py runs/sst2 --split validation
    python eval.py runs/sst2

The task is the variant; without one it is sst2. Its data set is that of TFDS, which
`python -m mhe_jax data glue/sst2` prepares (`super_glue/boolq`, `squad/v1.1` and so on);
docs/finetuning.md says how to read files of your own, or of the suites' sites. The last command
writes predictions: a line of index and label for each example, as the site of GLUE takes it. An
encoder of another shape, such
as that of configs/bert_base.py, brings the shape with its run; it needs
`--optimizer.learning_rate 3e-5`. For the longer rows of SuperGLUE and SQuAD pre-train with
`--model.max_length 512`.

MNLI is validated on its matched part. The mismatched part is scored by
`python eval.py runs/mnli --split validation --sources tfds:glue/mnli:validation_mismatched`; for
the diagnostic set, which has no labels, `python eval.py runs/mnli --split test --sources
tfds:glue/ax:test` writes predictions. COPA's choices are scored as pairs with the premise; WiC and
WSC read the vectors of the words in question. ReCoRD, whose answers are entities marked in a
passage, is not here.

SQuAD has no public test set: dev stands for it. A context longer than a row is read through
windows, 128 tokens apart.

Expected time: 2 minutes on one CPU core for CoLA, and for SST-2 with `--train.num_steps 2000` (AMD
EPYC, jax 0.10.2, 2026-11-22).
Expected score: mhe_mul with these steps, pre-trained as in experiments/paper (other pieces and
positions than the commands above): accuracy 81.1 % on the dev set of SST-2 (from scratch 79.8),
Matthews correlation 12.6 on that of CoLA (9.9). Others not measured.

`configs/finetune.py:local` is a tiny model on sst2.
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PublishedDataset,
    TaskName,
    TrainConfig,
)

# What TFDS calls a task, the longest row, and how many steps of 32 rows to train.
TASKS = {
    "cola": ("glue/cola", 128, 1600),
    "sst2": ("glue/sst2", 128, 4000),
    "mrpc": ("glue/mrpc", 128, 800),
    "qqp": ("glue/qqp", 128, 12_000),
    "stsb": ("glue/stsb", 128, 1600),
    "mnli": ("glue/mnli", 128, 12_000),
    "qnli": ("glue/qnli", 128, 8000),
    "rte": ("glue/rte", 128, 800),
    "wnli": ("glue/wnli", 128, 200),
    "boolq": ("super_glue/boolq", 256, 3000),
    "cb": ("super_glue/cb", 256, 200),
    "copa": ("super_glue/copa", 64, 300),
    "multirc": ("super_glue/multirc", 512, 8000),
    "superglue_rte": ("super_glue/rte", 256, 800),
    "wic": ("super_glue/wic", 128, 1600),
    "wsc": ("super_glue/wsc.fixed", 128, 300),
    "squad": ("squad/v1.1", 384, 10_000),
    "squad_v2": ("squad/v2.0", 384, 10_000),
}
OTHERS: dict[str, TaskName] = {
    "stsb": "regression",
    "copa": "multiple_choice",
    "squad": "span",
    "squad_v2": "span",
}


def get_config(variant: Literal["", "local", PublishedDataset] = "") -> Config:
    small = variant == "local"
    name = "sst2" if variant in ("", "local") else variant
    place, length, num_steps = TASKS[name]
    suite = place.partition("/")[0]
    longest = {"glue": 128, "super_glue": 512, "squad": 384}[suite]
    dev, test = ("validation", "validation") if suite == "squad" else ("validation", "test")
    part = "_matched" if name == "mnli" else ""
    return Config(
        task=OTHERS.get(name, "classification"),
        workdir=f"runs/{name}",
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
            max_length=longest,
            dropout_rate=0.1,
        ),
        data=DataConfig(
            dataset=name,
            train=(f"tfds:{place}:train",),
            validation=(f"tfds:{place}:{dev}{part}",),
            test=(f"tfds:{place}:{test}{part}",),
            sequence_length=length,
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
