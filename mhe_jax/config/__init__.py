"""Configuration: one frozen dataclass a part, checked before anything is compiled.

An experiment is a Python file in `configs/` whose `get_config(variant)` returns a `Config`. The
command line, sweeps and the JSON beside the checkpoints all name a field by the same dotted path,
such as `model.attention.kind`. Nothing here imports jax.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Literal

from mhe_jax.config.tasks import FACTS, Role, TaskFacts, TaskName

Kind = Literal["mha", "sha", "mqa", "gqa", "skv", "el", "mhe_add", "mhe_mul", "mva"]
Form = Literal["auto", "materialized", "folded", "shared"]
Engine = Literal["auto", "xla", "cudnn", "pallas"]
# Data sets of labelled examples, see `tasks/labelled/table.py`; `own` is any other.
Dataset = Literal[
    "own",
    "cola",
    "sst2",
    "mrpc",
    "qqp",
    "stsb",
    "mnli",
    "qnli",
    "rte",
    "wnli",
    "boolq",
    "cb",
    "copa",
    "multirc",
    "superglue_rte",
    "wic",
    "wsc",
    "squad",
    "squad_v2",
]
# A hash of whole words and what embeds it, see `mhe_jax.hashformers`.
Hashing = Literal[
    "md_emb", "md_pool", "md_add", "md_proj", "lsh_emb", "lsh_pool", "lsh_add", "lsh_proj"
]


MHE_KINDS: tuple[Kind, ...] = ("mhe_add", "mhe_mul")
# Fields of `AttentionConfig` that belong to some kinds only.
FIELDS_OF_KINDS: dict[str, tuple[Kind, ...]] = {
    "num_kv_heads": ("gqa",),
    "form": (*MHE_KINDS, "mva"),
    "num_groups": (*MHE_KINDS, "mva"),
    "score_groups": ("mhe_add",),
    "score_features": ("mva",),
    "head_embedding_stddev": MHE_KINDS,
}


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """That `what` is missing, and how a clone gets it: no package index has mhe_jax."""
    return InputError(f"{what}: in the clone, pip install -e '.[{extra}]' -c constraints.txt")


@dataclass(frozen=True)
class AttentionConfig:
    """One attention sublayer. Fields of one kind are None by default and refused for the others."""

    # Which attention: see the table of kinds in the README.
    kind: Kind = "mha"
    # Number of query heads H.
    num_heads: int = 8
    # Number of key and value heads K; `gqa` only, divides num_heads.
    num_kv_heads: int | None = None
    # Width of all heads together, H*D; None means the width of the model.
    qkv_features: int | None = None
    # How an MHE kind or `mva` is computed; None is `auto`: the fastest form that is exact for the
    # call.
    form: Form | None = None
    # Shared query and key projections G of an MHE kind or `mva`, H/G heads on each; None is 1.
    num_groups: int | None = None
    # Groups of heads with a score matrix each; `mhe_add` only; None is 1.
    score_groups: int | None = None
    # Width of queries and keys; `mva` only; None is the width of a head.
    score_features: int | None = None
    # Standard deviation of the initial head embeddings; None: 0.02 for mhe_add, 0.5 for mhe_mul.
    head_embedding_stddev: float | None = None
    # What computes the softmax; `auto` takes the fastest that can do the call.
    engine: Engine = "auto"
    # Dropout on the attention weights, one mask per example shared over its heads.
    dropout_rate: float = 0.0
    # Biases in the four projections; the published parameter counts have none.
    use_bias: bool = False
    # LayerNorm over each head's queries and keys.
    normalize_qk: bool = False


if typing.TYPE_CHECKING:
    AttentionOverride = AttentionConfig
else:
    # Every field of `AttentionConfig`, None by default: what is None is not changed.
    AttentionOverride = dataclasses.make_dataclass(
        "AttentionOverride",
        [
            (name, hint | None, field(default=None))
            for name, hint in typing.get_type_hints(AttentionConfig).items()
        ],
        frozen=True,
    )
    AttentionOverride.__module__ = __name__
    AttentionOverride.__doc__ = (
        "Fields of `AttentionConfig` that one role changes; None keeps them."
    )


@dataclass(frozen=True)
class AttentionByRole:
    """Where one role of attention differs from `model.attention`."""

    # Self-attention of the encoder.
    encoder: AttentionOverride = AttentionOverride()
    # Causal self-attention of the decoder or language model.
    decoder: AttentionOverride = AttentionOverride()
    # Attention of the decoder to the encoder.
    cross: AttentionOverride = AttentionOverride()


@dataclass(frozen=True)
class KroneckerConfig:
    """Matrices as sums of Kronecker products (Shapeshifter): how many; None keeps them dense."""

    # Terms of each projection of attention.
    attention: int | None = None
    # Terms of each matrix of the MLPs, and of the head of `mlm`.
    mlp: int | None = None
    # Terms of the token embeddings, and of the output matrix where that is another.
    embedding: int | None = None
    # `factored` never makes the matrix, `materialized` makes it in each step; `auto` takes what is
    # fewer operations.
    apply: Literal["auto", "factored", "materialized"] = "auto"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer; its architecture follows from the task."""

    # Vocabulary V; a tokenizer trained by a run gets exactly this many pieces. Of hashed words with
    # a table (`_emb`) its rows: 5 special tokens and the buckets, 50,265 in the paper; the other
    # hashed words have no vocabulary.
    vocabulary_size: int = 8000
    # Whole words by their hash in place of pieces (HashFormers, encoders only): MD5 or LSH of the
    # word's pieces, and what makes a vector of it; None takes pieces.
    hashing: Hashing | None = None
    # Rows of the embedding tables are rounded up to a multiple of this; what is past the
    # vocabulary is never predicted nor counted.
    vocabulary_multiple: int = 1
    # Width M.
    features: int = 512
    # Width F of the hidden layer of the MLP.
    mlp_features: int = 2048
    # Layers of the encoder or of the language model.
    num_layers: int = 6
    # Layers of the decoder in translation; None means num_layers.
    num_decoder_layers: int | None = None
    # The attention of every layer.
    attention: AttentionConfig = AttentionConfig()
    # Where encoder, decoder and cross-attention differ from `attention`.
    attention_by_role: AttentionByRole = AttentionByRole()
    # Matrices as sums of Kronecker products.
    kronecker: KroneckerConfig = KroneckerConfig()
    # Non-linearity of the MLP.
    activation: Literal["relu", "gelu"] = "gelu"
    # LayerNorm before each sublayer (and once after the stack), or after each residual sum.
    norm_position: Literal["pre", "post"] = "pre"
    # Added in LayerNorm's denominator.
    layer_norm_epsilon: float = 1e-6
    # What a token of an encoder sees: all tokens of its text, or only itself, which is attention
    # switched off: a baseline that knows nothing of context.
    context: Literal["text", "token"] = "text"
    # Learned position rows, or fixed sine and cosine.
    positions: Literal["learned", "sinusoidal"] = "learned"
    # Longest sequence; rows of the learned positions, and the size of the cache.
    max_length: int = 512
    # Kinds of segment with an embedding each (BERT has 2); 0 for none.
    num_token_types: int = 0
    # Dropout on embeddings and on the output of each sublayer.
    dropout_rate: float = 0.1
    # Outputs of a classifier; None: as many as `data.labels`.
    num_classes: int | None = None
    # What a classifier takes for a whole text: the output at its first token, as in BERT, or the
    # mean over its tokens.
    pooling: Literal["first", "mean"] = "first"
    # Marked spans that a classifier reads beside the whole text; None: as `data.dataset` has.
    num_spans: int | None = None
    # One table for input embeddings and output logits.
    tie_embeddings: bool = True
    # One compiled layer scanned over stacked parameters: compiles faster, and keeps no more for the
    # backward pass than products and attention; False unrolls the layers.
    scan_layers: bool = False
    # Recompute each layer in the backward pass: less memory, about a third more time.
    remat: bool = False
    # Type of activations; parameters, softmax and loss stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def padded_vocabulary_size(self) -> int:
        """Rows of the embedding tables."""
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def has_table(self) -> bool:
        """Whether each token has a row of a table, and is not embedded by its hash's bits."""
        return self.hashing is None or self.hashing.endswith("_emb")

    @property
    def has_pieces(self) -> bool:
        """Whether a sentencepiece model cuts texts, or the words that are hashed."""
        return self.hashing is None or self.hashing.startswith("lsh_")

    def attention_for(self, role: Role) -> AttentionConfig:
        """`attention` with what `attention_by_role` says of `role` laid over it."""
        override = getattr(self.attention_by_role, role)
        changes = {f.name: getattr(override, f.name) for f in dataclasses.fields(override)}
        changes = {name: value for name, value in changes.items() if value is not None}
        common = self.attention
        if changes.get("kind", common.kind) != common.kind:
            # What belongs to the common kind alone means nothing to another.
            common = dataclasses.replace(common, **dict.fromkeys(FIELDS_OF_KINDS))
        return dataclasses.replace(common, **changes)


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes batches.

    A split is one source, or for translation two parallel text files. A source is a text file, a
    `.tsv` or `.jsonl` file, each also as `.gz` or `.xz`, or `tfds:NAME/CONFIG:SPLIT`. A split of
    labelled examples is one or more files as `dataset` distributes them, read one after the other.
    """

    # Relative paths below start here.
    directory: str = "."
    # Training source: one, or two parallel text files; several with `train_weights`.
    train: tuple[str, ...] = ()
    # A weight for each of several training sources: the share of rows drawn from it; () for one.
    train_weights: tuple[float, ...] = ()
    # Validation source; chooses the best checkpoint.
    validation: tuple[str, ...] = ()
    # Test source; read by eval.py only.
    test: tuple[str, ...] = ()
    # Names of the text fields in JSONL or TFDS: one, or source and target; those of `own` examples.
    fields: tuple[str, ...] = ("text",)
    # A sentencepiece model; None trains one on `train`. With LSH its pieces are the features.
    tokenizer: str | None = None
    # Pieces of the sentencepiece model that a run with LSH trains.
    lsh_pieces: int = 8000
    # Built indices and token counts; None means $MHE_JAX_CACHE or ~/.cache/mhe_jax.
    cache_directory: str | None = None
    # Tokens in a row: the block of running text; in translation the longest training sentence; the
    # longest labelled example, which is cut to it.
    sequence_length: int = 128
    # Several examples (lines, or pairs) in each training row, none of which sees another.
    packing: bool = False
    # Rows in a global batch of all tasks but translation.
    batch_size: int = 32
    # Padded source plus target tokens in a global batch of translation.
    tokens_per_batch: int = 4096
    # Padded lengths of batches of pairs and of labelled examples; the last is sequence_length.
    length_buckets: tuple[int, ...] = ()
    # Rows of a translation batch are a multiple of this: a multiple of data * fsdp devices.
    row_multiple: int = 8
    # Share of the tokens that MLM predicts; 80 % of them masked, 10 % random, 10 % kept.
    mask_rate: float = 0.15
    # Share of the words that `shuffle_random` takes from other places, and of the others that it
    # replaces by a random one.
    corruption_rate: float = 0.1
    # What labelled examples are; `own` has the texts in `fields` and the label in `label_field`.
    dataset: Dataset = "own"
    # Column or field of the label of `own` examples.
    label_field: str = "label"
    # Names of the labels, in order; () takes those of the data set, or of `own` training examples.
    labels: tuple[str, ...] = ()
    # Tokens from one window over a long text to the next (task span).
    window_stride: int = 128
    # A question is cut to this many tokens (task span).
    question_length: int = 64


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    # Optimizer.
    name: Literal["adamw", "adafactor"] = "adamw"
    # Peak learning rate, reached at the end of the warmup.
    learning_rate: float = 1e-3
    # Course after the warmup: `linear` and `cosine` reach 0 at the last of train.num_steps updates
    # (updates that train.skip_nonfinite leaves out are not counted).
    schedule: Literal["constant", "inverse_sqrt", "linear", "cosine"] = "inverse_sqrt"
    # Steps of linear growth from 0.
    warmup_steps: int = 1000
    # Decay of the first moment (adamw).
    beta1: float = 0.9
    # Decay of the second moment (adamw).
    beta2: float = 0.98
    # Added in the denominator (adamw).
    epsilon: float = 1e-9
    # Decoupled weight decay; none on biases, LayerNorm and head embeddings.
    weight_decay: float = 0.0
    # Largest global gradient norm; None does not clip.
    clip_norm: float | None = 1.0
    # Each global batch is split into this many parts, gradients summed: exactly the big batch.
    accumulate_steps: int = 1
    # Decay of an exponential moving average of the parameters, used in evaluation; None for none.
    ema_decay: float | None = None
    # Share of the target probability spread over the vocabulary (training loss only).
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    # A finished run whose encoder and tokenizer this one starts from; None starts from nothing.
    init_from: str | None = None
    # Updates in all.
    num_steps: int = 10_000
    # Of parameters, data order, masking and dropout.
    seed: int = 0
    # Steps between validations; the last step is always validated.
    eval_every: int = 500
    # Batches of a validation; None reads the whole split.
    eval_batches: int | None = None
    # Steps between checkpoints; the last step is always saved.
    checkpoint_every: int = 500
    # Checkpoints kept, beside the best on the validation split.
    keep_checkpoints: int = 3
    # Steps between log lines.
    log_every: int = 50
    # Updates with a loss or gradient that is not finite that are left out before the run stops.
    skip_nonfinite: int = 0
    # First and last step of a profiler trace in WORKDIR/profile; empty for none.
    profile_steps: tuple[int, ...] = ()
    # Also write TensorBoard event files (needs the extra `report`).
    tensorboard: bool = False


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one may be -1: all that are left."""

    # Batch split, parameters whole.
    data: int = -1
    # Batch and parameters split.
    fsdp: int = 1
    # Heads, MLP and vocabulary split.
    tensor: int = 1
    # Activations of training between the sublayers: whole along the length of a row, or split over
    # `tensor` as well (long rows).
    length: Literal["whole", "tensor"] = "whole"


@dataclass(frozen=True)
class EvaluationConfig:
    """What eval.py does with a run."""

    # Which split.
    split: Literal["validation", "test"] = "test"
    # Sources to read in place of the split's.
    sources: tuple[str, ...] = ()
    # `best` on the validation split (by the official score of labelled examples, else by loss),
    # `last`, or a step number.
    checkpoint: str = "best"
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); 1 for one.
    average_checkpoints: int = 1
    # Rows decoded or scored at once.
    batch_size: int = 64
    # Beams; 1 is greedy.
    beam_size: int = 5
    # alpha of ((5 + length) / 6)^alpha that divides a hypothesis' log-probability; 0 for none.
    length_penalty: float = 0.6
    # Longest output is the length of the source or prompt plus this, at most model.max_length (or,
    # of a language model with its prompt, data.sequence_length).
    extra_length: int = 50
    # Of a language model: windows of data.sequence_length tokens that begin this far apart, each
    # token predicted once, with at least sequence_length - stride before it; None: sequence_length.
    stride: int | None = None
    # Generation: what divides the logits before a token is drawn; 0 takes the most probable.
    temperature: float = 0.0
    # Generation: draw from this many most probable tokens only.
    top_k: int | None = None
    # Generation: draw from the fewest most probable tokens that together have this probability.
    top_p: float | None = None
    # Generation and misspelling: of what is drawn.
    seed: int = 0
    # Share of the words that are misspelt in the texts of labelled examples (not of task span, nor
    # where spans are marked).
    spelling_noise: float = 0.0
    # Tokens of the longest answer (task span).
    answer_length: int = 30
    # How much more no answer must score than the best one to be given (squad_v2).
    no_answer_threshold: float = 0.0


@dataclass(frozen=True)
class Config:
    """One experiment."""

    # What is learned: `mlm` an encoder by its masked tokens, `shuffle_random` one by which tokens
    # were moved or replaced, `lm` a language model, `translation` an encoder-decoder; the others
    # tune an encoder on labelled examples: a class, a number, which of several texts, or the span
    # that answers a question.
    task: TaskName = "mlm"
    # Where checkpoints, logs and the resolved config go.
    workdir: str = "runs/unnamed"
    # Shape of the transformer.
    model: ModelConfig = ModelConfig()
    # Where text comes from and how it becomes batches.
    data: DataConfig = DataConfig()
    # How parameters are updated.
    optimizer: OptimizerConfig = OptimizerConfig()
    # The loop.
    train: TrainConfig = TrainConfig()
    # Devices.
    mesh: MeshConfig = MeshConfig()
    # What eval.py does.
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def facts(self) -> TaskFacts:
        """The facts of its task."""
        return FACTS[self.task]


@dataclass(frozen=True)
class Target:
    """What to compile for instead of training: devices that need not be there."""

    # A TPU and its layout, as v5e:16x16.
    topology: str = ""
    # Slices of that topology, joined by the data axis of the mesh.
    num_slices: int = 1
    # Find the largest batch that fits.
    search_batch: bool = False


@dataclass(frozen=True)
class Comparison:
    """Tables and plots of finished runs, by attention and whatever else differs."""

    # Where report.html, report.md and the tables as .csv go.
    out: str = "report"
    # Which split's scores; eval.py has left them in the run.
    split: Literal["validation", "test"] = "test"
    # The score: a number of eval_SPLIT.json; None is that of the task.
    metric: str | None = None
    # Fields of which each attention has the value with the best validation loss, such as
    # optimizer.learning_rate.
    choose: tuple[str, ...] = ()
    # Lengths T at which the memory of a layer is compiled; none leaves it out.
    lengths: tuple[int, ...] = (128, 512, 2048)
