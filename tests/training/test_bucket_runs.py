"""Runs under gs://, against a store on 127.0.0.1: to the bit those of a disk."""

import json
import os
import uuid

import jax
import pytest
from whole_runs import assert_same, logged

import mhe_jax
from mhe_jax.config import Comparison, EvaluationConfig, InputError, places
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import CONFIG, METRICS, RESULT, TOKENIZER, check_new, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.evaluation import evaluate
from mhe_jax.interchange import export
from mhe_jax.report import report
from mhe_jax.training import loop, tracking

# A kill -9 of its own when all files of step 4 are written but for the last one.
KILL_IN_SAVE = """
import os
from mhe_jax.training.checkpoint import steps

write = steps.write_checksums

def killing(step):
    if step.name == "4":
        os.kill(os.getpid(), 9)
    write(step)

steps.write_checksums = killing
"""
CHANGES = {"optimizer.ema_decay": 0.9, "train.num_steps": 6}


@pytest.fixture
def bucket(gs):
    """A directory that no other test uses."""
    return f"{gs}/{uuid.uuid4().hex}"


@pytest.fixture
def one_device():
    return jax.devices()[:1]


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """Where the test is at work, nothing is left behind."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    yield
    assert not os.listdir(place)


@pytest.mark.whole_run
def test_a_run_and_all_that_is_done_with_it(finished, tiny, saved, bucket, tmp_path, one_device):
    config, wanted = finished("lm")
    there = set_field(config, "workdir", f"{bucket}/runs/a")
    found = loop.train(there, one_device)
    assert found["best_validation_loss"] == wanted["best_validation_loss"]
    assert_same(saved(config), saved(there))
    assert logged(config.workdir) == logged(there.workdir) != []
    names = {path.name for path in path_of(there.workdir).iterdir()}
    assert {CONFIG, METRICS, RESULT, TOKENIZER, "checkpoints"} <= names

    assert loop.train(there, one_device) == found  # complete: the same again
    longer = set_field(there, "train.num_steps", 7)
    assert loop.train(longer, one_device)["steps"] == 7

    scores = evaluate(there.workdir, EvaluationConfig(split="validation"), devices=one_device)
    file = path_of(there.workdir) / "eval_validation.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(scores))
    run = mhe_jax.load(there.workdir, devices=one_device)
    exported = export(there.workdir, tmp_path / "export", "safetensors")
    assert exported["steps"] == run.steps
    out = tmp_path / "report"
    found = report.compare([f"{bucket}/runs"], Comparison(out=str(out), split="validation"))
    assert found["runs"]["done"] == 1

    # Copied there by hand, as people do; and what starts from it.
    for path in (tmp_path / "export").iterdir():
        path_of(f"{bucket}/export/{path.name}").write_bytes(path.read_bytes())
    copied = mhe_jax.load(f"{bucket}/export", devices=one_device)
    assert_same(jax.device_get(copied.params), jax.device_get(run.params))
    tuned = tiny("lm", workdir=f"{bucket}/runs/b", **{"train.init_from": there.workdir})
    assert loop.train(tuned, one_device)["steps"] == 6


@pytest.mark.whole_run
def test_a_kill_in_the_middle_of_a_save_costs_that_one(
    tiny, launch, finish, saved, bucket, tmp_path
):
    config = tiny("lm", **CHANGES)
    code, _, err = finish(launch(config, tmp_path / "whole"))
    assert code == 0, err
    killed, _, err = finish(launch(config, f"{bucket}/run", KILL_IN_SAVE))
    assert killed == -9, err
    steps = path_of(f"{bucket}/run/checkpoints")
    assert (steps / "4" / "params" / "manifest.ocdbt").exists()
    assert not (steps / "4" / "commit_success.txt").exists()
    code, _, err = finish(launch(config, f"{bucket}/run"))
    assert code == 0, err
    assert "3 of 6 steps are done" in err
    assert_same(saved(config, tmp_path / "whole"), saved(config, f"{bucket}/run"))
    assert logged(tmp_path / "whole") == logged(f"{bucket}/run")


@pytest.mark.slow
def test_a_checkpoint_with_other_bytes_is_put_aside(tiny, bucket, capsys, one_device):
    config = tiny("lm", workdir=f"{bucket}/run", **{"train.num_steps": 4})
    loop.train(config, one_device)
    place = path_of(config.workdir)
    data = next(path for path in (place / "checkpoints/4/params").rglob("*") if "/d/" in str(path))
    data.write_bytes(data.read_bytes()[::-1])
    capsys.readouterr()
    loop.train(config, one_device)
    told = capsys.readouterr().err
    assert f"warning: {data}: is not as it was written" in told
    assert (place / "checkpoints_unreadable" / "4" / "params" / "manifest.ocdbt").exists()
    assert "3 of 4 steps are done" in told


def test_a_bucket_that_is_not_there(tiny, gs, one_device):
    config = tiny("lm", workdir="gs://no-such-bucket/run")
    with pytest.raises(InputError, match="there is no bucket gs://no-such-bucket$"):
        loop.train(config, one_device)
    with pytest.raises(InputError, match="gs://no-such-bucket/run"):
        mhe_jax.load("gs://no-such-bucket/run")


@pytest.mark.parametrize(("field", "value"), [("tensorboard", True), ("profile_steps", (1, 2))])
def test_what_grows_where_it_lies_is_refused(tiny, field, value, gs):
    config = tiny("lm", workdir=f"{gs}/run", **{f"train.{field}": value})
    with pytest.raises(InputError, match=f"train.{field}.*local"):
        loop.train(config)
    assert not path_of(f"{gs}/run").exists()


def test_the_log_is_there_before_the_checkpoint(bucket):
    workdir = path_of(bucket)
    with tracking.Tracker(bucket, 4) as tracker:
        tracker.log(1, "train", {"loss": 1.0})
        assert not (workdir / METRICS).exists()
        tracker.upload()
        assert [line["step"] for line in tracking.read(workdir / METRICS)] == [1]
        tracker.log(2, "train", {"loss": 0.5})
    assert [line["step"] for line in tracking.read(workdir / METRICS)] == [1, 2]
    with tracking.Tracker(bucket, 4, 1) as tracker:  # what came after is dropped
        tracker.log(2, "train", {"loss": 0.25})
    assert [line["loss"] for line in tracking.read(workdir / METRICS)] == [1.0, 0.25]


def test_a_write_that_fails_is_one_line(gs, monkeypatch):
    def refuse(*_, **__):
        raise OSError("Forbidden: o\nno storage.objects.create")

    monkeypatch.setattr(places._store("gs"), "pipe_file", refuse)
    with pytest.raises(InputError, match=r"^cannot write gs://bucket/a: Forbidden: o no storage"):
        write_whole(path_of(f"{gs}/a"), "text")


def test_what_must_be_local_says_so(gs):
    with pytest.raises(InputError, match="^gs://bucket/out: .*takes a local path"):
        check_new(path_of(f"{gs}/out"))
