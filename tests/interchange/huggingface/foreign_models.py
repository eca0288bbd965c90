"""Models as others leave them, without torch: ours with the numbering of a foreign tokenizer."""

import numpy as np
from foreign_tokenizers import byte_level, word_piece
from random_models import model_config, random_params

from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.interchange.huggingface.tables import write_files
from mhe_jax.interchange.huggingface.writing import convert

LLAMA = {
    **{"positions": "rotary", "norm": "rms", "mlp": "gated", "activation": "silu"},
    **{"mlp_bias": False, "attention__num_kv_heads": 2},
}
# Of each: task, kind, fields, special tokens of the file (None: those of WordPiece), and which of
# them `config.json` names. Token 0, which is padding in ours, has no meaning in any of them.
MODELS = {
    "gpt2": ("lm", "mha", {}, ("<none>", "<|endoftext|>"), {BOS: 1, EOS: 1}),
    "llama": ("lm", "gqa", LLAMA, ("<none>", "<unk>", "<s>", "</s>"), {BOS: 2, EOS: 3}),
    "bert": ("mlm", "mha", {"num_token_types": 2}, None, {PAD: 1}),
    "labels": ("classification", "mha", {"num_token_types": 2}, None, {PAD: 1}),
    "number": ("regression", "mha", {"num_token_types": 2}, None, {PAD: 1}),
    "span": ("span", "mha", {"num_token_types": 2}, None, {PAD: 1}),
    "marian": (
        "translation",
        "mha",
        {"layer_norm_epsilon": 1e-5, "output_bias": True},
        ("<none>", "</s>", "<unk>", "<pad>"),
        {PAD: 3, EOS: 1, BOS: 3},
    ),
}


def foreign(name, directory, **fields):
    """Writes one of `MODELS`; its config and parameters, whose ids are the file's, and its file."""
    task, kind, more, special, ids = MODELS[name]
    directory.mkdir()
    file = word_piece(directory) if special is None else byte_level(directory, special)
    given = {"attention__use_bias": True, "max_length": 40, **more, **fields}
    size = file.get_vocab_size()
    config = model_config(task, kind, vocabulary_size=size, vocabulary_multiple=1, **given)
    params = random_params(config)
    write_files(directory, *convert(config, params, np.arange(size), ids))
    return config, params, file
