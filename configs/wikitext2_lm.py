"""A small language model, on WikiText-2.

    python -m mhe_jax data wikitext-2
    python train.py configs/wikitext2_lm.py --workdir runs/wikitext2-lm
    python eval.py runs/wikitext2-lm

Expected time: 7 minutes on two CPU cores (AMD EPYC, jax 0.10.2, 2026-11-21).
Expected score: test perplexity 40.5 per token, and 342 per word over 245,569 words with ends of
lines; 3.700 nats per token, where unigram frequencies of the training text have 6.295. These are
means of seeds 1 to 3 (one core of an Intel Xeon each, jax 0.10.2, 2026-11-26: experiments/paper).

The first command fetches train.txt.xz, valid.txt.xz and test.txt.xz (words split by spaces, as
usually distributed) to data/wikitext-2. They may lie elsewhere: `--data.directory`.

The learning rate is the best of four by seed 0, after a quarter of the steps (experiments/atlas).
For other text, try lower ones too.

`configs/wikitext2_lm.py:local` is a tiny model of the same design.
`configs/wikitext2_lm.py:large` is for a GPU: 8 layers of width 512, in bfloat16. Its learning rate
is the best of four for `mha` and `mva`, whose test perplexities are 24.2 and 22.6 per token (three
seeds, two to four minutes each with twelve runs at a time on an NVIDIA H200, jax 0.11.2,
2026-11-27: experiments/atlas). With `mhe_mul`, as it is here: not measured.
"""

from dataclasses import replace
from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: Literal["", "local", "large"] = "") -> Config:
    small = variant == "local"
    config = Config(
        task="lm",  # predicts the next token
        workdir="runs/wikitext2-lm",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces; scores are also given per word
            features=64 if small else 128,  # width M; a multiple of num_heads
            mlp_features=256 if small else 512,  # width F of the MLP
            num_layers=1 if small else 3,  # of the model
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 8,  # H; divides features
            ),
            max_length=128,  # longest row; rows of the learned positions
            dropout_rate=0.0,  # the text is not seen twice in ten minutes
        ),
        data=DataConfig(
            directory="data/wikitext-2",  # where the files below lie
            train=("train.txt.xz",),  # to learn from
            validation=("valid.txt.xz",),  # chooses the best checkpoint
            test=("test.txt.xz",),  # read by eval.py alone
            sequence_length=128,  # tokens of a row; at most max_length
            batch_size=16,  # blocks of 128 tokens: 2,048 tokens a step
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3 if small else 8e-3,  # at its highest, after the warmup
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
    return large(config) if variant == "large" else config


def large(config: Config) -> Config:
    """For a GPU: the text is seen about five times, with dropout against learning it by heart."""
    return replace(
        config,
        workdir="runs/wikitext2-lm-large",  # of the run, or --workdir
        model=replace(
            config.model,
            features=512,  # width M; a multiple of num_heads
            mlp_features=2048,  # width F of the MLP
            num_layers=8,  # of the model
            max_length=256,  # longest row; rows of the learned positions
            dropout_rate=0.2,  # on embeddings and outputs of sublayers
            dtype="bfloat16",  # of activations; parameters stay float32
            scan_layers=True,  # one layer to compile instead of all
        ),
        data=replace(config.data, sequence_length=256, batch_size=64),  # 16,384 tokens a step
        optimizer=replace(config.optimizer, learning_rate=4e-3, warmup_steps=100),
        train=replace(config.train, num_steps=1000, eval_every=100, keep_checkpoints=1),
    )
