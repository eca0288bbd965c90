"""Which changes of the config a run survives."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mhe_jax.config import InputError, OptimizerConfig
from mhe_jax.config.fields import save_json, set_field
from mhe_jax.config.files import CONFIG
from mhe_jax.training import resume
from mhe_jax.training.loop import train
from mhe_jax.training.optimizer import make_optimizer


@pytest.fixture
def begun(tiny, tmp_path):
    config = tiny("mlm")
    (tmp_path / "run").mkdir()
    save_json(config, tmp_path / "run" / CONFIG)
    return config


def test_the_same_config_and_a_new_directory_have_nothing_to_say(begun, tiny):
    assert resume.changed_fields(begun) == []
    assert resume.changed_fields(tiny(workdir="new")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.num_steps", 100),
        ("mesh.fsdp", 2),
        ("optimizer.learning_rate", 0.5),
        ("data.directory", "elsewhere"),
        ("data.test", ("test.en",)),
        ("model.remat", True),
        ("model.attention.form", "materialized"),
        ("model.attention_by_role.encoder.engine", "xla"),
    ],
)
def test_what_may_change_is_told(begun, tiny, name, value):
    (line,) = resume.changed_fields(tiny("mlm", **{name: value}))
    assert line.startswith(f"{name}: ")
    assert "->" in line


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("task", "mlm", "lm"),
        ("model.attention.kind", "mhe_mul", "mha"),
        ("model.scan_layers", False, True),
        ("optimizer.name", "adamw", "adafactor"),
        ("data.train", ["train.en"], ["other.en"]),
        ("data.mask_rate", 0.15, 0.3),
        ("train.seed", 0, 1),
        ("train.eval_batches", None, 1),  # the best is the best of one and the same data
        ("train.init_from", None, "elsewhere"),
        ("evaluation.spelling_noise", 0.0, 0.2),
        ("evaluation.seed", 0, 1),
        ("evaluation.answer_length", 30, 5),
        ("evaluation.no_answer_threshold", 0.0, 1.0),
        # These have a state of their own in the checkpoint.
        ("optimizer.ema_decay", None, 0.9),
        ("optimizer.head_embedding_rate", 1.0, 4.0),
    ],
)
def test_what_may_not_change_is_named_with_both_values(begun, tiny, name, old, new):
    with pytest.raises(InputError) as error:
        resume.changed_fields(tiny("mlm", **{name: new}))
    assert f"{name}={old!r}, not {new!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_of_the_optimizer_that_may_change_leave_the_shape_of_its_state(tiny):
    """All those that `changed_fields` lets by, from their usual values and to them."""
    others = {
        "learning_rate": 0.5,
        "adam_rate": 0.25,
        "schedule": "linear",
        "warmup_steps": 7,
        "beta1": 0.0,
        "beta2": 0.5,
        "epsilon": 1e-6,
        "weight_decay": 0.1,
        "clip_norm": None,
        "accumulate_steps": 2,
        "label_smoothing": 0.1,
    }
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert names == {*others, "name", "ema_decay", "head_embedding_rate"}
    parameters = {"kernel": np.zeros((200, 200)), "bias": np.zeros(3)}

    def shape(config):
        return jax.tree.structure(jax.eval_shape(make_optimizer(config).init, parameters))

    for optimizer in ("adamw", "adafactor"):
        usual = tiny("lm", **{"optimizer.name": optimizer})
        for name, value in others.items():
            assert shape(set_field(usual, f"optimizer.{name}", value)) == shape(usual), name


def test_part_of_the_validation_split_stays_the_same(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    save_json(tiny(**{"train.eval_batches": 2}), tmp_path / "run" / CONFIG)
    with pytest.raises(InputError, match="evaluation.batch_size=8, not 4"):
        resume.changed_fields(tiny(**{"train.eval_batches": 2, "evaluation.batch_size": 4}))


RATE, LINEAR = "optimizer.learning_rate", "optimizer.schedule"


@pytest.mark.parametrize(
    ("courses", "changed"),
    [
        # (steps done before, fields): each leaves a checkpoint, but where the next begins no later.
        ([(0, {}), (0, {RATE: 0.5})], []),  # nothing was trained yet
        ([(0, {}), (3, {RATE: 0.5}), (5, {})], ["3: learning_rate", "5: learning_rate"]),
        ([(0, {}), (3, {LINEAR: "linear"})], ["3: schedule"]),
        # Only some schedules end with the last step.
        ([(0, {}), (3, {"train.num_steps": 50})], []),
        (
            [(0, {LINEAR: "cosine"}), (3, {LINEAR: "cosine", "train.num_steps": 50})],
            ["3: num_steps"],
        ),
        ([(0, {}), (3, {"train.eval_every": 1, "mesh.fsdp": 2, "model.remat": True})], []),
    ],
)
def test_what_changes_in_the_middle_is_kept(tiny, courses, changed):
    meta = {}
    for done, fields in courses:
        config, before = tiny("mlm", **fields), json.loads(json.dumps(meta))
        resume.note_changes(config, meta, done)
        # Killed before its next checkpoint, it goes on again.
        resume.note_changes(config, before, done)
        assert before == json.loads(json.dumps(meta))
    told = [line.split()[1:3] for line in meta["changed"]]
    assert [f"{step} {name.rpartition('.')[2]}" for step, name in told] == changed


HOLDER = """
import sys
from pathlib import Path
from mhe_jax.training import resume
with resume.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_trains_in_a_directory_and_a_killed_one_blocks_nobody(tiny, tmp_path):
    workdir = Path(tiny("lm").workdir)
    command = [sys.executable, "-c", HOLDER, str(workdir)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="run: another process trains here"):
            train(tiny("lm"), jax.devices()[:1])
        assert [path.name for path in workdir.iterdir()] == [resume.LOCK]
        holder.kill()
    for _ in range(2):
        with resume.locked(workdir):
            assert [path.name for path in workdir.iterdir()] == [resume.LOCK]
    assert not list(workdir.iterdir())


@pytest.mark.whole_run
def test_the_result_says_what_was_changed(tiny):
    assert train(tiny("lm", **{"train.num_steps": 2}))["changed"] == []
    longer = {"train.num_steps": 3, RATE: 0.5}
    (line,) = train(tiny("lm", **longer))["changed"]
    assert line.startswith(f"step 2: {RATE} ")
    assert train(tiny("lm", **longer))["changed"] == [line]
    with pytest.raises(InputError, match="train.num_steps is 2: .* has done 3 already"):
        train(tiny("lm", **{"train.num_steps": 2}))


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "checkpoints/7"])
def test_a_new_run_writes_over_nothing(tiny, tmp_path, name):
    """Nor does a run that has lost its config go on with any other."""
    path = tmp_path / "run" / name
    path.mkdir(parents=True)
    with pytest.raises(InputError, match=f"run/{name} is there, but no config.json"):
        resume.check_files(tiny(), tmp_path / "run")


@pytest.mark.whole_run
@pytest.mark.parametrize("task", [pytest.param("mlm", marks=pytest.mark.rest), "translation"])
def test_packed_rows_of_a_mixture_resume_exactly(tiny, saved, tmp_path, task, capsys):
    names = ("train.en", "train.de") if task == "translation" else ("train.en",)
    changes = {
        "data.packing": True,
        "data.train": (*names, *names[::-1]) if task == "translation" else (*names, "train.de"),
        "data.train_weights": (1.0, 2.0),
        "data.length_buckets": (),
        "train.num_steps": 4,
        "train.eval_every": 4,
    }
    whole = tiny(task, **changes)
    result = train(whole, jax.devices()[:1])
    assert np.isfinite(result["validation_loss"])
    assert "33.33% " in capsys.readouterr().err
    parts = set_field(whole, "workdir", str(tmp_path / "parts"))
    for steps in (2, 4):
        train(set_field(parts, "train.num_steps", steps), jax.devices()[:1])
    jax.tree.map(np.testing.assert_array_equal, saved(whole), saved(parts))
