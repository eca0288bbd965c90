"""Checkpoints by Orbax: written while training goes on, whole or not at all.

    WORKDIR/checkpoints/STEP    params; ema_params, where there is an average; optimizer (its state,
                                the step, the key); meta (JSON); checksums of every file of these;
                                validation, where it came in a later process

The last `keep_checkpoints` stay, and the one with the best validation (`tasks.sums.criterion`). A
crash in any write leaves complete older ones. A run goes on from the newest step that is as it was
written, and moves newer ones to `checkpoints_unreadable`. Arrays come back on the current mesh,
whatever mesh wrote them.

A run may have a `model.safetensors` instead, with parameters alone: an exported one has.
"""

from mhe_jax.training.checkpoint.faults import NotSaved
from mhe_jax.training.checkpoint.manager import Checkpoints
from mhe_jax.training.checkpoint.reading import Meta, restore_params

__all__ = ["Checkpoints", "Meta", "NotSaved", "restore_params"]
