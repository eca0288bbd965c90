"""WikiText-2 language model of the shape that most have today: Llama's, small.

    python -m mhe_jax data wikitext-2
    python train.py configs/llama_lm.py --workdir runs/llama-lm
    python eval.py runs/llama-lm

Rotary positions, RMSNorm, a gated MLP with silu (SwiGLU) and grouped-query attention, without any
bias: RMSNorm before each sublayer and once at the end. Any other kind works too
(`--model.attention.kind mhe_mul --model.attention.num_kv_heads None`); the shape is Llama's own
with `mha`, `mqa` and `gqa`.

The first command fetches train.txt.xz, valid.txt.xz and test.txt.xz (words split by spaces, as
usually distributed) to data/wikitext-2. They may lie elsewhere (`--data.directory`).

Expected time: not measured.
Expected score: not measured.

`configs/llama_lm.py:local` is a tiny model of the same design that trains for a minute.
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
        workdir="runs/llama-lm",
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces; scores are also given per word
            features=64 if small else 128,
            mlp_features=172 if small else 344,  # 8/3 of the width: as many weights as a plain MLP
            num_layers=1 if small else 3,
            attention=AttentionConfig(
                kind="gqa",
                num_heads=4 if small else 8,
                num_kv_heads=2,
            ),
            mlp="gated",
            mlp_bias=False,
            activation="silu",
            norm="rms",
            layer_norm_epsilon=1e-5,
            positions="rotary",
            max_length=128,
            dropout_rate=0.0,  # the text is not seen twice in ten minutes
        ),
        data=DataConfig(
            directory="data/wikitext-2",
            train=("train.txt.xz",),
            validation=("valid.txt.xz",),
            test=("test.txt.xz",),
            sequence_length=128,
            batch_size=16,  # blocks of 128 tokens: 2,048 tokens a step
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            schedule="cosine",
            warmup_steps=20 if small else 200,
            weight_decay=0.01,
        ),
        train=TrainConfig(
            num_steps=150 if small else 2000,
            eval_every=50 if small else 500,
            checkpoint_every=50 if small else 500,
        ),
    )
