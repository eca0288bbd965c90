"""A translator of numbers and dates to German, on phrases made by rules.

    python train.py configs/demo.py --workdir runs/demo
    python eval.py runs/demo
    echo "about twenty-five to nine in the evening" | python eval.py runs/demo --translate

Expected time: 100 seconds on two CPU cores, for training and evaluation (2026-11-28).
Expected score: 98.4 BLEU and 98.0 % exact match on the test (one run, seed 0, Python 3.11, jax
0.10.2, AMD EPYC, 2026-11-28).

English numbers, dates and times of day, in words, come with the package; nothing is downloaded. No
number, date or time of the test occurs in training. `make demo` runs all three commands, and fails
below 85 BLEU or 75 % exact match.

`configs/demo.py:local` is a tiny model that only shows that everything runs.
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


def get_config(variant: Literal["", "local"] = "") -> Config:
    small = variant == "local"
    return Config(
        task="translation",  # encoder-decoder, on pairs of texts
        workdir="runs/demo",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=400,  # 256 of them are bytes that this text never needs
            features=32 if small else 128,  # width M; a multiple of num_heads
            mlp_features=64 if small else 384,  # width F of the MLP
            num_layers=1 if small else 2,  # of the encoder, and as many of the decoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4,  # H; divides features
            ),
            positions="sinusoidal",  # fixed sine and cosine; even features
            max_length=80,  # texts to translate may be longer than training texts
            dropout_rate=0.0,  # the phrases are made by rules, and no phrase is seen often
        ),
        data=DataConfig(
            train=("demo:train",),  # to learn from
            validation=("demo:validation",),  # chooses the best checkpoint
            test=("demo:test",),  # read by eval.py alone
            sequence_length=40,  # in tokens: all phrases fit
            length_buckets=(16, 24, 40),  # padded lengths; the last is sequence_length
            tokens_per_batch=512 if small else 3072,  # of both sides, padding included
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=20 if small else 100,  # of linear growth from 0
        ),
        train=TrainConfig(
            num_steps=100 if small else 600,  # updates
            eval_every=50 if small else 100,  # steps between validations
            eval_translate=0 if small else 100,  # validation pairs translated for BLEU
            checkpoint_every=50 if small else 200,  # steps between saves
            keep_checkpoints=1,  # newest ones, besides the best
        ),
        evaluation=EvaluationConfig(
            batch_size=128,  # rows at once
            beam_size=1 if small else 4,  # 1 is greedy
            extra_length=40,  # a German number is one word and many tokens
        ),
    )
