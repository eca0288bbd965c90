"""An encoder of whole words by their hashes, on WikiText-2.

    python -m mhe_jax data wikitext-2
    python train.py configs/hashformer.py --workdir runs/hashformer
    python eval.py runs/hashformer
    python -m mhe_jax data glue/sst2
    python train.py configs/finetune.py:sst2 --train.init_from runs/hashformer --workdir runs/sst2

Expected time: 6 minutes on one CPU core, 5 to 8 by hash (AMD EPYC, jax 0.10.2, 2026-11-22).
Expected score: md_proj 0.320 nats, accuracy 88.0 %, AUC of moved against original words 0.786, on
the test set; lsh_proj 0.269 nats, 90.1 %, 0.791; one seed each. Predicting the shares of the labels
has 0.61 nats, accuracy 81 % (experiments/paper).

Training and scoring need the extra `report`, for the AUC.

Training asks of each word whether it is original, moved or random. `--model.hashing` sets the hash
and what embeds it: md_emb, md_pool, md_add, md_proj, lsh_emb, lsh_pool, lsh_add or lsh_proj.

- A table (`_emb`) learns from rare words only with smaller steps: `--optimizer.learning_rate 5e-4`.
- On pieces of words: `--model.hashing None --model.vocabulary_size 4000`.
- Without context, as a baseline: `--model.context token`.
- Masked words instead, by the buckets of their hash: `--task mlm --model.hashing md_emb`.

The first command fetches train.txt.xz, valid.txt.xz and test.txt.xz to data/wikitext-2. They may
lie elsewhere: `--data.directory`.

`configs/hashformer.py:base` has the published shape, RoBERTa-base's, on TFDS's Wiki-40B; any other
text will do.
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
        task="shuffle_random",  # tells which words are out of place
        workdir="runs/hashformer",  # of the run, or --workdir
        model=ModelConfig(
            hashing="md_proj",  # hash, and what embeds it
            vocabulary_size=50_265,  # rows of the table of _emb: 50,260 buckets
            features=64 if small else 128,  # width M; a multiple of num_heads
            mlp_features=128 if small else 512,  # width F of the MLP
            num_layers=1 if small else 3,  # of the encoder
            attention=AttentionConfig(kind="mha", num_heads=4),  # heads divide features
            positions="sinusoidal",  # finds neighbours, which tell most, much sooner
            max_length=128,  # longest row
            dropout_rate=0.0,  # a short run underfits
        ),
        data=DataConfig(
            directory="data/wikitext-2",  # where the files below lie
            train=("train.txt.xz",),  # to learn from
            validation=("valid.txt.xz",),  # chooses the best checkpoint
            test=("test.txt.xz",),  # read by eval.py alone
            sequence_length=64,  # tokens of a row; at most max_length
            batch_size=32,  # every word teaches something, and many steps teach most
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=20 if small else 200,  # of linear growth from 0
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=150 if small else 4000,  # updates
            eval_every=50 if small else 1000,  # steps between validations
            checkpoint_every=50 if small else 1000,  # steps between saves
        ),
    )


def base() -> Config:
    return Config(
        task="shuffle_random",  # tells which words are out of place
        workdir="runs/hashformer-base",  # of the run, or --workdir
        model=ModelConfig(
            hashing="md_proj",  # hash, and what embeds it
            vocabulary_size=50_265,  # rows of the table of _emb
            features=768,  # width M; a multiple of num_heads
            mlp_features=3072,  # width F of the MLP
            num_layers=12,  # of the encoder
            # Heads divide features; dropout is on attention weights, biases in four projections.
            attention=AttentionConfig(kind="mha", num_heads=12, dropout_rate=0.1, use_bias=True),
            norm_position="post",  # after each residual sum
            layer_norm_epsilon=1e-5,  # in the norm's denominator
            max_length=514,  # longest row
            num_token_types=1,  # kinds of segment, each with an embedding
            dropout_rate=0.1,  # on embeddings and outputs of sublayers
            scan_layers=True,  # one layer to compile instead of twelve
            dtype="bfloat16",  # of activations; parameters stay float32
        ),
        data=DataConfig(
            train=("tfds:wiki40b/en:train",),  # to learn from
            validation=("tfds:wiki40b/en:validation",),  # chooses the best checkpoint
            test=("tfds:wiki40b/en:test",),  # read by eval.py alone
            sequence_length=512,  # tokens of a row; at most max_length
            batch_size=256,  # rows of a step; devices divide it
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-4,  # at its highest, after the warmup
            schedule="linear",  # falls to 0 at the last step
            warmup_steps=10_000,  # of linear growth from 0
            beta2=0.999,  # decay of the second moment
            epsilon=1e-6,  # in the update's denominator
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=500_000,  # updates
            eval_every=10_000,  # steps between validations
            eval_batches=100,  # batches of a validation
            checkpoint_every=5_000,  # steps between saves
        ),
    )
