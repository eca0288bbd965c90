"""A run as a model of transformers: weights, settings, tokenizer."""

from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange.card import card
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.plain import Tensors
from mhe_jax.interchange.huggingface.tables import write_files, write_json
from mhe_jax.interchange.huggingface.tokenizer import write_tokenizer

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
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def write(run: Run, directory: Path) -> dict[str, Any]:
    """Writes a run into an empty directory, which `from_pretrained` of transformers reads.

    Returns:
      `architecture`, the class of transformers, and the number of `parameters` it has.

    Raises:
      InputError: a run that has no exact home, with the reason.
    """
    tensors, values = convert(run.config, run.params)
    count = write_files(directory, tensors, values)
    write_tokenizer(run.tokenizer, run.config, directory)
    if run.config.task in ("lm", "translation"):
        write_json(directory / "generation_config.json", _generation(run.config, values))
    architecture = values["architectures"][0]
    text = card(run, WHAT, USE.format(architecture=architecture))
    (directory / "README.md").write_text(text, encoding="utf-8")
    return {"architecture": architecture, "parameters": count}


def convert(config: Config, params: Any) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and `config.json` of a run.

    Raises:
      InputError: it has no exact home.
    """
    if config.model.hashing is not None:
        raise InputError(
            f"model.hashing is {config.model.hashing!r}: hashed words have no home in transformers"
        )
    homes = {"lm": llama if llama.is_home_of(config.model) else gpt2, "translation": marian}
    tensors, values = homes.get(config.task, bert).write(config, params)
    values |= {**SPECIAL, "dtype": "float32"}
    if config.task == "translation":
        values |= {"decoder_start_token_id": BOS, "forced_eos_token_id": None}
    return tensors, values


def _generation(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """How transformers searches: it never chooses what our search does not."""
    found: dict[str, Any] = {**SPECIAL, "suppress_tokens": [PAD, UNK, BOS, MASK]}
    if config.task == "translation":
        found["decoder_start_token_id"] = values["decoder_start_token_id"]
        found["num_beams"] = config.evaluation.beam_size
        found["max_length"] = config.model.max_length
    return found
