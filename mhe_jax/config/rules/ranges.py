"""Rules for the value of one field."""

import functools
import math
from collections.abc import Callable
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.places import RUNS, check_scheme, scheme_of


def refuse(name: str, value: Any, allowed: str) -> InputError:
    return InputError(f"{name} is {value!r}: {allowed}")


# The largest float32.
LARGEST = (2 - 2**-23) * 2.0**127

# What is allowed, in words, and its test.
AT_LEAST_1 = ("takes 1 or more", lambda x: x >= 1)
AT_LEAST_0 = ("takes 0 or more", lambda x: x >= 0)
POSITIVE = ("takes a finite float32 number above 0", lambda x: 0 < x <= LARGEST)
NOT_NEGATIVE = ("takes a finite float32 number, 0 or more", lambda x: 0 <= x <= LARGEST)
SHARE = ("takes a number of 0 or more and below 1", lambda x: 0 <= x < 1)
SEED = ("takes 0 or more, below 2**63", lambda x: 0 <= x < 1 << 63)
INSIDE_0_1 = ("takes a number above 0 and below 1", lambda x: 0 < x < 1)
UP_TO_1 = ("takes a number above 0, at most 1", lambda x: 0 < x <= 1)
FROM_0_TO_1 = ("takes a number from 0 to 1", lambda x: 0 <= x <= 1)
FINITE = ("takes a finite number", math.isfinite)

# Far above what any machine holds: nothing larger is ever made.
STEPS, TOKENS, VOCABULARY, LENGTH = 2**31 - 1, 2**28, 2**27, 2**24
ROWS, WIDTH, LAYERS = 2**20, 2**20, 2**13
PARAMETERS = 2**40  # of a model, about

# A rule, and the largest value allowed, or None.
Range = tuple[tuple[str, Callable[[Any], bool]], int | None]
RANGES: dict[str, Range] = {
    "model.vocabulary_size": (AT_LEAST_1, VOCABULARY),
    "model.vocabulary_multiple": (AT_LEAST_1, VOCABULARY),
    "model.features": (AT_LEAST_1, WIDTH),
    "model.mlp_features": (AT_LEAST_1, WIDTH),
    "model.num_layers": (AT_LEAST_1, LAYERS),
    "model.num_decoder_layers": (AT_LEAST_1, LAYERS),
    "model.layer_norm_epsilon": (POSITIVE, None),
    "model.rotary_base": (POSITIVE, None),
    "model.rotary_scaling": (POSITIVE, None),
    "model.max_length": (AT_LEAST_1, LENGTH),
    "model.num_token_types": (AT_LEAST_0, WIDTH),
    "model.dropout_rate": (SHARE, None),
    "model.kronecker.attention": (AT_LEAST_1, WIDTH),
    "model.kronecker.mlp": (AT_LEAST_1, WIDTH),
    "model.kronecker.embedding": (AT_LEAST_1, WIDTH),
    "data.sequence_length": (AT_LEAST_1, LENGTH),
    "data.batch_size": (AT_LEAST_1, ROWS),
    "data.tokens_per_batch": (AT_LEAST_1, TOKENS),
    "data.row_multiple": (AT_LEAST_1, ROWS),
    "data.mask_rate": (INSIDE_0_1, None),
    "data.corruption_rate": (INSIDE_0_1, None),
    "data.lsh_pieces": (AT_LEAST_1, VOCABULARY),
    "data.window_stride": (AT_LEAST_1, LENGTH),
    "data.question_length": (AT_LEAST_1, LENGTH),
    "model.num_classes": (AT_LEAST_1, WIDTH),
    "model.num_spans": (AT_LEAST_0, LAYERS),
    "optimizer.learning_rate": (POSITIVE, None),
    "optimizer.head_embedding_rate": (POSITIVE, None),
    "optimizer.warmup_steps": (AT_LEAST_0, STEPS),
    "optimizer.beta1": (SHARE, None),
    "optimizer.beta2": (SHARE, None),
    "optimizer.epsilon": (POSITIVE, None),
    "optimizer.weight_decay": (NOT_NEGATIVE, None),
    "optimizer.clip_norm": (POSITIVE, None),
    "optimizer.accumulate_steps": (AT_LEAST_1, ROWS),
    "optimizer.ema_decay": (INSIDE_0_1, None),
    "optimizer.label_smoothing": (SHARE, None),
    "train.num_steps": (AT_LEAST_1, STEPS),
    "train.seed": (SEED, None),
    "train.eval_every": (AT_LEAST_1, STEPS),
    "train.eval_batches": (AT_LEAST_1, STEPS),
    "train.eval_translate": (AT_LEAST_0, STEPS),
    "train.checkpoint_every": (AT_LEAST_1, STEPS),
    "train.keep_checkpoints": (AT_LEAST_1, STEPS),
    "train.log_every": (AT_LEAST_1, STEPS),
    "train.skip_nonfinite": (AT_LEAST_0, STEPS),
    "evaluation.average_checkpoints": (AT_LEAST_1, STEPS),
    "evaluation.batch_size": (AT_LEAST_1, ROWS),
    "evaluation.beam_size": (AT_LEAST_1, LAYERS),
    "evaluation.length_penalty": (NOT_NEGATIVE, None),
    "evaluation.min_length": (AT_LEAST_0, LENGTH),
    "evaluation.extra_length": (AT_LEAST_0, LENGTH),
    "evaluation.stride": (AT_LEAST_1, LENGTH),
    "evaluation.temperature": (NOT_NEGATIVE, None),
    "evaluation.top_k": (AT_LEAST_1, STEPS),
    "evaluation.top_p": (UP_TO_1, None),
    "evaluation.seed": (SEED, None),
    "evaluation.spelling_noise": (FROM_0_TO_1, None),
    "evaluation.answer_length": (AT_LEAST_1, LENGTH),
    "evaluation.no_answer_threshold": (FINITE, None),
}
ATTENTION_RANGES: dict[str, Range] = {
    "num_heads": (AT_LEAST_1, WIDTH),
    "num_kv_heads": (AT_LEAST_1, None),
    "num_groups": (AT_LEAST_1, None),
    "score_groups": (AT_LEAST_1, None),
    "score_features": (AT_LEAST_1, WIDTH),
    "qkv_features": (AT_LEAST_1, WIDTH),
    "head_embedding_stddev": (NOT_NEGATIVE, None),
    "dropout_rate": (SHARE, None),
    "query_rank": (AT_LEAST_1, WIDTH),
    "key_rank": (AT_LEAST_1, WIDTH),
    "value_rank": (AT_LEAST_1, WIDTH),
    "latent_features": (AT_LEAST_1, WIDTH),
    "latent_groups": (AT_LEAST_1, None),
    "rotary_features": (AT_LEAST_1, WIDTH),
}


def check_range(name: str, value: Any, allowed: Range) -> None:
    """Checks one field; None means not given, and passes."""
    (rule, fits), most = allowed
    if value is not None and not fits(value):
        raise refuse(name, value, rule)
    if value is not None and most is not None and value > most:
        raise refuse(name, value, f"takes at most {most:,}")


def check_ranges(config: Config) -> None:
    """Checks every field of `RANGES`, and those of which only some values mean something."""
    for name, allowed in RANGES.items():
        check_range(name, functools.reduce(getattr, name.split("."), config), allowed)
    steps = config.train.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise refuse("train.profile_steps", steps, "takes a first and a last step, or nothing")
    _check_products(config)
    if not config.workdir:
        raise InputError("workdir is empty: takes a directory")
    check_scheme("workdir", config.workdir, RUNS)
    if config.workdir.startswith("gs:") and not config.workdir.startswith("gs://"):
        raise InputError(f"workdir={config.workdir}: names no bucket: takes gs://bucket/name")
    if steps and scheme_of(config.workdir):
        raise refuse("train.profile_steps", steps, f"needs a local workdir, not {config.workdir}")


def _check_products(config: Config) -> None:
    """Checks sizes that are allowed each alone, but not all together."""
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
