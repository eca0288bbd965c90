import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from text_for_tests import small_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()
