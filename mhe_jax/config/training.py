"""How a model is trained: optimizer, loop and devices."""

from dataclasses import dataclass
from typing import Literal

from mhe_jax.config.values import AxisSize, Count, Natural, NotNegative, Positive, Rate, Seed, Share


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    # Optimizer.
    name: Literal["adamw", "adafactor"] = "adamw"
    # Peak learning rate, reached at the end of the warmup.
    learning_rate: Positive = 1e-3
    # Learning rate of the head embeddings, as a multiple of that of all other parameters.
    head_embedding_rate: Positive = 1.0
    # Course after the warmup: `linear` and `cosine` reach 0 at the last of train.num_steps updates
    # (updates that train.skip_nonfinite leaves out are not counted).
    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine"] = "inverse_sqrt"
    # Steps of linear growth from 0.
    warmup_steps: Natural = 1000
    # Decay of the first moment (adamw).
    beta1: Share = 0.9
    # Decay of the second moment (adamw).
    beta2: Share = 0.98
    # Added in the denominator (adamw).
    epsilon: Positive = 1e-9
    # Decoupled weight decay; none on biases, norms and embeddings of heads and their groups.
    weight_decay: NotNegative = 0.0
    # Largest global gradient norm; None does not clip.
    clip_norm: Positive | None = 1.0
    # Each global batch is split into this many parts, gradients summed: exactly the big batch.
    accumulate_steps: Count = 1
    # Decay of an exponential moving average of the parameters, used in evaluation; None for none.
    ema_decay: Rate | None = None
    # Share of the target probability spread over the vocabulary (training loss only).
    label_smoothing: Share = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    # A finished run whose parameters and tokenizer this one starts from: all parameters of a run of
    # the same task, the encoder of another. The model takes that run's shape and attention too,
    # except for dropout; None starts from scratch.
    init_from: str | None = None
    # Updates in all.
    num_steps: Count = 10_000
    # Seed of parameters, data order, masking and dropout.
    seed: Seed = 0
    # Steps between validations; the last step is always validated.
    eval_every: Count = 500
    # Batches of a validation (running text); None reads the whole split, as other tasks must.
    eval_batches: Count | None = None
    # Translation: at each validation, BLEU of this many validation pairs (the first ones),
    # translated greedily; 0 for none.
    eval_translate: Natural = 0
    # Steps between checkpoints; the last step is always saved.
    checkpoint_every: Count = 500
    # Checkpoints kept, besides the best on the validation split.
    keep_checkpoints: Count = 3
    # Steps between log lines.
    log_every: Count = 50
    # How many updates with a non-finite loss or gradient are left out before the run stops.
    skip_nonfinite: Natural = 0
    # First and last step of a profiler trace in WORKDIR/profile; empty for none.
    profile_steps: tuple[Count, ...] = ()
    # Also write TensorBoard event files (needs the extra `report`).
    tensorboard: bool = False
    # Also log to Weights & Biases, resuming the same run there (needs the extra `wandb`).
    wandb: bool = False


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one may be -1: all that are left."""

    # Batch split, parameters whole.
    data: AxisSize = -1
    # Batch and parameters split.
    fsdp: AxisSize = 1
    # Heads, MLP and vocabulary split.
    tensor: AxisSize = 1
    # Activations of training between the sublayers: whole along the length of a row, or split over
    # `tensor` as well (long rows).
    length: Literal["whole", "tensor"] = "whole"
