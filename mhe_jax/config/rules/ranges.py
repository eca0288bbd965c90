"""Rules for the value of one field."""

import functools
import math
from typing import Any

from mhe_jax.config import (
    Config,
    InputError,
)


def refuse(name: str, value: Any, allowed: str) -> InputError:
    return InputError(f"{name} is {value!r}: {allowed}")


# What float32 holds.
LARGEST = (2 - 2**-23) * 2.0**127

# name -> (what is allowed, in words; the test). None means not given, and passes.

AT_LEAST_1 = ("takes 1 or more", lambda x: x >= 1)
AT_LEAST_0 = ("takes 0 or more", lambda x: x >= 0)
POSITIVE = ("takes a finite number above 0 of float32", lambda x: 0 < x <= LARGEST)
NOT_NEGATIVE = ("takes a finite number of float32, 0 or more", lambda x: 0 <= x <= LARGEST)
SHARE = ("takes a number from 0 to below 1", lambda x: 0 <= x < 1)
SEED = ("takes 0 or more, below 2**63", lambda x: 0 <= x < 1 << 63)
INSIDE_0_1 = ("takes a number above 0 and below 1", lambda x: 0 < x < 1)
RANGES = {
    "model.vocabulary_size": AT_LEAST_1,
    "model.vocabulary_multiple": AT_LEAST_1,
    "model.features": AT_LEAST_1,
    "model.mlp_features": AT_LEAST_1,
    "model.num_layers": AT_LEAST_1,
    "model.num_decoder_layers": AT_LEAST_1,
    "model.layer_norm_epsilon": POSITIVE,
    "model.max_length": AT_LEAST_1,
    "model.num_token_types": AT_LEAST_0,
    "model.dropout_rate": SHARE,
    "model.kronecker.attention": AT_LEAST_1,
    "model.kronecker.mlp": AT_LEAST_1,
    "model.kronecker.embedding": AT_LEAST_1,
    "data.sequence_length": AT_LEAST_1,
    "data.batch_size": AT_LEAST_1,
    "data.tokens_per_batch": AT_LEAST_1,
    "data.row_multiple": AT_LEAST_1,
    "data.mask_rate": INSIDE_0_1,
    "data.corruption_rate": INSIDE_0_1,
    "data.lsh_pieces": AT_LEAST_1,
    "data.window_stride": AT_LEAST_1,
    "data.question_length": AT_LEAST_1,
    "model.num_classes": AT_LEAST_1,
    "model.num_spans": AT_LEAST_0,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.warmup_steps": AT_LEAST_0,
    "optimizer.beta1": SHARE,
    "optimizer.beta2": SHARE,
    "optimizer.epsilon": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip_norm": POSITIVE,
    "optimizer.accumulate_steps": AT_LEAST_1,
    "optimizer.ema_decay": INSIDE_0_1,
    "optimizer.label_smoothing": SHARE,
    "train.num_steps": AT_LEAST_1,
    "train.seed": SEED,
    "train.eval_every": AT_LEAST_1,
    "train.eval_batches": AT_LEAST_1,
    "train.checkpoint_every": AT_LEAST_1,
    "train.keep_checkpoints": AT_LEAST_1,
    "train.log_every": AT_LEAST_1,
    "train.skip_nonfinite": AT_LEAST_0,
    "evaluation.average_checkpoints": AT_LEAST_1,
    "evaluation.batch_size": AT_LEAST_1,
    "evaluation.beam_size": AT_LEAST_1,
    "evaluation.length_penalty": NOT_NEGATIVE,
    "evaluation.extra_length": AT_LEAST_0,
    "evaluation.stride": AT_LEAST_1,
    "evaluation.temperature": NOT_NEGATIVE,
    "evaluation.top_k": AT_LEAST_1,
    "evaluation.top_p": ("takes a number above 0, at most 1", lambda x: 0 < x <= 1),
    "evaluation.seed": SEED,
    "evaluation.spelling_noise": ("takes a number from 0 to 1", lambda x: 0 <= x <= 1),
    "evaluation.answer_length": AT_LEAST_1,
    "evaluation.no_answer_threshold": ("takes a finite number", math.isfinite),
}
# name -> the largest that is taken, far above what any machine holds: nothing larger is ever made.
STEPS, TOKENS, VOCABULARY, LENGTH = 2**31 - 1, 2**28, 2**27, 2**24
ROWS, WIDTH, LAYERS = 2**20, 2**20, 2**13
LIMITS = {
    "model.vocabulary_size": VOCABULARY,
    "model.vocabulary_multiple": VOCABULARY,
    "model.features": WIDTH,
    "model.mlp_features": WIDTH,
    "model.num_layers": LAYERS,
    "model.num_decoder_layers": LAYERS,
    "model.max_length": LENGTH,
    "model.num_token_types": WIDTH,
    "model.kronecker.attention": WIDTH,
    "model.kronecker.mlp": WIDTH,
    "model.kronecker.embedding": WIDTH,
    "data.sequence_length": LENGTH,
    "data.batch_size": ROWS,
    "data.tokens_per_batch": TOKENS,
    "data.row_multiple": ROWS,
    "data.lsh_pieces": VOCABULARY,
    "data.window_stride": LENGTH,
    "data.question_length": LENGTH,
    "model.num_classes": WIDTH,
    "model.num_spans": LAYERS,
    "optimizer.warmup_steps": STEPS,
    "optimizer.accumulate_steps": ROWS,
    "train.num_steps": STEPS,
    "train.eval_every": STEPS,
    "train.eval_batches": STEPS,
    "train.checkpoint_every": STEPS,
    "train.keep_checkpoints": STEPS,
    "train.log_every": STEPS,
    "train.skip_nonfinite": STEPS,
    "evaluation.average_checkpoints": STEPS,
    "evaluation.batch_size": ROWS,
    "evaluation.beam_size": LAYERS,
    "evaluation.extra_length": LENGTH,
    "evaluation.stride": LENGTH,
    "evaluation.top_k": STEPS,
    "evaluation.answer_length": LENGTH,
}
# Parameters of a model, about.
PARAMETERS = 2**40
ATTENTION_RANGES = {
    "num_heads": AT_LEAST_1,
    "num_kv_heads": AT_LEAST_1,
    "num_groups": AT_LEAST_1,
    "score_groups": AT_LEAST_1,
    "score_features": AT_LEAST_1,
    "qkv_features": AT_LEAST_1,
    "head_embedding_stddev": NOT_NEGATIVE,
    "dropout_rate": SHARE,
}
ATTENTION_LIMITS: dict[str, int] = dict.fromkeys(
    ("num_heads", "score_features", "qkv_features"), WIDTH
)


def check_ranges(config: Config) -> None:
    """Every field of `RANGES`, and those of which only some values mean something."""
    for name, (allowed, fits) in RANGES.items():
        value: Any = functools.reduce(getattr, name.split("."), config)
        if value is not None and not fits(value):
            raise refuse(name, value, allowed)
        if value is not None and value > LIMITS.get(name, value):
            raise refuse(name, value, f"takes at most {LIMITS[name]:,}")
    if config.model.positions == "sinusoidal" and config.model.features % 2:
        raise refuse("model.features", config.model.features, "sinusoidal positions take even ones")
    steps = config.train.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise refuse("train.profile_steps", steps, "takes a first and a last step, or nothing")
    _check_products(config)
    if not config.workdir:
        raise InputError("workdir is empty: takes a directory")


def _check_products(config: Config) -> None:
    """Sizes that may be each alone, and not all together."""
    model, data, evaluation = config.model, config.data, config.evaluation
    layers = model.num_layers + (model.num_decoder_layers or 0)
    rows = model.padded_vocabulary_size + model.max_length + layers * model.mlp_features
    if rows * model.features > PARAMETERS:
        raise InputError(
            f"model is too large: (vocabulary_size {model.padded_vocabulary_size:,} + max_length "
            f"{model.max_length:,} + layers {layers:,} · mlp_features {model.mlp_features:,}) · "
            f"features {model.features:,} must be at most {PARAMETERS:,}"
        )
    own = config.facts.rows
    for name, count, other, size in (
        (f"data.{own}", getattr(data, own), "data.sequence_length", data.sequence_length),
        (
            "evaluation.batch_size",
            evaluation.batch_size,
            "data.sequence_length",
            data.sequence_length,
        ),
        (
            "evaluation.batch_size",
            evaluation.batch_size,
            "evaluation.beam_size",
            evaluation.beam_size,
        ),
    ):
        if count * size > TOKENS:
            raise refuse(name, count, f"times {other}={size} must be at most {TOKENS:,}")
