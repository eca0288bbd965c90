"""Penn Treebank language model: a small text, decoder-only like the paper's.

    python train.py configs/ptb_lm.py --workdir runs/ptb-lm
    python eval.py runs/ptb-lm --stride 32

The files ptb.train.txt, ptb.valid.txt and ptb.test.txt (one sentence per line, lower case, numbers
as N, as usually distributed) lie in data/ptb, or where `--data.directory` says. The usual score is
perplexity per word: 82,430 words of the test set with ends of lines.

Expected time: not measured.
Expected score: not measured.

`configs/ptb_lm.py:local` is a tiny model of the same design that trains for a minute.
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
        task="lm",
        workdir="runs/ptb-lm",
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces; scores are also given per word
            features=64 if small else 256,
            mlp_features=256 if small else 1024,
            num_layers=1 if small else 4,
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if small else 8,
            ),
            max_length=128,
            dropout_rate=0.0 if small else 0.3,  # the text is seen many times
        ),
        data=DataConfig(
            directory="data/ptb",
            train=("ptb.train.txt",),
            validation=("ptb.valid.txt",),
            test=("ptb.test.txt",),
            sequence_length=128,
            batch_size=16 if small else 32,
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3 if small else 1e-3,
            schedule="cosine",
            warmup_steps=20 if small else 500,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=150 if small else 8000,
            eval_every=50 if small else 500,
            checkpoint_every=50 if small else 500,
        ),
    )
