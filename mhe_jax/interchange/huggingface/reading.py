"""A model of transformers as our config, parameters and tokenizer, and as a run."""

import dataclasses
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from mhe_jax import tasks
from mhe_jax.config import Config, DataConfig, EvaluationConfig, InputError, ModelConfig
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import check_scheme, path_of
from mhe_jax.config.rules import check
from mhe_jax.data import JsonTokenizer
from mhe_jax.data.tokenizer_json import ABSENT
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.fields import Fields, read_object
from mhe_jax.interchange.huggingface.tokenizer import read_tokenizer
from mhe_jax.interchange.plain import Tensors, abstract_of, flat_shape, rows_of_tokens, scaled
from mhe_jax.interchange.tables import take_in
from mhe_jax.model import count_parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors
from mhe_jax.training.from_run import check_new_run, write_run

INDEX = "model.safetensors.index.json"
# First parts of the names of heads.
HEADS = ("lm_head", "cls", "classifier", "qa_outputs", "final_logits_bias")
LONGEST = 512  # tokens in a row of the new run, if its model has more positions
# A class of transformers: our task, and the module for its fields and tensors.
ARCHITECTURES: dict[str, tuple[Any, ModuleType]] = {
    "GPT2LMHeadModel": ("lm", gpt2),
    "GPTBigCodeForCausalLM": ("lm", gpt2),
    "LlamaForCausalLM": ("lm", llama),
    "MistralForCausalLM": ("lm", llama),
    "BertForMaskedLM": ("mlm", bert),
    "BertForSequenceClassification": ("classification", bert),
    "BertForQuestionAnswering": ("span", bert),
    "RobertaForMaskedLM": ("mlm", bert),
    "RobertaForSequenceClassification": ("classification", bert),
    "RobertaForQuestionAnswering": ("span", bert),
    "MarianMTModel": ("translation", marian),
}


def read(source: Path) -> tuple[Config, Any, JsonTokenizer]:
    """The config of a run with the model in a directory, its parameters, and its tokenizer."""
    fields = Fields(source)
    name = fields.get("architectures", ["none"])[0]
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{fields.path}: architectures is {name!r}: takes one of {known}")
    task, module = ARCHITECTURES[name]
    for field, allowed in {**module.RULES, "quantization_config": (None, {})}.items():
        fields.must(field, allowed)
    config = _config(fields, task, module.model_of(fields))
    model = config.model
    tokenizer = read_tokenizer(source, model.vocabulary_size)
    begin = _begin(fields, config, tokenizer)
    table = module.table(model, fields["model_type"], task)
    tensors = _whole_names(read_weights(source), next(iter(table)).split(".")[0])
    tensors = {
        name: array
        for name, array in tensors.items()
        if name in table or not re.fullmatch(module.IGNORED, name)
    }
    if hasattr(module, "named"):
        tensors = module.named(fields, model, tensors)
    abstract = abstract_of(config)
    shapes = {path: flat_shape(path, leaf.shape) for path, leaf in abstract.items()}
    found = take_in(table, tensors, shapes, source)
    if module.LAST_NORM is not None:
        found = scaled(model, found, 1 / np.float32(model.features**0.5), module.LAST_NORM)
    found = {path: found[path].reshape(leaf.shape) for path, leaf in abstract.items()}
    for path, axis in rows_of_tokens(found).items():
        found[path] = _permuted(found[path], axis, tokenizer, begin)
    biased = model.output_bias and bool(found["embeddings/vocabulary_bias"].any())
    if not biased:
        found.pop("embeddings/vocabulary_bias", None)
    model = dataclasses.replace(
        model,
        vocabulary_size=tokenizer.vocabulary_size,
        absent_tokens=tokenizer.absent,
        output_bias=biased,
    )
    return dataclasses.replace(config, model=model), unflatten_dict(found, sep="/"), tokenizer


def _config(fields: Fields, task: Any, model: ModelConfig) -> Config:
    """The config of a run with this model, checked as any other."""
    labels = ()
    if task in ("classification", "span"):  # no head over the vocabulary, so no table for it
        model = dataclasses.replace(model, tie_embeddings=True)
    if task == "classification":
        task, labels = bert.task_and_labels(fields)
    data = DataConfig(
        sequence_length=min(model.max_length, LONGEST),
        dataset="squad" if task == "span" else "own",
        labels=labels,
    )
    evaluation = EvaluationConfig(checkpoint="last")
    config = tasks.resolve(Config(task=task, model=model, data=data, evaluation=evaluation))
    try:
        check(config, trains=False)
    except InputError as error:
        raise InputError(f"{fields.path}: cannot be converted: {error}") from None
    return config


def read_weights(source: Path) -> Tensors:
    """All tensors of a directory, from one file or several."""
    if (source / WEIGHTS).is_file():  # as transformers, which then reads no index
        return read_tensors(source / WEIGHTS)[0]
    if not (source / INDEX).is_file():
        raise InputError(f"{source}: has no {WEIGHTS}: save the model as safetensors")
    index = read_object(source / INDEX).get("weight_map", {})
    found: Tensors = {}
    for file in sorted({*index.values()}):
        read, _ = read_tensors(source / file)
        found |= {name: x for name, x in read.items() if index.get(name, file) == file}
    return found


def _whole_names(tensors: Tensors, body: str) -> Tensors:
    """The tensors by names that begin with `body`, but for heads: some files leave it out."""
    bare = not any(name.startswith(f"{body}.") for name in tensors)
    return {
        f"{body}.{name}" if bare and name.split(".")[0] not in HEADS else name: array
        for name, array in tensors.items()
    }


def _begin(fields: Fields, config: Config, tokenizer: JsonTokenizer) -> int:
    """The id in the file of the token that begins a text, or a target."""
    of_file, translates = tokenizer.of_file.tolist(), config.task == "translation"
    bos = "decoder_start_token_id" if translates else "bos_token_id"
    for i, name in {PAD: "pad_token_id", BOS: bos, EOS: "eos_token_id"}.items():
        said = fields.get(name, ABSENT)
        several = said if isinstance(said, list) else [said]
        if of_file[i] not in (ABSENT, *several) and ABSENT not in several:
            raise InputError(
                f"{tokenizer.name}: has {of_file[i]} as {name}, and {fields.path} has {said}"
            )
    if of_file[EOS] == ABSENT:
        raise InputError(f"{tokenizer.name}: has no token that ends a text, as </s> or [SEP]")
    if config.facts.is_encoder and tokenizer.absent:
        raise InputError(f"{tokenizer.name}: an encoder needs pad, unk, bos, eos and mask")
    begin = fields[bos] if translates else fields.get(bos, ABSENT)
    return begin if 0 <= begin < config.model.vocabulary_size else of_file[EOS]


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
    """Makes the run `new`, without text to train on, from the model in the directory `source`.

    Its checkpoint has step 0, float32 and a fresh optimizer. Nothing in `source` is executed.
    """
    check_scheme("", str(source), ())
    new = path_of(new)
    check_new_run(new, Path(source))
    config, params, tokenizer = read(Path(source))
    config = dataclasses.replace(config, workdir=str(new))
    mesh = sharding.mesh_at_hand(config, "converting")
    write_run(config, params, mesh, tokenizer.key, tokenizer.model)
    counts = count_parameters(params, config.model)
    numbers = {"parameters": counts["total"], "attention": counts["attention"]}
    return {"task": config.task, **numbers, "absent": list(tokenizer.absent)}
