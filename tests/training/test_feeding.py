"""Batches in order, the next one on its way, and errors where they belong."""

import threading
import time
from contextlib import closing

import pytest

from mhe_jax.training.sharding import feed


def waited(condition):
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_one_ahead_and_in_order():
    put = []

    def to_device(batch):
        put.append(batch)
        return batch * 10

    with closing(feed(range(5), to_device)) as batches:
        for i, batch in enumerate(batches):
            assert batch == 10 * i
            assert waited(lambda i=i: put == list(range(min(i + 2, 5))))


def test_an_error_comes_in_its_place():
    def to_device(batch):
        if batch == 2:
            raise ValueError("no room")
        return batch

    batches = feed(range(5), to_device)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no room"):
        next(batches)


def test_the_thread_ends():
    before = set(threading.enumerate())
    with closing(feed(iter(range(100)), str)) as batches:
        assert next(batches) == "0"
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    assert list(feed([], str)) == []
