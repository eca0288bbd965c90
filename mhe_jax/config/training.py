"""How a model is trained: optimizer, loop and devices; and how runs are scored and compared."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt, Le

from mhe_jax.config import values

# The names of sacreBLEU.
BleuTokenizer = Literal[
    "13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab", "flores200", "spBLEU-1K"
]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    # Optimizer: `muon` moves the kernels of the layers, and AdamW all else.
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    # Peak learning rate, reached at the end of the warmup.
    learning_rate: values.Positive = 1e-3
    # That of what AdamW moves under `muon`; None for the same.
    adam_rate: values.Positive | None = None
    # Learning rate of the head embeddings, as a multiple of that of all other parameters.
    head_embedding_rate: values.Positive = 1.0
    # Course after the warmup: `linear` and `cosine` reach 0 at the last of train.num_steps updates.
    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine"] = "inverse_sqrt"
    # Steps of linear growth from 0.
    warmup_steps: values.Natural = 1000
    # Decay of the first moment (of AdamW).
    beta1: values.Share = 0.9
    # Decay of the second moment (of AdamW).
    beta2: values.Share = 0.98
    # Added in the denominator (of AdamW).
    epsilon: values.Positive = 1e-9
    # Decoupled weight decay; none on biases, norms and embeddings of heads and their groups.
    weight_decay: values.NotNegative = 0.0
    # Largest global gradient norm; None does not clip.
    clip_norm: values.Positive | None = 1.0
    # Each global batch is split into this many parts, gradients summed: exactly the big batch.
    accumulate_steps: values.Count = 1
    # Decay of an exponential moving average of the parameters, used in evaluation; None for none.
    ema_decay: values.Rate | None = None
    # Share of the target probability spread over the vocabulary (training loss only).
    label_smoothing: values.Share = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    # A finished run to start from, with its tokenizer, shape and attention, but not its dropout:
    # all parameters of a run of the same task, the encoder of another; None starts from scratch.
    init_from: str | None = None
    # Updates in all.
    num_steps: values.Count = 10_000
    # Seed of parameters, data order, masking and dropout.
    seed: values.Seed = 0
    # Steps between validations; the last step is always validated.
    eval_every: values.Count = 500
    # Batches of a validation (running text); None reads the whole split, as other tasks must.
    eval_batches: values.Count | None = None
    # Translation: at each validation, BLEU of the first pairs, this many, translated greedily.
    eval_translate: values.Natural = 0
    # Steps between checkpoints; the last step is always saved.
    checkpoint_every: values.Count = 500
    # Checkpoints kept, besides the best on the validation split.
    keep_checkpoints: values.Count = 3
    # Steps between log lines.
    log_every: values.Count = 50
    # How many updates with a non-finite loss or gradient are left out before the run stops.
    skip_nonfinite: values.Natural = 0
    # First and last step of a profiler trace in WORKDIR/profile; empty for none.
    profile_steps: tuple[values.Count, ...] = ()
    # Also write TensorBoard event files (needs the extra `report`).
    tensorboard: bool = False
    # Also log to Weights & Biases, resuming the same run there (needs the extra `wandb`).
    wandb: bool = False


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one may be -1: all that are left."""

    # Batch split, parameters whole.
    data: values.AxisSize = -1
    # Batch and parameters split.
    fsdp: values.AxisSize = 1
    # Heads, MLP and vocabulary split.
    tensor: values.AxisSize = 1
    # Rows along their length: whole; split over `tensor` between sublayers; or split over it
    # everywhere, in attention too, in place of heads, MLP and vocabulary.
    length: Literal["whole", "tensor", "everywhere"] = "whole"


@dataclass(frozen=True)
class Target:
    """Devices to compile for instead of training; they need not be there."""

    # Compile for `topology`, and train nothing.
    compile_only: bool = False
    # A TPU and its layout, such as v5e:16x16.
    topology: str = ""
    # Slices of that topology, joined by the data axis of the mesh.
    num_slices: values.Count = 1
    # Find the largest batch that fits.
    search_batch: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """How eval.py scores, translates or continues with a run."""

    # Which split.
    split: Literal["validation", "test"] = "test"
    # Sources to read instead of the split's, also relative to data.directory.
    sources: tuple[str, ...] = ()
    # `best` on the validation split (by loss, or the official score), `last`, or a step number.
    checkpoint: str = "best"
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); 1 for one.
    average_checkpoints: values.Count = 1
    # Rows decoded or scored at once.
    batch_size: values.Count = 64
    # Beams; 1 is greedy.
    beam_size: values.Count = 5
    # alpha of ((5 + length) / 6)^alpha, which divides a hypothesis' log-probability; 0 for none.
    length_penalty: values.NotNegative = 0.6
    # Fewest tokens of an output before its end; 0 allows an empty one.
    min_length: values.Natural = 1
    # How much longer than its source or prompt an output may be, within model.max_length (for a
    # language model: data.sequence_length, prompt included).
    extra_length: values.Natural = 50
    # How sacreBLEU cuts texts into words; Chinese takes zh, Japanese char or ja-mecab.
    bleu_tokenizer: BleuTokenizer = "13a"
    # For a language model: windows of data.sequence_length tokens begin this far apart, and each
    # token is predicted once, after sequence_length - stride others or more; None: sequence_length.
    stride: values.Count | None = None
    # Generation: divides the logits before a token is drawn; 0 takes the most probable token.
    temperature: values.NotNegative = 0.0
    # Generation: draw only from this many most probable tokens.
    top_k: values.Count | None = None
    # Generation: draw from the most probable tokens that together have this probability.
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    # Seed of generation and misspelling.
    seed: values.Seed = 0
    # Share of the words of labelled examples to misspell (not where spans are marked or found).
    spelling_noise: values.Part = 0.0
    # Longest answer, in tokens (task span).
    answer_length: values.Count = 30
    # By how much giving no answer must outscore the best answer (squad_v2).
    no_answer_threshold: values.Finite = 0.0
    # Hold matrices as int8 numbers with float scales (needs the extra `quantize`); None for not.
    quantize: Literal["int8"] | None = None


def result_name(evaluation: EvaluationConfig) -> str:
    """The name of result files: the split, or the first source that replaces it."""
    name = evaluation.split
    if evaluation.sources:
        name = re.sub(r"\W+", "_", Path(evaluation.sources[0]).name)
        name = f"sources_{name}" if name in ("validation", "test") else name  # not the split's own
    if evaluation.spelling_noise:
        name += f"_misspelt_{evaluation.spelling_noise}_{evaluation.seed}"
    if evaluation.quantize:
        name += f"_{evaluation.quantize}"
    return name


@dataclass(frozen=True)
class Comparison:
    """Tables and plots of finished runs, by attention and whatever else differs."""

    # Where report.html, table.csv and runs.csv go.
    out: str = "report"
    # The split whose scores are compared, as eval.py left them in the run.
    split: Literal["validation", "test"] = "test"
    # The score: a number in eval_SPLIT.json; None takes the task's.
    metric: str | None = None
    # Fields whose value is chosen for each attention by the best validation loss, such as
    # optimizer.learning_rate.
    choose: tuple[str, ...] = ()
