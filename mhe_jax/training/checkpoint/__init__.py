"""Checkpoints by Orbax: written while training goes on, whole or not at all.

    WORKDIR/checkpoints/STEP    params; ema_params, where there is an average; optimizer (its state,
                                the step, the key); meta (JSON); checksums of every file of these

The last `keep_checkpoints` stay, and the one with the best validation (`tasks.sums.criterion`). A
crash in any write leaves complete older ones; what is not as it was written moves to
`checkpoints_unreadable`. Arrays are restored onto the current mesh, whatever mesh wrote them.

A run may have a `model.safetensors` instead, with parameters alone: an exported one has.
"""

from mhe_jax.training.checkpoint.manager import Checkpoints
from mhe_jax.training.checkpoint.reading import restore_params
from mhe_jax.training.checkpoint.store import Meta, NotSaved

__all__ = ["Checkpoints", "Meta", "NotSaved", "restore_params"]
