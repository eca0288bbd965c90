"""The packages; all else stands in pyproject.toml.

The configs lie at the top of a clone, where they are read and changed, and in the package where it
is installed.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["mhe_jax*"]), "mhe_jax.configs"],
    package_dir={"mhe_jax.configs": "configs"},
)
