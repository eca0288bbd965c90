"""A run goes on over the text that it began with, and over no other."""

import gzip
import os
import shutil

import pytest
from whole_runs import train

from mhe_jax import tasks
from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field
from mhe_jax.training import resume


@pytest.fixture
def begun(tiny, text, tmp_path):
    """A run that has done 6 steps over a packed text of its own."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        shutil.copy(text / "validation.en", tmp_path / place / "validation.en")
    data = gzip.compress((text / "train.en").read_bytes(), 0, mtime=1)
    (tmp_path / "here" / "train.en.gz").write_bytes(data)
    names = {"data.directory": str(tmp_path / "here"), "data.train": ("train.en.gz",)}
    config = tiny("lm", **names)
    train(config)
    return set_field(config, "train.num_steps", 8)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_changed_text_of_equal_size_is_refused(begun, tmp_path, split):
    """The same lines in another order: as many bytes and tokens, and the time of before.

    The best checkpoint would be the best of two different texts of validation.
    """
    path = tmp_path / "here" / {"train": "train.en.gz", "validation": "validation.en"}[split]
    pack = {"train": lambda lines: gzip.compress(lines, 0, mtime=1), "validation": bytes}[split]
    unpack = {"train": gzip.decompress, "validation": bytes}[split]
    before, lines = path.stat(), unpack(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(pack(b"".join(lines[::-1])))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(
        InputError, match=rf"^data\.{split} is not the text that the run in"
    ) as told:
        train(begun)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_the_key_of_a_split_is_that_of_its_text(tiny, tmp_path, task):
    """Whatever it is cut into."""
    config = tiny(task)
    tokenizer = tasks.make_tokenizer(config, tmp_path / "tokenizer.model")
    given = tasks.train_batches(config, tokenizer).text
    assert tasks.evaluation_batches(config, tokenizer, "train").text == given
    assert tasks.evaluation_batches(config, tokenizer, "validation").text != given


def test_the_same_text_elsewhere_packed_anew_is_the_same_run(begun, tmp_path):
    data = gzip.decompress((tmp_path / "here" / "train.en.gz").read_bytes())
    (tmp_path / "there" / "train.en.gz").write_bytes(gzip.compress(data, 9, mtime=2))
    shutil.rmtree(tmp_path / "here")
    moved = set_field(begun, "data.directory", str(tmp_path / "there"))
    train(moved)
    assert (tmp_path / "run" / "checkpoints" / "8").is_dir()


def test_a_checkpoint_that_does_not_say_goes_on():
    resume.check_text("run", {}, {"text": "a digest", "validation_text": "another"})
