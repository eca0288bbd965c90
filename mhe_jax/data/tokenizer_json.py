"""A `tokenizer.json` of the library `tokenizers`: WordPiece, byte-level BPE, and others.

Our ids 0 to 4 are pad, unk, bos, eos and mask, whatever the file says; all other tokens follow in
the order of the file. So our ids are a permutation of the file's, except for special tokens that
the file does not have, or has in two roles: these are ours alone.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNK
from mhe_jax.data.cache import key_of
from mhe_jax.data.tokenizer import SPECIAL_PIECES, Tokenizer

# The special token is the first of its names that a file has; bos and eos may be the same.
NAMES = {
    PAD: ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    UNK: ("<unk>", "[UNK]"),
    BOS: ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    EOS: ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    MASK: ("<mask>", "[MASK]", "<|mask|>"),
}
NAME = "tokenizer.json"
ABSENT = -1  # in `of_file`: a special token that is ours alone
# Joiners of letters, and the tags of emoji.
JOINERS = {*map(chr, (0x200C, 0x200D, *range(0xE0020, 0xE0080)))}


class JsonTokenizer(Tokenizer):
    """Text to ids and back, as the file says; names of special tokens mean nothing inside a text.

    What the file says of tokens around a text, truncation and padding is ignored: tasks make rows.
    """

    def __init__(self, model: bytes, name: str = NAME):
        """As `Tokenizer`; InputError also where `tokenizers` is not installed."""
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise not_installed(f"{name} needs tokenizers", "export") from None
        self.model, self.name, self.key = model, name, key_of(model.hex())
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(model.decode())
        except Exception as error:  # the library raises no class of its own
            raise InputError(f"{name}: is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        names = [[name for name in NAMES[i] if name in ids] for i in range(NUM_SPECIAL)]
        special = [ids[found[0]] if found else ABSENT for found in names]
        if special[BOS] == special[EOS]:
            special[BOS] = ABSENT
        others = sorted({*range(max(ids.values()) + 1)} - {*special})
        self.of_file = np.array([*special, *others])  # [V]: the file's id for each of ours
        self.vocabulary_size = len(self.of_file)
        there = self.of_file != ABSENT
        self._ours = np.zeros(max(ids.values()) + 1, np.int64)
        self._ours[self.of_file[there]] = np.flatnonzero(there)
        self.separators = self._between(special[EOS])

    def _between(self, eos: int) -> int:
        """How many eos the file puts between two texts, e.g. RoBERTa's two; 1 if it puts none."""
        pair = self._tokenizer.encode("a", "a")
        texts = pair.sequence_ids  # of each token: 0, 1, or None for those around the texts
        if 0 not in texts or 1 not in texts:
            return 1
        end = len(texts) - texts[::-1].index(0)
        return max(1, pair.ids[end : texts.index(1)].count(eos))

    @property
    def absent(self) -> tuple[int, ...]:
        """Special tokens that are not in the file."""
        return tuple(np.flatnonzero(self.of_file == ABSENT).tolist())

    def spelling(self, of_file: int) -> str:
        """The token that has this id in the file."""
        return self._tokenizer.id_to_token(of_file)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Ids of many texts; the library chooses the number of threads, not `num_threads`."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._ours[one.ids].tolist() if one.ids else [] for one in found]

    def offsets(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """As `Tokenizer`; letters and marks that the file drops, or composes with others, belong
        to the token before them in their word, or else to that after them.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        assert len(found.ids) >= len(ids)
        begins, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        of_words = [unicodedata.category(c)[0] in "LMN" or c in JOINERS for c in text]
        inside = np.zeros(len(text) + 1, bool)
        for begin, end in found.offsets:
            inside[begin:end] = True
        others = np.append(-1, np.flatnonzero(inside | ~np.array([*of_words, False])))
        before = others[np.searchsorted(others, begins) - 1]
        begins = np.where(inside[before], begins, before + 1)
        return np.stack([begins, others[np.searchsorted(others, ends)]], 1)[: len(ids)]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The tokens of these ids as the file spells them; our name for one that it lacks."""
        of_file = [(i, int(self.of_file[i])) for i in ids]
        return [SPECIAL_PIECES[i] if n == ABSENT else self.spelling(n) for i, n in of_file]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens give nothing."""
        ids = np.array([i for i in ids if i >= NUM_SPECIAL], np.int64)
        return self._tokenizer.decode(self.of_file[ids].tolist(), skip_special_tokens=True)
