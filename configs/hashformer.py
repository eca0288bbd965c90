"""HashFormer: an encoder of whole words by their hash, trained to tell which are out of place.

    python train.py configs/hashformer.py --workdir runs/hashformer
    python eval.py runs/hashformer
    python train.py configs/finetune.py:sst2 --train.init_from runs/hashformer --workdir runs/sst2

`--model.hashing` sets the hash and what embeds it: md_emb, md_pool, md_add, md_proj, lsh_emb,
lsh_pool, lsh_add or lsh_proj. The same objective on pieces of words: `--model.hashing None
--model.vocabulary_size 4000`; without context, as a baseline: `--model.context token`; MLM over the
buckets of a hash: `--task mlm --model.hashing md_emb`.

The files train.txt.xz, valid.txt.xz and test.txt.xz of WikiText-2 lie in data/wikitext-2
(`mhe-jax data wikitext-2` fetches them), or where `--data.directory` says.
`configs/hashformer.py:base` has the shape of RoBERTa-base, as published, on TFDS's Wiki-40B; any
other text works.

A table (`_emb`) learns from rare words only with smaller steps: `--optimizer.learning_rate 5e-4`.

Expected time: 6 minutes on one CPU core, 5 to 8 by hash (AMD EPYC, jax 0.10.2, 2026-11-22).
Expected score: md_proj 0.320 nats, accuracy 88.0 %, AUC of moved against original words 0.786, on
the test set; lsh_proj 0.269 nats, 90.1 %, 0.791; one seed each. Predicting the shares of the labels
has 0.61 nats, accuracy 81 %.

`configs/hashformer.py:local` is a tiny model of the same design.
Source: Xue & Aletras 2022, "HashFormers".
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: Literal["", "base", "local"] = "") -> Config:
    return base() if variant == "base" else wikitext2(small=variant == "local")


def wikitext2(small: bool) -> Config:
    return Config(
        task="shuffle_random",
        workdir="runs/hashformer",
        model=ModelConfig(
            hashing="md_proj",
            vocabulary_size=50_265,  # rows of the table of _emb: 50,260 buckets
            features=64 if small else 128,
            mlp_features=128 if small else 512,
            num_layers=1 if small else 3,
            attention=AttentionConfig(kind="mha", num_heads=4),
            positions="sinusoidal",  # finds neighbours, which tell most, much sooner
            max_length=128,
            dropout_rate=0.0,  # a short run underfits
        ),
        data=DataConfig(
            directory="data/wikitext-2",
            train=("train.txt.xz",),
            validation=("valid.txt.xz",),
            test=("test.txt.xz",),
            sequence_length=64,
            batch_size=32,  # every word teaches something, and many steps teach most
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            schedule="cosine",
            warmup_steps=20 if small else 200,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=150 if small else 4000,
            eval_every=50 if small else 1000,
            checkpoint_every=50 if small else 1000,
        ),
    )


def base() -> Config:
    return Config(
        task="shuffle_random",
        workdir="runs/hashformer-base",
        model=ModelConfig(
            hashing="md_proj",
            vocabulary_size=50_265,
            features=768,
            mlp_features=3072,
            num_layers=12,
            attention=AttentionConfig(kind="mha", num_heads=12, dropout_rate=0.1, use_bias=True),
            norm_position="post",
            layer_norm_epsilon=1e-5,
            max_length=514,
            num_token_types=1,
            dropout_rate=0.1,
            scan_layers=True,  # one layer to compile instead of twelve
            dtype="bfloat16",
        ),
        data=DataConfig(
            train=("tfds:wiki40b/en:train",),
            validation=("tfds:wiki40b/en:validation",),
            test=("tfds:wiki40b/en:test",),
            sequence_length=512,
            batch_size=256,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            schedule="linear",
            warmup_steps=10_000,
            beta2=0.999,
            epsilon=1e-6,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=500_000,
            eval_every=10_000,
            eval_batches=100,
            checkpoint_every=5_000,
        ),
    )
