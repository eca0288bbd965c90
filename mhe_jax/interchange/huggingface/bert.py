"""BERT and RoBERTa: encoders with the head of masked tokens, or tuned for classes or spans.

Our encoder is BERT if its norms come last (`model.norm_position` post). A model whose norms come
first has no home: BERT has no norm after its last layer.
"""

import dataclasses
import re
from typing import Any

from mhe_jax.config import Config, InputError, ModelConfig, TaskName
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.plain import Tensors
from mhe_jax.interchange.tables import Slot, Table, modules, output

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
# By the type of the model: the head of `mlm`, and in it the matrix and the norm; classifiers.
MLM = {
    "bert": ("cls.predictions", "transform.dense", "transform.LayerNorm"),
    "roberta": ("lm_head", "dense", "layer_norm"),
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
RULES = {
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "position_embedding_type": (None, "absolute"),
}


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
        head, dense, norm = MLM[model_type]
        found |= modules(f"{head}.", "", {dense: "head_dense", norm: "head_norm"})
        found[f"{head}.bias"] = Slot("vocabulary_bias")
        found[f"{head}.decoder.weight"] = output(model)
        found[f"{head}.decoder.bias"] = Slot("vocabulary_bias", twin=model.tie_embeddings)
        return found
    head = {"qa_outputs": "span"} if task == "span" else CLASSIFIERS[model_type]
    return found | modules("", "", head)


def write(config: Config, found: Tensors) -> dict[str, Any]:
    """Makes the parameters those of an encoder: what `config.json` says beside `FIELDS`."""
    model, task = config.model, config.task
    if task not in HEADS:
        raise InputError(f"task is {task!r}: BERT has no such head; takes {', '.join(HEADS)}")
    if task != "mlm":
        found.pop("embeddings/output", None)  # of logits, which it has none of
    found.setdefault("embeddings/type", 0 * found["embeddings/token"][:1])
    values: dict[str, Any] = {"type_vocab_size": max(1, model.num_token_types)}
    if task in ("classification", "regression"):
        labels = config.data.labels
        if len(labels) != (count := len(found["classifier/bias"])):
            labels = [f"LABEL_{i}" for i in range(count)]
        values["id2label"] = {str(i): label for i, label in enumerate(labels)}
        values["label2id"] = {label: i for i, label in enumerate(labels)}
        kind = "regression" if task == "regression" else "single_label_classification"
        values["problem_type"] = kind
    return values | {"architectures": [HEADS[task]], "model_type": "bert"}


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` of BERT or RoBERTa describes."""
    if fields["model_type"] == "roberta":  # its head has no other activation
        fields.must("hidden_act", (None, "gelu", "gelu_python"))
    model = fields.model(FIELDS, **FIXED)
    return dataclasses.replace(model, max_length=model.max_length - _offset(fields))


def task_and_labels(fields: Fields) -> tuple[TaskName, tuple[str, ...]]:
    """The task of a head over whole texts: classes, with their names, or one number."""
    kind = "problem_type"
    fields.must(kind, (None, "single_label_classification", "regression"))
    count = fields.get("num_labels", 2)
    said = fields.get("id2label", {str(i): f"LABEL_{i}" for i in range(count)})
    if len(said) == 1 or fields.get(kind) == "regression":
        return "regression", ()
    return "classification", tuple(said[i] for i in sorted(said, key=int))


def named(fields: Fields, model: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors by the names of the table, and positions without those of padding."""
    old = {".gamma": ".weight", ".beta": ".bias"}  # of LayerNorm, in the first files
    found = {
        re.sub(r"\.(gamma|beta)$", lambda m: old[m[0]], name): x for name, x in tensors.items()
    }
    positions = f"{fields['model_type']}.embeddings.position_embeddings.weight"
    if positions in found:
        found[positions] = found[positions][_offset(fields) :]
    return found


def _offset(fields: Fields) -> int:
    """The first position: of RoBERTa, the one after padding's, which equals the padding id."""
    return fields.get("pad_token_id", 1) + 1 if fields["model_type"] == "roberta" else 0
