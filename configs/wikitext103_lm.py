"""WikiText-103 language model: 12 layers for one accelerator, decoder-only like the paper's.

    python train.py configs/wikitext103_lm.py --workdir runs/wikitext103-lm
    python eval.py runs/wikitext103-lm --stride 64

The files wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (words split by spaces, as
usually distributed) lie in data/wikitext-103, or where `--data.directory` says. The usual
score is perplexity per word with sliding windows: 245,569 words of the test set with ends of lines.

Expected time: not measured.
Expected score: not measured.

`configs/wikitext103_lm.py:local` is a tiny model of the same design that trains for a minute.
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
        workdir="runs/wikitext103-lm",
        model=ModelConfig(
            vocabulary_size=1000 if small else 32_000,  # pieces; scores are also given per word
            features=64 if small else 768,
            mlp_features=256 if small else 3072,
            num_layers=1 if small else 12,
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if small else 12,
            ),
            max_length=128 if small else 512,
            dropout_rate=0.0 if small else 0.1,
            scan_layers=not small,  # one layer to compile instead of twelve
            dtype="float32" if small else "bfloat16",
        ),
        data=DataConfig(
            directory="data/wikitext-103",
            train=("wiki.train.tokens",),
            validation=("wiki.valid.tokens",),
            test=("wiki.test.tokens",),
            sequence_length=128 if small else 512,
            batch_size=16 if small else 64,  # 32,768 tokens a step
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3 if small else 5e-4,
            schedule="cosine",
            warmup_steps=20 if small else 2000,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=150 if small else 40_000,  # about ten times through the text
            eval_every=50 if small else 2000,
            checkpoint_every=50 if small else 2000,
        ),
    )
