"""Fast tokenizers of transformers: their files as a tokenizer of ours, and back, with the same ids.

Sentencepiece merges the pair whose piece has the highest score; `tokenizers` merges by the rank of
the pair. So each way to cut a piece in two is a merge, in the order of the scores of the pieces. A
space is written as itself: U+2581, which sentencepiece writes for it, is then in no piece, and
becomes bytes as it does in ours.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.data import JsonTokenizer, Tokenizer
from mhe_jax.data.tokenizer import SPACE, SPECIAL_PIECES
from mhe_jax.data.tokenizer_json import NAME
from mhe_jax.interchange.huggingface.fields import read_object
from mhe_jax.interchange.huggingface.tables import write_json

SETTINGS = "tokenizer_config.json"
# What transformers sets in `tokenizer.json` if the settings say so; its general classes do not.
PARTS = {
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
}
GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The names of each special token in transformers.
ROLES = {
    PAD: ("pad_token",),
    UNK: ("unk_token",),
    BOS: ("bos_token", "cls_token"),
    EOS: ("eos_token", "sep_token"),
    MASK: ("mask_token",),
}
# Texts that both must encode alike before a file is written.
PROBES = 1000


def tokenizer_json(tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    """The content of `tokenizer.json` for a run's sentencepiece model."""
    scores = {piece.replace(SPACE, " "): score for piece, score in tokenizer.scores.items()}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    special = [
        {
            "id": i,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, piece in enumerate(SPECIAL_PIECES)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Prepend", "prepend": " "},
        "pre_tokenizer": None,
        "post_processor": around(config, tokenizer, dict(enumerate(SPECIAL_PIECES))),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL_PIECES[UNK],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.replace(SPACE, " "): i for i, piece in enumerate(tokenizer.vocabulary)},
            "merges": merges,
        },
    }


def around(
    config: Config,
    tokenizer: Tokenizer,
    names: Mapping[int, str],
    ids: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """The special tokens around a text, as in the rows that the run was trained on.

    `names` and `ids` are those of the file; without `ids` they are ours.
    """

    def special(i: int, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[i], "type_id": kind}}

    def text(which: str, kind: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": which, "type_id": kind}}

    second = int(config.model.num_token_types > 1)
    single, pair = [text("A")], [text("A"), text("B", second)]
    if config.task == "translation":
        single, pair = [*single, special(EOS)], [*pair, special(EOS, second)]
    elif config.task == "lm":
        single, pair = [special(BOS), *single], [special(BOS), *pair]
    else:
        single = [special(BOS), text("A"), special(EOS)]
        between = [special(EOS, second)] * (tokenizer.separators - 1)
        pair = [*single, *between, text("B", second), special(EOS, second)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            names[i]: {"id": names[i], "ids": [ids[i] if ids else i], "tokens": [names[i]]}
            for i in (BOS, EOS)
        },
    }


def write_tokenizer(
    tokenizer: Tokenizer, config: Config, special: Mapping[int, int], directory: Path
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    Args:
      tokenizer: of the run; a `tokenizer.json` is written as it is, but for the tokens that it puts
        around a text if the run was trained here.
      config: of the run.
      special: the id in the file of each special token that it has.
      directory: where.

    Raises:
      InputError: a sentencepiece model that cuts texts differently than its pieces and scores say.
    """
    if isinstance(tokenizer, JsonTokenizer):
        names = {i: tokenizer.spelling(of_file) for i, of_file in special.items()}
        tokenizer.save(directory / NAME)
        if config.data.train:  # an imported model was trained on the rows that its file makes
            found = json.loads(tokenizer.model)
            found["post_processor"] = around(config, tokenizer, names, special)
            write_json(directory / NAME, found)
    else:
        found = tokenizer_json(tokenizer, config)
        check(tokenizer, found)
        write_json(directory / NAME, found)
        names = dict(enumerate(SPECIAL_PIECES))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    if config.model.num_token_types < 2:
        inputs.remove("token_type_ids")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: names[i] for i, roles in ROLES.items() if i in names for name in roles},
        "model_max_length": config.model.max_length,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        # The names of special tokens mean nothing inside a text, as in ours.
        "split_special_tokens": True,
    }
    write_json(directory / SETTINGS, settings)


def read_tokenizer(source: Path, rows: int) -> JsonTokenizer:
    """The `tokenizer.json` of a model with `rows` tokens; rows without a token get one.

    What `tokenizer_config.json` says of the text is put into it, as transformers does.

    Raises:
      InputError: there is none, or it has more tokens than the model.
    """
    path = source / NAME
    if not path.is_file():
        raise InputError(f"{source}: has no {NAME}: save a fast tokenizer beside the model")
    tokenizer = JsonTokenizer.load(path)
    count = int(tokenizer.of_file.max()) + 1
    if count > rows:
        raise InputError(
            f"{path}: has {count} tokens, and the model {rows} rows: not its tokenizer"
        )
    values = json.loads(tokenizer.model)
    settings = read_object(source / SETTINGS) if (source / SETTINGS).exists() else {}
    general = settings.get("tokenizer_class") in GENERAL
    for name, (part, field) in PARTS.items():
        there = values.get(part) or {}
        if settings.get(name) is not None and field in there and not general:
            there[field] = settings[name]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    unused = [
        {"id": i, "content": f"<unused{i}>", "special": True, **flags} for i in range(count, rows)
    ]
    values["added_tokens"] = [*values.get("added_tokens", ()), *unused]
    if values != json.loads(tokenizer.model):
        tokenizer = JsonTokenizer(json.dumps(values, ensure_ascii=False).encode(), str(path))
    return tokenizer


def check(tokenizer: Tokenizer, found: dict[str, Any]) -> None:
    """Encodes texts of its pieces, and of noise, by both tokenizers.

    Raises:
      InputError: the ids differ.
    """
    written = JsonTokenizer(json.dumps(found).encode(), NAME)
    draw = random.Random(0)
    pieces = [piece.replace(SPACE, " ") for piece in tokenizer.scores]
    noise = [" ", "  ", "\t", "\n", "é", "e\u0301", "ß", "Ａ", "𝔸", "🙂", "\u2581", "\u00a0", "0"]
    texts = [piece for piece in pieces]
    for _ in range(PROBES):
        texts.append("".join(draw.choice(draw.choice((pieces, noise))) for _ in range(20)))
    for text, ours, theirs in zip(
        texts, tokenizer.encode_batch(texts), written.encode_batch(texts), strict=True
    ):
        if ours != theirs:
            raise InputError(
                f"{tokenizer.name}: has no exact {NAME}: the ids of {text[:40]!r} differ; takes a "
                "tokenizer trained by a run"
            )
