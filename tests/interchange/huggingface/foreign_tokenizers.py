"""Files of `tokenizers` as other models have them, trained on a few lines."""

import json

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
