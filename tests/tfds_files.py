"""A real data set of TFDS, written without TensorFlow: as array_record, and as tfrecord by hand."""

import json
import struct

import pytest

tfds = pytest.importorskip("tensorflow_datasets")

SHARD = "tiny_pairs_in_tfrecord-train.tfrecord-{:05}-of-00002"
PAIRS = [(f"häuser {i}", f"houses {i}") for i in range(12)]


class TinyPairs(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(12), "test": self._generate_examples(3)}

    def _generate_examples(self, count):
        for i, (german, english) in enumerate(PAIRS[:count]):
            yield i, {"de": german, "en": english}


def prepare(path):
    """Prepares `tiny_pairs`, with two splits of pairs, below `path`; returns its builder."""
    builder = TinyPairs(data_dir=str(path), file_format="array_record")
    builder.download_and_prepare()
    return builder


def crc32c(data):
    """Bit by bit, as it is defined: polynomial 0x1edc6f41, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def write_records(path, records):
    """A tfrecord file, by hand."""

    def masked(data):
        crc = crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % (1 << 32))

    with path.open("wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + masked(length) + record + masked(record))


def prepare_in_tfrecord(path, builder):
    """The directory of the same as TFDS's default format has it, in two shards."""
    directory = path / "tiny_pairs_in_tfrecord" / "1.0.0"
    directory.mkdir(parents=True)
    info = json.loads((path / "tiny_pairs" / "1.0.0" / "dataset_info.json").read_text())
    info |= {"name": "tiny_pairs_in_tfrecord", "fileFormat": "tfrecord"}
    info["splits"] = [info["splits"][0] | {"shardLengths": ["5", "7"]}]
    (directory / "dataset_info.json").write_text(json.dumps(info))
    features = (path / "tiny_pairs" / "1.0.0" / "features.json").read_text()
    (directory / "features.json").write_text(features)
    encode = builder.info.features.serialize_example
    for shard, pairs in enumerate((PAIRS[:5], PAIRS[5:])):
        records = [encode({"de": german, "en": english}) for german, english in pairs]
        write_records(directory / SHARD.format(shard), records)
    return directory
