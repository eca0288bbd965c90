"""BERT and RoBERTa: encoders with the head of masked tokens, or tuned for classes or spans.

Our encoder is BERT if its norms come last (`model.norm_position` post). A model whose norms come
first has no home: BERT has no norm after its last layer.
"""

import re
from typing import Any

import numpy as np

from mhe_jax.config import AttentionConfig, Config, InputError, ModelConfig, TaskName
from mhe_jax.interchange.huggingface.fields import ACTIVATIONS, Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, lay_out, linear, norm, output
from mhe_jax.interchange.plain import Tensors, plain, require, unscaled

# The classes of transformers for our tasks.
HEADS = {
    "mlm": "BertForMaskedLM",
    "classification": "BertForSequenceClassification",
    "regression": "BertForSequenceClassification",
    "multiple_choice": "BertForMultipleChoice",
    "span": "BertForQuestionAnswering",
}
LAST_NORM = "head_norm"


def table(model: ModelConfig, model_type: str, task: str) -> Table:
    """Where the parameters of a BERT or RoBERTa with the head of `task` lie."""
    prefix, roberta = model_type, model_type == "roberta"
    embeddings = f"{prefix}.embeddings"
    found = {
        f"{embeddings}.word_embeddings.weight": Slot(("embeddings/token",)),
        f"{embeddings}.position_embeddings.weight": Slot(("embeddings/position",)),
        f"{embeddings}.token_type_embeddings.weight": Slot(("embeddings/type",)),
        **norm(f"{embeddings}.LayerNorm", "embeddings/norm"),
    }
    for i in range(model.num_layers):
        theirs, ours = f"{prefix}.encoder.layer.{i}", f"encoder/layer_{i}"
        for name in ("query", "key", "value"):
            found |= linear(f"{theirs}.attention.self.{name}", f"{ours}/self_attention/{name}")
        found |= linear(f"{theirs}.attention.output.dense", f"{ours}/self_attention/out")
        found |= norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/self_attention_norm")
        found |= linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/up")
        found |= linear(f"{theirs}.output.dense", f"{ours}/mlp/down")
        found |= norm(f"{theirs}.output.LayerNorm", f"{ours}/mlp_norm")
    if task == "mlm":
        head = "lm_head" if roberta else "cls.predictions"
        found |= linear(f"{head}.dense" if roberta else f"{head}.transform.dense", "head_dense")
        last = f"{head}.layer_norm" if roberta else f"{head}.transform.LayerNorm"
        found |= norm(last, "head_norm")
        found[f"{head}.bias"] = Slot(("vocabulary_bias",))
        found[f"{head}.decoder.weight"] = output(model)
        found[f"{head}.decoder.bias"] = Slot(("vocabulary_bias",), twin=model.tie_embeddings)
    elif task == "span":
        found |= linear("qa_outputs", "span")
    elif roberta:
        found |= linear("classifier.dense", "pooler") | linear("classifier.out_proj", "classifier")
    else:
        found |= linear(f"{prefix}.pooler.dense", "pooler") | linear("classifier", "classifier")
    return found


def write(
    config: Config, params: Any, rows: np.ndarray | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of an encoder, and its `config.json`; see `writing.convert`."""
    model, task = config.model, config.task
    if task not in HEADS:
        raise InputError(f"task is {task!r}: BERT has no such head; takes {', '.join(HEADS)}")
    require(
        model,
        "BERT, the format for encoders,",
        norm_position="post",
        norm="layer",
        mlp="plain",
        context="text",
        pooling="first",
        num_spans=None,
    )
    found = plain(config, params, "BERT", rows=rows)
    if task != "mlm":
        found.pop("embeddings/output", None)  # of logits, which it has none of
    found = unscaled(model, found, LAST_NORM if task == "mlm" else None)
    types = max(1, model.num_token_types)
    found.setdefault("embeddings/type", 0 * found["embeddings/token"][:1])
    attention = model.attention_for("encoder")
    values = {
        "architectures": [HEADS[task]],
        "model_type": "bert",
        "vocab_size": found["embeddings/token"].shape[0],
        "hidden_size": model.features,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "intermediate_size": model.mlp_features,
        "hidden_act": ACTIVATIONS[model.activation][0],
        "hidden_dropout_prob": model.dropout_rate,
        "attention_probs_dropout_prob": attention.dropout_rate,
        "max_position_embeddings": model.max_length,
        "type_vocab_size": types,
        "layer_norm_eps": model.layer_norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if task in ("classification", "regression"):
        count = 1 if task == "regression" else found["classifier/bias"].shape[0]
        labels = config.data.labels if len(config.data.labels) == count else ()
        labels = labels or tuple(f"LABEL_{i}" for i in range(count))
        values["id2label"] = {str(i): label for i, label in enumerate(labels)}
        values["label2id"] = {label: i for i, label in enumerate(labels)}
        kind = "regression" if task == "regression" else "single_label_classification"
        values["problem_type"] = kind
    return lay_out(table(model, "bert", task), found, "BERT"), values


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` of BERT or RoBERTa describes."""
    roberta = fields.values["model_type"] == "roberta"
    if roberta:
        fields.must("hidden_act", *ACTIVATIONS["gelu"])  # its head has no other activation
    fields.must("position_embedding_type", "absolute")
    fields.must("is_decoder", False, None)
    fields.must("add_cross_attention", False, None)
    return ModelConfig(
        vocabulary_size=fields.size("vocab_size"),
        features=fields.size("hidden_size"),
        mlp_features=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        attention=AttentionConfig(
            num_heads=fields.size("num_attention_heads"),
            dropout_rate=fields.get("attention_probs_dropout_prob", 0.1),
            use_bias=True,
        ),
        activation=fields.activation("hidden_act", "gelu"),
        norm_position="post",
        layer_norm_epsilon=fields.get("layer_norm_eps", 1e-12),
        positions="learned",
        max_length=fields.size("max_position_embeddings") - (_offset(fields) if roberta else 0),
        num_token_types=fields.size("type_vocab_size", 2),
        dropout_rate=fields.get("hidden_dropout_prob", 0.1),
        tie_embeddings=fields.get("tie_word_embeddings", True),
    )


def task_and_labels(fields: Fields) -> tuple[TaskName, tuple[str, ...]]:
    """The task of a head over whole texts: classes, with their names, or one number.

    Raises:
      InputError: several labels for one text; labels without a name each.
    """
    fields.must("problem_type", None, "single_label_classification", "regression")
    count = fields.size("num_labels", 2)
    said = fields.values.get("id2label") or {str(i): f"LABEL_{i}" for i in range(count)}
    numbers = [str(i) for i in range(len(said))] if isinstance(said, dict) else ["none"]
    labels = tuple(said.get(i) for i in numbers) if isinstance(said, dict) else ()
    if len({label for label in labels if isinstance(label, str)}) != len(numbers):
        raise InputError(f"{fields.path}: id2label is {said!r}: takes a name for each number")
    fields.must("num_labels", len(labels), None)
    if len(labels) == 1 or fields.values.get("problem_type") == "regression":
        return "regression", ()
    return "classification", labels  # pyright: ignore[reportReturnType]


def named(fields: Fields, model: ModelConfig, tensors: Tensors, task: str) -> Tensors:
    """The tensors by the names of the table, without heads and buffers that our models lack."""
    prefix = fields.values["model_type"]
    old = {".gamma": ".weight", ".beta": ".bias"}  # of LayerNorm, in the first files
    renamed = {
        re.sub(r"\.(gamma|beta)$", lambda m: old[m[0]], name): x for name, x in tensors.items()
    }
    left_out = rf"{prefix}\.embeddings\.(position|token_type)_ids|cls\.seq_relationship\..*"
    if prefix == "roberta" or task not in ("classification", "regression"):
        left_out += rf"|{prefix}\.pooler\..*"
    left_out = re.compile(left_out)
    found = {name: array for name, array in renamed.items() if not left_out.fullmatch(name)}
    if prefix == "roberta":
        positions = "roberta.embeddings.position_embeddings.weight"
        if positions in found:
            found[positions] = found[positions][_offset(fields) :]
    head = "lm_head" if prefix == "roberta" else "cls.predictions"
    if not model.tie_embeddings and f"{head}.decoder.bias" in found:
        found.pop(f"{head}.bias", None)  # if it is another, it is never used
    return found


def _offset(fields: Fields) -> int:
    """The first position of RoBERTa: the one after padding's, which equals the padding id."""
    return fields.get("pad_token_id", 1) + 1
