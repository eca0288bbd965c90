"""Configuration: one frozen dataclass per part, checked before anything is compiled.

An experiment is a Python file in `configs/` whose `get_config(variant)` returns a `Config`. The
command line, sweeps and the JSON beside the checkpoints all name a field by the same dotted path,
such as `model.attention.kind`. The comment above a field is its help text. Nothing here imports
jax.

model.py  data.py  training.py    the parts, and what is evaluated and compared
values.py  types of fields, tasks      rules.py   what values are allowed together
fields.py  dotted names, JSON          loading.py  config files, configs of runs
files.py   what is written and read    places.py  local names and buckets
"""
# ruff: noqa: F401, what other rooms import

from dataclasses import dataclass

from mhe_jax.config.data import DataConfig, Dataset, PublishedDataset
from mhe_jax.config.model import (
    FIELDS_OF_KINDS,
    FORMS_OF_KINDS,
    AttentionByRole,
    AttentionConfig,
    AttentionOverride,
    ConversionConfig,
    Form,
    Kind,
    KroneckerConfig,
    ModelConfig,
)
from mhe_jax.config.training import (
    Comparison,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    Target,
    TrainConfig,
    result_name,
)
from mhe_jax.config.values import FACTS, InputError, Name, Role, TaskFacts, TaskName, not_installed


@dataclass(frozen=True)
class Config:
    """One experiment."""

    __pydantic_config__ = {"strict": True, "extra": "forbid"}  # of its parts too
    # What is learned: `mlm` an encoder that predicts masked tokens, `shuffle_random` one that tells
    # which were moved or replaced, `lm` a language model, `translation` an encoder-decoder; others
    # tune an encoder on labelled examples: a class, a number, one of several texts, an answer.
    task: TaskName = "mlm"
    # Where checkpoints, logs and the resolved config go.
    workdir: Name = "runs/unnamed"
    # Shape of the transformer.
    model: ModelConfig = ModelConfig()
    # Where text comes from and how it becomes batches.
    data: DataConfig = DataConfig()
    # How parameters are updated.
    optimizer: OptimizerConfig = OptimizerConfig()
    # The loop.
    train: TrainConfig = TrainConfig()
    # Devices.
    mesh: MeshConfig = MeshConfig()
    # What eval.py does.
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def facts(self) -> TaskFacts:
        return FACTS[self.task]

    @property
    def kinds(self) -> dict[Role, Kind]:
        """The kind of attention of each role that its task has."""
        return {role: self.model.attention_for(role).kind for role in self.facts.roles}
