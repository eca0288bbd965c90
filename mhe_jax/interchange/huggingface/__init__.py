"""Models of Hugging Face: our runs as files for transformers, and their models as our runs.

Nothing here imports transformers or torch: files are safetensors and JSON.

    fields.py   fields of a `config.json`           tokenizer.py   `tokenizer.json`, both ways
    gpt2.py  llama.py  bert.py  marian.py           an architecture each, both ways
    reading.py  their model as a run of ours

An architecture is a module with

    FIELDS      of `config.json`, and ours
    table(model, model_type, task)     where parameters lie
    LAST_NORM   the norm before tied logits, if √M is in the tables (`plain.scaled`)
    NAME, ROLE  its name, and the role whose attention the fields describe
    NEEDED      what it takes alone of a model; PLAIN, where it has it, options for `plain`
    write(config, tensors)             what no table says: it changes tensors, and returns fields
    RULES       the values that fields may have that ours lack; None allows them to be absent
    model_of(fields)                   the model
    IGNORED     what else a file may have
    named(fields, model, tensors)      where it has it: the tensors by the names of the table
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mhe_jax.config import Config, InputError, not_installed
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.config.files import CONFIG
from mhe_jax.data import AnyTokenizer, JsonTokenizer, Tokenizer
from mhe_jax.data.tokenizer_json import ABSENT
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import Export
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.fields import write_json, written
from mhe_jax.interchange.huggingface.tokenizer import write_tokenizer
from mhe_jax.interchange.plain import Tensors, plain, require, scaled
from mhe_jax.interchange.tables import lay_out
from mhe_jax.training.checkpoint.tensors import WEIGHTS, write_tensors

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
# Special tokens and their ids in a file that has our numbers, and what `config.json` calls them.
OURS: Mapping[int, int] = {i: i for i in (PAD, UNK, BOS, EOS, MASK)}
NAMES = {PAD: "pad", BOS: "bos", EOS: "eos", MASK: "mask"}
# What a `tokenizer.json` must have, as the rows of the task do; the bos of a decoder has a rule of
# its own.
NEEDED = {"lm": (EOS,), "translation": (PAD, EOS), "mlm": (PAD, BOS, EOS, MASK)}


def write(run: Run, directory: Path, converted: Any = None) -> Export:
    """Writes a run into an empty directory, which `from_pretrained` of transformers reads.

    `converted` is `convert`, or another that takes and gives as much.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise not_installed("huggingface needs tokenizers", "export")
    config, tokenizer = run.config, run.tokenizer
    rows, special = numbering(tokenizer, config, run.params)
    tensors, values = (converted or convert)(config, run.params, rows, special)
    write_files(directory, tensors, values)
    assert isinstance(tokenizer, Tokenizer)  # hashed words have been refused
    write_tokenizer(tokenizer, config, special, directory)
    if config.task in ("lm", "translation"):
        write_json(directory / "generation_config.json", generation(config, special))
    architecture = values["architectures"][0]
    count = sum(array.size for array in tensors.values())
    use = USE.format(architecture=architecture)
    return {"architecture": architecture, "parameters": count}, WHAT, use


def write_files(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Writes the weights and `config.json`."""
    # Without the metadata, transformers does not know which framework wrote the tensors.
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / CONFIG, config)


def convert(
    config: Config, params: Any, rows: np.ndarray | None = None, special: Mapping[int, int] = OURS
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and `config.json` of a run; `rows` and `special` as `numbering` gives them."""
    model = config.model
    require(model, "transformers", hashing=None)
    homes = {"lm": llama if llama.is_home_of(model) else gpt2, "translation": marian}
    home: Any = homes.get(config.task, bert)
    require(model, f"{home.NAME}, the format for this task,", **home.NEEDED)
    found = plain(config, params, home.NAME, rows=rows, **getattr(home, "PLAIN", {}))
    tables = ("token", "type", "position") if home.LAST_NORM else ("position",)
    found = scaled(model, found, np.float32(model.features**0.5), home.LAST_NORM, tables)
    own = home.write(config, found)
    tensors = lay_out(home.table(model, own["model_type"], config.task), found, home.NAME)
    first = dict.fromkeys(("architectures", "model_type"))
    values = first | written(home.FIELDS, model, home.ROLE) | own
    size = model.vocabulary_size if rows is None else len(rows)
    values |= ids(special) | {"dtype": "float32", "vocab_size": size}
    if config.task == "translation":
        values |= {"decoder_start_token_id": special[BOS], "forced_eos_token_id": None}
        values["decoder_vocab_size"] = size
    return tensors, values


def numbering(
    tokenizer: AnyTokenizer, config: Config, params: Any
) -> tuple[np.ndarray | None, Mapping[int, int]]:
    """Our ids in the order of the file, and the id in the file of each special token it has.

    A `tokenizer.json` keeps its own numbers: special tokens that are ours alone have no row. Of
    bos, pad or eos takes the place if it has the same row.
    """
    absent = tokenizer.absent if isinstance(tokenizer, JsonTokenizer) else ()
    if {*config.model.absent_tokens} - {*absent}:
        raise InputError(
            f"model.absent_tokens is {config.model.absent_tokens}: needs a tokenizer.json that "
            "lacks them too"
        )
    if not isinstance(tokenizer, JsonTokenizer):
        return None, OURS
    of_file = tokenizer.of_file
    special = {i: int(of_file[i]) for i in OURS if of_file[i] != ABSENT}
    for i in NEEDED.get(config.task, (PAD, BOS, EOS)):
        if i not in special:
            raise InputError(f"{tokenizer.name}: has no {NAMES[i]}, which the rows of the run have")
    if BOS not in special and config.task in NEEDED:  # of a decoder
        table = np.asarray(jax.device_get(params["embeddings"]["token"]))
        like = [i for i in (PAD, EOS) if i in special and np.array_equal(table[i], table[BOS])]
        if not like:
            raise InputError(
                f"{tokenizer.name}: has no bos, and the run has learned one that is like neither "
                "pad nor eos"
            )
        special[BOS] = special[like[0]]
    there = np.flatnonzero(of_file != ABSENT)
    return there[np.argsort(of_file[there])], special


def ids(special: Mapping[int, int]) -> dict[str, int]:
    """The special tokens as `config.json` names them."""
    return {f"{NAMES[i]}_token_id": special[i] for i in (PAD, BOS, EOS) if i in special}


def generation(config: Config, special: Mapping[int, int]) -> dict[str, Any]:
    """Settings of the search of transformers: it never chooses what our search does not."""
    never = {special[i] for i in (PAD, UNK, BOS, MASK) if i in special} - {special[EOS]}
    found: dict[str, Any] = {**ids(special), "suppress_tokens": sorted(never)}
    e = config.evaluation
    if e.min_length:
        found["min_new_tokens"] = e.min_length
    if config.task == "lm" and e.temperature:
        cut = {"top_k": e.top_k or 0, "top_p": e.top_p or 1.0}
        found |= {"do_sample": True, "temperature": e.temperature, **cut}
    if config.task == "translation":
        found |= {"decoder_start_token_id": special[BOS], "num_beams": e.beam_size}
        # There bos counts; n^penalty divides, not ((5 + n) / 6)^penalty; and a search that is not
        # told "never" ends before a longer translation could be the better one.
        found["max_length"] = config.model.max_length + 1
        found |= {"length_penalty": e.length_penalty, "early_stopping": "never"}
    return found
