"""Byte-pair encoding by sentencepiece that decodes to exactly the text that was encoded.

    decode(encode(text)) == text        for every text

Nothing is normalised, spaces are kept, and a character without a piece of its own becomes its UTF-8
bytes, so that `unk` never appears. The one character sentencepiece itself would lose, its visible
space U+2581, goes through as bytes too. Names of the special tokens mean nothing inside a text.
"""

import functools
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import sentencepiece

from mhe_jax.config import InputError
from mhe_jax.config.data import MASK, NUM_SPECIAL
from mhe_jax.config.files import publish
from mhe_jax.config.places import path_of
from mhe_jax.data.cache import key_of
from mhe_jax.data.text import Text

SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
ROLES = ("pad", "unk", "bos", "eos")  # of the first of them, as sentencepiece calls them
# A tokenizer trains on at most this much text; more changes the pieces little and costs minutes.
SAMPLE_BYTES = 32 << 20
PIECE = 1024  # bytes that are tokenized at once
SPACE = "\u2581"
# sentencepiece puts this for characters outside the coverage, and trains on no text that has it.
RESERVED = "\u2585"


def read_model(path: str | Path) -> bytes:
    """The bytes of a model file; InputError if it cannot be read."""
    try:
        return path_of(path).read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise InputError(f"{path}: {'no such file' if missing else error.strerror}") from None


class Pieces:
    """A sentencepiece model, unchanged: texts to piece numbers."""

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """Takes the bytes of a model; `name` is for messages. InputError if they are none."""
        self.model, self.name, self.key = model, name, key_of(model.hex())
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = self.vocabulary_size = self._processor.vocab_size()
            # The pieces by their numbers, as sentencepiece spells them; it may have none.
            self.vocabulary = self._processor.id_to_piece(list(range(size or 1)))
        except (RuntimeError, OSError, TypeError, ValueError, IndexError):  # or they are not UTF-8
            raise InputError(f"{name}: is not a sentencepiece model") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a model file."""
        return cls(read_model(path), str(path))

    def save(self, path: str | Path) -> None:
        """Writes the model file, whole or not at all."""
        with publish(path_of(path)) as temporary:
            temporary.write_bytes(self.model)

    @property
    def scores(self) -> dict[str, float]:
        """The score of each piece that is neither a special token nor a byte, best first."""
        special = {*self._where("control"), *self._where("byte"), *self._where("unknown")}
        others = {*range(self.vocabulary_size)} - special
        found = sorted((-self._processor.get_score(i), i) for i in others)
        return {self.vocabulary[i]: -score for score, i in found}

    @functools.cached_property
    def characters(self) -> np.ndarray:
        """How many characters each piece stands for; a byte counts as one, a control token as 0."""
        counts = np.array([len(piece.replace(SPACE, "")) for piece in self.vocabulary])
        counts[self._where("control")] = 0
        counts[[*self._where("byte"), *self._where("unknown")]] = 1
        return counts

    def _where(self, kind: str) -> list[int]:
        """The numbers of the pieces that are a `control` token, a `byte` or `unknown`."""
        return [*filter(getattr(self._processor, f"is_{kind}"), range(self.vocabulary_size))]

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Piece numbers of many texts; `num_threads` -1 uses all cores."""
        return self._processor.encode(list(texts), num_threads=num_threads) if texts else []


class Tokenizer(Pieces):
    """Text to piece numbers and back.

    Ids 0 to 4 are pad, unk, bos, eos and mask; `encode` never gives them, `decode` skips them.
    """

    separators = 1  # eos between two texts of a row

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """As `Pieces`; InputError also where its special tokens or bytes differ from ours."""
        super().__init__(model, name)
        pieces = self.vocabulary
        if tuple(pieces[:NUM_SPECIAL]) != SPECIAL_PIECES:
            raise InputError(f"{name}: pieces 0 to 4 must be {' '.join(SPECIAL_PIECES)}")
        self._bytes = {int(pieces[i][3:5], 16): i for i in self._where("byte")}
        if len(self._bytes) < 256:
            raise InputError(f"{name}: has no piece for some bytes (train with byte_fallback)")
        self._characters = set("".join(pieces))
        # Bytes of text that each piece stands for.
        self._sizes = np.array([len(piece.replace(SPACE, " ").encode()) for piece in pieces])
        self._sizes[:NUM_SPECIAL] = 0
        self._sizes[[*self._bytes.values()]] = 1

    def encode(self, text: str) -> list[int]:
        """Piece numbers of a text, without bos and eos."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """`encode` of many texts; `num_threads` -1 uses all cores."""
        stand_ins = {i: self._stand_in(text) for i, text in enumerate(texts) if SPACE in text}
        texts = [text.replace(SPACE, stand_ins.get(i, SPACE)) for i, text in enumerate(texts)]
        rows = super().encode_batch(texts, num_threads)
        for i, stand_in in stand_ins.items():
            # Numbers as characters, so that a run of them is replaced as one.
            row = "".join(map(chr, rows[i])).replace(self._of(stand_in), self._of(SPACE))
            rows[i] = [*map(ord, row)]
        return rows

    def inputs(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a model for ids [...]: the ids themselves, as `tokens`."""
        return {"tokens": ids}

    def offsets(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where each piece of `encode(text)` begins and ends in `text`, in characters: [n, 2].

        A piece holds the space before it. Pieces that are bytes of one character share its offsets.
        """
        starts = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
        begun = np.concatenate([[0], np.cumsum(starts)])  # characters before each byte
        # The space that is put before every text is not part of it.
        ends = np.cumsum(self._sizes[np.asarray(ids, np.int64)]) - 1
        if len(ids) and (ends[-1] != len(starts) or self.decode(ids) != text):
            raise InputError(f"{self.name}: changes a text: takes a tokenizer trained by a run")
        begins = np.maximum(np.concatenate([[0], ends[:-1]]), 0)[: len(ids)]
        following = begun[np.minimum(begins + 1, len(starts))]
        return np.stack([np.where(begins < len(starts), following - 1, begun[-1]), begun[ends]], 1)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces with these numbers, as they are: a space is U+2581, a byte <0x00>."""
        return [self.vocabulary[i] for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of piece numbers; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        return self._processor.decode([int(i) for i in ids if i >= NUM_SPECIAL])

    def _stand_in(self, text: str) -> str:
        """A character of three bytes that is in no piece and not in `text`."""
        private = map(chr, range(0xE000, 0xF900))
        return next(c for c in private if c not in self._characters and c not in text)

    def _of(self, character: str) -> str:
        return "".join(chr(self._bytes[byte]) for byte in character.encode())


def pieces(text: str, anywhere: bool = False) -> Iterator[str]:
    """A text in parts of at most `PIECE` bytes, which are tokenized faster than a long one.

    Between them a space is dropped, which a tokenizer puts before each text. Without one there, it
    is cut at the next; or `anywhere`, between two characters.
    """
    data, start = text.encode(), 0
    while len(data) - start > PIECE:
        space = data.rfind(b" ", start + 1, start + PIECE + 1)
        if space < 0 and not anywhere and (space := data.find(b" ", start + PIECE)) < 0:
            break
        stop = space if space >= 0 else start + PIECE
        while 0x80 <= data[stop] < 0xC0:
            stop -= 1
        yield data[start:stop].decode()
        start = stop + (space >= 0)
    yield data[start:].decode()


def sample_text(text: Text, sample_bytes: int = SAMPLE_BYTES) -> Iterator[str]:
    """All of a small text, or parts from all over a large one; no blank lines."""
    share, generator = sample_bytes / text.size, np.random.default_rng(0)
    for line in itertools.chain.from_iterable(text):
        for part in pieces(line, anywhere=True):
            if part.strip() and (share >= 1 or generator.random() < share):
                yield part.replace(RESERVED, "\0")  # NUL becomes no piece, either


def train_tokenizer(
    texts: Sequence[tuple[Text, float]],
    vocabulary_size: int,
    field: str = "model.vocabulary_size",
) -> Tokenizer:
    """Trains exactly `vocabulary_size` pieces; the same text gives the same bytes.

    Of large texts it sees a sample in proportion to their weights. Messages name `field`.
    """
    name = " and ".join(text.name for text, _ in texts)
    total = sum(weight for _, weight in texts)
    shares = [(text, math.ceil(SAMPLE_BYTES * weight / total)) for text, weight in texts]
    special: dict[str, Any] = {f"{role}_id": i for i, role in enumerate(ROLES)}
    special |= {f"{role}_piece": SPECIAL_PIECES[i] for i, role in enumerate(ROLES)}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(itertools.starmap(sample_text, shares)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            **special,
            control_symbols=[SPECIAL_PIECES[MASK]],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            byte_fallback=True,
            character_coverage=0.9995,  # characters outside this share of the text become bytes
            max_sentence_length=16 * PIECE,
            num_threads=1,  # a merge tie must not depend on which thread is first
            minloglevel=3,
        )
    except RuntimeError as error:  # it says which sizes this text allows
        reason = str(error).rpartition("] ")[2].strip() or "has no text to train a tokenizer on"
        if least := re.search(r"required_chars. \d+ vs (\d+)", reason):
            reason = f"is too few for its characters: takes at least {least[1]}"
        elif most := re.search(r"<= (\d+)", reason):
            reason = f"has too little text for so many: give --{field} {most[1]}, or less"
        raise InputError(f"{field}={vocabulary_size}: {name}: {reason}") from None
    return Tokenizer(model.getvalue(), f"tokenizer of {name}")
