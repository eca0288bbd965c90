import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from text_for_tests import small_tokenizer  # noqa: E402

from mhe_jax.config import DataConfig  # noqa: E402
from mhe_jax.data import open_source  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def read(tmp_path):
    """Opens what is written below `tmp_path`."""

    def open_it(*written, content="text", **fields):
        places = {"directory": str(tmp_path), "cache_directory": str(tmp_path / "cache")}
        return open_source(written, content, DataConfig(**places | fields))

    return open_it
