"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed. The range
of one field stands in its type.

model.py  attention, and what only some models have      data.py  what is trained on, and scored
devices.py  the mesh, and what it divides
"""

from mhe_jax.config import Config
from mhe_jax.config.fields import checked
from mhe_jax.config.rules.data import check_data, check_evaluation, training_sources
from mhe_jax.config.rules.devices import check_devices, mesh_shape
from mhe_jax.config.rules.model import check_attention, check_model

__all__ = ["check", "check_attention", "check_devices", "mesh_shape", "training_sources"]


def check(config: Config, *, trains: bool = True) -> None:
    """Raises InputError for the first rule that the config breaks; needs text only if it trains."""
    checked(Config, config)
    check_model(config)
    check_attention(config)
    check_data(config, trains)
    check_evaluation(config)
