"""A small language model of Llama's shape, on WikiText-2.

    python -m mhe_jax data wikitext-2
    python train.py configs/llama_lm.py --workdir runs/llama-lm
    python eval.py runs/llama-lm

Expected time: not measured.
Expected score: not measured.

The model has rotary positions, RMSNorm before each sublayer and once at the end, a gated MLP with
silu (SwiGLU), grouped-query attention, and no biases. With `mha`, `mqa` or `gqa` this is Llama's
own design. Any other kind works too: `--model.attention.kind mhe_mul --model.attention.num_kv_heads
None`.

The first command fetches train.txt.xz, valid.txt.xz and test.txt.xz (words split by spaces, as
usually distributed) to data/wikitext-2. They may lie elsewhere: `--data.directory`.

`configs/llama_lm.py:local` is a tiny model of the same design.
`configs/llama_lm.py:large` is for a GPU: 12 layers of width 512, in bfloat16, which read 100
million tokens of C sources once (experiments/atlas, "One pass"). Not measured.
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
        workdir="runs/llama-lm",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=1000 if small else 4000,  # pieces; scores are also given per word
            features=64 if small else 128,  # width M; a multiple of num_heads
            mlp_features=172 if small else 344,  # 8/3 of the width: as many weights as a plain MLP
            num_layers=1 if small else 3,  # of the model
            attention=AttentionConfig(
                kind="gqa",  # of attention; see docs/which_kind.md
                num_heads=4 if small else 8,  # H; divides features
                num_kv_heads=2,  # K; divides num_heads
            ),
            mlp="gated",  # a third matrix multiplies the activation
            mlp_bias=False,  # none in the MLP
            activation="silu",  # a gated MLP with silu is SwiGLU
            norm="rms",  # RMSNorm: no mean, no bias
            layer_norm_epsilon=1e-5,  # in the norm's denominator
            positions="rotary",  # queries and keys turn by position
            max_length=128,  # longest row
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
    return large(config) if variant == "large" else config


def large(config: Config) -> Config:
    return replace(
        config,
        workdir="runs/llama-lm-large",  # of the run, or --workdir
        model=replace(
            config.model,
            vocabulary_size=16_000,  # of the tokenizer below
            features=512,  # width M; a multiple of num_heads
            mlp_features=1376,  # 8/3 of the width, in multiples of 32
            num_layers=12,  # of the model
            max_length=512,  # longest row
            dtype="bfloat16",  # of activations; parameters stay float32
            scan_layers=True,  # one layer to compile instead of all
        ),
        data=replace(
            config.data,
            directory="data/linux",  # where the files lie
            tokenizer="tokenizer.model",  # made before the run
            sequence_length=512,  # tokens of a row; at most max_length
            batch_size=64,  # 32,768 tokens a step
        ),
        optimizer=replace(config.optimizer, name="muon", warmup_steps=150),
        train=replace(
            config.train,
            num_steps=3072,  # 100.7 million tokens
            eval_every=256,  # steps between validations
            checkpoint_every=512,  # steps between saves
            keep_checkpoints=1,  # newest ones, besides the best
        ),
    )
