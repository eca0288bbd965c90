"""Configuration: one frozen dataclass per part, checked before anything is compiled.

An experiment is a Python file in `configs/` whose `get_config(variant)` returns a `Config`. The
command line, sweeps and the JSON beside the checkpoints all name a field by the same dotted path,
such as `model.attention.kind`. The comment above a field is its help text. Nothing here imports
jax.

model.py  data.py  training.py  evaluation.py  the parts
kinds.py   the kinds of attention, and attention's fields
values.py  types of fields       tasks.py  the tasks by name, and which fields go with each
fields.py  dotted names and JSON, by pydantic     loading.py  config files
files.py   names, the cache      places.py  local names and buckets
rules/     what values are allowed together
"""

from dataclasses import dataclass

from mhe_jax.config.data import DataConfig, Dataset, PublishedDataset
from mhe_jax.config.evaluation import Comparison, EvaluationConfig
from mhe_jax.config.kinds import (
    FIELDS_OF_KINDS,
    FORMS_OF_KINDS,
    AttentionByRole,
    AttentionConfig,
    AttentionOverride,
    ConversionConfig,
    Form,
    Kind,
)
from mhe_jax.config.model import KroneckerConfig, ModelConfig
from mhe_jax.config.tasks import FACTS, Role, TaskFacts, TaskName
from mhe_jax.config.training import MeshConfig, OptimizerConfig, TrainConfig
from mhe_jax.config.values import Count, InputError, not_installed

__all__ = [
    "FACTS",
    "FIELDS_OF_KINDS",
    "FORMS_OF_KINDS",
    "AttentionByRole",
    "AttentionConfig",
    "AttentionOverride",
    "Comparison",
    "Config",
    "ConversionConfig",
    "DataConfig",
    "Dataset",
    "EvaluationConfig",
    "Form",
    "InputError",
    "Kind",
    "KroneckerConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PublishedDataset",
    "Role",
    "Target",
    "TaskName",
    "TrainConfig",
    "not_installed",
]


@dataclass(frozen=True)
class Config:
    """One experiment."""

    __pydantic_config__ = {"strict": True, "extra": "forbid"}  # of its parts too
    # What is learned: `mlm` an encoder that predicts masked tokens, `shuffle_random` one that tells
    # which tokens were moved or replaced, `lm` a language model, `translation` an encoder-decoder;
    # the others tune an encoder on labelled examples: a class, a number, which of several texts, or
    # the span that answers a question.
    task: TaskName = "mlm"
    # Where checkpoints, logs and the resolved config go.
    workdir: str = "runs/unnamed"
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
        """The facts of its task."""
        return FACTS[self.task]

    @property
    def kinds(self) -> dict[Role, Kind]:
        """The kind of attention of each role that its task has."""
        return {role: self.model.attention_for(role).kind for role in self.facts.roles}


@dataclass(frozen=True)
class Target:
    """Devices to compile for instead of training; they need not be there."""

    # Compile for `topology`, and train nothing.
    compile_only: bool = False
    # A TPU and its layout, such as v5e:16x16.
    topology: str = ""
    # Slices of that topology, joined by the data axis of the mesh.
    num_slices: Count = 1
    # Find the largest batch that fits.
    search_batch: bool = False
