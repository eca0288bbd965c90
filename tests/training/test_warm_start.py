"""Tuning an encoder: it learns, starts from exactly what was pre-trained, says what is wrong."""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_runs import assert_same, params_of

from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, save_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.model.stack import unroll_layers
from mhe_jax.training import from_run
from mhe_jax.training.from_run import check_init_from
from mhe_jax.training.loop import train
from mhe_jax.training.sharding import make_mesh
from mhe_jax.training.state import TrainState
from mhe_jax.training.tracking import read

pytestmark = pytest.mark.whole_run


@pytest.fixture(scope="module")
def moods(tmp_path_factory):
    """Texts whose label is told by one word, in a directory."""
    directory = tmp_path_factory.mktemp("moods")
    draw = random.Random(0)
    for name, count in (("train", 240), ("dev", 40)):
        lines = ["text\tlabel"]
        for i in range(count):
            words = draw.choices(["one", "small", "dog", "runs"], k=draw.randint(1, 5))
            words.insert(draw.randrange(len(words) + 1), ["glad", "sad"][i % 2])
            lines.append(" ".join(words) + "\t" + ["up", "down"][i % 2])
        (directory / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def tuned(tiny, moods, tmp_path):
    """`tuned(**changes)`: a config on those texts."""

    def make(**changes):
        fields = {
            "data.directory": str(moods),
            "data.train": ("train.tsv",),
            "data.validation": ("dev.tsv",),
            "data.test": ("dev.tsv",),
            "data.length_buckets": (16,),
            "data.batch_size": 16,
            "workdir": str(tmp_path / "tuned"),
            **changes,
        }
        return tiny("classification", **fields)

    return make


# A step so small that nothing moves.
STILL = {
    "train.num_steps": 1,
    "optimizer.learning_rate": 1e-30,
    "optimizer.weight_decay": 0.0,
    "data.validation": (),
}


@pytest.fixture
def one():
    return jax.devices()[:1]


@pytest.fixture
def pretrained(finished):
    """The workdir of a finished run of a masked language model."""
    return finished("mlm")[0].workdir


def test_it_learns_and_keeps_the_best_by_score(tuned, one):
    config = tuned(
        **{
            "train.num_steps": 60,
            "train.eval_every": 20,
            "optimizer.learning_rate": 1e-2,
            "model.dropout_rate": 0.0,
        }
    )
    result = train(config, one)
    assert result["best_validation"]["accuracy"] >= 90
    saved = load_json(Path(config.workdir) / "config.json")
    assert (saved.data.labels, saved.model.num_classes) == (("down", "up"), 2)
    found = evaluate(config.workdir, saved.evaluation, devices=one)
    assert found["accuracy"] == found["score"] == result["best_validation"]["score"]
    assert found["steps"] == [result["best_step"]]
    header, *written = Path(config.workdir, "test.predictions.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    right = [f"{i}\t{['up', 'down'][i % 2]}" for i in range(40)]
    equal = sum(line == other for line, other in zip(written, right, strict=True))
    assert 100 * equal / 40 == found["accuracy"]
    # The same command says the same again.
    assert train(config, one)["best_validation"] == result["best_validation"]


def test_a_start_takes_exactly_the_encoder(pretrained, tuned, one):
    run = pretrained
    fields = {"train.init_from": run, **STILL}
    config = tuned(**fields)
    train(config, one)
    theirs, ours = params_of(run), params_of(config.workdir)
    assert set(ours) == {"embeddings", "encoder", "pooler", "classifier"}
    for name in ("embeddings", "encoder"):
        assert_same(ours[name], theirs[name])
    assert Path(config.workdir, "tokenizer.model").read_bytes() == (
        Path(run, "tokenizer.model").read_bytes()
    )
    # The head is that of a run from nothing, which has another encoder.
    nothing = tuned(**{**fields, "train.init_from": None, "workdir": config.workdir + "-nothing"})
    nothing = set_field(nothing, "data.tokenizer", str(Path(run, "tokenizer.model")))
    train(nothing, one)
    fresh = params_of(nothing.workdir)
    np.testing.assert_array_equal(fresh["pooler"]["kernel"], ours["pooler"]["kernel"])
    assert not np.array_equal(fresh["embeddings"]["token"], ours["embeddings"]["token"])


def test_a_start_is_from_the_best_checkpoint(tuned, one, monkeypatch):
    config, asked = tuned(**{"model.num_classes": 2}), []
    monkeypatch.setattr(
        from_run,
        "restore_params",
        lambda run, which, abstract, tokenizer: asked.append((which, tokenizer)) or (None, (3,)),
    )
    monkeypatch.setattr(from_run, "load_tokenizer", lambda config, path: path)
    assert from_run.read_run("run", config, make_mesh(config, one))[1] == 3
    assert asked == [("best", Path("run") / "tokenizer.model")]


def test_a_stopped_run_does_not_start_again(pretrained, tuned, one):
    """Resuming takes the run's own parameters, not the pre-trained ones."""
    part = tuned(**{"train.init_from": pretrained, "train.num_steps": 4})
    train(set_field(part, "train.num_steps", 2), one)
    # A start anew would take the first step again.
    assert train(part, one)["steps"] == 4
    lines = read(Path(part.workdir, "metrics.jsonl"))
    assert [line["step"] for line in lines if line["split"] == "train"] == [2, 4]
    with pytest.raises(InputError, match="holds a run with train.init_from="):
        train(set_field(part, "train.init_from", None), one)


def test_a_run_goes_on_without_the_one_it_started_from(copied, tuned, one, tmp_path):
    run = copied("mlm").workdir
    config = tuned(**{"train.init_from": run, "train.num_steps": 2})
    train(config, one)
    Path(run).rename(tmp_path / "elsewhere")
    assert train(set_field(config, "train.num_steps", 3), one)["steps"] == 3
    command = ["configs/finetune.py:rte", "--train.init_from", run, "--workdir", config.workdir]
    found = parse_train_arguments([*command, "--data.sequence_length", "16"])
    assert found.model.features == config.model.features
    Path(tmp_path / "elsewhere").rename(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model.features": 32},
            r"model.features is 32: must be 16, as in train.init_from=.*mlm$",
        ),
        ({"model.attention.kind": "mha"}, r"model.attention.kind is 'mha': must be 'mhe_mul'"),
        ({"model.activation": "relu"}, r"model.activation is 'relu': must be 'gelu'"),
        ({"model.num_token_types": 2}, r"model.num_token_types is 2: must be 0"),
        ({"train.init_from": "gone"}, r"train.init_from: no run at gone"),
        (
            {"data.tokenizer": "x"},
            r"data.tokenizer is 'x': must be None: train.init_from",
        ),
        (
            {"train.eval_batches": 1},
            r"train.eval_batches is 1: must be None",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(tuned, tiny, tmp_path, changes, said):
    mlm = tiny("mlm", workdir=str(tmp_path / "mlm"))
    Path(mlm.workdir).mkdir()
    save_json(mlm, Path(mlm.workdir) / "config.json")
    config = tuned(**{"train.init_from": mlm.workdir, **changes})
    with pytest.raises(InputError, match=said) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert not Path(config.workdir).exists()


@pytest.mark.parametrize(
    ("task", "theirs", "said"),
    [
        ("classification", "lm", "a run of task lm: takes a run of an encoder"),
        ("mlm", "translation", "a run of task translation: takes a run of an encoder"),
        ("lm", "mlm", "a run of task mlm: takes a run of task lm"),
        ("translation", "lm", "a run of task lm: takes a run of task translation"),
    ],
)
def test_a_run_of_another_task_has_nothing_to_give(tuned, tiny, tmp_path, task, theirs, said):
    other = tiny(theirs, workdir=str(tmp_path / "other"))
    Path(other.workdir).mkdir()
    save_json(other, Path(other.workdir) / "config.json")
    make = tuned if task == "classification" else lambda **fields: tiny(task, **fields)
    with pytest.raises(InputError, match=said):
        check_init_from(make(**{"train.init_from": other.workdir}))


@pytest.mark.parametrize(
    "task",
    [
        "lm",
        pytest.param("translation", marks=pytest.mark.rest),
        pytest.param("mlm", marks=pytest.mark.rest),
    ],
)
def test_a_run_of_the_same_task_is_taken_whole(tiny, one, tmp_path, task):
    """Also with layers scanned."""
    fields = {"model.num_layers": 2, "data.validation": (), "train.num_steps": 2}
    first = tiny(task, **fields, workdir=str(tmp_path / "first"))
    train(first, one)
    fields = {"train.init_from": first.workdir, "model.num_layers": 2, **STILL}
    fields["model.scan_layers"] = True
    config = tiny(task, **fields, workdir=str(tmp_path / "second"))
    train(config, one)
    theirs, ours = params_of(first.workdir), unroll_layers(params_of(config.workdir))
    assert_same(ours, theirs)
    # And back.
    again = tiny(
        task,
        **{
            **fields,
            "model.scan_layers": False,
            "train.init_from": config.workdir,
            "workdir": str(tmp_path / "third"),
        },
    )
    train(again, one)
    assert_same(params_of(again.workdir), theirs)


@pytest.mark.parametrize("length", [12, 24])
def test_positions_are_cut_or_drawn(finished, tiny, one, tmp_path, length):
    first, _ = finished("lm")
    fields = {"model.max_length": length, "data.sequence_length": 12, **STILL}
    config = tiny(
        "lm", **fields, **{"train.init_from": first.workdir}, workdir=str(tmp_path / "second")
    )
    train(config, one)
    file = str(Path(first.workdir, "tokenizer.model"))
    train(tiny("lm", **fields, **{"data.tokenizer": file}, workdir=str(tmp_path / "new")), one)
    theirs, ours, fresh = (
        params_of(run)["embeddings"]["position"]
        for run in (first.workdir, config.workdir, tmp_path / "new")
    )
    both = min(16, length)
    np.testing.assert_array_equal(ours[:both], theirs[:both])
    np.testing.assert_array_equal(ours[both:], fresh[both:])
    assert ours.shape == (length, 16)


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(("down", "up"), marks=pytest.mark.rest),
        ("up", "down"),
        ("down", "sideways", "up"),
    ],
)
def test_other_labels_get_a_head_of_their_own(tuned, one, tmp_path, labels):
    moves = {"train.num_steps": 2, "data.validation": ()}
    first = tuned(workdir=str(tmp_path / "first"), **moves)
    train(first, one)
    fields = {"train.init_from": first.workdir, "data.labels": labels, **STILL}
    config = tuned(**fields, workdir=str(tmp_path / "second"))
    train(config, one)
    theirs, ours = params_of(first.workdir), params_of(config.workdir)
    assert_same(ours["encoder"], theirs["encoder"])
    same = np.array_equal(ours["pooler"]["kernel"], theirs["pooler"]["kernel"])
    assert same == (labels == ("down", "up"))
    assert ours["classifier"]["kernel"].shape == (16, len(labels))


def test_the_command_line_takes_the_shape_of_the_other_run(tiny, tmp_path):
    mlm = tiny("mlm", workdir=str(tmp_path / "mlm"), **{"model.dropout_rate": 0.3})
    Path(mlm.workdir).mkdir()
    save_json(mlm, Path(mlm.workdir) / "config.json")
    command = ["configs/finetune.py:rte", "--train.init_from", mlm.workdir]
    found = parse_train_arguments([*command, "--data.sequence_length", "16"])
    assert found.model == dataclasses.replace(mlm.model, dropout_rate=0.1)
    pooled = tiny("mlm", workdir=mlm.workdir, **{"model.pooling": "mean"})
    save_json(pooled, Path(mlm.workdir) / "config.json")
    found = parse_train_arguments([*command, "--data.sequence_length", "16"])
    assert found.model.pooling == "first"  # of the head, which is its own
    with pytest.raises(InputError, match="train.init_from: no run at .*mlmm"):
        parse_train_arguments([*command[:2], mlm.workdir + "m"])


def filled(value, *names):
    return {name: {"token": jnp.full(3, value)} for name in names}


@pytest.fixture
def start(tiny, monkeypatch):
    """`start(fields, average)`: a state before and after a start from a run of the same config."""

    def make(fields, average=True):
        theirs = set_field(tiny("classification"), "train.init_from", "other")
        monkeypatch.setattr(from_run, "config_of", lambda *_: theirs)
        found = filled(7.0, *from_run.ENCODER, "head")
        monkeypatch.setattr(from_run, "read_run", lambda *_: (found, 0, None))
        config = theirs
        for name, value in fields.items():
            config = set_field(config, name, value)
        fresh = filled(0.0, *from_run.ENCODER, "head")
        ema = fresh if average else None
        state = TrainState(step=0, params=fresh, opt_state=(), ema_params=ema, key=None)
        return from_run.start_from("other", config, state, make_mesh(config, jax.devices()[:1]))

    return make


def test_an_average_starts_with_what_is_taken_in_arrays_of_its_own(start):
    """A step gives up those that it is given."""
    started = start({})
    assert_same(started.params, filled(7.0, *from_run.ENCODER, "head"))
    assert_same(started.ema_params, started.params)
    assert started.ema_params["encoder"]["token"] is not started.params["encoder"]["token"]
    assert start({}, average=False).ema_params is None


@pytest.mark.parametrize("name", ["num_classes", "num_spans"])
def test_a_head_of_another_shape_is_not_taken(start, name):
    started = start({f"model.{name}": 5})
    assert_same(started.params, filled(7.0, *from_run.ENCODER) | filled(0.0, "head"))
