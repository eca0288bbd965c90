"""A translator with a tenth of the parameters, on IWSLT14 or WMT16.

    python train.py configs/shapeshifter.py --workdir runs/iwslt14
    python eval.py runs/iwslt14
    python train.py configs/shapeshifter.py:wmt --workdir runs/wmt-enro
    python train.py configs/shapeshifter.py --model.attention.kind mhe_mul --workdir runs/both

Expected time: not measured; meant for one GPU, `:wmt` for several.
Expected score: not measured.

All matrices are sums of Kronecker products (docs/small_matrices.md).

IWSLT14, German to English: the files train, valid and test, each `.de` and `.en`, lie in
data/iwslt14, or where `--data.directory` says. No command fetches them.
`:wmt`, English to Romanian, reads a data set that TFDS prepares once:
`python -m mhe_jax data wmt16_translate/ro-en`.

`configs/shapeshifter.py:local` is a tiny model of the same design on the demo's phrases.
Sources: learning rates and batches from Panahi, Saeedi and Arodz 2021, who do not give all shapes;
`:wmt` is the base shape of Vaswani et al. 2017, the other the customary one for IWSLT14.
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    KroneckerConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

DATA = {
    "": DataConfig(
        directory="data/iwslt14",  # where the files below lie
        train=("train.de", "train.en"),  # to learn from
        validation=("valid.de", "valid.en"),  # chooses the best checkpoint
        test=("test.de", "test.en"),  # read by eval.py alone
        sequence_length=128,  # longer training pairs are left out
        length_buckets=(16, 24, 32, 48, 64, 128),  # padded lengths; the last is sequence_length
        tokens_per_batch=8192,  # about 128 pairs
    ),
    "wmt": DataConfig(
        train=("tfds:wmt16_translate/ro-en:train",),  # to learn from
        validation=("tfds:wmt16_translate/ro-en:validation",),  # chooses the best checkpoint
        test=("tfds:wmt16_translate/ro-en:test",),  # read by eval.py alone
        fields=("en", "ro"),  # source, target
        sequence_length=128,  # tokens of a row; at most max_length
        length_buckets=(16, 24, 32, 48, 64, 128),  # padded lengths; the last is sequence_length
        tokens_per_batch=12_288,  # about 192 pairs
    ),
    "local": DataConfig(
        train=("demo:train",),  # to learn from
        validation=("demo:validation",),  # chooses the best checkpoint
        test=("demo:test",),  # read by eval.py alone
        sequence_length=64,  # tokens of a row; at most max_length
        tokens_per_batch=1024,  # of both sides, padding included
    ),
}


def get_config(variant: Literal["", "wmt", "local"] = "") -> Config:
    small, wmt = variant == "local", variant == "wmt"
    return Config(
        task="translation",  # encoder-decoder, on pairs of texts
        workdir="runs/wmt-enro" if wmt else "runs/iwslt14",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=400 if small else 32_000 if wmt else 10_000,  # joint
            features=64 if small else 512,  # width M; a multiple of num_heads
            mlp_features=128 if small else 2048 if wmt else 1024,  # width F of the MLP
            num_layers=1 if small else 6,  # of the encoder, and as many of the decoder
            attention=AttentionConfig(kind="mha", num_heads=8 if wmt else 4),  # divides features
            # Few terms in attention, more in the embeddings, which stay smaller than the layers.
            kronecker=(
                KroneckerConfig(attention=4, mlp=8, embedding=8)
                if small
                else KroneckerConfig(attention=8, mlp=16, embedding=128)
            ),
            activation="relu",  # of the MLP
            positions="sinusoidal",  # fixed sine and cosine; even features
            max_length=256,  # longest row
            dropout_rate=0.1,  # on embeddings and outputs of sublayers
            scan_layers=True,  # one layer to compile instead of all
        ),
        data=DATA[variant],
        optimizer=OptimizerConfig(
            learning_rate=3e-3 if wmt else 2e-3,  # at its highest, after the warmup
            schedule="inverse_sqrt",  # falls as 1 / sqrt(step)
            warmup_steps=50 if small else 4000,  # of linear growth from 0
            beta1=0.9,  # decay of the first moment
            beta2=0.98,  # decay of the second moment
            label_smoothing=0.1,  # share spread over all tokens, in training
        ),
        train=TrainConfig(
            num_steps=200 if small else 100_000 if wmt else 50_000,  # updates
            eval_every=100 if small else 2500,  # steps between validations
            checkpoint_every=100 if small else 500,  # steps between saves
            keep_checkpoints=5,  # newest ones, besides the best
        ),
        evaluation=EvaluationConfig(
            checkpoint="last",  # the newest
            average_checkpoints=2 if small else 5,  # their mean; at most keep_checkpoints
            beam_size=5,  # 1 is greedy
            length_penalty=1.0,  # alpha of beam search; 0 for none
        ),
    )
