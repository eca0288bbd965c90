"""A model of transformers as our config, parameters and tokenizer, and as a run."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from mhe_jax import tasks
from mhe_jax.config import Config, DataConfig, EvaluationConfig, InputError, ModelConfig, TaskName
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.config.fields import did_you_mean, nearest
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import check_scheme, path_of
from mhe_jax.config.rules import check
from mhe_jax.data import JsonTokenizer
from mhe_jax.data.tokenizer_json import ABSENT
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.fields import Fields, read_object
from mhe_jax.interchange.huggingface.tables import take_in
from mhe_jax.interchange.huggingface.tokenizer import read_tokenizer
from mhe_jax.interchange.plain import Tensors, from_plain, plain_shapes, scaled
from mhe_jax.model import count_parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors
from mhe_jax.training.run.fresh import check_new_run, write_run

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
# Parameters with a row for each token, and on which axis.
ROWS = {
    "embeddings/token": 0,
    "embeddings/output": 1,
    "embeddings/vocabulary_bias": 0,
    "vocabulary_bias": 0,
}
# Fields that change what a model of any class computes, and a value of each that does not.
NEUTRAL = {
    "quantization_config": {},
    "pruned_heads": {},
    "per_layer_config": {},
    "transformers_weights": WEIGHTS,
}
# First parts of the names of heads.
HEADS = ("lm_head", "cls", "classifier", "qa_outputs", "final_logits_bias")
# Tokens in a row of the new run, if its model has more positions.
LONGEST = 512


class Architecture(NamedTuple):
    """A class of transformers: its type, our task, and the module for its fields and tensors.

    A module has `model_of(fields)`, the model, which refuses a field that ours lack; `table(model,
    model_type, task)`, where parameters lie; `named(fields, model, tensors, task)`, the tensors by
    the names of the table; and `LAST_NORM`, the norm before tied logits, if √M is in the tables
    (see `plain.scaled`).
    """

    model_type: str
    task: TaskName
    module: ModuleType


ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture("gpt2", "lm", gpt2),
    "GPTBigCodeForCausalLM": Architecture("gpt_bigcode", "lm", gpt2),
    "LlamaForCausalLM": Architecture("llama", "lm", llama),
    "MistralForCausalLM": Architecture("mistral", "lm", llama),
    "BertForMaskedLM": Architecture("bert", "mlm", bert),
    "BertForSequenceClassification": Architecture("bert", "classification", bert),
    "BertForQuestionAnswering": Architecture("bert", "span", bert),
    "RobertaForMaskedLM": Architecture("roberta", "mlm", bert),
    "RobertaForSequenceClassification": Architecture("roberta", "classification", bert),
    "RobertaForQuestionAnswering": Architecture("roberta", "span", bert),
    "MarianMTModel": Architecture("marian", "translation", marian),
}


def read(source: Path) -> tuple[Config, Any, JsonTokenizer]:
    """The model in a directory of transformers; nothing in it is executed.

    Returns:
      The config of a run with this model, its parameters as NumPy arrays, and its tokenizer.

    Raises:
      InputError: an architecture, field, tensor or token that our models have no place for; a file
        that is missing, cut short, or of another model.
    """
    check_scheme("", str(source), ())
    source = Path(source)
    fields = Fields(source)
    model_type, task, module = _architecture(fields)
    fields.must("model_type", model_type, absent=None)
    model: ModelConfig = module.model_of(fields)
    data = DataConfig(sequence_length=min(model.max_length, LONGEST))
    if task in ("classification", "span"):  # no head over the vocabulary, so no table for it
        model = dataclasses.replace(model, tie_embeddings=True)
    if task == "classification":
        task, labels = bert.task_and_labels(fields)
        data = dataclasses.replace(data, labels=labels)
    elif task == "span":
        data = dataclasses.replace(data, dataset="squad")
    for name, neutral in NEUTRAL.items():
        fields.must(name, None, neutral)
    fields.must("layer_types", None, ["full_attention"] * model.num_layers)
    config = tasks.resolve(
        Config(task=task, model=model, data=data, evaluation=EvaluationConfig(checkpoint="last"))
    )
    try:
        check(config, trains=False)
    except InputError as error:
        raise InputError(f"{fields.path}: cannot be converted: {error}") from None
    model = config.model
    tokenizer = read_tokenizer(source, model.vocabulary_size)
    begin = _begin(fields, config, tokenizer)
    table = module.table(model, model_type, task)
    tensors = _whole_names(read_weights(source), next(iter(table)).split(".")[0])
    tensors = module.named(fields, model, tensors, task)
    shapes = plain_shapes(abstract_of(config))
    found = take_in(table, tensors, shapes, source)
    if module.LAST_NORM is not None:
        found = scaled(model, found, module.LAST_NORM)
    for part, axis in ROWS.items():
        if part in found:
            found[part] = _permuted(found[part], axis, tokenizer, begin)
    changed: dict[str, Any] = {
        "vocabulary_size": tokenizer.vocabulary_size,
        "absent_tokens": tokenizer.absent,
    }
    if model.output_bias and not found["embeddings/vocabulary_bias"].any():
        changed["output_bias"] = False
    config = dataclasses.replace(config, model=dataclasses.replace(model, **changed))
    return config, from_plain(abstract_of(config), found), tokenizer


def _architecture(fields: Fields) -> Architecture:
    """The architecture that a `config.json` names first."""
    names = fields.values.get("architectures") or ["none"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        near = did_you_mean(nearest(str(name), list(ARCHITECTURES)))
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{fields.path}: architectures is {name!r}: takes one of {known}{near}")
    return ARCHITECTURES[name]


def abstract_of(config: Config) -> Any:
    """The shapes of the parameters of a config's model."""
    task = tasks.of(config)
    init = task.initializer(task.model(config.model), config.data.sequence_length)
    return nn.unbox(jax.eval_shape(init, jax.random.key(0)))


def read_weights(source: Path) -> Tensors:
    """All tensors of a directory, from one file or several.

    Raises:
      InputError: there are none, or they cannot be read.
    """
    if (source / ADAPTER).exists():
        raise InputError(f"{source}: has {ADAPTER}: merge the adapter into the model first")
    if (source / WEIGHTS).is_file():  # as transformers, which then reads no index
        return read_tensors(source / WEIGHTS)[0]
    if (source / INDEX).is_file():
        index = read_object(source / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise InputError(f"{source / INDEX}: has no weight_map of files")
        found: Tensors = {}
        for file in sorted({*map(str, index.values())}):
            read, _ = read_tensors(source / file)
            found |= {name: x for name, x in read.items() if index.get(name, file) == file}
        return found
    raise InputError(f"{source}: has no {WEIGHTS}: save the model as safetensors")


def _whole_names(tensors: Tensors, body: str) -> Tensors:
    """The tensors by names that begin with `body`, but for heads: some files leave it out."""
    bare = not any(name.startswith(f"{body}.") for name in tensors)
    return {
        f"{body}.{name}" if bare and name.split(".")[0] not in HEADS else name: array
        for name, array in tensors.items()
    }


def _begin(fields: Fields, config: Config, tokenizer: JsonTokenizer) -> int:
    """The id in the file of the token that begins a text, or a target."""
    said = {i: fields.values.get(f"{name}_token_id") for i, name in ((PAD, "pad"), (EOS, "eos"))}
    begin = fields.values.get("bos_token_id")
    rows = config.model.vocabulary_size
    if config.task == "translation":
        begin = fields.values.get("decoder_start_token_id")
        if type(begin) is not int or not 0 <= begin < rows:
            takes = f"takes a token, 0 to {rows - 1}"
            raise InputError(f"{fields.path}: decoder_start_token_id is {begin!r}: {takes}")
    said[BOS] = begin
    for i, value in said.items():
        there = int(tokenizer.of_file[i])
        values = value if isinstance(value, list) else [value]
        values = [one for one in values if type(one) is int]
        if values and there not in (ABSENT, *values):
            raise InputError(
                f"{tokenizer.name}: has {there} as {SPECIAL[i]}, and {fields.path} has {value}"
            )
    if tokenizer.of_file[EOS] == ABSENT:
        raise InputError(f"{tokenizer.name}: has no token that ends a text, as </s> or [SEP]")
    if config.facts.is_encoder and tokenizer.absent:
        raise InputError(f"{tokenizer.name}: an encoder needs pad, unk, bos, eos and mask")
    return begin if type(begin) is int and 0 <= begin < rows else int(tokenizer.of_file[EOS])


SPECIAL = {PAD: "pad", BOS: "bos", EOS: "eos"}


def _permuted(array: np.ndarray, axis: int, tokenizer: JsonTokenizer, begin: int) -> np.ndarray:
    """Rows in the order of our ids; a bos that is ours alone copies `begin`, other such are 0."""
    ids = tokenizer.of_file.copy()
    if ids[BOS] == ABSENT:
        ids[BOS] = begin
    missing = ids == ABSENT
    found = np.take(array, np.where(missing, 0, ids), axis)
    found[(slice(None),) * axis + (missing,)] = 0
    return found


def is_foreign(directory: Path) -> bool:
    """Whether `directory` has a `config.json` of transformers, and not of a run."""
    try:
        return "model_type" in read_object(directory / CONFIG)
    except InputError:
        return False


def make_run(source: str | Path, new: str | Path) -> dict[str, Any]:
    """Makes the run `new` from the model in the directory `source`.

    It has the model's config, without text to train on; its tokenizer; and a checkpoint of step 0,
    its parameters in float32 with a fresh optimizer.

    Returns:
      The `task`, the numbers of `parameters` and `attention` parameters, and the special tokens
      that are `absent` in the vocabulary.

    Raises:
      InputError: as `read`; `new` exists already. Nothing has been written.
    """
    check_scheme("", str(source), ())
    source, new = Path(source), path_of(new)
    check_new_run(new, source)
    config, params, tokenizer = read(source)
    config = dataclasses.replace(config, workdir=str(new))
    mesh = sharding.mesh_at_hand(config, "converting")
    write_run(config, params, mesh, tokenizer.key, tokenizer.model)
    counts = count_parameters(params, config.model)
    return {
        "task": config.task,
        "parameters": counts["total"],
        "attention": counts["attention"],
        "absent": list(tokenizer.absent),
    }
