"""A real data set of TFDS, written and read without TensorFlow."""

import json
import os
import re
import shutil
import sys

import numpy as np
import pytest
from text_for_tests import experiment
from tfds_files import (
    PAIRS,
    SHARD,
    TEXTS,
    TinyPairs,
    TinyTexts,
    crc32c,
    prepare,
    prepare_in_tfrecord,
    records_of,
    tfds,
    write_records,
)

from mhe_jax.config import InputError
from mhe_jax.data import open_source, tfds_source, tfrecord
from mhe_jax.tasks import train_batches


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The directory of a prepared data set with two splits of pairs."""
    path = tmp_path_factory.mktemp("tfds")
    return path, prepare(path)


@pytest.fixture
def read(prepared, monkeypatch, tmp_path):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(prepared[0]))
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared[0]))

    def open_it(written, content="pair", fields=("de", "en")):
        return open_source([written], content, fields=fields, cache=tmp_path)

    return open_it


def test_items(read):
    source = read("tfds:tiny_pairs:train")
    assert sorted(source) == sorted(PAIRS)
    assert list(read("tfds:tiny_pairs:train")) == list(source)
    text = read("tfds:tiny_pairs:train", "text", ("en",))
    assert list(text) == [english for _, english in source]
    assert text.key != source.key
    assert text.locate(0) == (0, 0.0)
    assert text.locate(text.extent)[0] == 11
    assert sum(text.size(i) for i in range(12)) == text.extent
    assert source.locate(3.5) == (3, 0.5)


class NestedPairs(TinyPairs):
    name = "nested_pairs"

    def _info(self):
        pair = tfds.features.Translation(languages=("en", "de"))
        features = tfds.features.FeaturesDict({"id": tfds.features.Text(), "translation": pair})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _generate_examples(self, count):
        for i, pair in super()._generate_examples(count):
            yield i, {"id": "x", "translation": pair}


def test_nested_fields(read, prepared):
    prepare(prepared[0], NestedPairs)
    found = read("tfds:nested_pairs:train", fields=("translation.de", "translation.en"))
    assert sorted(found) == sorted(PAIRS)
    for fields in (("translation.de", "translation.fr"), ("text",)):
        with pytest.raises(InputError, match=r"'id', 'translation\.de', 'translation\.en'"):
            read("tfds:nested_pairs:train", fields=fields)


def test_a_set_is_prepared_once(read, tmp_path, monkeypatch):
    """By its own code where it is not there, in a format that is read without TensorFlow."""
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    found = tfds_source.prepare("tiny_pairs")
    assert found == {
        "directory": str(tmp_path / "tiny_pairs" / "1.0.0"),
        "examples": {"train": 12, "test": 3},
    }
    assert sorted(read("tfds:tiny_pairs:train")) == sorted(PAIRS)
    monkeypatch.setattr(TinyPairs, "download_and_prepare", lambda *_: pytest.fail("prepared again"))
    assert tfds_source.prepare("tiny_pairs") == found


def test_version_and_slice(read):
    whole = list(read("tfds:tiny_pairs:train"))
    part = read("tfds:tiny_pairs:1.0.0:train[25%:75%]")
    assert list(part) == whole[3:9]
    assert part.key != read("tfds:tiny_pairs:train").key


@pytest.fixture(scope="module")
def in_tfrecord(prepared):
    return prepare_in_tfrecord(*prepared)


def test_prepared_as_tfrecord(read, in_tfrecord):
    """What TFDS prepares by default is read too."""
    assert list(read("tfds:tiny_pairs_in_tfrecord:train")) == PAIRS
    assert list(read("tfds:tiny_pairs_in_tfrecord:train[3:8]")) == PAIRS[3:8]
    assert list(read("tfds:tiny_pairs_in_tfrecord:train[:5]")) == PAIRS[:5]
    parts = ("", "[3:8]", "[:8]", "[3:]")
    assert len({read(f"tfds:tiny_pairs_in_tfrecord:train{part}").key for part in parts}) == 4
    assert "tensorflow" not in sys.modules


def test_the_index_of_a_tfrecord_is_kept(read, in_tfrecord, monkeypatch):
    list(read("tfds:tiny_pairs_in_tfrecord:train"))
    monkeypatch.setattr(tfrecord, "_scan", None)
    assert list(read("tfds:tiny_pairs_in_tfrecord:train")) == PAIRS


@pytest.fixture(scope="module")
def texts(prepared):
    prepare_in_tfrecord(prepared[0], prepare(prepared[0], TinyTexts), TEXTS)


@pytest.mark.parametrize(
    "name", ["tiny_texts", pytest.param("tiny_texts_in_tfrecord", marks=pytest.mark.rest)]
)
def test_long_and_short_texts_are_seen_alike(read, texts, tokenizer, tmp_path, name):
    """Each word about once an epoch, also where one text is 30 times as long as another."""
    config = experiment(tmp_path, "lm", train=(f"tfds:{name}:train",), sequence_length=240)
    batches = train_batches(config, tokenizer)
    true = sum(len(tokenizer.encode(row["text"])) + 1 for row in TEXTS)
    assert abs(batches.num_tokens / true - 1) < 0.02
    seen = np.zeros(len(TEXTS))
    epochs = 30
    for step in range(round(epochs * batches.steps_per_epoch)):
        for ids in batches.batch(step)["labels"]:
            words = re.findall(r"\d+", tokenizer.decode(ids))[1:-1]  # the outer ones may be cut
            np.add.at(seen, [int(word) // 1000 - 1 for word in words], 1 / epochs)
    rate = seen / [len(row["text"].split()) for row in TEXTS]
    assert rate.min() > 0.75
    assert rate.max() < 1.25


def test_the_sizes_of_records_are_kept(read, texts, monkeypatch):
    first = read("tfds:tiny_texts:train", "text", ("text",))
    monkeypatch.setattr(tfds_source._ArrayRecords, "_index", None)
    again = read("tfds:tiny_texts:train", "text", ("text",))
    assert [again.size(i) for i in range(204)] == [first.size(i) for i in range(204)]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (-1, r"00001-of-00002: record 7 is broken: its checksum is wrong"),
        (-9, r"00001-of-00002: record 7 is broken: its checksum is wrong"),
        (0, r"00001-of-00002: record 1 is broken: the checksum of its length is wrong"),
        (8, r"00001-of-00002: record 1 is broken: the checksum of its length is wrong"),
        (slice(-3, None), r"00001-of-00002: record 7 is cut short"),
        (slice(10, None), r"00001-of-00002: record 1 is cut short"),
        (slice(0, None), r"00001-of-00002: has 0 records, its data set says 7 or more"),
    ],
    ids=str,
)
def test_a_broken_tfrecord_is_one_clear_line(read, in_tfrecord, tmp_path, place, said):
    path = in_tfrecord / SHARD.format(1)
    whole = path.read_bytes()
    data = bytearray(whole)
    if isinstance(place, slice):
        del data[place]
    else:
        data[place] ^= 1
    try:
        path.write_bytes(data)
        with pytest.raises(InputError, match=said) as caught:
            read("tfds:tiny_pairs_in_tfrecord:train")
        path.unlink()
        with pytest.raises(InputError, match="00001-of-00002: no such file"):
            read("tfds:tiny_pairs_in_tfrecord:train")
    finally:
        path.write_bytes(whole)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("index/.*"))


def test_checksum():
    """The check value of CRC-32C, and RFC 3720, B.4: 32 zeros."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_what_is_prepared_needs_no_code(read, prepared):
    """The code of super_glue imports TensorFlow; its prepared data does not."""
    path, _ = prepared
    directory = path / "super_glue" / "wic" / "1.0.2"
    shutil.copytree(path / "tiny_pairs" / "1.0.0", directory)
    for file in directory.glob("tiny_pairs-*"):
        file.rename(directory / file.name.replace("tiny_pairs", "super_glue"))
    info = json.loads((directory / "dataset_info.json").read_text())
    info |= {"name": "super_glue", "configName": "wic", "version": "1.0.2"}
    for split in info["splits"]:
        split.pop("filepathTemplate", None)
    (directory / "dataset_info.json").write_text(json.dumps(info))
    assert sorted(read("tfds:super_glue/wic:train")) == sorted(PAIRS)
    assert "tensorflow" not in sys.modules


def test_text_that_is_str(prepared):
    """TFDS's mock data are str where real data are bytes."""
    from mhe_jax.data.tfds_source import _Texts

    texts = _Texts("mock", [{"de": "ja", "en": b"yes"}, {"de": b"\xff", "en": ""}], ("de", "en"))
    assert texts[0] == ("ja", "yes")
    with pytest.raises(InputError, match=r"mock: field 'de' of item 1 is not UTF-8"):
        texts[1]


@pytest.mark.parametrize(
    ("written", "fields", "said"),
    [
        ("tfds:tiny_pairs", ("de", "en"), r"must be tfds:NAME:SPLIT or tfds:NAME/CONFIG:SPLIT"),
        (
            "tfds:tiny_pairs:dev",
            ("de", "en"),
            r"has no split 'dev'; it has train, test",
        ),
        ("tfds:tiny_pairs:train", ("fr", "en"), r"has no field 'fr'; it has 'de', 'en'"),
        ("tfds:tiny_pairs:train", ("text",), r"data.fields=\('text',\): .* needs 2"),
        ("tfds:no_such_set:train", ("de", "en"), r"TFDS knows no data set 'no_such_set'"),
        ("tfds:wmt14_translate/de-xx:train", ("de", "xx"), r"TFDS cannot open"),
        (
            "tfds:wmt14_translate/de-en:train",
            ("de", "en"),
            r"not prepared in .*wmt14_translate/de-en/1.0.0; "
            r"mhe-jax data wmt14_translate/de-en prepares it$",
        ),
    ],
)
def test_bad_input_is_one_clear_line(read, written, fields, said):
    with pytest.raises(InputError, match=said) as caught:
        read(written, fields=fields)
    assert "\n" not in str(caught.value)


@pytest.fixture
def damaged(prepared, tmp_path, monkeypatch):
    """`damaged(bytes)`: a copy of the data set whose training file is these of its bytes."""
    place = tmp_path / "damaged"
    shutil.copytree(prepared[0] / "tiny_pairs", place / "tiny_pairs")
    (path,) = place.rglob("*train.array_record*")
    whole = path.read_bytes()
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(place))
    monkeypatch.setenv("TFDS_DATA_DIR", str(place))

    def make(spoil):
        path.unlink() if spoil is None else path.write_bytes(spoil(whole))
        return open_source(
            ["tfds:tiny_pairs:train"], "pair", fields=("de", "en"), cache=tmp_path / "cache"
        )

    return make


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (None, r"cannot be read: .*No such file"),
        (lambda whole: whole[: len(whole) // 2], r"example 0 is not there: a file is cut short$"),
        (lambda whole: b"", r"cannot be read: .*64KB"),
        (lambda whole: whole[:-10], r"cannot be read: Invalid Riegeli"),
        (lambda whole: whole[:100] + b"?" + whole[101:], r"cannot be read: Corrupted Riegeli"),
    ],
    ids=["missing", "half", "empty", "tail", "changed"],
)
def test_a_broken_array_record_is_one_clear_line(damaged, spoil, says):
    with pytest.raises(InputError, match=f"^tfds:tiny_pairs:train: {says}") as caught:
        damaged(spoil)
    assert "\n" not in str(caught.value)


def test_a_copy_of_records_has_the_same_key(damaged, tmp_path, monkeypatch, prepared):
    there = damaged(lambda whole: whole)
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(prepared[0]))
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared[0]))
    here = open_source(["tfds:tiny_pairs:train"], "pair", fields=("de", "en"), cache=tmp_path)
    assert here.key == there.key
    part = open_source(["tfds:tiny_pairs:train[:5]"], "pair", fields=("de", "en"), cache=tmp_path)
    assert part.key != here.key


def test_a_tfrecord_that_shrinks_after_it_was_opened(read, in_tfrecord):
    source = read("tfds:tiny_pairs_in_tfrecord:train")
    path = in_tfrecord / SHARD.format(1)
    whole = path.read_bytes()
    try:
        for size in (len(whole) - 5, len(whole) // 2, 0):
            path.write_bytes(whole[:size])
            with pytest.raises(InputError, match="00001-of-00002: has become shorter since it was"):
                source[11]
    finally:
        path.write_bytes(whole)


def test_a_changed_tfrecord_of_equal_size_is_another_text(read, in_tfrecord):
    first = read("tfds:tiny_pairs_in_tfrecord:train").key
    path = in_tfrecord / SHARD.format(1)
    whole, before = path.read_bytes(), path.stat()
    try:
        write_records(path, [r.replace(b"houses", b"horses") for r in records_of(whole)])
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        changed = read("tfds:tiny_pairs_in_tfrecord:train")
        assert changed[11][1] == "horses 11"
        assert changed.key != first
    finally:
        path.write_bytes(whole)
    assert read("tfds:tiny_pairs_in_tfrecord:train").key == first
