"""Tokens are made once, and are those of the text, whatever was interrupted, damaged or changed."""

import lzma
import os
import random
import shutil

import pytest
from text_for_tests import equal, experiment, sentences, small_tokenizer, write_lines

from mhe_jax.config import InputError, ModelConfig
from mhe_jax.data import EOS, HashedWords, tokens
from mhe_jax.data.cache import built_once
from mhe_jax.data.tokenizer import PIECE, pieces
from mhe_jax.data.tokens import tokens_of
from mhe_jax.tasks import train_batches

ONE, TWO = (("".join(f"{line}\n" for line in sentences(101, seed))).encode() for seed in (1, 2))
CHANGED = ONE.replace(b"dog", b"cat")  # of equal size
PAIRS = ONE.replace(b"\n", b"\tja\n")


@pytest.fixture
def small_parts(monkeypatch):
    """A file holds some lines of the text."""
    monkeypatch.setattr(tokens, "PART", 300)


def whole(side):
    return side[0 : side.num_tokens].tolist()


def of_lines(tokenizer, lines):
    return [i for line in lines for i in (*tokenizer.encode_batch([line])[0], EOS)]


def made(tmp_path):
    return sorted(path for path in (tmp_path / "cache" / "tokens").rglob("*") if path.is_file())


def test_tokens_of_a_text(read, tmp_path, tokenizer, small_parts):
    (tmp_path / "a.txt").write_bytes(ONE)
    text, lines = read("a.txt"), ONE.decode().splitlines()
    (side,) = tokens_of(text, tokenizer, tmp_path / "cache")
    assert len(made(tmp_path)) > 4
    expected = of_lines(tokenizer, lines)
    assert whole(side) == expected
    draw = random.Random(0)
    for _ in range(50):
        start, stop = sorted(draw.randrange(len(expected) + 9) for _ in range(2))
        assert side[start:stop].tolist() == expected[start:stop]
    for number in (0, 1, 40, 100):
        assert side.item(number).tolist() == of_lines(tokenizer, [lines[number]])
    assert side.lengths.tolist() == [len(tokenizer.encode(line)) + 1 for line in lines]


def test_tokens_of_pairs(read, tmp_path, tokenizer, small_parts):
    write_lines(tmp_path / "a.tsv", [f"{line}\t{line} ja" for line in sentences(60)])
    sides = tokens_of(read("a.tsv", content="pair"), tokenizer, tmp_path / "cache")
    for side, end in zip(sides, ("", " ja"), strict=True):
        for number in (0, 7, 59):
            text = sentences(60)[number] + end
            assert side.item(number).tolist() == of_lines(tokenizer, [text])


def test_pairs_and_their_sides_line_by_line_are_kept_apart(read, tmp_path, tokenizer):
    write_lines(tmp_path / "a.txt", ["haus", "house"])
    write_lines(tmp_path / "a.tsv", ["haus\thouse"])
    for content, name, items in (("text", "a.txt", [2]), ("pair", "a.tsv", [1, 1])):
        sides = tokens_of(read(name, content=content), tokenizer, tmp_path / "cache")
        assert [len(side.lengths) for side in sides] == items


def test_a_large_vocabulary_takes_four_bytes(read, tmp_path, tokenizer, monkeypatch):
    write_lines(tmp_path / "a.txt", ["haus hund"])
    monkeypatch.setattr(tokenizer, "vocabulary_size", 1 << 17)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, **_: [[70_000, 7]] * len(texts))
    (side,) = tokens_of(read("a.txt"), tokenizer, tmp_path / "cache")
    assert whole(side) == [70_000, 7, EOS]


def test_an_eos_inside_a_text_is_refused(read, tmp_path, tokenizer, monkeypatch):
    """Items end where it stands."""
    write_lines(tmp_path / "a.txt", ["haus"])
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, **_: [[7, EOS, 7]] * len(texts))
    with pytest.raises(InputError, match=f"{tokenizer.name}: .*eos"):
        tokens_of(read("a.txt"), tokenizer, tmp_path / "cache")
    assert not made(tmp_path)


def test_a_large_text_has_few_large_parts(read, tmp_path, tokenizer, small_parts, monkeypatch):
    (tmp_path / "a.txt").write_bytes(ONE)
    monkeypatch.setattr(tokens, "MOST_PARTS", 3)
    (side,) = tokens_of(read("a.txt"), tokenizer, tmp_path / "cache")
    assert len(made(tmp_path)) <= 1 + 4
    assert whole(side) == of_lines(tokenizer, ONE.decode().splitlines())


class Stopped(Exception):
    pass


def test_who_was_interrupted_goes_on(read, tmp_path, tokenizer, small_parts, monkeypatch):
    (tmp_path / "a.txt").write_bytes(ONE)
    text, cache, done = read("a.txt"), tmp_path / "cache", []
    write = tokens._write

    def three_times(*arguments):
        if len(done) == 3:
            raise Stopped
        done.append(write(*arguments))

    monkeypatch.setattr(tokens, "_write", three_times)
    with pytest.raises(Stopped):
        tokens_of(text, tokenizer, cache)
    monkeypatch.setattr(tokens, "_write", write)
    first = {path: path.stat().st_mtime_ns for path in made(tmp_path)}
    assert len(first) == 3
    (side,) = tokens_of(text, tokenizer, cache)
    assert whole(side) == of_lines(tokenizer, ONE.decode().splitlines())
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())


def test_several_processes_make_different_files(
    read, tmp_path, tokenizer, small_parts, monkeypatch
):
    (tmp_path / "a.txt").write_bytes(ONE)
    text, by, write = read("a.txt"), [], tokens._write
    monkeypatch.setattr(tokens, "_write", lambda *a: by.append(a[-1].name) or write(*a))
    # Process 1 has made its files, and is gone.
    key = (tokens.VERSION, tokens.PART, text.key, 1, tokenizer.key, tokenizer.vocabulary_size)
    directory = tmp_path / "cache" / "tokens" / tokens.key_of(*key)
    tokens._make(text, tokenizer, directory, 1, 2)
    assert {int(name[:6]) % 2 for name in by} == {1}
    (side,) = tokens_of(text, tokenizer, tmp_path / "cache", 0, 2)
    assert len(by) == len(set(by)) > 4
    assert whole(side) == of_lines(tokenizer, ONE.decode().splitlines())


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_file_is_named(read, tmp_path, tokenizer, small_parts, damage):
    (tmp_path / "a.txt").write_bytes(ONE)
    text = read("a.txt")
    before = whole(*tokens_of(text, tokenizer, tmp_path / "cache"))
    path = made(tmp_path)[1]
    path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"")
    if damage == "gone":
        path.unlink()
    with pytest.raises(InputError, match=f"{path.parent}: is damaged"):
        tokens_of(text, tokenizer, tmp_path / "cache")
    shutil.rmtree(path.parent)
    assert whole(*tokens_of(text, tokenizer, tmp_path / "cache")) == before


def test_a_changed_file_is_read_again(read, tmp_path, tokenizer):
    """Also where size and modification time are those of before."""
    path = tmp_path / "a.txt"
    path.write_bytes(ONE)
    old, before = read("a.txt"), path.stat()
    tokens_of(old, tokenizer, tmp_path / "cache")
    path.write_bytes(CHANGED)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    new = read("a.txt")
    assert new.key != old.key
    (side,) = tokens_of(new, tokenizer, tmp_path / "cache")
    assert whole(side) == of_lines(tokenizer, CHANGED.decode().splitlines())


def test_a_text_that_was_moved_touched_or_packed_keeps_its_tokens(
    read, tmp_path, tokenizer, monkeypatch
):
    (tmp_path / "a.txt").write_bytes(ONE)
    tokens_of(read("a.txt"), tokenizer, tmp_path / "cache")
    with monkeypatch.context() as patch:  # a second start does not read it either
        patch.setattr("mhe_jax.data.readers.lines", None)
        key = read("a.txt").key
    (tmp_path / "a.txt").touch()
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(ONE))
    monkeypatch.setattr(tokenizer, "encode_batch", None)
    for name in ("a.txt", "b.txt", "c.txt.xz"):
        assert read(name).key == key
        tokens_of(read(name), tokenizer, tmp_path / "cache")


def test_texts_have_a_key_of_their_own(read, tmp_path):
    """Each field and each pair of sides, in order; files in another order; fewer examples."""
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de": "eins"}\n' * 3)
    keys = []
    for fields in (("en",), ("de",), ("en", "de"), ("de", "en")):
        keys.append(read("a.jsonl", content=["text", "pair"][len(fields) - 1], fields=fields).key)
    for name, data in (("a.en", ONE), ("a.de", TWO), ("b.de", ONE)):
        (tmp_path / name).write_bytes(data)
    sides = [("a.en", "a.de"), ("a.en", "b.de"), ("a.de", "a.en")]
    keys += [read(*written, content="pair").key for written in sides]
    keys += [read("*.de").key, read("*.de", max_examples=3).key]
    (tmp_path / "a.de").rename(tmp_path / "c.de")
    keys.append(read("*.de").key)
    for name, data in (("a.txt", b"ab\nc\n"), ("b.txt", b"a\nbc\n"), ("c.txt", b"abc\n")):
        (tmp_path / name).write_bytes(data)
        keys.append(read(name).key)
    assert len(set(keys)) == len(keys)


def test_each_tokenizer_has_tokens_of_its_own(read, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(ONE)
    text = read("a.txt")
    for own in (tokenizer, small_tokenizer(320), tokenizer):  # at last from the cache
        (side,) = tokens_of(text, own, tmp_path / "cache")
        assert whole(side) == of_lines(own, ONE.decode().splitlines())


@pytest.mark.parametrize("hashing", ["md_proj", "md_emb"])
def test_hashed_words(read, tmp_path, hashing):
    """Numbers of words are those of this process, and nothing of them stays in the cache; tables
    of two sizes are kept apart."""
    (tmp_path / "a.txt").write_bytes(ONE)
    for size in (1000, 1000, 105):
        words = HashedWords(ModelConfig(hashing=hashing, vocabulary_size=size))
        words.encode_batch(["other words first"])
        (side,) = tokens_of(read("a.txt"), words, tmp_path / "cache")
        assert whole(side) == of_lines(words, ONE.decode().splitlines())
    assert bool(made(tmp_path)) == (hashing == "md_emb")


@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize("letters", ["ab  ", "ä語😀 ", "ä語😀"])
def test_pieces_of_a_long_text(letters, anywhere):
    draw = random.Random(1)
    for _ in range(20):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(1, 5 * PIECE)))
        parts, at = [*pieces(text, anywhere)], 0
        if " " in letters or anywhere:
            assert max(len(part.encode()) for part in parts) <= PIECE
        assert anywhere or " ".join(parts) == text
        # Only single spaces at the cuts are missing.
        for part in parts:
            at += text[at:].startswith(" " + part) and not text[at:].startswith(part)
            assert text[at:].startswith(part)
            at += len(part)
        assert at == len(text)


@pytest.mark.parametrize("line", ["haus und  hund " * 500, "語ä" * 1500, "x" * 5000 + " y"])
def test_a_long_line_has_the_tokens_of_its_text(read, tmp_path, tokenizer, line):
    write_lines(tmp_path / "a.txt", [line, "x"])
    (side,) = tokens_of(read("a.txt"), tokenizer, tmp_path / "cache")
    assert tokenizer.decode(side.item(0).tolist()) == line
    if " " not in line.strip():
        assert side.item(0).tolist() == [*tokenizer.encode(line), EOS]


def test_a_text_that_changes_while_it_is_read_is_refused(read, tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_bytes(ONE)
    text = read("a.txt")
    path.write_bytes(ONE + b"one more\n")
    with pytest.raises(InputError, match="a.txt: has changed while it was read"):
        tokens_of(text, tokenizer, tmp_path / "cache")
    assert not made(tmp_path)
    path.write_bytes(ONE)
    assert whole(*tokens_of(text, tokenizer, tmp_path / "cache")) == of_lines(
        tokenizer, ONE.decode().splitlines()
    )


def test_what_fails_leaves_nothing(tmp_path):
    def fail(draft):
        draft.write_bytes(b"half")
        raise Stopped

    with pytest.raises(Stopped):
        built_once(tmp_path / "x" / "a", fail)
    assert not list(tmp_path.rglob("*a*"))


SQUAD = (
    '{"data": [{"paragraphs": [{"context": "the big dog runs", "qas": [{"id": "1", "question": '
    '"who runs", "answers": [{"text": "big dog", "answer_start": 4}]}]}]}]}\n'
)
LABELLED = "text\tlabel\n" + "one\ta\ntwo\tb\n" * 20
OWN = {"labels": ("a", "b")}
SPANS = {"dataset": "squad", "question_length": 8, "window_stride": 4}
# A task, what it reads, and a change of equal size.
TEXTS = {
    "lm": ("lm", {}, {"a.txt": ONE.decode()}, ("dog", "cat")),
    "packed": ("mlm", {"packing": True}, {"a.txt": ONE.decode()}, ("dog", "cat")),
    "mixture": (
        "lm",
        {"train_weights": (2.0, 1.0)},
        {"b.txt": TWO.decode(), "a.txt": ONE.decode()},
        ("dog", "cat"),
    ),
    "pairs": ("translation", {}, {"a.tsv": PAIRS.decode()}, ("ja", "no")),
    "two files": ("translation", {}, {"a.en": ONE.decode(), "a.de": TWO.decode()}, ("dog", "cat")),
    "labels": ("classification", OWN, {"a.tsv": LABELLED}, ("\ta\n", "\tb\n")),
    "label texts": ("classification", OWN, {"a.tsv": LABELLED}, ("one", "two")),
    "answers": ("span", SPANS, {"a.json": SQUAD}, ('"big dog"', '"big d"  ')),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_key_of_the_text_is_that_of_its_content(tmp_path, tokenizer, case):
    """The same under another path and packed anew, another after a change of equal size."""
    task, options, files, (old, new) = TEXTS[case]
    found = {}
    for place in ("here", "there", "packed", "changed"):
        (tmp_path / place).mkdir()
        for name, text in files.items():
            path = tmp_path / place / name
            path.write_text(text.replace(old, new) if place == "changed" else text)
            if place == "packed":
                path.with_name(f"{name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        names = [f"{name}.xz" if place == "packed" else name for name in files]
        config = experiment(tmp_path / place, task, train=tuple(names), **options)
        found[place] = train_batches(config, tokenizer)
    here, *same, changed = found.values()
    for other in same:
        assert here.text == other.text
        equal(here.batch(1), other.batch(1))
    assert here.text != changed.text


def test_max_examples(tmp_path, tokenizer):
    """The first examples of each split alone, of every task."""
    write_lines(tmp_path / "a.txt", sentences(50))
    (tmp_path / "a.tsv").write_text(LABELLED)
    texts = {"train": ("a.txt",), "max_examples": 3}
    batches = train_batches(experiment(tmp_path, "lm", **texts), tokenizer)
    tokens_there = sum(len(tokenizer.encode(line)) + 1 for line in sentences(50)[:3])
    assert f" {tokens_there} tokens" in batches.describe()
    config = experiment(tmp_path, "classification", train=("a.tsv",), max_examples=3, **OWN)
    assert "3 examples" in train_batches(config, tokenizer).describe()
