"""A run as a model of transformers with code of its own, `modeling_mhe.py`, in the directory.

It keeps the cache of kinds that Hugging Face has no class for, and their one score matrix: `mva`,
`mhe_add` and `mhe_mul`. Other kinds are written as plain heads.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from mhe_jax.attention.module import Attention
from mhe_jax.config import Config, InputError
from mhe_jax.config.data import BOS
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import Export, huggingface
from mhe_jax.interchange.plain import (
    SUBLAYER,
    Tensors,
    dense,
    flat_shape,
    heads_of,
    matrices,
    require,
    rows_of_tokens,
)
from mhe_jax.model.layers import attention_module
from mhe_jax.model.stack import role_of

MODELING = Path(__file__).parent / "modeling_mhe.py"
# The classes of a task: of transformers, and of the file.
CLASSES = {
    "lm": ("AutoModelForCausalLM", "MHEForCausalLM"),
    "mlm": ("AutoModelForMaskedLM", "MHEForMaskedLM"),
    "translation": ("AutoModelForSeq2SeqLM", "MHEForConditionalGeneration"),
}
OWN = "mva", "mhe_add", "mhe_mul"
# Fields of `config.json`, and ours.
FIELDS = {
    "hidden_size": "features",
    "intermediate_size": "mlp_features",
    "mlp_bias": "mlp_bias",
    "activation": "activation",
    "norm": "norm",
    "norm_position": "norm_position",
    "norm_epsilon": "layer_norm_epsilon",
    "positions": "positions",
    "rotary_base": "rotary_base",
    "rotary_pairs": "rotary_pairs",
    "rotary_scaling": "rotary_scaling",
    "max_position_embeddings": "max_length",
    "type_vocab_size": "num_token_types",
    "tie_word_embeddings": "tie_embeddings",
}
WHAT = """\
`modeling_mhe.py` computes with PyTorch what the run computes, one score matrix for all heads and
the cache of its kind included; `model.safetensors` and `config.json` are its weights and sizes,
`tokenizer.json` gives the same ids. It needs `torch` and `transformers` alone."""
USE = """\
```python
from transformers import AutoTokenizer, {auto}

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY", trust_remote_code=True)
model = {auto}.from_pretrained("DIRECTORY", trust_remote_code=True)
```"""


def write(run: Run, directory: Path) -> Export:
    """Writes a run into an empty directory, which `from_pretrained` of transformers reads."""
    found, *_ = huggingface.write(run, directory, convert)
    shutil.copy(MODELING, directory)
    return found, WHAT, USE.format(auto=CLASSES[run.config.task][0])


def convert(
    config: Config,
    params: Any,
    rows: np.ndarray | None = None,
    special: Mapping[int, int] = huggingface.OURS,
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and `config.json` of a run; `rows` and `special` as `huggingface.numbering` gives."""
    model, task = config.model, config.task
    if task not in CLASSES:
        raise InputError(f"task is {task!r}: --to transformers takes {', '.join(CLASSES)}")
    require(model, "--to transformers", hashing=None, context="text")
    given, found, sublayers = dense(config, params), {}, {}
    rows = np.arange(model.vocabulary_size) if rows is None else rows
    for path, axis in rows_of_tokens(given).items():
        given[path] = np.take(given[path], rows, axis)
    for path, array in given.items():
        if inside := SUBLAYER.fullmatch(path):
            sublayers.setdefault(inside[1], {})[inside[2]] = array
        else:
            found[path] = array
    attention = {}
    for path, arrays in sublayers.items():
        role = role_of(tuple(path.split("/")))
        module = attention_module(model, role)
        own, attention[role] = _attention(module, unflatten_dict(arrays, sep="/"))
        found |= {f"{path}/{name}": array for name, array in own.items()}
    auto, name = CLASSES[task]
    classes = {"AutoConfig": "MHEConfig", auto: name}
    values = {
        "model_type": "mhe",
        "architectures": [name],
        "auto_map": {theirs: f"modeling_mhe.{ours}" for theirs, ours in classes.items()},
        "is_encoder_decoder": task == "translation",
        "num_hidden_layers": model.decoder_layers if task == "translation" else model.num_layers,
        "num_encoder_layers": 0 if task == "lm" else model.num_layers,
        "attention": attention,
        "gated_mlp": model.mlp == "gated",
        "output_bias": model.output_bias or task == "mlm",
        **{theirs: getattr(model, ours) for theirs, ours in FIELDS.items()},
        **huggingface.ids(special),
        "dtype": "float32",
        "vocab_size": len(rows),
    }
    if task == "translation":
        values["decoder_start_token_id"] = special[BOS]
    return dict(_laid_out(path, array) for path, array in found.items()), values


def _attention(module: Attention, params: Any) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a sublayer, and its sizes."""
    # Rotated, the heads of MHE have keys of their own; with several scores, `mhe_add` has.
    shared = module.rotary is None or module.kind == "mva"
    several = getattr(module, "score_groups", 1) > 1
    several |= not getattr(module, "use_key_bias", True)
    if module.kind not in OWN or several or module.normalize_qk or not shared:
        heads = heads_of(module, params, "--to transformers")
        found = matrices("", heads, True)  # some kinds become biases
        kind, groups = "heads", len(heads.key)
        scored, width = heads.query.shape[-1], heads.out.shape[1]
        found = {path.removeprefix("/"): array for path, array in found.items()}
    else:
        kind, groups, width = module.kind, module.num_groups, params["out"]["kernel"].shape[1]
        found = {
            f"{name}/{leaf}": array.reshape(flat_shape(f"/{name}/{leaf}", array.shape))
            for name, part in params.items()
            if isinstance(part, dict)
            for leaf, array in part.items()
        }
        scored = math.prod(params["query"]["kernel"].shape[1:]) // groups
        if kind != "mva":
            e_q, e_k, e_v = (params[f"{role}_head_embedding"] for role in ("query", "key", "value"))
            times = kind == "mhe_mul"
            found["query_head_embedding"] = (1 + e_q) * (1 + e_k) if times else e_q
            found["value_head_embedding"] = 1 + e_v if times else e_v
    return found, {
        "kind": kind,
        "num_heads": module.num_heads,
        "num_groups": groups,
        "head_dim": width,
        "score_dim": scored,
        "use_bias": "out/bias" in found,
    }


def _laid_out(path: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The name of a parameter in the file, and its numbers in the order of PyTorch."""
    *parts, leaf = path.replace("layer_", "layers/").split("/")
    if leaf in ("output", "vocabulary_bias"):
        parts, leaf = ["output"], {"output": "kernel", "vocabulary_bias": "bias"}[leaf]
    elif parts == ["embeddings"]:
        # A module of PyTorch has a method `type`.
        parts, leaf = [*parts, leaf.replace("type", "types")], "weight"
    array = array.T if leaf == "kernel" else array
    leaf = {"kernel": "weight", "scale": "weight"}.get(leaf, leaf)
    return ".".join([*parts, leaf]), np.ascontiguousarray(array, np.float32)
