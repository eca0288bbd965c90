r"""The encoder of the MHE paper: BERT-base's shape, masked language model of 512 tokens.

    python train.py configs/bert_base.py --workdir runs/bert-mul
    python train.py configs/bert_base.py --workdir runs/bert-mha --model.attention.kind mha

Any text will do, with `--data.train my.txt --data.validation held_out.txt`. The default is
wiki40b/en of TFDS, which is made with Apache Beam. Beam does not install beside mhe_jax. So make
the text once in an environment of its own, in the TFDS_DATA_DIR that training has (tried on 150
articles, not on all):

    python3.11 -m venv beam
    beam/bin/pip install tensorflow-datasets importlib_resources tensorflow \
        'apache-beam[gcp,tfrecord]'
    beam/bin/python -c 'import tensorflow_datasets as tfds
    tfds.builder("wiki40b/en", file_format="array_record").download_and_prepare()'

Expected time: not measured; meant for a pod (batch 256 of 512 tokens, a million steps).
Expected score: not measured. Published attention parameters are 8.88M for mhe_add and mhe_mul and
28.32M (by arithmetic 28.31M) for mha; the recipe is not published, this one is BERT's.

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
            directory="data/wikitext-2",
            train=("train.txt.xz",),
            validation=("valid.txt.xz",),
            test=("test.txt.xz",),
            sequence_length=64,
            batch_size=16,
        )
    else:
        data = DataConfig(
            train=("tfds:wiki40b/en:train",),
            validation=("tfds:wiki40b/en:validation",),
            test=("tfds:wiki40b/en:test",),
            sequence_length=512,
            batch_size=256,  # divides over up to 256 devices
        )
    return Config(
        task="mlm",
        workdir="runs/bert-base",
        model=ModelConfig(
            vocabulary_size=1000 if small else 32_000,
            features=64 if small else 768,
            mlp_features=128 if small else 3072,
            num_layers=2 if small else 12,
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if small else 12,  # 64 wide
                dropout_rate=0.1,
            ),
            norm_position="post",  # as in BERT
            layer_norm_epsilon=1e-12,
            max_length=512,
            dropout_rate=0.1,
            scan_layers=True,  # one layer to compile instead of twelve
            dtype="float32" if small else "bfloat16",
        ),
        data=data,
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            schedule="linear",  # to 0 at the last step
            warmup_steps=50 if small else 10_000,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=200 if small else 1_000_000,
            eval_every=100 if small else 10_000,
            eval_batches=8 if small else 100,
            checkpoint_every=100 if small else 5_000,
        ),
        mesh=MeshConfig(data=-1),
        evaluation=EvaluationConfig(batch_size=64),
    )
