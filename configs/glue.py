"""GLUE: a small encoder tuned on one of its nine tasks, pre-trained or from scratch.

    python train.py configs/wikitext2_mlm.py --workdir runs/mlm
    python train.py configs/glue.py:sst2 --train.init_from runs/mlm --workdir runs/sst2
    python eval.py runs/sst2 --split validation
    python eval.py runs/sst2

The task is the variant; without one it is sst2. Files lie in data/glue/SST-2 and so on as GLUE
distributes them (train.tsv, dev.tsv, test.tsv), or where `--data.directory`, `--data.train`,
`--data.validation` and `--data.test` say; `--data.train tfds:glue/sst2:train` works too. The last
command writes test.predictions.tsv for GLUE's site. An encoder of another shape, such as that of
configs/bert_base.py, brings the shape with its run; it needs `--optimizer.learning_rate 3e-5`.

MNLI is validated on its matched part. The mismatched part is scored by
`python eval.py runs/mnli --split validation --sources dev_mismatched.tsv`; for the diagnostic set,
which has no labels, `python eval.py runs/mnli --split test --sources diagnostic.tsv` writes
predictions.

Expected time: 2 minutes on one CPU core for CoLA, and for SST-2 with `--train.num_steps 2000` (AMD
EPYC, jax 0.10.2, 2026-11-22).
Expected score: mhe_mul with these steps, pre-trained as in experiments/paper (other pieces and
positions than the commands above): accuracy 81.1 % on the dev set of SST-2 (from scratch 79.8),
Matthews correlation 12.6 on that of CoLA (9.9). Others not measured.

`configs/glue.py:local` is a tiny model on sst2.
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

# Where GLUE keeps a task, and how many steps of 32 rows to train.
TASKS = {
    "cola": ("CoLA", 1600),
    "sst2": ("SST-2", 4000),
    "mrpc": ("MRPC", 800),
    "qqp": ("QQP", 12_000),
    "stsb": ("STS-B", 1600),
    "mnli": ("MNLI", 12_000),
    "qnli": ("QNLI", 8000),
    "rte": ("RTE", 800),
    "wnli": ("WNLI", 200),
}
Variant = Literal["", "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli", "local"]


def get_config(variant: Variant = "") -> Config:
    small = variant == "local"
    name = "sst2" if variant in ("", "local") else variant
    directory, num_steps = TASKS[name]
    matched = "_matched" if name == "mnli" else ""
    return Config(
        task="regression" if name == "stsb" else "classification",
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
            max_length=128,
            dropout_rate=0.1,
        ),
        data=DataConfig(
            directory=f"data/glue/{directory}",
            dataset=name,
            train=("train.tsv",),
            validation=(f"dev{matched}.tsv",),
            test=(f"test{matched}.tsv",),
            sequence_length=128,
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
