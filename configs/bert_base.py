r"""An encoder of BERT-base's shape, as in the MHE paper, on Wiki-40B.

    python train.py configs/bert_base.py --workdir runs/bert-mul
    python train.py configs/bert_base.py --workdir runs/bert-mha --model.attention.kind mha

Expected time: not measured; meant for a pod (a million steps of 256 rows of 512 tokens).
Expected score: not measured. Published attention parameters are 8.88M for mhe_add and mhe_mul, and
28.32M for mha (28.31M by arithmetic). The paper does not give its recipe; this one is BERT's.

The text is wiki40b/en of TFDS. Apache Beam makes it, and does not install beside mhe_jax. So make
the text once, in an environment of its own, with the TFDS_DATA_DIR that training has (tried on 150
articles, not on all):

    python3.11 -m venv beam
    beam/bin/pip install tensorflow-datasets importlib_resources tensorflow \
        'apache-beam[gcp,tfrecord]'
    beam/bin/python -c 'import tensorflow_datasets as tfds
    tfds.builder("wiki40b/en", file_format="array_record").download_and_prepare()'

Any other text will do: `--data.train my.txt --data.validation held_out.txt`.

`configs/bert_base.py:local` is a tiny model of the same design on WikiText-2 in data/wikitext-2.
Sources: Xue & Aletras 2023, table 1; Devlin et al. 2019, appendix A.2.
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: Literal["", "local"] = "") -> Config:
    small = variant == "local"
    if small:
        data = DataConfig(
            directory="data/wikitext-2",  # where the files below lie
            train=("train.txt.xz",),  # to learn from
            validation=("valid.txt.xz",),  # chooses the best checkpoint
            test=("test.txt.xz",),  # read by eval.py alone
            sequence_length=64,  # tokens of a row; at most max_length
            batch_size=16,  # rows of a step; devices divide it
        )
    else:
        data = DataConfig(
            train=("tfds:wiki40b/en:train",),  # to learn from
            validation=("tfds:wiki40b/en:validation",),  # chooses the best checkpoint
            test=("tfds:wiki40b/en:test",),  # read by eval.py alone
            sequence_length=512,  # tokens of a row; at most max_length
            batch_size=256,  # divides over up to 256 devices
        )
    return Config(
        task="mlm",  # fills in masked tokens
        workdir="runs/bert-base",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 32_000,  # pieces of the run's own tokenizer
            features=64 if small else 768,  # width M; a multiple of num_heads
            mlp_features=128 if small else 3072,  # width F of the MLP
            num_layers=2 if small else 12,  # of the encoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 12,  # 64 wide
                dropout_rate=0.1,  # on attention weights
            ),
            norm_position="post",  # as in BERT
            layer_norm_epsilon=1e-12,  # in the norm's denominator
            max_length=512,  # longest row; rows of the learned positions
            dropout_rate=0.1,  # on embeddings and outputs of sublayers
            scan_layers=True,  # one layer to compile instead of twelve
            dtype="float32" if small else "bfloat16",  # of activations; parameters stay float32
        ),
        data=data,
        optimizer=OptimizerConfig(
            learning_rate=1e-4,  # at its highest, after the warmup
            schedule="linear",  # falls to 0 at the last step
            warmup_steps=50 if small else 10_000,  # of linear growth from 0
            beta2=0.999,  # decay of the second moment
            epsilon=1e-6,  # in the update's denominator
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=200 if small else 1_000_000,  # updates
            eval_every=100 if small else 10_000,  # steps between validations
            eval_batches=8 if small else 100,  # batches of a validation
            checkpoint_every=100 if small else 5_000,  # steps between saves
        ),
        mesh=MeshConfig(data=-1),  # all devices split the batch
        evaluation=EvaluationConfig(batch_size=64),  # rows at once
    )
