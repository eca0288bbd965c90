"""Real processes that train as one: the same numbers, one end, nothing lost when one is."""

import json
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import KILL, assert_same

from mhe_jax.config.files import METRICS
from mhe_jax.evaluation import TranslatedSample
from mhe_jax.training import loop, tracking

pytestmark = pytest.mark.whole_run

CHANGES = {
    "model.dropout_rate": 0.1,
    "model.attention.dropout_rate": 0.1,
    "optimizer.ema_decay": 0.9,
    "train.log_every": 1,
    "train.num_steps": 8,
    "train.checkpoint_every": 2,
}
# Tells on standard error how many rows of a batch this process holds, and whether it found a
# tokenizer; process 0 takes its time before it makes one.
TELL = """
import time
from mhe_jax import tasks
from mhe_jax.training import sharding
make = tasks.make_tokenizer
def waiting(config, path):
    time.sleep(2 * (sys.argv[-1] == "0"))
    print("tokenizer", path.exists(), file=sys.stderr)
    return make(config, path)
tasks.make_tokenizer = waiting
whole = sharding.global_batch
def told(rows, mesh):
    print("rows", len(rows["labels"]), file=sys.stderr)
    return whole(rows, mesh)
sharding.global_batch = told
"""


# A process that does not find the directory of process 0 soon says so.
SOON = "from mhe_jax.training import resume; resume.SHOWN_WITHIN = 2"


def numbers_of(workdir):
    """What was computed, in each line of metrics.jsonl."""
    names = ("step", "loss", "gradient_norm", "perplexity")
    lines = tracking.read(Path(workdir) / METRICS)
    return [{name: line[name] for name in names if name in line} for line in lines]


def assert_alike(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=1e-5), (a, b)


def assert_ended(found, code=0):
    assert [status for status, _, _ in found] == [code] * len(found), [err for _, _, err in found]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_what_one_does(tiny, job, saved, tmp_path, count):
    """Dropout, masks, averages and validation; each reads its share; one writes."""
    config = tiny("mlm", **CHANGES)
    loop.train(config, jax.devices()[:1])
    together = tmp_path / "together"
    found = job(config, together, count, before=dict.fromkeys(range(count), TELL))
    assert_ended(found)
    for _, _, err in found:
        assert {line for line in err.splitlines() if line.startswith("rows")} == {
            f"rows {8 // count}"
        }
    assert ["tokenizer True" in err for _, _, err in found] == [p > 0 for p in range(count)]
    assert json.loads(found[0][1].splitlines()[-1])["num_devices"] == count
    assert all("num_devices" not in out for _, out, _ in found[1:])
    assert_alike(numbers_of(config.workdir), numbers_of(together))
    # The checksums are of what each wrote.
    summed = (together / "checkpoints/8/checksums").read_text()
    assert all(f" optimizer/ocdbt.process_{p}/d/" in summed for p in range(count))
    for one, other in zip(
        jax.tree.leaves(saved(config).params),
        jax.tree.leaves(saved(config, together).params),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_processes_translate_the_sample_as_one(tiny, job, tmp_path):
    config = tiny("translation", **{"train.eval_translate": 5, "train.num_steps": 3})
    loop.train(config, jax.devices()[:1], sample=TranslatedSample)
    together = tmp_path / "together"
    assert_ended(job(config, together, 2))
    one, two = (
        [line["bleu"] for line in tracking.read(Path(place) / METRICS) if "bleu" in line]
        for place in (config.workdir, together)
    )
    assert one == pytest.approx(two)
    assert len(one) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (1, 1, 4)])
def test_meshes_across_processes(tiny, job, tmp_path, sizes):
    """Two processes with two devices each, `tensor` within one and across both."""
    names = ("mesh.data", "mesh.fsdp", "mesh.tensor")
    changes = CHANGES | {"model.attention.num_heads": 4}
    config = tiny("lm", **changes)
    loop.train(config, jax.devices()[:1])
    split = tiny("lm", **changes, **dict(zip(names, sizes, strict=True)))
    assert_ended(job(split, tmp_path / "together", 2, devices=2))
    assert_alike(numbers_of(config.workdir), numbers_of(tmp_path / "together"))


def test_a_signal_to_one_process_stops_all_after_the_same_step(tiny, job, tmp_path):
    never = 10**6
    config = tiny(
        "lm",
        **{"train.num_steps": never, "train.eval_every": never, "train.checkpoint_every": never},
    )
    found = job(config, tmp_path / "run", 2, before={1: KILL.format("3, 0, 15")})
    assert_ended(found, 143)
    (step,) = (path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert int(step) > 3
    assert f"SIGTERM: stopped after step {step}, which is saved" in found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_others_and_nothing_is_lost(tiny, job, saved, tmp_path, killed):
    config = tiny("mlm", **CHANGES)
    assert_ended(job(config, tmp_path / "whole", 2))
    begin = time.monotonic()
    found = job(config, tmp_path / "killed", 2, before={killed: KILL.format("5, 0, 9")}, timeout=60)
    assert time.monotonic() - begin < 240  # 60 of them without a sign of life
    other = 1 - killed
    assert found[killed][0] == -9
    assert found[other][0] != 0
    assert not (tmp_path / "killed" / "checkpoints" / "8").exists()
    assert_ended(job(config, tmp_path / "killed", 2))
    assert_same(*(saved(config, tmp_path / name) for name in ("whole", "killed")))
    assert numbers_of(tmp_path / "whole") == numbers_of(tmp_path / "killed")


@pytest.mark.parametrize(
    ("flag", "before", "wrong"),
    [
        ("--train.seed", "", "train.seed is 3"),
        (
            "--workdir",
            "from mhe_jax.training import resume; resume.SHOWN_WITHIN = 2",
            "not the dir",
        ),
        ("--data.directory", "", "the text of data.train is"),
        pytest.param("--data.tokenizer", "", "nowhere", marks=pytest.mark.slow),
    ],
)
def test_processes_that_do_not_agree_are_told(tiny, job, tmp_path, flag, before, wrong):
    """Else they train a mixture of two runs, or wait for each other at the first checkpoint."""
    config = tiny("lm")
    other = tmp_path / "other"
    if flag == "--data.directory":
        shutil.copytree(config.data.directory, other)
        text = other / config.data.train[0]
        text.write_text(text.read_text(encoding="utf-8").swapcase(), encoding="utf-8")
    value = {"--train.seed": "3", "--data.tokenizer": "nowhere"}.get(flag, str(other))
    found = job(config, tmp_path / "run", 2, flags={1: [flag, value]}, before={1: before})
    assert_ended(found, 2)
    for (_, _, err), line in zip(found, ("see its error", wrong), strict=True):
        assert line in err.strip().splitlines()[-1]
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_error_of_process_0_with_the_tokenizer_ends_all(tiny, job, tmp_path):
    fail = """
from mhe_jax import tasks
from mhe_jax.config import InputError
def failing(*_):
    raise InputError("no such words")
tasks.make_tokenizer = failing
"""
    found = job(tiny("lm"), tmp_path / "run", 2, before={0: fail})
    assert_ended(found, 2)
    for (_, _, err), line in zip(found, ("no such words", "see its error"), strict=True):
        assert line in err.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lm", "translation"])
def test_processes_evaluate_as_one(tiny, job, launch, finish, tmp_path, task):
    """Five and seven rows are left for the last batch; beams go over processes too."""
    config = tiny(task, **{"train.num_steps": 3, "evaluation.batch_size": 10})
    loop.train(config, jax.devices()[:1])
    flags = ["--split", "validation"]
    found = job(config, config.workdir, 2, script="eval.py", flags={0: flags, 1: flags})
    assert_ended(found)
    status, out, err = finish(launch(config, config.workdir, "", *flags, script="eval.py"))
    assert status == 0, err
    one, two = json.loads(out.splitlines()[-1]), json.loads(found[0][1].splitlines()[-1])
    measured = [
        name
        for name, value in one.items()
        if type(value) in (int, float) and "second" not in name and name != "num_devices"
    ]
    assert len(measured) > 4
    assert {name: two[name] for name in measured} == pytest.approx(
        {name: one[name] for name in measured}, rel=1e-5
    )
    assert "num_devices" not in found[1][1]
