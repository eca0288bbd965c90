"""A real data set of TFDS, written without TensorFlow: as array_record, and as tfrecord by hand."""

import json
import struct

import pytest

tfds = pytest.importorskip("tensorflow_datasets")

SHARD = "tiny_pairs_in_tfrecord-train.tfrecord-{:05}-of-00002"
PAIRS = [(f"häuser {i}", f"houses {i}") for i in range(12)]
TEXTS = [
    {"text": " ".join(str(1000 * (i + 1) + j) for j in range(900 if i % 51 == 25 else 30))}
    for i in range(204)
]


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


def prepare(path, make=TinyPairs):
    """Prepares `tiny_pairs`, with two splits of pairs, below `path`; returns its builder."""
    builder = make(data_dir=str(path), file_format="array_record")
    builder.download_and_prepare()
    return builder


class TinyTexts(tfds.core.GeneratorBasedBuilder):
    """200 texts of 30 words and four of 900: word j of text i is the number 1000 (i + 1) + j."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": enumerate(TEXTS)}

    def _generate_examples(self):
        raise NotImplementedError


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


def records_of(data):
    """What the records of a tfrecord file hold."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def prepare_in_tfrecord(path, builder, examples=None):
    """The directory of the same as TFDS's default format has it, in two shards."""
    examples = examples or [{"de": german, "en": english} for german, english in PAIRS]
    directory = path / f"{builder.name}_in_tfrecord" / "1.0.0"
    directory.mkdir(parents=True)
    prepared = path / builder.name / "1.0.0"
    info = json.loads((prepared / "dataset_info.json").read_text())
    info |= {"name": f"{builder.name}_in_tfrecord", "fileFormat": "tfrecord"}
    info["splits"] = [info["splits"][0] | {"shardLengths": ["5", str(len(examples) - 5)]}]
    (directory / "dataset_info.json").write_text(json.dumps(info))
    (directory / "features.json").write_text((prepared / "features.json").read_text())
    records = [builder.info.features.serialize_example(example) for example in examples]
    for shard, part in enumerate((records[:5], records[5:])):
        name = SHARD.format(shard).replace("tiny_pairs", builder.name)
        write_records(directory / name, part)
    return directory
