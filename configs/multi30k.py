"""Multi30k, English to German captions: 3.7 million parameters with mhe_mul, 5.2 with mha.

    python -m mhe_jax data multi30k
    python train.py configs/multi30k.py --workdir runs/multi30k-mul
    python eval.py runs/multi30k-mul
    python train.py configs/multi30k.py --workdir runs/multi30k-mha --model.attention.kind mha

The first command fetches train, val and test_2016_flickr, each `.en.gz` and `.de.gz`, to
data/multi30k, from github.com/multi30k/dataset, whose licence is for research only. They may lie
elsewhere (`--data.directory`).

Expected time: 40 minutes on one CPU core (AMD EPYC, jax 0.10.2, 2026-11-21).
Expected score: mhe_mul 36.5 sacreBLEU (cased, 13a, beam 5) on test_2016_flickr, validation loss
1.793; mha 36.9, validation loss 1.720; one seed each.

`configs/multi30k.py:small` is for comparisons of many runs (experiments/paper): two layers on
each side, and 2,100 steps of half the tokens, seven minutes on such a core.

`configs/multi30k.py:local` is a tiny model of the same design that trains for a minute or two.
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


def get_config(variant: Literal["", "small", "local"] = "") -> Config:
    tiny, small = variant == "local", variant == "small"
    return Config(
        task="translation",
        workdir="runs/multi30k",
        model=ModelConfig(
            # One tokenizer and one table for both languages.
            vocabulary_size=1000 if tiny else 5000,
            features=64 if tiny else 256,
            mlp_features=128 if tiny else 512,
            num_layers=1 if tiny else 2 if small else 3,  # of encoder and of decoder
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if tiny else 8,
            ),
            positions="sinusoidal",
            max_length=128,  # texts to translate may be longer than training texts
            # 29,000 pairs are seen about ten times; less than four times by the small variant.
            dropout_rate=0.0 if small else 0.2,
        ),
        data=DataConfig(
            directory="data/multi30k",
            train=("train.en.gz", "train.de.gz"),
            validation=("val.en.gz", "val.de.gz"),
            test=("test_2016_flickr.en.gz", "test_2016_flickr.de.gz"),
            sequence_length=64,  # longer training pairs, a handful, are left out
            length_buckets=(12, 16, 20, 24, 32, 64) if small else (16, 24, 32, 64),
            tokens_per_batch=2048 if tiny or small else 4096,  # of both sides, padding included
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            schedule="cosine",
            warmup_steps=50 if tiny else 150 if small else 400,
            beta1=0.9,
            beta2=0.98,
            label_smoothing=0.1,
        ),
        train=TrainConfig(
            num_steps=200 if tiny else 2100 if small else 3000,
            eval_every=100 if tiny else 500,
            checkpoint_every=100 if tiny else 500,
            keep_checkpoints=1 if small else 5,  # for --checkpoint last --average_checkpoints 5
        ),
        evaluation=EvaluationConfig(
            checkpoint="best",  # by validation loss; the test is read once, at the end
            beam_size=5,
            length_penalty=1.0,
        ),
    )
