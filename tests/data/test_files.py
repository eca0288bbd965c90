"""Files that are packed, damaged, cut short or changed, and what is kept of them in the cache."""

import errno
import gzip
import lzma
import os
import shutil
import time

import numpy as np
import pytest
from text_for_tests import equal, experiment, sentences, small_tokenizer, write_lines

from mhe_jax.config import InputError
from mhe_jax.config.files import publish, write_whole
from mhe_jax.data import EOS, index, open_source, unpacking
from mhe_jax.data.cache import built_once
from mhe_jax.data.pairs import token_lengths
from mhe_jax.data.tokens import TokenFile
from mhe_jax.tasks import train_batches
from mhe_jax.tasks.labelled import records
from mhe_jax.tasks.labelled.examples import read_examples, read_questions

PACK = {".gz": gzip.compress, ".xz": lzma.compress}
ONE, TWO = (("".join(f"{line}\n" for line in sentences(501, seed))).encode() for seed in (1, 2))


def in_cache(tmp_path, room):
    return sorted(path for path in (tmp_path / "cache" / room).rglob("*") if path.is_file())


@pytest.fixture(params=[13, 1 << 20])
def chunk(request, monkeypatch):
    for module in (index, unpacking):
        monkeypatch.setattr(module, "CHUNK", request.param)


@pytest.mark.parametrize("between", [b"", bytes(8)], ids=["", "padded"])
@pytest.mark.parametrize("suffix", PACK)
def test_streams_one_after_the_other(read, tmp_path, chunk, suffix, between):
    data = PACK[suffix](ONE) + between + PACK[suffix](TWO) + between
    (tmp_path / f"a.txt{suffix}").write_bytes(data)
    assert list(read(f"a.txt{suffix}")) == (ONE + TWO).decode().splitlines()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]


DAMAGE = {
    "a word behind": lambda one, two: one + b"word",
    "a text behind": lambda one, two: one + ONE,
    "a text behind padding": lambda one, two: one + bytes(8) + ONE,
    "beginning of the second": lambda one, two: one + flipped(two, 0),
    "head of the second": lambda one, two: one + flipped(two, 2),
    "middle of the second": lambda one, two: one + flipped(two, len(two) // 2),
    "checksum of the second": lambda one, two: one + flipped(two, len(two) - 7),
    "second cut in its head": lambda one, two: one + two[:5],
    "second cut": lambda one, two: one + two[:-3],
    "checksum of the first": lambda one, two: flipped(one, len(one) - 7) + two,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("suffix", PACK)
def test_damage_loses_no_line_silently(read, tmp_path, chunk, suffix, damage):
    pack = PACK[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(DAMAGE[damage](pack(ONE), pack(TWO)))
    with pytest.raises(InputError, match=rf"a\.txt{suffix}: is (not a|cut short \(the) \{suffix}"):
        read(f"a.txt{suffix}")
    assert not in_cache(tmp_path, "unpacked")


@pytest.mark.parametrize("suffix", PACK)
def test_a_trap_is_seen_early(read, tmp_path, monkeypatch, suffix):
    """What unpacks to a thousand times its size is no text; nearly nothing is written of it."""
    monkeypatch.setattr(unpacking, "ALWAYS", 1 << 20)
    monkeypatch.setattr(unpacking, "CHUNK", 1 << 16)
    check, sizes = unpacking.check_limit, []
    monkeypatch.setattr(unpacking, "check_limit", lambda *a: sizes.append(a[1]) or check(*a))
    (tmp_path / f"a.txt{suffix}").write_bytes(PACK[suffix](bytes(1_000_000)) * 101)
    with pytest.raises(InputError, match=rf"a\.txt{suffix}: unpacks to more than 100 times its si"):
        read(f"a.txt{suffix}")
    assert max(sizes) < 8e6
    assert not in_cache(tmp_path, "unpacked")


def test_the_limit_can_be_set(read, tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ONE))
    monkeypatch.setenv(unpacking.LIMIT, str(len(ONE) - 1))
    with pytest.raises(InputError, match=rf"a\.txt\.gz: unpacks to more than {len(ONE) - 1:,} byt"):
        read("a.txt.gz")
    monkeypatch.setenv(unpacking.LIMIT, "much")
    with pytest.raises(InputError, match=rf"{unpacking.LIMIT} is 'much': takes a number of bytes"):
        read("a.txt.gz")
    monkeypatch.setenv(unpacking.LIMIT, str(len(ONE)))
    monkeypatch.setattr(unpacking, "ALWAYS", 0)
    monkeypatch.setattr(unpacking, "RATIO", 1)  # what is set stands in its place
    assert len(read("a.txt.gz")) == 501


def test_a_disk_may_say_that_nothing_is_free(read, tmp_path, monkeypatch):
    """Some network disks do; one that is full says so when it is written."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ONE))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    monkeypatch.setattr(unpacking, "_parts_of_gz", full_disk)
    with pytest.raises(InputError, match=r"^cannot write .*/unpacked/\w+/\w+: No space left on de"):
        read("a.txt.gz")
    assert not in_cache(tmp_path, "unpacked")
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    assert len(read("a.txt.gz")) == 501


def full_disk(file):
    yield b"one"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("suffix", PACK)
def test_one_unpacked_copy_is_kept(read, tmp_path, suffix):
    path, other = tmp_path / f"a.txt{suffix}", tmp_path / f"b.txt{suffix}"
    path.write_bytes(PACK[suffix](ONE))
    other.write_bytes(PACK[suffix](TWO))
    old, others = read(path.name), read(other.name)
    assert len(in_cache(tmp_path, "unpacked")) == 2
    (one,) = {copy for copy in in_cache(tmp_path, "unpacked") if copy.read_bytes() == ONE}
    draft = one.with_name(f".{one.name}.x.tmp")
    draft.write_bytes(b"a parallel build")
    path.write_bytes(PACK[suffix](CHANGED))
    assert list(read(path.name)) == CHANGED.decode().splitlines()
    found = {copy.read_bytes() for copy in in_cache(tmp_path, "unpacked")}
    assert found == {CHANGED, TWO, draft.read_bytes()}
    assert len(in_cache(tmp_path, "unpacked")) == 3
    assert list(old) == ONE.decode().splitlines()  # who has it open keeps it
    assert list(others) == list(read(other.name)) == TWO.decode().splitlines()


def test_copies_of_other_hosts_stay(read, tmp_path):
    """Where hosts share the cache, and each has a file of its own under one path."""
    path, there = tmp_path / "a.txt.gz", tmp_path / "there"
    path.write_bytes(gzip.compress(ONE))
    there.write_bytes(gzip.compress(TWO))
    read(path.name)
    (copy,) = in_cache(tmp_path, "unpacked")
    there.rename(path)
    later = time.time() + 7
    os.utime(copy, (later, later))  # after the other host's file was there
    read(path.name)
    assert {copy.read_bytes() for copy in in_cache(tmp_path, "unpacked")} == {ONE, TWO}


# What is written, what is opened of it, and as what.
OPENED = {
    "text": ({"a.txt": ONE}, ["a.txt"], "text", ("text",)),
    "a long line": ({"a.txt": ONE.replace(b"\n", b" ")}, ["a.txt"], "text", ("text",)),
    "tsv": ({"a.tsv": ONE.replace(b"\n", b"\tja\n")}, ["a.tsv"], "pair", ("text",)),
    "jsonl": (
        {"a.jsonl": b'{"text": "one small dog"}\n' * 301},
        ["a.jsonl"],
        "text",
        ("text",),
    ),
    "two": ({"a.en": ONE, "a.de": TWO}, ["a.de", "a.en"], "pair", ("text",)),
}


@pytest.mark.parametrize("case", OPENED)
def test_a_file_that_shrinks_after_it_was_opened(read, tmp_path, case):
    files, written, content, fields = OPENED[case]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    source = read(*written, content=content, fields=fields)
    name, data = next(iter(files.items()))
    for size in (len(data) - 1, len(data) // 2, 0):
        os.truncate(tmp_path / name, size)
        with pytest.raises(InputError, match=rf"{name}: has become shorter since it was opened"):
            list(source)
        with pytest.raises(InputError, match=rf"{name}: has become shorter since it was opened"):
            [part[:] for part in source.utf8(len(source) - 1)]


def test_tokens_that_are_cut_after_they_were_opened(read, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(ONE)
    tokens = TokenFile(read("a.txt"), tokenizer, tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "tokens").iterdir()
    os.truncate(path, 2 * len(tokens) - 2)
    with pytest.raises(InputError, match=rf"{path.name}: has become shorter"):
        tokens[len(tokens) - 3 : len(tokens)]


LABELLED = {
    "a.tsv": b"text\tlabel\n" + b"one\ta\ntwo\tb\n" * 1801,
    "a.csv": b"text,label\n" + b"one,a\ntwo,b\n" * 1801,
    "a.jsonl": b'{"text": "one", "label": "a"}\n{"text": "two", "label": "b"}\n' * 1801,
}


@pytest.mark.parametrize("name", [*LABELLED, "a.json"])
def test_labelled_files_that_shrink(tmp_path, monkeypatch, name):
    """A table may end anywhere, and is still one."""
    squad = b'{"data": [{"paragraphs": []}]}\n'
    (tmp_path / name).write_bytes(LABELLED.get(name, squad))

    def open_and_cut(path, *more):
        file = index.open_lines(path, *more)
        os.truncate(path, path.stat().st_size // (2 if name in LABELLED else 1) - 1)
        return file

    monkeypatch.setattr(records, "open_lines", open_and_cut)
    task, dataset = ("span", "squad") if name == "a.json" else ("classification", "own")
    labels = ("a", "b") if name in LABELLED else ()
    config = experiment(tmp_path, task, train=(name,), dataset=dataset, labels=labels)
    with pytest.raises(InputError, match=rf"{name}: changed while it was being read"):
        (read_examples if name in LABELLED else read_questions)(config, "train")


def test_a_file_that_grows_while_it_is_read(read, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(ONE)
    scan = index._scan_lines

    def scan_and_write(*arguments):
        yield from scan(*arguments)
        with (tmp_path / "a.txt").open("ab") as file:
            file.write(b"more\n")

    monkeypatch.setattr(index, "_scan_lines", scan_and_write)
    with pytest.raises(InputError, match=r"a\.txt: changed while it was being read"):
        read("a.txt")
    assert not list((tmp_path / "cache" / "index").iterdir())


@pytest.mark.parametrize("size", [0, 8, 64, -8, -1, 1])
@pytest.mark.parametrize("room", ["unpacked", "index", "tokens", "lengths"])
def test_what_is_kept_and_damaged_is_built_anew(tmp_path, tokenizer, room, size):
    """A file of the cache that lost its end, or has another, is not read."""
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(ONE.replace(b"\n", b"\tja\n")))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ONE))
    cache = tmp_path / "cache"

    def all_of_it():
        text = open_source(["a.txt.gz"], "text", directory=str(tmp_path), cache=cache)
        pairs = open_source(["a.tsv.gz"], "pair", directory=str(tmp_path), cache=cache)
        tokens = TokenFile(text, tokenizer, cache)
        whole = tokens[0 : len(tokens)].tolist()
        return list(text), list(pairs), whole, token_lengths(pairs, tokenizer, cache).tolist()

    first = all_of_it()
    names = in_cache(tmp_path, room)
    for path in names:
        os.truncate(path, size if size in (0, 8, 64) else path.stat().st_size + size)
    assert all_of_it() == first
    assert in_cache(tmp_path, room) == names


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
        assert path.name == "a.7"
    else:
        write_whole(path, "seven b")
    (_, draft, size), renaming, (after, directory, _) = seen
    assert size == 7
    assert renaming == ("rename", draft, str(path))
    assert (after, directory) == ("sync", str(tmp_path))
    assert path.read_text() == "seven b"


def in_place(path, data):
    with path.open("r+b") as file:
        file.write(data)


def by_rename(path, data):
    other = path.with_name("draft")
    other.write_bytes(data)
    os.replace(other, path)


CHANGED = ONE.replace(b"dog", b"cat")


@pytest.mark.parametrize("times", ["new", "restored"])
@pytest.mark.parametrize("how", [in_place, by_rename])
def test_a_changed_text_of_equal_size_is_tokenized_anew(read, tmp_path, tokenizer, how, times):
    """Also where the time of change was set back, as `cp -p` and `rsync -t` do."""
    path = tmp_path / "a.txt"
    path.write_bytes(ONE)

    def tokens():
        found = TokenFile(read("a.txt"), tokenizer, tmp_path / "cache")
        return found[0 : len(found)].tolist()

    before, old = path.stat(), tokens()
    assert len(CHANGED) == len(ONE)
    how(path, CHANGED)
    if times == "restored":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert list(read("a.txt")) == CHANGED.decode().splitlines()
    new = tokens()
    assert new != old
    assert "".join(tokenizer.decode(new).split()) == "".join(CHANGED.decode().split())


def test_a_packed_text_that_changes(read, tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one dog\n", 0))
    before = path.stat()
    assert list(read("a.txt.gz")) == ["one dog"]
    path.write_bytes(gzip.compress(b"one cat\n", 0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert list(read("a.txt.gz")) == ["one cat"]


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


def test_each_field_of_a_file_has_tokens_of_its_own(read, tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de": "eins"}\n' * 3)
    keys = set()
    for fields in (("en",), ("de",), ("en", "de"), ("de", "en")):
        content = "pair" if len(fields) == 2 else "text"
        source = read("a.jsonl", content=content, fields=fields)
        keys.add(source.key)
        if content == "text":
            tokens = TokenFile(source, tokenizer, tmp_path / "cache")
            assert tokens[0 : len(tokens)].tolist() == [*tokenizer.encode(source[0]), EOS] * 3
    assert len(keys) == 4


def test_each_tokenizer_has_tokens_and_lengths_of_its_own(read, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(ONE)
    (tmp_path / "a.tsv").write_bytes(ONE.replace(b"\n", b"\tja\n"))
    text, pairs, cache = read("a.txt"), read("a.tsv", content="pair"), tmp_path / "cache"
    for own in (tokenizer, small_tokenizer(320)):
        ids = [own.encode(line) for line in text]
        tokens = TokenFile(text, own, cache)
        assert tokens[0 : len(tokens)].tolist() == [i for row in ids for i in (*row, EOS)]
        assert token_lengths(pairs, own, cache)[:, 0].tolist() == [len(row) for row in ids]


def test_files_in_another_order_are_another_text(read, tmp_path):
    (tmp_path / "a.txt").write_bytes(ONE)
    (tmp_path / "b.txt").write_bytes(TWO)
    key = read("?.txt").key
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert read("?.txt").key != key


def test_pairs_are_known_by_both_of_their_texts(read, tmp_path):
    for name, data in (("a.en", ONE), ("a.de", TWO), ("b.de", ONE)):
        (tmp_path / name).write_bytes(data)
    sides = [("a.en", "a.de"), ("a.en", "b.de"), ("a.de", "a.en")]
    assert len({read(*written, content="pair").key for written in sides}) == 3


SQUAD = (
    '{"data": [{"paragraphs": [{"context": "the big dog runs", "qas": [{"id": "1", "question": '
    '"who runs", "answers": [{"text": "big dog", "answer_start": 4}]}]}]}]}\n'
)
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
    "pairs": ("translation", {}, {"a.tsv": ONE.decode().replace("\n", "\tja\n")}, ("ja", "no")),
    "two files": ("translation", {}, {"a.en": ONE.decode(), "a.de": TWO.decode()}, ("dog", "cat")),
    "labels": (
        "classification",
        {"labels": ("a", "b")},
        {"a.tsv": LABELLED["a.tsv"].decode()},
        ("\ta\n", "\tb\n"),
    ),
    "label texts": (
        "classification",
        {"labels": ("a", "b")},
        {"a.tsv": LABELLED["a.tsv"].decode()},
        ("one", "two"),
    ),
    "answers": (
        "span",
        {"dataset": "squad", "question_length": 8, "window_stride": 4},
        {"a.json": SQUAD},
        ('"big dog"', '"big d"  '),
    ),
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
        found[place] = train_batches(config, tokenizer).text
    assert found["here"] == found["there"] == found["packed"]
    assert found["here"] != found["changed"]


def test_the_same_text_gives_the_same_batches_wherever_it_lies(tmp_path, tokenizer):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_lines(tmp_path / place / "a.txt", sentences(53))
    one, other = (
        train_batches(experiment(tmp_path / place, "lm", train=("a.txt",)), tokenizer)
        for place in ("here", "there")
    )
    equal(one.batch(5), other.batch(5))


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "two"])
def test_the_longest_line(read, tmp_path, monkeypatch, chunk, name, end):
    """What is read whole has a bound; a line of running text has none."""
    begin, stop = (b'{"text": "', b'"}') if name == "a.jsonl" else (b"x\t", b"")
    begin = b"" if name == "two" else begin
    line = begin + b"long " * 20 + stop + end
    short = begin + b"short" + stop + b"\n"
    written = ["a.en", "a.de"] if name == "two" else [name]
    content = "text" if name == "a.jsonl" else "pair"
    for file in written:
        (tmp_path / file).write_bytes(short * 2 + line)
    monkeypatch.setattr(index, "LONGEST", len(line))
    assert len(read(*written, content=content)) == 3
    monkeypatch.setattr(index, "LONGEST", len(line) - 1)
    for file in written:
        (tmp_path / file).touch()  # to be checked again
    says = rf"{written[0]}:3: has more than 0 MiB, too much for one example"
    with pytest.raises(InputError, match=says):
        read(*written, content=content)
    (tmp_path / "a.txt").write_bytes(line)
    assert len(read("a.txt")) == 1
    with pytest.raises(InputError, match="a.txt:1: has more than 0 MiB"):  # of pairs, though known
        read("a.txt", "a.txt", content="pair")


def test_lengths_are_those_of_the_tokens(read, tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_bytes(ONE.replace(b"\n", b"\tja\n"))
    source = read("a.tsv", content="pair")
    for _ in range(2):  # computed, and from the cache
        lengths = token_lengths(source, tokenizer, tmp_path / "cache")
        right = [[len(tokenizer.encode(text)) for text in pair] for pair in source]
        np.testing.assert_array_equal(lengths, right)


def test_a_write_that_is_cut_short_has_a_reason(tmp_path):
    """numpy's `tofile` on a full disk has neither number nor text of the system's error."""
    path = tmp_path / "lengths"
    with (
        pytest.raises(InputError, match="cannot write .*lengths: 9 .* 4 written; is the disk full"),
        publish(path),
    ):
        raise OSError("9 requested and 4 written")
    assert not path.exists()
