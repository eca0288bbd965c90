"""Checkpoints by Orbax: written while training goes on, whole or not at all.

    WORKDIR/checkpoints/STEP        params, ema_params (where there is an average), optimizer (its
                                    state, the step, the key), meta; the last `keep_checkpoints`
    WORKDIR/checkpoints_best/STEP   params (the average where there is one), meta; of the step with
                                    the best validation (`tasks.sums.criterion`): what
                                    evaluation needs

Until a checkpoint of its step is written, a new best one leaves the best of the steps before the
newest checkpoint, for a run that goes on from there with other fields.

A best checkpoint outlives the last N, and a crash in any write leaves complete older ones. Those
that cannot be read move to `checkpoints_unreadable`, and the best ones of abandoned steps move to
`checkpoints_best_left`, which nothing reads. Arrays are restored onto the current mesh, whatever
mesh wrote them.

Each step keeps a checksum of every file; a step with a file that differs counts as unreadable.

A run may have a `model.safetensors` instead, with parameters alone: an exported one has.

writing.py     the checkpoints of a run that trains    reading.py   parameters of a finished one
tensors.py     parameters by name, as safetensors
store.py       calls of Orbax, and what it prints      checksums.py of the files, verified
"""

from mhe_jax.training.checkpoint.reading import restore_params
from mhe_jax.training.checkpoint.store import (
    Meta,
    NotSaved,
    check_path,
    check_tokenizer,
    has_steps,
    reason_of,
)
from mhe_jax.training.checkpoint.writing import Checkpoints

__all__ = [
    "Checkpoints",
    "Meta",
    "NotSaved",
    "check_path",
    "check_tokenizer",
    "has_steps",
    "reason_of",
    "restore_params",
]
