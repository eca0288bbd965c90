"""A run as a model of transformers: weights, settings, tokenizer."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mhe_jax.config import Config, InputError, not_installed
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.data import AnyTokenizer, JsonTokenizer, Tokenizer
from mhe_jax.data.tokenizer_json import ABSENT
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange.card import Export
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.fields import written
from mhe_jax.interchange.huggingface.tables import Written, lay_out, write_files, write_json
from mhe_jax.interchange.huggingface.tokenizer import write_tokenizer
from mhe_jax.interchange.plain import plain, require, scaled

WHAT = """\
`model.safetensors` and `config.json` are those of a model of transformers that computes what the
run computes; `tokenizer.json` gives the same ids. Names of special tokens mean nothing inside a
text, but with `tokenizer(..., split_special_tokens=False)`."""
USE = """\
```python
from transformers import AutoTokenizer, {architecture}

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
model = {architecture}.from_pretrained("DIRECTORY")
```"""
# Special tokens and their ids in a file that has our numbers.
OURS: Mapping[int, int] = {i: i for i in (PAD, UNK, BOS, EOS, MASK)}
NAMES = {PAD: "pad", BOS: "bos", EOS: "eos", MASK: "mask"}
# What a `tokenizer.json` must have, as the rows of the task do; the bos of a decoder has a rule of
# its own.
NEEDED = {"lm": (EOS,), "translation": (PAD, EOS), "mlm": (PAD, BOS, EOS, MASK)}


def write(run: Run, directory: Path) -> Export:
    """Writes a run into an empty directory, which `from_pretrained` of transformers reads."""
    if importlib.util.find_spec("tokenizers") is None:
        raise not_installed("huggingface needs tokenizers", "export")
    config, tokenizer = run.config, run.tokenizer
    rows, special = numbering(tokenizer, config, run.params)
    tensors, values = convert(config, run.params, rows, special)
    write_files(directory, tensors, values)
    assert isinstance(tokenizer, Tokenizer)  # hashed words have been refused
    write_tokenizer(tokenizer, config, special, directory)
    if config.task in ("lm", "translation"):
        write_json(directory / "generation_config.json", _generation(config, values, special))
    architecture = values["architectures"][0]
    count = sum(array.size for array in tensors.values())
    use = USE.format(architecture=architecture)
    return {"architecture": architecture, "parameters": count}, WHAT, use


def convert(
    config: Config,
    params: Any,
    rows: np.ndarray | None = None,
    special: Mapping[int, int] = OURS,
) -> Written:
    """Tensors and `config.json` of a run; `rows` and `special` as `numbering` gives them."""
    model = config.model
    require(model, "transformers", hashing=None)
    homes = {"lm": llama if llama.is_home_of(model) else gpt2, "translation": marian}
    home: Any = homes.get(config.task, bert)
    require(model, f"{home.NAME}, the format for this task,", **home.NEEDED)
    found = plain(config, params, home.NAME, rows=rows, **getattr(home, "PLAIN", {}))
    tables = ("token", "type", "position") if home.LAST_NORM else ("position",)
    found = scaled(model, found, np.float32(model.features**0.5), home.LAST_NORM, tables)
    found, own = home.write(config, found)
    places = home.table(model, own["model_type"], config.task)
    tensors = lay_out(places, found, home.NAME)
    first = dict.fromkeys(("architectures", "model_type"))
    values = first | written(home.FIELDS, model, home.ROLE) | own
    size = config.model.vocabulary_size if rows is None else len(rows)
    values |= _ids(special) | {"dtype": "float32", "vocab_size": size}
    if config.task == "translation":
        values |= {"decoder_start_token_id": special[BOS], "forced_eos_token_id": None}
        values["decoder_vocab_size"] = size
    return tensors, values


def numbering(
    tokenizer: AnyTokenizer, config: Config, params: Any
) -> tuple[np.ndarray | None, Mapping[int, int]]:
    """Our ids in the order of the file, and the id in the file of each special token it has.

    A `tokenizer.json` keeps its own numbers: special tokens that are ours alone have no row. If bos
    is one, pad or eos takes its place if it has the same row, as in a model read from there.
    """
    absent = tokenizer.absent if isinstance(tokenizer, JsonTokenizer) else ()
    if {*config.model.absent_tokens} - {*absent}:
        raise InputError(
            f"model.absent_tokens is {config.model.absent_tokens}: needs a tokenizer.json that "
            "lacks them too"
        )
    if not isinstance(tokenizer, JsonTokenizer):
        return None, OURS
    special = {i: int(tokenizer.of_file[i]) for i in OURS if tokenizer.of_file[i] != ABSENT}
    for i in NEEDED.get(config.task, (PAD, BOS, EOS)):
        if i not in special:
            raise InputError(f"{tokenizer.name}: has no {NAMES[i]}, which the rows of the run have")
    if BOS not in special and config.task in ("lm", "translation"):
        table = np.asarray(jax.device_get(params["embeddings"]["token"]))
        like = [i for i in (PAD, EOS) if i in special and np.array_equal(table[i], table[BOS])]
        if not like:
            raise InputError(
                f"{tokenizer.name}: has no bos, and the run has learned one that is like neither "
                "pad nor eos"
            )
        special[BOS] = special[like[0]]
    there = np.flatnonzero(tokenizer.of_file != ABSENT)
    return there[np.argsort(tokenizer.of_file[there])], special


def _ids(special: Mapping[int, int]) -> dict[str, int]:
    names = {PAD: "pad_token_id", BOS: "bos_token_id", EOS: "eos_token_id"}
    return {name: special[i] for i, name in names.items() if i in special}


def _generation(
    config: Config, values: dict[str, Any], special: Mapping[int, int]
) -> dict[str, Any]:
    """Settings of the search of transformers: it never chooses what our search does not."""
    never = {special[i] for i in (PAD, UNK, BOS, MASK) if i in special} - {special[EOS]}
    found: dict[str, Any] = {**_ids(special), "suppress_tokens": sorted(never)}
    e = config.evaluation
    if e.min_length:
        found["min_new_tokens"] = e.min_length
    if config.task == "lm" and e.temperature:
        cut = {"top_k": e.top_k or 0, "top_p": e.top_p or 1.0}
        found |= {"do_sample": True, "temperature": e.temperature, **cut}
    if config.task == "translation":
        found["decoder_start_token_id"] = values["decoder_start_token_id"]
        found["num_beams"] = e.beam_size
        if not e.length_penalty:  # which is another formula there, and not 0 by default
            found["length_penalty"] = 0.0
        found["max_length"] = config.model.max_length
    return found
