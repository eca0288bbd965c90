"""Parameters of runs that nothing trained."""

import flax.linen as nn
import jax
import numpy as np


def random_parameters(initialize, seed=3, size=1.0):
    """Parameters of the shapes that `initialize(key)` would give, which is not compiled.

    To compile it takes longer than most tests that want a run. None is what an initializer leaves
    as 0 or 1, so that none can be forgotten; all are large enough, with a `size` of 1, that
    probabilities are far from flat. Scores of `mhe_mul` go with two head embeddings, and the
    rounding of float32 with the scores: those are not larger than that takes.
    """
    shapes = jax.eval_shape(lambda key: nn.unbox(initialize(key)), jax.random.key(0))
    draw = np.random.default_rng(seed)

    def drawn(path, leaf):
        name = path[-1].key
        deviation = 0.5 if "head_embedding" in name else 0.2 if name in ("bias", "scale") else 0.35
        value = 1.4 * (name == "scale") + deviation * draw.standard_normal(leaf.shape)
        return (size * value).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, shapes)
