"""A small language model, on the Penn Treebank.

    python train.py configs/ptb_lm.py --workdir runs/ptb-lm
    python eval.py runs/ptb-lm --stride 32

Expected time: not measured.
Expected score: not measured. The usual score is perplexity per word: 82,430 words of the test set
with ends of lines.

The files ptb.train.txt, ptb.valid.txt and ptb.test.txt (one sentence per line, lower case, numbers
as N, as usually distributed) lie in data/ptb, or where `--data.directory` says. No command fetches
them.

`configs/ptb_lm.py:local` is a tiny model of the same design.
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
        task="lm",  # predicts the next token
        workdir="runs/ptb-lm",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces; scores are also given per word
            features=64 if small else 256,  # width M; a multiple of num_heads
            mlp_features=256 if small else 1024,  # width F of the MLP
            num_layers=1 if small else 4,  # of the model
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 8,  # H; divides features
            ),
            max_length=128,  # longest row; rows of the learned positions
            dropout_rate=0.0 if small else 0.3,  # the text is seen many times
        ),
        data=DataConfig(
            directory="data/ptb",  # where the files below lie
            train=("ptb.train.txt",),  # to learn from
            validation=("ptb.valid.txt",),  # chooses the best checkpoint
            test=("ptb.test.txt",),  # read by eval.py alone
            sequence_length=128,  # tokens of a row; at most max_length
            batch_size=16 if small else 32,  # rows of a step; devices divide it
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3 if small else 1e-3,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=20 if small else 500,  # of linear growth from 0
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=150 if small else 8000,  # updates
            eval_every=50 if small else 500,  # steps between validations
            checkpoint_every=50 if small else 500,  # steps between saves
        ),
    )
