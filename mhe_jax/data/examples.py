"""Rows of a batch, made from ids of pieces or words.

Every row is a dict of int32 arrays; `weights` is float32, 1 where `labels` count and 0 where not.
T is the length of a row, P the maximum number of tokens a masked row predicts; padding is `PAD`.

    mlm_row          tokens [T]  positions [P]  labels [P]  weights [P]
    lm_row           tokens [T]                 labels [T]  weights [T]
    translation_row  source [S]  target [T]     labels [T]  weights [T]

For hashed words without a table, `tokens` are types and come with signatures [T, 16], see `words`.
A packed row holds several examples one after the other. For each of its sides, segments [T] or
source_segments [S] and target_segments [T] say which example a token belongs to: 1, 2, ...; 0 is
padding.
"""

from collections.abc import Sequence

import numpy as np

from mhe_jax.config.data import BOS, EOS, MASK, NUM_SPECIAL, PAD

Ids = Sequence[int] | np.ndarray
Row = dict[str, np.ndarray]

# Each array of tokens, and the array of a packed row that says which example they belong to.
SEGMENTS_OF = {"tokens": "segments", "source": "source_segments", "target": "target_segments"}


def num_predictions(sequence_length: int, mask_rate: float) -> int:
    """P: how many tokens a masked row predicts when it is full of ordinary tokens."""
    return max(1, round(mask_rate * (sequence_length - 1)))


def mlm_row(
    ids: Ids,
    sequence_length: int,
    vocabulary_size: int,
    mask_rate: float,
    generator: np.random.Generator,
) -> Row:
    """bos and at most T - 1 tokens, of which a share `mask_rate` is to be predicted.

    Of n ordinary tokens, max(1, round(mask_rate · n)) are chosen without replacement, in order:
    80 % become `MASK`, 10 % a random ordinary piece, 10 % stay. Special tokens are never chosen
    and never inserted. Source: Devlin et al. 2019, section 3.1 and appendix A.1.
    """
    tokens = begun(ids, sequence_length)
    most = num_predictions(sequence_length, mask_rate)
    positions, labels = np.zeros(most, np.int32), np.zeros(most, np.int32)
    weights = np.zeros(most, np.float32)
    ordinary = np.flatnonzero(tokens >= NUM_SPECIAL)
    if len(ordinary):
        count = min(most, max(1, round(mask_rate * len(ordinary))))
        chosen = np.sort(generator.choice(ordinary, count, replace=False))
        positions[:count], labels[:count], weights[:count] = chosen, tokens[chosen], 1
        fate = generator.random(count)
        random = generator.integers(NUM_SPECIAL, vocabulary_size, count)
        tokens[chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, random, tokens[chosen]))
    return {"tokens": tokens, "positions": positions, "labels": labels, "weights": weights}


def begun(ids: Ids, sequence_length: int) -> np.ndarray:
    """bos, the ids, and padding up to the length."""
    row = _padded(ids, sequence_length, 1)
    row[0] = BOS
    return row


def lm_row(ids: Ids, sequence_length: int) -> Row:
    """At most T tokens to predict, each from bos and the tokens before it in the row."""
    return _shifted("tokens", ids, sequence_length)


def translation_row(source: Ids, target: Ids, length: int) -> Row:
    """A source; a target with bos to read, and to predict. Both end in eos, cut to `length`."""
    source, target = (
        ids if len(ids) <= length else [*ids[: length - 1], EOS] for ids in (source, target)
    )
    return {"source": _padded(source, length)} | _shifted("target", target, length)


def _shifted(name: str, ids: Ids, length: int) -> Row:
    labels, n = _padded(ids, length), len(ids)
    tokens, weights = np.full(length, PAD, np.int32), np.zeros(length, np.float32)
    tokens[: min(n, 1)], weights[:n] = BOS, 1
    tokens[1:n] = labels[: max(n - 1, 0)]
    return {name: tokens, "labels": labels, "weights": weights}


def _padded(ids: Ids, length: int, start: int = 0) -> np.ndarray:
    row = np.full(length, PAD, np.int32)
    row[start : start + len(ids)] = ids
    return row


def pack(rows: Sequence[Row], sequence_length: int, most_predictions: int = 0) -> Row:
    """Several rows of one task, which must fit, as one row without their padding."""
    packed, lengths = {}, []
    for side, segments in SEGMENTS_OF.items():
        if side in rows[0]:
            lengths = [int(np.count_nonzero(row[side])) for row in rows]
            packed[side] = _joined(rows, side, lengths, sequence_length)
            numbers = np.repeat(np.arange(1, len(rows) + 1), lengths)
            packed[segments] = _padded(numbers, sequence_length)
    if "positions" in rows[0]:
        counts = [int(np.count_nonzero(row["weights"])) for row in rows]
        packed["positions"] = _joined(rows, "positions", counts, most_predictions)
        packed["positions"][: sum(counts)] += np.repeat(np.cumsum(lengths) - lengths, counts)
        lengths, sequence_length = counts, most_predictions
    for name in ("labels", "weights"):
        packed[name] = _joined(rows, name, lengths, sequence_length)
    return packed


def _joined(rows: Sequence[Row], name: str, lengths: Sequence[int], length: int) -> np.ndarray:
    """The first n entries of each row's array, n from `lengths`, joined; zeros up to `length`."""
    joined = np.zeros(length, rows[0][name].dtype)
    parts = [row[name][:n] for row, n in zip(rows, lengths, strict=True)]
    joined[: sum(lengths)] = np.concatenate(parts)
    return joined


def stack(rows: Sequence[Row]) -> Row:
    """Rows of one shape as one batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def padding_like(row: Row) -> Row:
    """A row that counts for nothing: all `PAD`, all weights 0, and `index`, if any, -1."""
    return {name: np.full_like(array, -(name == "index")) for name, array in row.items()}
