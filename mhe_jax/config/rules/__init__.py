"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed.

ranges.py      one field by itself              model.py     attention, and what some models have
data.py        what is trained on               devices.py   the mesh, and what it divides
evaluation.py  how a run is scored
"""

from mhe_jax.config import Config
from mhe_jax.config.rules.data import check_data, training_sources
from mhe_jax.config.rules.devices import check_devices, mesh_shape
from mhe_jax.config.rules.evaluation import check_evaluation
from mhe_jax.config.rules.model import (
    check_attention,
    check_encoder,
    check_positions,
    check_vocabulary,
)
from mhe_jax.config.rules.ranges import check_ranges

__all__ = [
    "check",
    "check_devices",
    "mesh_shape",
    "training_sources",
]


def check(config: Config, *, trains: bool = True) -> None:
    """Raises InputError for the first rule that the config breaks; needs text only if it trains."""
    check_ranges(config)
    check_positions(config)
    check_attention(config)
    check_encoder(config)
    check_vocabulary(config)
    check_data(config, trains)
    check_evaluation(config)
