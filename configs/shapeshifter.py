"""Translation with all matrices as sums of Kronecker products: ten times fewer parameters.

    python train.py configs/shapeshifter.py --workdir runs/iwslt14
    python eval.py runs/iwslt14
    python train.py configs/shapeshifter.py:wmt --workdir runs/wmt-enro
    python train.py configs/shapeshifter.py --model.attention.kind mhe_mul --workdir runs/both

IWSLT14, German to English: the files train, valid and test, each `.de` and `.en`, lie in
data/iwslt14 (or where `--data.directory` says). `:wmt`, English to Romanian, reads
`tfds:wmt16_translate/ro-en`, which must be prepared first (train.py says how).

Expected time: not measured; meant for one GPU, `:wmt` for several.
Expected score: not measured.

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
        directory="data/iwslt14",
        train=("train.de", "train.en"),
        validation=("valid.de", "valid.en"),
        test=("test.de", "test.en"),
        sequence_length=128,  # longer training pairs are left out
        length_buckets=(16, 24, 32, 48, 64, 128),
        tokens_per_batch=8192,  # about 128 pairs
    ),
    "wmt": DataConfig(
        train=("tfds:wmt16_translate/ro-en:train",),
        validation=("tfds:wmt16_translate/ro-en:validation",),
        test=("tfds:wmt16_translate/ro-en:test",),
        fields=("en", "ro"),
        sequence_length=128,
        length_buckets=(16, 24, 32, 48, 64, 128),
        tokens_per_batch=12_288,  # about 192 pairs
    ),
    "local": DataConfig(
        train=("demo:train",),
        validation=("demo:validation",),
        test=("demo:test",),
        sequence_length=64,
        tokens_per_batch=1024,
    ),
}


def get_config(variant: Literal["", "wmt", "local"] = "") -> Config:
    small, wmt = variant == "local", variant == "wmt"
    return Config(
        task="translation",
        workdir="runs/wmt-enro" if wmt else "runs/iwslt14",
        model=ModelConfig(
            vocabulary_size=400 if small else 32_000 if wmt else 10_000,  # joint
            features=64 if small else 512,
            mlp_features=128 if small else 2048 if wmt else 1024,
            num_layers=1 if small else 6,  # of the encoder, and as many of the decoder
            attention=AttentionConfig(kind="mha", num_heads=8 if wmt else 4),
            # Few terms in attention, more in the embeddings, which stay smaller than the layers.
            kronecker=(
                KroneckerConfig(attention=4, mlp=8, embedding=8)
                if small
                else KroneckerConfig(attention=8, mlp=16, embedding=128)
            ),
            activation="relu",
            positions="sinusoidal",
            max_length=256,
            dropout_rate=0.1,
            scan_layers=True,
        ),
        data=DATA[variant],
        optimizer=OptimizerConfig(
            learning_rate=3e-3 if wmt else 2e-3,
            schedule="inverse_sqrt",
            warmup_steps=50 if small else 4000,
            beta1=0.9,
            beta2=0.98,
            label_smoothing=0.1,
        ),
        train=TrainConfig(
            num_steps=200 if small else 100_000 if wmt else 50_000,
            eval_every=100 if small else 2500,
            checkpoint_every=100 if small else 500,
            keep_checkpoints=5,
        ),
        evaluation=EvaluationConfig(
            checkpoint="last",
            average_checkpoints=2 if small else 5,
            beam_size=5,
            length_penalty=1.0,
        ),
    )
