"""Parameter-efficient attention in JAX and Flax, and the training code around it.

`mhe_jax.attention.make_attention` makes a module for a model of one's own; `python -m mhe_jax
--help` lists the commands. Importing this package loads nothing.
"""

__version__ = "0.1.0"
