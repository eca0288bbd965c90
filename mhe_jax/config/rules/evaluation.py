"""Rules for how a run is scored."""

from mhe_jax.config import (
    FACTS,
    Config,
)
from mhe_jax.config.places import SOURCES, check_scheme
from mhe_jax.config.rules.ranges import refuse


def _has_spans(config: Config) -> bool:
    """Whether positions in the texts matter."""
    return config.facts.questions or config.data.dataset in ("wic", "wsc")


def check_evaluation(config: Config) -> None:
    """Checks fields against the task, and against one another."""
    evaluation = config.evaluation
    if sample := config.train.eval_translate:
        if config.task != "translation":
            raise refuse("train.eval_translate", sample, f"translation only, not {config.task}")
        if not config.data.validation:
            raise refuse("train.eval_translate", sample, "needs data.validation")
    for name in evaluation.sources:
        check_scheme("evaluation.sources", name, SOURCES)
    name = evaluation.checkpoint
    if name not in ("best", "last") and not (name.isascii() and name.isdigit()):
        raise refuse("evaluation.checkpoint", name, "takes best, last or a step number")
    if evaluation.stride is not None:
        if not config.facts.stride:
            which = ", ".join(name for name, facts in FACTS.items() if facts.stride)
            raise refuse("evaluation.stride", evaluation.stride, f"{which} only, not {config.task}")
        if evaluation.stride > config.data.sequence_length:
            raise refuse(
                "evaluation.stride",
                evaluation.stride,
                f"at most data.sequence_length={config.data.sequence_length}",
            )
    if evaluation.spelling_noise and (not config.facts.labelled or _has_spans(config)):
        what = (
            f"data.dataset {config.data.dataset}" if _has_spans(config) else f"task {config.task}"
        )
        raise refuse("evaluation.spelling_noise", evaluation.spelling_noise, f"not for {what}")
    for field in ("top_k", "top_p"):
        value = getattr(evaluation, field)
        if value is not None and not evaluation.temperature:
            raise refuse(f"evaluation.{field}", value, "needs evaluation.temperature above 0")
    if evaluation.average_checkpoints > 1:
        if name != "last":
            raise refuse(
                "evaluation.average_checkpoints",
                evaluation.average_checkpoints,
                f"needs evaluation.checkpoint last, not {name}",
            )
        if evaluation.average_checkpoints > config.train.keep_checkpoints:
            raise refuse(
                "evaluation.average_checkpoints",
                evaluation.average_checkpoints,
                f"at most train.keep_checkpoints={config.train.keep_checkpoints}",
            )
