"""Data sets of TFDS that are not there, or broken; and a cache that is."""

import pytest
from tfds_files import SHARD, prepare, prepare_in_tfrecord, tfds


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    return path, prepare_in_tfrecord(path, prepare(path))


@pytest.fixture(autouse=True)
def found(sets, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(sets[0]))
    monkeypatch.setenv("TFDS_DATA_DIR", str(sets[0]))


ENTRIES = {
    "train": "train.py tiny.py:translation --workdir runs/new --data.fields de en --data.train {}",
    "validation": "train.py tiny.py:translation --workdir runs/new --data.fields de en "
    "--data.train train.en train.de --data.validation {}",
    "mixture": "train.py tiny.py:translation --workdir runs/new --data.fields de en "
    "--data.train train.en train.de {} --data.train_weights 1 1",
    "labels": "train.py tiny.py:labels --workdir runs/new --data.train {}",
}
FAULTS = {
    "tfds:tiny_pairs": "must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:SPLIT",
    "tfds:tiny_pairs:dev": "has no split 'dev'; it has train, test",
    "tfds:no_such_set:train": "TFDS knows no data set 'no_such_set', prepared or not",
    "tfds:wmt14_translate/de-xx:train": "TFDS cannot open 'wmt14_translate/de-xx': ",
    "tfds:wmt14_translate/de-en:train": "not prepared in ",
    "tfds:tiny_pairs:train[:0]": "is empty",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_set(refused, said, name, entry):
    refused(ENTRIES[entry].format(name), said(name, f": {FAULTS[name]}"))


def test_fields_of_a_set(refused, said):
    train = ENTRIES["train"].format("tfds:tiny_pairs:train")
    says = "tfds:tiny_pairs:train: has no field 'fr'; it has 'de', 'en' (data.fields)"
    refused(train.replace("de en", "fr en"), said("", says))
    labels = ENTRIES["labels"].format("tfds:tiny_pairs:train")
    says = "tfds:tiny_pairs:train: example 0: has no 'label'; it has 'de', 'en'"
    refused(labels, said("", says))


@pytest.mark.parametrize("entry", ["train", "validation", "mixture"])
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda data: data[:-3], "record 7 is cut short"),
        (lambda data: data[:8] + b"x" + data[9:], "record 1 is broken: the checksum of its length"),
        (lambda data: data[:-1] + b"x", "record 7 is broken: its checksum is wrong"),
        (lambda data: b"", "has 0 records, its data set says 7 or more"),
        (None, "no such file"),
    ],
    ids=["cut", "length", "data", "empty", "missing"],
)
def test_records(sets, refused, harm, says, entry):
    path = sets[1] / SHARD.format(1)
    whole = path.read_bytes()
    try:
        path.unlink() if harm is None else path.write_bytes(harm(whole))
        arguments = ENTRIES[entry].format("tfds:tiny_pairs_in_tfrecord:train")
        refused(arguments, rf".*tfrecord-00001-of-00002: {says}")
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("harm", ["empty", "cut", "other"])
def test_lengths_in_the_cache_that_are_damaged_are_counted_again(place, good, harm, monkeypatch):
    """Not an error: what is in the cache can be made again."""
    from mhe_jax.data import Tokenizer, pairs
    from mhe_jax.data.opening import open_source

    cache = place / "cache"
    tokenizer = Tokenizer.load(good / "runs" / "translation" / "tokenizer.model")
    source = open_source(("train.en", "train.de"), "pair", cache=cache)
    right = pairs.token_lengths(source, tokenizer, cache)
    (path,) = (cache / "lengths").iterdir()
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": data[:-7], "other": b"one dog"}[harm])
    assert (pairs.token_lengths(source, tokenizer, cache) == right).all()
    assert path.read_bytes() == data


@pytest.mark.parametrize("line", ["{}", "[1]", "3", '{"step": 1}', "[" * 100_000, "\udcff"])
def test_lines_of_metrics_that_are_none_are_left_out(run, line):
    """Not an error: a run that was killed leaves half a line."""
    from mhe_jax.config.files import METRICS
    from mhe_jax.training import tracking

    path = run("lm") / METRICS
    whole = list(tracking.read(path))
    assert len(whole) == 3
    with path.open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    assert list(tracking.read(path)) == whole
