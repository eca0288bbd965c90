"""Files that are packed, damaged, cut short or changed, and what is kept of them in the cache."""

import gzip
import lzma
import os
import shutil

import pytest
from text_for_tests import equal, experiment, sentences, small_tokenizer, write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import publish, write_whole
from mhe_jax.data import EOS, index, open_source
from mhe_jax.data.cache import built_once
from mhe_jax.data.pairs import token_lengths
from mhe_jax.data.tokens import TokenFile
from mhe_jax.tasks import train_batches

PACK = {".gz": gzip.compress, ".xz": lzma.compress}
ONE, TWO = (("".join(f"{line}\n" for line in sentences(101, seed))).encode() for seed in (1, 2))
CHANGED = ONE.replace(b"dog", b"cat")  # of equal size
PAIRS = ONE.replace(b"\n", b"\tja\n")


def in_cache(tmp_path, room=""):
    return sorted(path for path in (tmp_path / "cache" / room).rglob("*") if path.is_file())


def all_tokens(source, tokenizer, tmp_path):
    found = TokenFile(source, tokenizer, tmp_path / "cache")
    return found[0 : len(found)].tolist()


@pytest.fixture(params=[13, 1 << 20])
def chunk(request, monkeypatch):
    monkeypatch.setattr(index, "CHUNK", request.param)


@pytest.mark.parametrize("suffix", PACK)
def test_streams_one_after_the_other(read, tmp_path, chunk, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(PACK[suffix](ONE) + PACK[suffix](TWO))
    assert list(read(f"a.txt{suffix}")) == (ONE + TWO).decode().splitlines()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]


@pytest.mark.parametrize("suffix", PACK)
def test_damage_loses_no_line_silently(read, tmp_path, chunk, suffix):
    one, two = PACK[suffix](ONE), PACK[suffix](TWO)
    second = [one + flipped(two, len(two) // 2), one + flipped(two, len(two) - 7)]
    for damaged in (
        flipped(one, len(one) // 2),
        flipped(one, len(one) - 7) + two,  # its checksum
        one[:-3],
        one + two[:-3],
        *(second if suffix == ".gz" else ()),  # of .xz, `lzma` takes it for the end
    ):
        (tmp_path / f"a.txt{suffix}").write_bytes(damaged)
        with pytest.raises(InputError, match=rf"a\.txt{suffix}: "):
            read(f"a.txt{suffix}")
        assert not in_cache(tmp_path, "unpacked")


@pytest.mark.parametrize("suffix", PACK)
def test_one_unpacked_copy_is_kept(read, tmp_path, suffix):
    path, other = tmp_path / f"a.txt{suffix}", tmp_path / f"b.txt{suffix}"
    path.write_bytes(PACK[suffix](ONE))
    other.write_bytes(PACK[suffix](TWO))
    old, others = read(path.name), read(other.name)
    (one,) = {copy for copy in in_cache(tmp_path, "unpacked") if copy.read_bytes() == ONE}
    draft = one.with_name(f".{one.name}.x.tmp")
    draft.write_bytes(b"a parallel build")
    path.write_bytes(PACK[suffix](CHANGED))
    assert list(read(path.name)) == CHANGED.decode().splitlines()
    found = [copy.read_bytes() for copy in in_cache(tmp_path, "unpacked")]
    assert sorted(found) == sorted([CHANGED, TWO, draft.read_bytes()])
    assert list(old) == ONE.decode().splitlines()  # who has it open keeps it
    assert list(others) == list(read(other.name)) == TWO.decode().splitlines()


def test_what_is_kept_and_damaged_is_built_anew(tmp_path, tokenizer):
    """A file of the cache that lost its end, or has another, is not read."""
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(PAIRS))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ONE))
    cache = tmp_path / "cache"

    def all_of_it():
        text = open_source(["a.txt.gz"], "text", directory=str(tmp_path), cache=cache)
        pairs = open_source(["a.tsv.gz"], "pair", directory=str(tmp_path), cache=cache)
        tokens = all_tokens(text, tokenizer, tmp_path)
        return list(text), list(pairs), tokens, token_lengths(pairs, tokenizer, cache).tolist()

    first, names = all_of_it(), in_cache(tmp_path)
    assert {path.relative_to(cache).parts[0] for path in names} == {
        *("unpacked", "index", "tokens", "lengths")
    }
    for change in (-1, 1, -64):
        for path in names:
            os.truncate(path, path.stat().st_size + change)
        assert all_of_it() == first
        assert in_cache(tmp_path) == names


@pytest.mark.parametrize("write", ["publish", "write_whole", "built_once"])
def test_what_is_published_is_on_the_disk_first(tmp_path, monkeypatch, write):
    seen, fsync, rename = [], os.fsync, os.replace

    def synced(file):
        seen.append(("sync", os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size))
        fsync(file)

    def renamed(one, other, **options):
        seen.append(("rename", str(one), str(other)))
        rename(one, other, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    path = tmp_path / "a"
    if write == "publish":
        with publish(path) as temporary:
            temporary.write_text("seven b")
    elif write == "built_once":
        path = built_once(path, lambda temporary: temporary.write_text("seven b"))
    else:
        write_whole(path, "seven b")
    (_, draft, size), renaming, (after, directory, _) = seen
    assert size == 7
    assert renaming == ("rename", draft, str(path))
    assert (after, directory) == ("sync", str(tmp_path))
    assert path.read_text() == "seven b"


@pytest.mark.parametrize("renamed", [False, True])
def test_a_changed_text_of_equal_size_is_tokenized_anew(read, tmp_path, tokenizer, renamed):
    """Also where the time of change was set back, as `cp -p` and `rsync -t` do."""
    path, draft = tmp_path / "a.txt", tmp_path / "draft"
    path.write_bytes(ONE)
    before, old = path.stat(), all_tokens(read("a.txt"), tokenizer, tmp_path)
    (draft if renamed else path).write_bytes(CHANGED)
    if renamed:
        os.replace(draft, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(read("a.txt")) == CHANGED.decode().splitlines()
    new = all_tokens(read("a.txt"), tokenizer, tmp_path)
    assert new != old
    assert "".join(tokenizer.decode(new).split()) == "".join(CHANGED.decode().split())


def test_a_text_that_was_only_touched_keeps_its_tokens(read, tmp_path, tokenizer, monkeypatch):
    write_lines(tmp_path / "a.txt", sentences(31))
    TokenFile(read("a.txt"), tokenizer, tmp_path / "cache")
    (tmp_path / "a.txt").touch()
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress((tmp_path / "a.txt").read_bytes()))
    monkeypatch.setattr("mhe_jax.data.tokens.tokenize", None)
    for name in ("a.txt", "b.txt", "c.txt.xz"):
        assert read(name).key == read("a.txt").key
        TokenFile(read(name), tokenizer, tmp_path / "cache")


def test_texts_have_a_key_of_their_own(read, tmp_path, tokenizer):
    """Each field and each pair of sides, in order; and files in another order."""
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de": "eins"}\n' * 3)
    keys = []
    for fields in (("en",), ("de",), ("en", "de"), ("de", "en")):
        source = read("a.jsonl", content=["text", "pair"][len(fields) - 1], fields=fields)
        keys.append(source.key)
        if source.content == "text":
            expected = [*tokenizer.encode(source[0]), EOS] * 3
            assert all_tokens(source, tokenizer, tmp_path) == expected
    for name, data in (("a.en", ONE), ("a.de", TWO), ("b.de", ONE)):
        (tmp_path / name).write_bytes(data)
    sides = [("a.en", "a.de"), ("a.en", "b.de"), ("a.de", "a.en")]
    keys += [read(*written, content="pair").key for written in sides]
    keys.append(read("*.de").key)
    (tmp_path / "a.de").rename(tmp_path / "c.de")
    keys.append(read("*.de").key)
    assert len(set(keys)) == len(keys)


def test_each_tokenizer_has_tokens_and_lengths_of_its_own(read, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(ONE)
    (tmp_path / "a.tsv").write_bytes(PAIRS)
    text, pairs = read("a.txt"), read("a.tsv", content="pair")
    for own in (tokenizer, small_tokenizer(320), tokenizer):  # at last from the cache
        ids = [own.encode(line) for line in text]
        assert all_tokens(text, own, tmp_path) == [i for row in ids for i in (*row, EOS)]
        lengths = token_lengths(pairs, own, tmp_path / "cache")
        assert lengths.tolist() == [[len(row), len(own.encode("ja"))] for row in ids]


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
