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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import sentencepiece

from mhe_jax.config import InputError
from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNK
from mhe_jax.config.files import publish
from mhe_jax.config.places import path_of
from mhe_jax.data.cache import key_of
from mhe_jax.data.text import Text

SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
# Special tokens and the 256 bytes.
NUM_FIXED = NUM_SPECIAL + 256

# A tokenizer trains on at most this much text; more changes the pieces little and costs minutes.
SAMPLE_BYTES = 32 << 20
# Characters outside this share of the text become bytes.
CHARACTER_COVERAGE = 0.9995

PIECE = 1024  # bytes that are tokenized at once

SPACE = "\u2581"
# sentencepiece puts this for characters outside the coverage, and trains on no text that has it.
RESERVED = "\u2585"


class Pieces:
    """A sentencepiece model, unchanged: texts to piece numbers."""

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """Takes the bytes of a model; `name` is for messages. InputError if they are none."""
        self.model, self.name = model, name
        self.key = key_of(model.hex())
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocabulary_size = self._processor.vocab_size()
            # The pieces by their numbers, as sentencepiece spells them.
            self.vocabulary = list(map(self._processor.id_to_piece, range(self.vocabulary_size)))
        except (RuntimeError, OSError, TypeError, ValueError):  # pieces may not be UTF-8
            self.vocabulary_size = 0
        if self.vocabulary_size == 0:
            raise InputError(f"{name}: is not a sentencepiece model")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a model file."""
        try:
            return cls(path_of(path).read_bytes(), str(path))
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None

    def save(self, path: str | Path) -> None:
        """Writes the model file, whole or not at all."""
        with publish(path_of(path)) as temporary:
            temporary.write_bytes(self.model)

    @property
    def scores(self) -> dict[str, float]:
        """The score of each piece that is neither a special token nor a byte, best first."""
        processor, found = self._processor, {}
        for i in range(self.vocabulary_size):
            if not (processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i)):
                found[processor.id_to_piece(i)] = processor.get_score(i)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @functools.cached_property
    def characters(self) -> np.ndarray:
        """How many characters each piece stands for; a byte counts as one, a control token as 0."""
        counts = [len(piece.replace(SPACE, "")) for piece in self.vocabulary]
        for i in range(self.vocabulary_size):
            if self._processor.is_byte(i) or self._processor.is_unknown(i):
                counts[i] = 1
            elif self._processor.is_control(i):
                counts[i] = 0
        return np.array(counts)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Piece numbers of many texts; `num_threads` -1 uses all cores."""
        return self._processor.encode(list(texts), num_threads=num_threads) if texts else []


class Tokenizer(Pieces):
    """Text to piece numbers and back.

    Ids 0 to 4 are pad, unk, bos, eos and mask; `encode` never gives them, `decode` skips them.
    """

    # The number of eos between two texts of a row.
    separators = 1
    # Whether a space between two texts that are encoded alone is as good as one inside a text.
    takes_pieces = True

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """As `Pieces`; InputError also where its special tokens or bytes differ from ours."""
        super().__init__(model, name)
        pieces = self.vocabulary
        if tuple(pieces[:NUM_SPECIAL]) != SPECIAL_PIECES:
            raise InputError(
                f"{name}: pieces 0 to 4 must be {' '.join(SPECIAL_PIECES)}, "
                f"not {' '.join(pieces[:NUM_SPECIAL])}"
            )
        self._bytes = np.full(256, -1, np.int64)
        for i in range(self.vocabulary_size):
            if self._processor.is_byte(i):
                self._bytes[int(pieces[i][3:5], 16)] = i
        if (self._bytes < 0).any():
            raise InputError(f"{name}: has no piece for some bytes (train with byte_fallback)")
        self._characters = set("".join(pieces))
        # Bytes of text that each piece stands for.
        sizes = [len(piece.replace(SPACE, " ").encode()) for piece in pieces]
        self._sizes = np.array([0] * NUM_SPECIAL + sizes[NUM_SPECIAL:])
        self._sizes[self._bytes] = 1

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raises InputError unless a model of `vocabulary_size` fits."""
        if self.vocabulary_size != vocabulary_size:
            raise InputError(
                f"{self.name}: has {self.vocabulary_size} pieces, "
                f"model.vocabulary_size is {vocabulary_size}; they must be equal"
            )

    def encode(self, text: str) -> list[int]:
        """Piece numbers of a text, without bos and eos."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """`encode` of many texts; `num_threads` -1 uses all cores."""
        stand_ins = {i: self._stand_in(text) for i, text in enumerate(texts) if SPACE in text}
        texts = [text.replace(SPACE, stand_ins.get(i, SPACE)) for i, text in enumerate(texts)]
        rows = super().encode_batch(texts, num_threads)
        for i, stand_in in stand_ins.items():
            rows[i] = _replace(rows[i], self._byte_ids(stand_in), self._byte_ids(SPACE))
        return rows

    def inputs(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a model for ids [...]: the ids themselves, as `tokens`."""
        return {"tokens": ids}

    def offsets(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where each piece of `encode(text)` begins and ends in `text`, in characters: [n, 2].

        A piece holds the space before it. Pieces that are bytes of one character share its offsets.
        InputError if the tokenizer does not preserve the text.
        """
        starts = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
        begun = np.concatenate([[0], np.cumsum(starts)])  # characters before each byte
        # The space that is put before every text is not part of it.
        ends = np.cumsum(self._sizes[np.asarray(ids, np.int64)]) - 1
        if len(ids) and (ends[-1] != len(starts) or self.decode(ids) != text):
            raise InputError(
                f"{self.name}: does not preserve the text: give a tokenizer trained by a run"
            )
        begins = np.maximum(np.concatenate([[0], ends[:-1]]), 0)[: len(ids)]
        following = begun[np.minimum(begins + 1, len(starts))]
        return np.stack([np.where(begins < len(starts), following - 1, begun[-1]), begun[ends]], 1)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces with these numbers, as they are: a space is U+2581, a byte <0x00>."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of piece numbers; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        return self._processor.decode([int(i) for i in ids if i >= NUM_SPECIAL])

    def _stand_in(self, text: str) -> str:
        """A character of three bytes that is in no piece and not in `text`."""
        private = map(chr, range(0xE000, 0xF900))
        return next(c for c in private if c not in self._characters and c not in text)

    def _byte_ids(self, character: str) -> list[int]:
        return [int(self._bytes[byte]) for byte in character.encode()]


def _replace(ids: list[int], old: list[int], new: list[int]) -> list[int]:
    """`ids` with each run `old` replaced by `new`.

    >>> _replace([1, 2, 3, 2, 3], [2, 3], [7, 8])
    [1, 7, 8, 7, 8]
    """
    result, i = [], 0
    while i < len(ids):
        if ids[i : i + len(old)] == old:
            result += new
            i += len(old)
        else:
            result.append(ids[i])
            i += 1
    return result


def pieces(text: str, anywhere: bool = False) -> list[str]:
    """A text in parts of at most `PIECE` bytes, so that a long one takes no longer than short ones.

    It is cut at a space, which is dropped since a tokenizer puts one before each text. Without a
    space there, it is cut at the next one; or `anywhere`, between two characters.

    >>> pieces("a b"), [len(piece) for piece in pieces("x" * 1500, anywhere=True)]
    (['a b'], [1024, 476])
    """
    data = text.encode()
    found, start = [], 0
    while len(data) - start > PIECE:
        stop = start + PIECE
        space = data.rfind(b" ", start + 1, stop + 1)
        if space < 0 and anywhere:
            while 0x80 <= data[stop] < 0xC0:
                stop -= 1
            found.append(data[start:stop].decode())
            start = stop
            continue
        if space < 0 and (space := data.find(b" ", stop)) < 0:
            break
        found.append(data[start:space].decode())
        start = space + 1
    return [*found, data[start:].decode()]


def sample_text(text: Text, sample_bytes: int = SAMPLE_BYTES) -> Iterator[str]:
    """All of a small text, or parts from all over a large one; no blank lines."""
    share, generator = sample_bytes / text.size, np.random.default_rng(0)
    lines = itertools.chain.from_iterable(text)
    for part in itertools.chain.from_iterable(pieces(line, anywhere=True) for line in lines):
        if part.strip() and (share >= 1 or generator.random() < share):
            yield part.replace(RESERVED, "\0")  # NUL becomes no piece, either


def train_tokenizer(
    texts: Sequence[tuple[Text, float]],
    vocabulary_size: int,
    option: str = "model.vocabulary_size",
) -> Tokenizer:
    """Trains exactly `vocabulary_size` pieces; the same text gives the same bytes.

    From several texts, each with a weight, it sees at most a sample in proportion to the weights.
    `option` is the field that messages name.

    Raises:
      InputError: the text holds too few different words, or too many different characters.
    """
    option = f"{option}={vocabulary_size}"
    if vocabulary_size <= NUM_FIXED:
        raise InputError(
            f"{option}: a tokenizer needs more than {NUM_FIXED} "
            f"({NUM_SPECIAL} special tokens and 256 bytes)"
        )
    name = " and ".join(text.name for text, _ in texts)
    total = sum(weight for _, weight in texts)
    samples = [
        sample_text(text, math.ceil(SAMPLE_BYTES * weight / total)) for text, weight in texts
    ]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(samples),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_piece=SPECIAL_PIECES[PAD],
            unk_piece=SPECIAL_PIECES[UNK],
            bos_piece=SPECIAL_PIECES[BOS],
            eos_piece=SPECIAL_PIECES[EOS],
            control_symbols=[SPECIAL_PIECES[MASK]],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            byte_fallback=True,
            character_coverage=CHARACTER_COVERAGE,
            max_sentence_length=16 * PIECE,
            num_threads=1,  # a merge tie must not depend on which thread is first
            minloglevel=3,
        )
    except RuntimeError as error:  # it says which sizes this text allows
        reason = str(error).rpartition("] ")[2].strip() or "has no text to train a tokenizer on"
        raise InputError(f"{option}: {name}: {reason}") from None
    return Tokenizer(model.getvalue(), f"tokenizer of {name}")
