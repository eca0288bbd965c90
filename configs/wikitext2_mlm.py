"""A small BERT-like encoder (masked language model), on WikiText-2.

    python -m mhe_jax data wikitext-2
    python train.py configs/wikitext2_mlm.py --workdir runs/wikitext2-mlm
    python eval.py runs/wikitext2-mlm

Expected time: 11 minutes on two CPU cores (AMD EPYC, jax 0.10.2, 2026-11-21).
Expected score: test loss 4.563 nats, accuracy 32.7 %, perplexity 95.9 on masked tokens; one seed.
Unigram frequencies of the training text have 6.295 nats (experiments/paper).

The first command fetches train.txt.xz, valid.txt.xz and test.txt.xz (words split by spaces, as
usually distributed) to data/wikitext-2. They may lie elsewhere: `--data.directory`.

`configs/wikitext2_mlm.py:local` is a tiny model of the same design.
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


def get_config(variant: Literal["", "local"] = "") -> Config:
    small = variant == "local"
    return Config(
        task="mlm",  # fills in masked tokens
        workdir="runs/wikitext2-mlm",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces of the run's own tokenizer
            features=64 if small else 128,  # width M; a multiple of num_heads
            mlp_features=256 if small else 512,  # width F of the MLP
            num_layers=1 if small else 3,  # of the encoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 8,  # H; divides features
            ),
            max_length=128,  # longest row; rows of the learned positions
            dropout_rate=0.0,  # a short run underfits
        ),
        data=DataConfig(
            directory="data/wikitext-2",  # where the files below lie
            train=("train.txt.xz",),  # to learn from
            validation=("valid.txt.xz",),  # chooses the best checkpoint
            test=("test.txt.xz",),  # read by eval.py alone
            sequence_length=128,  # tokens of a row; at most max_length
            batch_size=32,  # only masked tokens, 15 % of 4,096, teach anything in a step
            mask_rate=0.15,  # share of the tokens to predict
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=20 if small else 200,  # of linear growth from 0
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=150 if small else 2000,  # updates
            eval_every=50 if small else 500,  # steps between validations
            checkpoint_every=50 if small else 500,  # steps between saves
        ),
    )
