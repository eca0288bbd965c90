"""Runs Flax's own tests of its attention module with `mha` in the place of Flax's class.

    pip download --no-deps --no-binary flax flax==0.12.8 && tar xzf flax-0.12.8.tar.gz
    python experiments/robustness/flax_tests.py flax-0.12.8/tests/linen/linen_attention_test.py

The file is read where it is. Exit status 0: all tests pass but those in `DIFFERENT`, each of which
is held by a test of ours in tests/attention/test_flax_equality.py.
"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import flax.linen as nn

from mhe_jax.attention import MultiHeadAttention

DIFFERENT = {
    "test_multihead_kv_args": "inputs_kv, deprecated in Flax, is refused with one line",
    "test_multihead_mask_warning": "a mask as third argument, deprecated in Flax, is refused",
}


def main(path: str) -> int:
    # By Flax's names, after which a module without one is called.
    for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
        setattr(nn, name, type(name, (MultiHeadAttention,), {}))
    sys.path.insert(0, str(Path(path).parent))
    tests = unittest.defaultTestLoader.loadTestsFromName(Path(path).stem)
    result = unittest.TextTestRunner().run(tests)
    failed = {case.id().rpartition(".")[2] for case, _ in result.failures + result.errors}
    print(f"{result.testsRun - len(failed)} of {result.testsRun} pass")
    for name in sorted(failed):
        print(f"{name}: {DIFFERENT.get(name, 'FAILS')}")
    for name in sorted(set(DIFFERENT) - failed):
        print(f"{name}: passes, and is named as different")
    return int(failed != set(DIFFERENT))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
