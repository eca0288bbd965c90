"""A real data set of TFDS, written and read without TensorFlow."""

import json
import shutil
import sys

import pytest
from tfds_files import PAIRS, prepare, tfds

from mhe_jax.config import DataConfig, InputError
from mhe_jax.data import open_source


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
        data = DataConfig(fields=fields, cache_directory=str(tmp_path))
        return open_source([written], content, data)

    return open_it


def test_items(read):
    source = read("tfds:tiny_pairs:train")
    assert sorted(source) == sorted(PAIRS)
    assert list(read("tfds:tiny_pairs:train")) == list(source)
    text = read("tfds:tiny_pairs:train", "text", ("en",))
    assert list(text) == [(english,) for _, english in source]
    assert text.key != source.key


def test_version_and_slice(read):
    whole = list(read("tfds:tiny_pairs:train"))
    part = read("tfds:tiny_pairs:1.0.0:train[25%:75%]")
    assert list(part) == whole[3:9]
    assert part.key != read("tfds:tiny_pairs:train").key


def test_prepared_as_tfrecord(read, prepared):
    """TFDS needs TensorFlow to read what it prepares by default: told with what to do."""
    path, builder = prepared
    directory = path / "in_tfrecord" / "1.0.0"
    shutil.copytree(path / builder.name / "1.0.0", directory)
    info = json.loads((directory / "dataset_info.json").read_text())
    info |= {"name": "in_tfrecord", "fileFormat": "tfrecord"}
    for split in info["splits"]:
        split.pop("filepathTemplate", None)
    (directory / "dataset_info.json").write_text(json.dumps(info))
    said = f"tfds:in_tfrecord:train: not prepared in {directory} .*mhe-jax data in_tfrecord"
    with pytest.raises(InputError, match=said):
        read("tfds:in_tfrecord:train")


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
        ("tfds:tiny_pairs:train", ("de",), r"data.fields is \('de',\): .* needs 2"),
        ("tfds:no_such_set:train", ("de", "en"), r"TFDS cannot open 'no_such_set'"),
        ("tfds:wmt14_translate/de-xx:train", ("de", "xx"), r"TFDS cannot open"),
        (
            "tfds:wmt14_translate/de-en:train",
            ("de", "en"),
            "not prepared in .*mhe-jax data wmt14_translate/de-en",
        ),
    ],
)
def test_bad_input_is_one_clear_line(read, written, fields, said):
    with pytest.raises(InputError, match=said) as caught:
        read(written, fields=fields)
    assert "\n" not in str(caught.value)
