"""Small models: ours with random parameters, and others' with the tokenizers that they have."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from random_parameters import random_parameters
from tiny_runs import KINDS

from mhe_jax import tasks
from mhe_jax.config import AttentionConfig, Config, DataConfig, ModelConfig
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.config.fields import set_field
from mhe_jax.interchange.huggingface import convert, write_files


def model_config(task, kind="mha", **fields):
    """A config of a model of width 16 with 4 heads of 4, and a vocabulary of 37 in 40 rows."""
    config = Config(
        task=task,
        model=ModelConfig(
            vocabulary_size=37,
            vocabulary_multiple=8,
            features=16,
            mlp_features=23,
            num_layers=2,
            max_length=13,
            attention=AttentionConfig(kind=kind, num_heads=4, **KINDS.get(kind, {})),
            norm_position="pre" if task == "lm" else "post",
            num_classes=3 if task == "classification" else None,
        ),
        data=DataConfig(train=("train.txt",), sequence_length=13),
    )
    for name, value in fields.items():
        config = set_field(config, f"model.{name.replace('__', '.')}", value)
    return config


def random_params(config):
    """Parameters that nothing trained."""
    task = tasks.of(config)
    init = task.initializer(task.model(config.model), config.data.sequence_length)
    return random_parameters(init)


def tokens_of(config, shape, seed=1, first=5):
    """Ids of ordinary tokens."""
    generator = np.random.default_rng(seed)
    return generator.integers(first, config.model.vocabulary_size, shape).astype(np.int32)


def apply(config, params, *args):
    """What the model of a config gives, as NumPy arrays."""
    return np.asarray(_compiled(config)({"params": jax.tree.map(jnp.asarray, params)}, *args))


@functools.lru_cache(4)
def _compiled(config):
    return jax.jit(tasks.of(config).model(config.model).apply)


# Files of `tokenizers` as other models have them, trained on a few lines

LINES = [
    "a small dog runs over the green meadow",
    "A man with a red hat watches him, and laughs.",
    "Größe und Ärger: 12,5 %",
] * 3


def byte_level(directory, special=("<|endoftext|>",), size=290):
    """Byte-level BPE, as GPT-2 and RoBERTa have."""
    import tokenizers as t

    tokenizer = t.Tokenizer(t.models.BPE())
    tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _saved(tokenizer, directory)


def word_piece(directory, size=120):
    """WordPiece, as BERT has, where the special tokens do not come first."""
    import tokenizers as t

    names = ["[unused0]", "[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = t.Tokenizer(t.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = t.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = t.decoders.WordPiece()
    trainer = t.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=names, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _saved(tokenizer, directory)


def _saved(tokenizer, directory):
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.to_str())), encoding="utf-8")
    return tokenizer


# Models as others leave them, without torch: ours with the numbering of a foreign tokenizer

LLAMA = {
    **{"positions": "rotary", "norm": "rms", "mlp": "gated", "activation": "silu"},
    "mlp_bias": False,
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
