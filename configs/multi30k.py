"""A translator of image captions, English to German, on Multi30k.

    python -m mhe_jax data multi30k
    python train.py configs/multi30k.py --workdir runs/multi30k-mul
    python eval.py runs/multi30k-mul
    python train.py configs/multi30k.py --workdir runs/multi30k-mha --model.attention.kind mha

Expected time: 40 minutes on one CPU core (AMD EPYC, jax 0.10.2, 2026-11-21).
Expected score: mhe_mul 36.5 sacreBLEU (cased, 13a, beam 5) on test_2016_flickr, validation loss
1.793; mha 36.9, validation loss 1.720; one seed each (experiments/paper). mhe_mul has 3.7 million
parameters, mha 5.2 million.

The first command fetches train, val and test_2016_flickr, each `.en.gz` and `.de.gz`, to
data/multi30k, from github.com/multi30k/dataset. Its licence is for research only. The files may lie
elsewhere: `--data.directory`.

`configs/multi30k.py:small` is for comparisons of many runs (experiments/paper): two layers on each
side, 2,100 steps of half the tokens. It takes 7 minutes on such a core.
`configs/multi30k.py:local` is a tiny model of the same design.
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
        task="translation",  # encoder-decoder, on pairs of texts
        workdir="runs/multi30k",  # of the run, or --workdir
        model=ModelConfig(
            # One tokenizer and one table for both languages.
            vocabulary_size=1000 if tiny else 5000,
            features=64 if tiny else 256,  # width M; a multiple of num_heads
            mlp_features=128 if tiny else 512,  # width F of the MLP
            num_layers=1 if tiny else 2 if small else 3,  # of encoder and of decoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if tiny else 8,  # H; divides features
            ),
            positions="sinusoidal",  # fixed sine and cosine; even features
            max_length=128,  # texts to translate may be longer than training texts
            # 29,000 pairs are seen about ten times; less than four times by the small variant.
            dropout_rate=0.0 if small else 0.2,
        ),
        data=DataConfig(
            directory="data/multi30k",  # where the files below lie
            train=("train.en.gz", "train.de.gz"),  # to learn from
            validation=("val.en.gz", "val.de.gz"),  # chooses the best checkpoint
            test=("test_2016_flickr.en.gz", "test_2016_flickr.de.gz"),  # read by eval.py alone
            sequence_length=64,  # longer training pairs, a handful, are left out
            # Padded lengths; the last is sequence_length.
            length_buckets=(12, 16, 20, 24, 32, 64) if small else (16, 24, 32, 64),
            tokens_per_batch=2048 if tiny or small else 4096,  # of both sides, padding included
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=50 if tiny else 150 if small else 400,  # of linear growth from 0
            beta1=0.9,  # decay of the first moment
            beta2=0.98,  # decay of the second moment
            label_smoothing=0.1,  # share spread over all tokens, in training
        ),
        train=TrainConfig(
            num_steps=200 if tiny else 2100 if small else 3000,  # updates
            eval_every=100 if tiny else 500,  # steps between validations
            checkpoint_every=100 if tiny else 500,  # steps between saves
            keep_checkpoints=1 if small else 5,  # for --checkpoint last --average_checkpoints 5
        ),
        evaluation=EvaluationConfig(
            checkpoint="best",  # by validation loss; the test is read once, at the end
            beam_size=5,  # 1 is greedy
            length_penalty=1.0,  # alpha of beam search; 0 for none
        ),
    )
