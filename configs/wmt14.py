"""WMT14 English to German with the transformers of the MHE paper, base and big.

    python train.py configs/wmt14.py --workdir runs/wmt14-base-mul
    python eval.py runs/wmt14-base-mul
    python train.py configs/wmt14.py:big --workdir runs/wmt14-big-mul
    python train.py configs/wmt14.py:big --workdir runs/wmt14-big-mha --model.attention.kind mha

`tfds:wmt14_translate/de-en` must be prepared first (train.py says how).

Expected time: not measured; meant for a GPU host or a pod.
Expected score: not measured. Published BLEU, of a direction that is not stated there, and attention
parameters:

    base   mhe_mul 23.6  6,515,712      mha 24.8  18,874,368
    big    mhe_mul 24.8  22,468,608     mha 26.5  75,497,472

`configs/wmt14.py:local` is a tiny model of the same design on the demo's phrases.
Sources: shapes from Xue & Aletras 2023, WMT14 table; the rest from Vaswani et al. 2017,
sections 5.3, 5.4 and 6.1.
"""

from typing import Literal

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: Literal["", "big", "local"] = "") -> Config:
    small, big = variant == "local", variant == "big"
    if small:
        data = DataConfig(
            train=("demo:train",),
            validation=("demo:validation",),
            test=("demo:test",),
            sequence_length=64,
            tokens_per_batch=1024,
        )
    else:
        data = DataConfig(
            train=("tfds:wmt14_translate/de-en:train",),
            validation=("tfds:wmt14_translate/de-en:validation",),
            test=("tfds:wmt14_translate/de-en:test",),
            fields=("en", "de"),  # source, target; the other way round for De→En
            sequence_length=128,  # longer training pairs are left out
            length_buckets=(16, 24, 32, 48, 64, 96, 128),
            tokens_per_batch=50_000,  # about 25,000 source and 25,000 target tokens
        )
    features = 64 if small else 1024 if big else 512
    averaged = 2 if small else 20 if big else 5
    return Config(
        task="translation",
        workdir="runs/wmt14-big" if big else "runs/wmt14-base",
        model=ModelConfig(
            vocabulary_size=400 if small else 37_000,  # joint
            features=features,
            mlp_features=128 if small else 4 * features,
            num_layers=1 if small else 6,  # of the encoder, and as many of the decoder
            attention=AttentionConfig(
                kind="mhe_mul",
                num_heads=4 if small else features // 64,
            ),
            activation="relu",
            norm_position="post",
            positions="sinusoidal",
            max_length=256,
            dropout_rate=0.3 if big else 0.1,
            scan_layers=True,  # one layer to compile instead of six
            dtype="float32" if small else "bfloat16",
        ),
        data=data,
        optimizer=OptimizerConfig(
            learning_rate=4.94e-4 if big else 6.99e-4,  # (features · warmup_steps)^-0.5
            schedule="inverse_sqrt",
            warmup_steps=50 if small else 4000,
            beta1=0.9,
            beta2=0.98,
            epsilon=1e-9,
            clip_norm=None,
            label_smoothing=0.1,
        ),
        train=TrainConfig(
            num_steps=200 if small else 300_000 if big else 100_000,
            eval_every=100 if small else 5000,
            checkpoint_every=100 if small else 1000,
            keep_checkpoints=averaged,
        ),
        mesh=MeshConfig(data=-1),
        evaluation=EvaluationConfig(
            checkpoint="last",
            average_checkpoints=averaged,
            beam_size=4,
            length_penalty=0.6,
            extra_length=50,
        ),
    )
