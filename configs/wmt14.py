"""A translator, English to German, of the MHE paper's shapes, on WMT14.

    python -m mhe_jax data wmt14_translate/de-en
    python train.py configs/wmt14.py --workdir runs/wmt14-base-mul
    python eval.py runs/wmt14-base-mul
    python train.py configs/wmt14.py:big --workdir runs/wmt14-big-mul
    python train.py configs/wmt14.py:big --workdir runs/wmt14-big-mha --model.attention.kind mha

Expected time: not measured; meant for a GPU host or a pod.
Expected score: not measured. Published BLEU, of a direction that is not stated there, and attention
parameters:

    base   mhe_mul 23.6  6,515,712      mha 24.8  18,874,368
    big    mhe_mul 24.8  22,468,608     mha 26.5  75,497,472

`configs/wmt14.py:local` is a tiny model of the same design on the demo's phrases.
Sources: shapes from Xue & Aletras 2023, WMT14 table; the rest from Vaswani et al. 2017, sections
5.3, 5.4 and 6.1.
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
            train=("demo:train",),  # to learn from
            validation=("demo:validation",),  # chooses the best checkpoint
            test=("demo:test",),  # read by eval.py alone
            sequence_length=64,  # tokens of a row; at most max_length
            tokens_per_batch=1024,  # of both sides, padding included
        )
    else:
        data = DataConfig(
            train=("tfds:wmt14_translate/de-en:train",),  # to learn from
            validation=("tfds:wmt14_translate/de-en:validation",),  # chooses the best checkpoint
            test=("tfds:wmt14_translate/de-en:test",),  # read by eval.py alone
            fields=("en", "de"),  # source, target; the other way round for De→En
            sequence_length=128,  # longer training pairs are left out
            # Padded lengths; the last is sequence_length.
            length_buckets=(16, 24, 32, 48, 64, 96, 128),
            tokens_per_batch=50_000,  # about 25,000 source and 25,000 target tokens
        )
    features = 64 if small else 1024 if big else 512
    averaged = 2 if small else 20 if big else 5
    return Config(
        task="translation",  # encoder-decoder, on pairs of texts
        workdir="runs/wmt14-big" if big else "runs/wmt14-base",  # of the run, or --workdir
        model=ModelConfig(
            vocabulary_size=400 if small else 37_000,  # joint
            features=features,  # width M; a multiple of num_heads
            mlp_features=128 if small else 4 * features,  # width F of the MLP
            num_layers=1 if small else 6,  # of the encoder, and as many of the decoder
            attention=AttentionConfig(
                kind="mhe_mul",  # of attention; see docs/which_kind.md
                num_heads=4 if small else features // 64,  # H; divides features
            ),
            activation="relu",  # of the MLP
            norm_position="post",  # after each residual sum
            positions="sinusoidal",  # fixed sine and cosine; even features
            max_length=256,  # longest row
            dropout_rate=0.3 if big else 0.1,  # on embeddings and outputs of sublayers
            scan_layers=True,  # one layer to compile instead of six
            dtype="float32" if small else "bfloat16",  # of activations; parameters stay float32
        ),
        data=data,
        optimizer=OptimizerConfig(
            learning_rate=4.94e-4 if big else 6.99e-4,  # (features · warmup_steps)^-0.5
            schedule="inverse_sqrt",  # falls as 1 / sqrt(step)
            warmup_steps=50 if small else 4000,  # of linear growth from 0
            beta1=0.9,  # decay of the first moment
            beta2=0.98,  # decay of the second moment
            epsilon=1e-9,  # in the update's denominator
            clip_norm=None,  # gradients are not clipped
            label_smoothing=0.1,  # share spread over all tokens, in training
        ),
        train=TrainConfig(
            num_steps=200 if small else 300_000 if big else 100_000,  # updates
            eval_every=100 if small else 5000,  # steps between validations
            checkpoint_every=100 if small else 1000,  # steps between saves
            keep_checkpoints=averaged,  # newest ones, besides the best
        ),
        mesh=MeshConfig(data=-1),  # all devices split the batch
        evaluation=EvaluationConfig(
            checkpoint="last",  # the newest
            average_checkpoints=averaged,  # their mean; at most keep_checkpoints
            beam_size=4,  # 1 is greedy
            length_penalty=0.6,  # alpha of beam search; 0 for none
            extra_length=50,  # tokens longer than the source at most
        ),
    )
