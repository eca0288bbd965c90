"""An encoder tuned to a task of GLUE, SuperGLUE or SQuAD.

    python -m mhe_jax data wikitext-2
    python -m mhe_jax data glue/sst2
    python train.py configs/wikitext2_mlm.py --workdir runs/mlm
    python train.py configs/finetune.py:sst2 --train.init_from runs/mlm --workdir runs/sst2
    python eval.py runs/sst2 --split validation     # the score
    python eval.py runs/sst2                        # predictions for the test set, as GLUE takes it

Expected time: 2 minutes on one CPU core for CoLA, and for SST-2 with `--train.num_steps 2000` (AMD
EPYC, jax 0.10.2, 2026-11-22).
Expected score: 81.1 % accuracy on the dev set of SST-2, and Matthews correlation 12.6 on that of
CoLA; without pre-training 79.8 and 9.9. These are of mhe_mul, with 2,000 and 1,600 steps; its
encoder has other pieces and positions than the one above (experiments/paper). Other tasks: not
measured.

The variant names the task, as in `configs/finetune.py:cola`; without one it is sst2. Without
--train.init_from the same command trains from scratch.
`python -m mhe_jax data super_glue/boolq` has TFDS prepare the data set of another task; others are
`squad/v1.1` and so on. docs/finetuning.md says how to read files of your own, or of the suites'
sites.

- An encoder of another shape brings its shape. That of configs/bert_base.py needs
  `--optimizer.learning_rate 3e-5`.
- SuperGLUE and SQuAD have longer rows: pre-train with `--model.max_length 512`.
- MNLI is validated on its matched part. `python eval.py runs/mnli --split validation --sources
  tfds:glue/mnli:validation_mismatched` scores the other part. `python eval.py runs/mnli --split
  test --sources tfds:glue/ax:test` writes predictions for the diagnostic set, which has no labels.
- COPA's choices are scored as pairs with the premise. WiC and WSC read the vectors of the words in
  question. ReCoRD, whose answers are entities marked in a passage, is not here.
- SQuAD has no public test set: dev stands for it. A context longer than a row is read through
  windows, 128 tokens apart.

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
        task=OTHERS.get(name, "classification"),  # by the kind of the label
        workdir=f"runs/{name}",  # of the run, or --workdir
        # With train.init_from the shape is that of the other run; the head, dropout rates and how
        # it is computed are these.
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces of the run's own tokenizer
            features=64 if small else 128,  # width M; a multiple of num_heads
            mlp_features=256 if small else 512,  # width F of the MLP
            num_layers=1 if small else 3,  # of the encoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 8,  # H; divides features
            ),
            max_length=longest,  # longest row; rows of the learned positions
            dropout_rate=0.1,  # on embeddings and outputs of sublayers
        ),
        data=DataConfig(
            dataset=name,  # its texts and labels, by their columns
            train=(f"tfds:{place}:train",),  # to learn from
            validation=(f"tfds:{place}:{dev}{part}",),  # chooses the best checkpoint
            test=(f"tfds:{place}:{test}{part}",),  # read by eval.py alone
            sequence_length=length,  # tokens of a row; at most max_length
            batch_size=32,  # rows of a step; devices divide it
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,  # at its highest, after the warmup
            schedule="linear",  # falls to 0 at the last step
            warmup_steps=20 if small else num_steps // 10,  # of linear growth from 0
            beta2=0.999,  # decay of the second moment
            epsilon=1e-6,  # in the update's denominator
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=200 if small else num_steps,  # updates
            eval_every=100 if small else max(num_steps // 10, 50),  # steps between validations
            checkpoint_every=100 if small else max(num_steps // 10, 50),  # steps between saves
            keep_checkpoints=1,  # newest ones, besides the best
        ),
        evaluation=EvaluationConfig(batch_size=128),  # rows at once
    )
