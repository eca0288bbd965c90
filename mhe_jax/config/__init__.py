"""Configuration: one frozen dataclass per part, checked before anything is compiled.

An experiment is a Python file in `configs/` whose `get_config(variant)` returns a `Config`. The
command line, sweeps and the JSON beside the checkpoints all name a field by the same dotted path,
such as `model.attention.kind`. The comment above a field is its help text. Nothing here imports
jax.

experiment.py  the whole         model.py  data.py  training.py  evaluation.py  its parts
values.py      types of fields   tasks.py  the tasks by name, and which fields go with each
fields.py      dotted names and JSON, by pydantic     loading.py  config files
files.py       names, the cache  places.py  local names and buckets
rules/         what values are allowed together
"""

from mhe_jax.config.data import DataConfig, Dataset
from mhe_jax.config.evaluation import Comparison, EvaluationConfig
from mhe_jax.config.experiment import Config, Target
from mhe_jax.config.model import (
    AttentionByRole,
    AttentionConfig,
    AttentionOverride,
    ConversionConfig,
    KroneckerConfig,
    ModelConfig,
)
from mhe_jax.config.tasks import FACTS, Role, TaskName
from mhe_jax.config.training import MeshConfig, OptimizerConfig, TrainConfig
from mhe_jax.config.values import (
    FIELDS_OF_KINDS,
    FORMS_OF_KINDS,
    MHE_KINDS,
    Form,
    InputError,
    Kind,
    not_installed,
)

__all__ = [
    "FACTS",
    "FIELDS_OF_KINDS",
    "FORMS_OF_KINDS",
    "MHE_KINDS",
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
    "Role",
    "Target",
    "TaskName",
    "TrainConfig",
    "not_installed",
]
