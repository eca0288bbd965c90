"""BERT and RoBERTa: encoders with the head of masked tokens, or tuned for classes or spans.

Our encoder is BERT if its norms come last (`model.norm_position` post). A model whose norms come
first has no home: BERT has no norm after its last layer.
"""

import dataclasses
import re
from typing import Any

from mhe_jax.config import Config, InputError, ModelConfig, TaskName
from mhe_jax.interchange.huggingface.fields import ACTIVATIONS, Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, Written, modules, output
from mhe_jax.interchange.plain import Tensors

# The classes of transformers for our tasks.
HEADS = {
    "mlm": "BertForMaskedLM",
    "classification": "BertForSequenceClassification",
    "regression": "BertForSequenceClassification",
    "multiple_choice": "BertForMultipleChoice",
    "span": "BertForQuestionAnswering",
}
NAME, ROLE, LAST_NORM = "BERT", "encoder", "head_norm"
# Buffers, and heads that our models lack.
IGNORED = r"\w+\.embeddings\.(position|token_type)_ids|cls\.seq_relationship\..*|\w+\.pooler\..*"
LAYER = {
    "attention.self.query": "self_attention/query",
    "attention.self.key": "self_attention/key",
    "attention.self.value": "self_attention/value",
    "attention.output.dense": "self_attention/out",
    "attention.output.LayerNorm": "self_attention_norm",
    "intermediate.dense": "mlp/up",
    "output.dense": "mlp/down",
    "output.LayerNorm": "mlp_norm",
}
# The matrices and norms of heads, by the type of the model; MLM is their name for that of `mlm`.
MLM = {"bert": "cls.predictions", "roberta": "lm_head"}
MLM_HEADS = {
    "bert": {
        "cls.predictions.transform.dense": "head_dense",
        "cls.predictions.transform.LayerNorm": "head_norm",
    },
    "roberta": {"lm_head.dense": "head_dense", "lm_head.layer_norm": "head_norm"},
}
CLASSIFIERS = {
    "bert": {"bert.pooler.dense": "pooler", "classifier": "classifier"},
    "roberta": {"classifier.dense": "pooler", "classifier.out_proj": "classifier"},
}
FIELDS = {
    "vocab_size": ("vocabulary_size", None),
    "hidden_size": ("features", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("attention.num_heads", None),
    "intermediate_size": ("mlp_features", None),
    "hidden_act": ("activation", "gelu"),
    "hidden_dropout_prob": ("dropout_rate", 0.1),
    "attention_probs_dropout_prob": ("attention.dropout_rate", 0.1),
    "max_position_embeddings": ("max_length", None),
    "type_vocab_size": ("num_token_types", 2),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-12),
    "tie_word_embeddings": ("tie_embeddings", True),
}
FIXED = {"norm_position": "post", "norm": "layer", "mlp": "plain"}
NEEDED = {**FIXED, "context": "text", "pooling": "first", "num_spans": None}


def table(model: ModelConfig, model_type: str, task: str) -> Table:
    """Where the parameters of a BERT or RoBERTa with the head of `task` lie."""
    embeddings = f"{model_type}.embeddings."
    found = {
        f"{embeddings}word_embeddings.weight": Slot("embeddings/token"),
        f"{embeddings}position_embeddings.weight": Slot("embeddings/position"),
        f"{embeddings}token_type_embeddings.weight": Slot("embeddings/type"),
        **modules(embeddings, "embeddings/", {"LayerNorm": "norm"}),
    }
    for i in range(model.num_layers):
        found |= modules(f"{model_type}.encoder.layer.{i}.", f"encoder/layer_{i}/", LAYER)
    if task == "mlm":
        head, tied = MLM[model_type], model.tie_embeddings
        found |= modules("", "", MLM_HEADS[model_type])
        found[f"{head}.bias"] = Slot("vocabulary_bias")
        found[f"{head}.decoder.weight"] = output(model)
        found[f"{head}.decoder.bias"] = Slot("vocabulary_bias", twin=tied)
        return found
    head = {"qa_outputs": "span"} if task == "span" else CLASSIFIERS[model_type]
    return found | modules("", "", head)


def write(config: Config, found: Tensors) -> Written:
    """The parameters of an encoder, and what `config.json` says beside `FIELDS`."""
    model, task = config.model, config.task
    if task not in HEADS:
        raise InputError(f"task is {task!r}: BERT has no such head; takes {', '.join(HEADS)}")
    if task != "mlm":
        found.pop("embeddings/output", None)  # of logits, which it has none of
    found.setdefault("embeddings/type", 0 * found["embeddings/token"][:1])
    values: dict[str, Any] = {"type_vocab_size": max(1, model.num_token_types)}
    if task in ("classification", "regression"):
        count = len(found["classifier/bias"])
        labels = config.data.labels if len(config.data.labels) == count else ()
        labels = labels or tuple(f"LABEL_{i}" for i in range(count))
        values["id2label"] = {str(i): label for i, label in enumerate(labels)}
        values["label2id"] = {label: i for i, label in enumerate(labels)}
        kind = "regression" if task == "regression" else "single_label_classification"
        values["problem_type"] = kind
    return found, values | {"architectures": [HEADS[task]], "model_type": "bert"}


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` of BERT or RoBERTa describes."""
    roberta = fields.values["model_type"] == "roberta"
    if roberta:
        fields.must("hidden_act", *ACTIVATIONS["gelu"])  # its head has no other activation
    fields.must("position_embedding_type", "absolute")
    fields.must("is_decoder", False, None)
    fields.must("add_cross_attention", False, None)
    model = fields.model(FIELDS, {}, **FIXED)
    length = model.max_length - (_offset(fields) if roberta else 0)
    return dataclasses.replace(model, max_length=length)


def task_and_labels(fields: Fields) -> tuple[TaskName, tuple[str, ...]]:
    """The task of a head over whole texts: classes, with their names, or one number."""
    fields.must("problem_type", None, "single_label_classification", "regression")
    count = fields.size("num_labels", 2)
    said: Any = fields.values.get("id2label") or {str(i): f"LABEL_{i}" for i in range(count)}
    labels: list[Any] = [None]
    if isinstance(said, dict):
        labels = [said.get(str(i)) for i in range(len(said))]
    if len({label for label in labels if isinstance(label, str)}) != len(labels):
        raise InputError(f"{fields.path}: id2label is {said!r}: takes a name for each number")
    fields.must("num_labels", len(labels), None)
    if len(labels) == 1 or fields.values.get("problem_type") == "regression":
        return "regression", ()
    return "classification", tuple(labels)


def named(fields: Fields, model: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors by the names of the table, and positions without those of padding."""
    old = {".gamma": ".weight", ".beta": ".bias"}  # of LayerNorm, in the first files
    found = {
        re.sub(r"\.(gamma|beta)$", lambda m: old[m[0]], name): x for name, x in tensors.items()
    }
    positions = "roberta.embeddings.position_embeddings.weight"
    if positions in found:
        found[positions] = found[positions][_offset(fields) :]
    head = MLM[fields.values["model_type"]]
    if not model.tie_embeddings and f"{head}.decoder.bias" in found:
        found.pop(f"{head}.bias", None)  # if it is another, it is never used
    return found


def _offset(fields: Fields) -> int:
    """The first position of RoBERTa: the one after padding's, which equals the padding id."""
    return fields.get("pad_token_id", 1) + 1
