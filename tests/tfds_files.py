"""A real data set of TFDS, written without TensorFlow as array_record."""

import pytest

tfds = pytest.importorskip("tensorflow_datasets")

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


def prepare(path, make=TinyPairs):
    """Prepares `tiny_pairs`, with two splits of pairs, below `path`; returns its builder."""
    builder = make(data_dir=str(path), file_format="array_record")
    builder.download_and_prepare()
    return builder
