"""The configs that train steps and decoding are measured with: ours, resized by flags."""

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from experiments import command_line
from mhe_jax.config import Config, InputError, TaskName
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.config.rules import check

CONFIGS: dict[TaskName, str] = {"mlm": "bert_base.py", "translation": "wmt14.py"}
# Flags that change the field of this name, where they are given.
FIELDS = {
    "layers": "model.num_layers",
    "features": "model.features",
    "mlp_features": "model.mlp_features",
    "vocabulary": "model.vocabulary_size",
    "heads": "model.attention.num_heads",
    "attention_dropout": "model.attention.dropout_rate",
}


def add_flags(parser: command_line.Parser) -> None:
    for flag, field in FIELDS.items():
        kind = float if flag == "attention_dropout" else command_line.positive
        parser.add_argument(f"--{flag}", type=kind, help=f"{field}, else the config's")
    parser.add_argument("--unrolled", action="store_true", help="model.scan_layers False")


def experiment(
    parser: command_line.Parser, args: Namespace, task: TaskName, length: int | None
) -> Config:
    """The config of `task` with the flags laid over it; a rule that they break ends the command."""
    config = load_config(str(Path(__file__).parents[1] / "configs" / CONFIGS[task]))
    length = length or config.data.sequence_length
    changes = {field: getattr(args, flag) for flag, field in FIELDS.items()}
    changes |= {
        "model.dtype": args.dtype,
        "model.max_length": max(length, config.model.max_length),
        "model.scan_layers": False if args.unrolled else None,
        "data.sequence_length": length,
        "data.length_buckets": (),
        "data.tokens_per_batch": max(config.data.tokens_per_batch, 16 * length),
        # One device, so that every number is of one.
        "mesh.data": 1,
    }
    try:
        for field, value in changes.items():
            if value is not None:
                config = set_field(config, field, value)
        check(config)
    except InputError as error:
        parser.error(str(error))
    return config


def with_attention(config: Config, fields: dict[str, Any]) -> Config:
    """The config with another attention: `fields` of `AttentionConfig`."""
    attention = dataclasses.replace(config.model.attention, **fields)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))


def shape_line(config: Config) -> str:
    m = config.model
    how = "scanned" if m.scan_layers else "unrolled"
    return (
        f"{m.num_layers} layers, {how}, width {m.features}, MLP {m.mlp_features}, "
        f"{m.attention.num_heads} heads, vocabulary {m.vocabulary_size}, "
        f"attention dropout {m.attention.dropout_rate}"
    )
