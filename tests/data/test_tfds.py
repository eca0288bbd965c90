"""A real data set of TFDS, written and read without TensorFlow."""

import json
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
    TinyTexts,
    prepare,
    prepare_in_tfrecord,
    tfds,
)

from mhe_jax.config import InputError
from mhe_jax.data import open_source, tfrecord
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


def test_version_and_slice(read):
    whole = list(read("tfds:tiny_pairs:train"))
    part = read("tfds:tiny_pairs:1.0.0:train[25%:75%]")
    assert list(part) == whole[3:9]
    assert part.key != read("tfds:tiny_pairs:train").key


@pytest.fixture(scope="module")
def in_tfrecord(prepared):
    return prepare_in_tfrecord(*prepared)


def test_prepared_as_tfrecord(read, in_tfrecord, monkeypatch):
    """What TFDS prepares by default is read too."""
    assert list(read("tfds:tiny_pairs_in_tfrecord:train")) == PAIRS
    assert list(read("tfds:tiny_pairs_in_tfrecord:train[3:8]")) == PAIRS[3:8]
    assert list(read("tfds:tiny_pairs_in_tfrecord:train[:5]")) == PAIRS[:5]
    parts = ("", "[3:8]", "[:8]", "[3:]")
    assert len({read(f"tfds:tiny_pairs_in_tfrecord:train{part}").key for part in parts}) == 4
    assert "tensorflow" not in sys.modules
    monkeypatch.setattr(tfrecord, "_index", None)  # its index is kept
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
    epochs = 15
    for step in range(round(epochs * batches.steps_per_epoch)):
        for ids in batches.batch(step)["labels"]:
            words = re.findall(r"\d+", tokenizer.decode(ids))[1:-1]  # the outer ones may be cut
            np.add.at(seen, [int(word) // 1000 - 1 for word in words], 1 / epochs)
    rate = seen / [len(row["text"].split()) for row in TEXTS]
    assert rate.min() > 0.75
    assert rate.max() < 1.25


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (7, "00001-of-00002: record 1 is broken"),  # the length
        (slice(-3, None), "00001-of-00002: record 7 is broken"),
        (slice(10, None), "00001-of-00002: record 1 is broken"),
        (slice(0, None), "00001-of-00002: has 0 records"),
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


@pytest.mark.parametrize(
    ("written", "fields", "said"),
    [
        ("tfds:tiny_pairs", ("de", "en"), "must be tfds:NAME:SPLIT"),
        ("tfds:tiny_pairs:dev", ("de", "en"), "has no split 'dev'; it has train, test"),
        ("tfds:tiny_pairs:train", ("fr", "en"), r"has no field 'fr'; it has 'de', 'en'"),
        ("tfds:tiny_pairs:train", ("text",), r"data.fields=\('text',\): .* needs 2"),
        ("tfds:no_such_set:train", ("de", "en"), r"TFDS knows no data set 'no_such_set'"),
        ("tfds:wmt14_translate/de-xx:train", ("de", "xx"), r"TFDS cannot open"),
        (
            "tfds:wmt14_translate/de-en:train",
            ("de", "en"),
            "not prepared in .*mhe-jax data wmt14_translate/de-en prepares it$",
        ),
    ],
)
def test_bad_input_is_one_clear_line(read, written, fields, said):
    with pytest.raises(InputError, match=said) as caught:
        read(written, fields=fields)
    assert "\n" not in str(caught.value)
