"""A run in one line before it, and in one JSON object after it."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax.attention import choices
from mhe_jax.config import Config
from mhe_jax.model import count_parameters
from mhe_jax.training.checkpoint import Meta


def about(config: Config, mesh: Mesh, params: Any) -> str:
    """One line for the log before a run."""
    counts = count_parameters(params, config.model)
    shape = " · ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"{config.task}: {counts['total']:,} parameters, {counts['attention']:,} in attention; "
        f"{mesh.devices.flat[0].device_kind}, {shape}"
    )


def runs_as(chosen: Mapping[str, str]) -> str:
    """Form and engine of each kind of attention, from `choices()`."""
    return ", ".join(f"{kind} {how}" for kind, how in chosen.items())


def described(config: Config, mesh: Mesh, params: Any) -> dict[str, Any]:
    """The part that all results share: the model, its size, and the devices."""
    kinds = config.kinds
    return {
        "task": config.task,
        "kind": kinds if len(set(kinds.values())) > 1 else next(iter(kinds.values())),
        "attention": choices(),
        "parameters": count_parameters(params, config.model),
        "device": mesh.devices.flat[0].device_kind,
        "num_devices": mesh.size,
        "jax": jax.__version__,
    }


def result(
    config: Config, mesh: Mesh, params: Any, meta: Meta, best: Meta | None
) -> dict[str, Any]:
    """The JSON object that ends a run; `meta` and `best` are of its last and best checkpoint."""
    last = meta.get("validation") or {}
    best = best or {}
    best_metrics = best.get("validation") or {}
    if "score" in best_metrics:  # it decides what is best
        of_best = {"best_validation_score": best_metrics["score"]}
        of_best["loss_at_best_step"] = best_metrics["loss"]
    else:
        of_best = {f"best_validation_{n}": best_metrics.get(n) for n in ("loss", "perplexity")}
    return {
        **described(config, mesh, params),
        "attention": meta.get("attention", {}),
        "steps": config.train.num_steps,
        "validation_loss": last.get("loss"),
        "validation_perplexity": last.get("perplexity"),
        "best_step": best.get("validated_step"),
        **of_best,
        # Official metrics of labelled examples; how well moved words are found; BLEU of a sample.
        **({"best_validation": best_metrics} if {"score", "auc", "bleu"} & {*best_metrics} else {}),
        "training_seconds": round(meta["seconds"], 1),
        # Source and target without padding; without compilation, validation and checkpoints.
        "tokens_per_second": round(meta["tokens"] / max(meta["stepping_seconds"], 1e-9), 1),
        "changed": meta.get("changed", []),  # at a resume: then no one config describes the run
        "workdir": config.workdir,
    }
