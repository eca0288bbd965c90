"""A language model of 12 layers for one accelerator, on WikiText-103.

    python train.py configs/wikitext103_lm.py --workdir runs/wikitext103-lm
    python eval.py runs/wikitext103-lm --stride 64

Expected time: not measured.
Expected score: not measured. The usual score is perplexity per word with sliding windows: 245,569
words of the test set with ends of lines.

The files wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (words split by spaces, as
usually distributed) lie in data/wikitext-103, or where `--data.directory` says. No command fetches
them.

`configs/wikitext103_lm.py:local` is a tiny model of the same design.
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
        workdir="runs/wikitext103-lm",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 32_000,  # pieces; scores are also given per word
            features=64 if small else 768,  # width M; a multiple of num_heads
            mlp_features=256 if small else 3072,  # width F of the MLP
            num_layers=1 if small else 12,  # of the model
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 12,  # H; divides features
            ),
            max_length=128 if small else 512,  # longest row; rows of the learned positions
            dropout_rate=0.0 if small else 0.1,  # on embeddings and outputs of sublayers
            scan_layers=not small,  # one layer to compile instead of twelve
            dtype="float32" if small else "bfloat16",  # of activations; parameters stay float32
        ),
        data=DataConfig(
            directory="data/wikitext-103",  # where the files below lie
            train=("wiki.train.tokens",),  # to learn from
            validation=("wiki.valid.tokens",),  # chooses the best checkpoint
            test=("wiki.test.tokens",),  # read by eval.py alone
            sequence_length=128 if small else 512,  # tokens of a row; at most max_length
            batch_size=16 if small else 64,  # 32,768 tokens a step
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3 if small else 5e-4,  # at its highest, after the warmup
            schedule="cosine",  # falls to 0 at the last step
            warmup_steps=20 if small else 2000,  # of linear growth from 0
            weight_decay=0.01,  # not of biases, norms and head embeddings
        ),
        train=TrainConfig(
            num_steps=150 if small else 40_000,  # about ten times through the text
            eval_every=50 if small else 2000,  # steps between validations
            checkpoint_every=50 if small else 2000,  # steps between saves
        ),
    )
