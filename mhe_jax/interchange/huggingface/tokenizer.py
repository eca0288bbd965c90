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
from mhe_jax.interchange.huggingface.fields import read_object, write_json

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
OUR_NAMES = dict(enumerate(SPECIAL_PIECES))


def tokenizer_json(tokenizer: Tokenizer, config: Config) -> str:
    """The content of `tokenizer.json` for a run's sentencepiece model."""
    import tokenizers as t

    pieces = dict.fromkeys(piece.replace(SPACE, " ") for piece in tokenizer.scores)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    vocabulary = {piece.replace(SPACE, " "): i for i, piece in enumerate(tokenizer.vocabulary)}
    bpe = t.models.BPE(vocabulary, merges, unk_token=SPECIAL_PIECES[UNK], byte_fallback=True)
    found: Any = t.Tokenizer(bpe)
    found.normalizer = t.normalizers.Prepend(" ")
    found.decoder = t.decoders.Sequence(
        [t.decoders.ByteFallback(), t.decoders.Fuse(), t.decoders.Strip(" ", 1, 0)]
    )
    found.post_processor = _around(config, tokenizer, OUR_NAMES, {BOS: BOS, EOS: EOS})
    found.add_special_tokens([t.AddedToken(piece, normalized=False) for piece in SPECIAL_PIECES])
    return found.to_str(pretty=True)


def _around(
    config: Config, tokenizer: Tokenizer, names: Mapping[int, str], ids: Mapping[int, int]
) -> Any:
    """The special tokens around a text, as in rows of the run; names and ids are the file's."""
    from tokenizers.processors import TemplateProcessing

    bos, eos, kind = names[BOS], names[EOS], int(config.model.num_token_types > 1)
    second, last = f"$B:{kind}", f"{eos}:{kind}"
    if config.task == "translation":
        single, pair = ["$A", eos], ["$A", second, last]
    elif config.task == "lm":
        single, pair = [bos, "$A"], [bos, "$A", second]
    else:
        single = [bos, "$A", eos]
        pair = [*single, *[last] * (tokenizer.separators - 1), second, last]
    special = [(names[i], ids[i]) for i in (BOS, EOS)]
    return TemplateProcessing(single=single, pair=pair, special_tokens=special)


def write_tokenizer(
    tokenizer: Tokenizer, config: Config, special: Mapping[int, int], directory: Path
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `special` as `numbering` gives it."""
    import tokenizers

    if isinstance(tokenizer, JsonTokenizer):
        names = {i: tokenizer.spelling(of_file) for i, of_file in special.items()}
        found = tokenizer.model.decode()
        if config.data.train:  # an imported model was trained on the rows that its file makes
            file: Any = tokenizers.Tokenizer.from_str(found)
            file.post_processor = _around(config, tokenizer, names, special)
            found = file.to_str(pretty=True)
    else:
        found, names = tokenizer_json(tokenizer, config), OUR_NAMES
        check(tokenizer, found)
    (directory / NAME).write_text(found, encoding="utf-8")
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
    """The `tokenizer.json` of a model with `rows` tokens; rows without a token get one."""
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
    if settings.get("tokenizer_class") not in GENERAL:
        for name, (part, field) in PARTS.items():
            there = values.get(part) or {}
            if settings.get(name) is not None and field in there:
                there[field] = settings[name]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"] = [*values.get("added_tokens", ())] + [
        {"id": i, "content": f"<unused{i}>", **flags, "special": True} for i in range(count, rows)
    ]
    if values != json.loads(tokenizer.model):
        tokenizer = JsonTokenizer(json.dumps(values, ensure_ascii=False).encode(), str(path))
    return tokenizer


def check(tokenizer: Tokenizer, found: str) -> None:
    """Raises InputError unless both encode texts of its pieces, and of noise, alike."""
    draw, pieces = random.Random(0), [piece.replace(SPACE, " ") for piece in tokenizer.scores]
    noise = [*" \t\né0ßＡ𝔸🙂", "  ", "e\u0301", SPACE, "\u00a0"]
    lots = [draw.choices((pieces, noise), k=20) for _ in range(1000)]
    texts = [*pieces, *("".join(map(draw.choice, lot)) for lot in lots)]
    if JsonTokenizer(found.encode()).encode_batch(texts) != tokenizer.encode_batch(texts):
        raise InputError(f"{tokenizer.name}: has no exact {NAME}; takes a tokenizer of a run")
