"""Configs from files and JSON, and their rules; every mistake is one line that names the field."""

import dataclasses
import json
import os
import re
import sys
import typing
from pathlib import Path

import pytest

from mhe_jax.config import AttentionConfig, Config, DataConfig, InputError
from mhe_jax.config.fields import checked, load_json, save_json, set_field, to_dict
from mhe_jax.config.files import cache_directory, publish
from mhe_jax.config.loading import load_config
from mhe_jax.config.places import path_of, source_path

LM = Config(task="lm", data=DataConfig(train=("a.txt",), validation=("b.txt",)))


def full(name):
    name = re.sub(r"^a\.", "model.attention.", name)
    return re.sub(r"^by\.", "model.attention_by_role.", name)


def changed(config, values):
    for name, value in values.items():
        config = set_field(config, full(name), value)
    return config


def message(function, *arguments):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Files


def test_what_is_published_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a machine that loses power keeps the name of an empty file, or no name."""
    done, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda of: (done.append(os.fstat(of).st_ino), sync(of))[1])
    monkeypatch.setattr(Path, "replace", lambda *of: (done.append("named"), replace(*of))[1])
    with publish(tmp_path / "run", is_directory=True) as draft:
        (draft / "a").mkdir()
        (draft / "a" / "b").write_text("b")
    named = done.index("named")
    written = {path.stat().st_ino for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))}
    assert (set(done[:named]), done[named + 1 :]) == (written, [tmp_path.stat().st_ino])


def test_a_config_without_variants_may_have_lists_and_whole_numbers_for_others(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        "from mhe_jax.config import *\n\n\ndef get_config():\n"
        "    return Config(data=DataConfig(train=['a', 'b']), optimizer=OptimizerConfig(beta1=0))\n"
    )
    config = load_config(str(path))
    assert config == changed(Config(), {"data.train": ("a", "b"), "optimizer.beta1": 0.0})
    assert type(config.optimizer.beta1) is float
    assert config.data.train == ("a", "b")


# JSON


def test_json_reads_back_the_same(tmp_path):
    values = {
        "workdir": "runs/größer",
        "data.length_buckets": (16, 32, 128),
        "by.cross.kind": "mqa",
        "optimizer.clip_norm": None,
        "optimizer.learning_rate": 1 / 3,
        "train.seed": 2**63 - 1,
        "model.attention": AttentionConfig("sha", score_groups=2),
    }
    config = changed(LM, values)
    save_json(config, tmp_path / "config.json")
    assert load_json(tmp_path / "config.json") == config
    assert checked(Config, to_dict(config)) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model"]["attention_by_role"]["cross"]["kind"] == "mqa"
    assert written["data"]["length_buckets"] == [16, 32, 128]
    assert written["train"]["seed"] == 2**63 - 1
    # What a file does not name has its default.
    (tmp_path / "config.json").write_text('{"task": "lm", "model": {"attention": {"kind": "el"}}}')
    assert load_json(tmp_path / "config.json") == changed(Config(task="lm"), {"a.kind": "el"})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tusk": "lm"}, "unknown field tusk; did you mean task"),
        ({"model": {"attention": {"knd": 1}}}, "unknown field .*mean model.attention.kind"),
        ({"model": 3}, "model is 3"),
        ({"task": "speech"}, "task is 'speech': .*'mlm'"),
        ({"train": {"num_steps": 1.5}}, "train.num_steps is 1.5"),
        ({"train": {"num_steps": "5"}}, "train.num_steps is '5'"),
        ({"train": {"num_steps": None}}, "train.num_steps is None"),
        ({"workdir": 1}, "workdir is 1"),
        ({"data": {"train": "a.txt"}}, "data.train is 'a.txt'"),
        ({"data": {"train": ["a", 1]}}, "data.train.1 is 1"),
        ({"model": [0] * 10_000}, r"model is .* \.\.\.: "),
    ],
)
def test_what_json_may_not_say(tmp_path, values, field):
    assert re.match(field, told := message(checked, Config, values))
    assert len(told) < 500
    (path := tmp_path / "config.json").write_text(json.dumps(values))
    assert message(load_json, path) == f"{path}: {told}"


def test_set_field_takes_parts_and_names_what_is_not_there():
    wanted = AttentionConfig("mqa", num_heads=2)
    assert set_field(LM, "model.attention", wanted).model.attention == wanted
    assert "did you mean model.attention.kind" in message(set_field, LM, "model.attention.kid", "m")
    assert "model.features is '8'" in message(set_field, LM, "model.features", "8")


# Ranges

# A field of each range, its ends, and the nearest values beyond them.
MOST, LARGEST = 2**31 - 1, 3.4028234663852886e38
RANGES = [
    ("train.num_steps", 1, MOST, (0, MOST + 1)),
    ("optimizer.warmup_steps", 0, MOST, (-1, MOST + 1)),
    ("train.seed", 0, 2**63 - 1, (-1, 2**63)),
    ("mesh.data", -1, MOST, (-2, MOST + 1)),
    ("by.decoder.dropout_rate", 0.0, 0.999, (-1e-30, 1.0)),
    ("data.mask_rate", 1e-30, 0.999, (0.0, 1.0)),
    ("optimizer.learning_rate", 1e-30, LARGEST, (0.0, 1e39)),
    ("optimizer.weight_decay", 0.0, LARGEST, (-1e-30, 1e39)),
    ("evaluation.spelling_noise", 0.0, 1.0, (-1e-30, 1.001)),
    ("evaluation.top_p", 1e-30, 1.0, (0.0, 1.001)),
    ("evaluation.no_answer_threshold", -LARGEST, LARGEST, (-1e39, 1e39)),
]


@pytest.mark.parametrize(("name", "least", "most", "beyond"), RANGES)
def test_a_field_takes_its_range(name, least, most, beyond):
    changed(changed(Config(), {name: least}), {name: most})
    for value in beyond:
        assert f"{full(name)} is " in message(changed, Config(), {name: value})


def hints_of(cls, prefix=""):
    """{dotted name: type} of every field below a dataclass."""
    hints = {}
    for name, hint in typing.get_type_hints(cls).items():
        is_part = dataclasses.is_dataclass(hint)
        hints |= hints_of(hint, f"{prefix}{name}.") if is_part else {f"{prefix}{name}": hint}
    return hints


def test_every_number_has_a_range():
    beyond = {int: 2**63, int | None: 2**63, float: 1e39, float | None: 1e39}
    numbers = {name: beyond[hint] for name, hint in hints_of(Config).items() if hint in beyond}
    assert set(beyond.values()) == set(numbers.values())
    for name, most in numbers.items():
        for value in (-most, most, float("nan")):
            assert f"{name} is " in message(changed, Config(), {name: value})


# Places: local names, those in buckets, and those that are refused


def test_local_names_stay_paths():
    for name in ("runs/a", "/runs/a", "a:b", "gs:/a", "tfds:glue/cola:train"):
        assert path_of(name) == Path(name)
        assert type(path_of(name)) is type(Path())
    assert source_path("data", "a.txt") == Path("data/a.txt")
    assert source_path("~", "a.txt") == Path("~/a.txt").expanduser()


def test_names_in_buckets_keep_their_scheme(gs, s3):
    place = path_of(f"{gs}/runs") / "a" / "config.json"
    assert str(place) == f"{place}" == f"{gs}/runs/a/config.json"
    assert (place.name, str(place.parent.parent)) == ("config.json", f"{gs}/runs")
    assert path_of(place) is place
    for directory, name in [(s3, "a.txt"), (f"{s3}/", "a.txt"), ("data", f"{s3}/a.txt")]:
        assert str(source_path(directory, name)) == f"{s3}/a.txt"
    assert source_path(gs, "/local/a.txt") == Path("/local/a.txt")


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (path_of, "s3://bucket/run"),
        (path_of, "gs:///run"),
        (path_of, "gs://bucket/a/../b"),
        (path_of, "http://host/run"),
        (lambda name: source_path("data", name), "hdfs://host/a"),
        (lambda name: source_path(name, "a.txt"), "https://host/a"),
        (cache_directory, "gs://bucket/a"),
    ],
)
def test_what_cannot_be_a_place_is_refused(read, name):
    with pytest.raises(InputError, match=rf"^(data\.cache_directory=)?{name}.*: .*takes ") as error:
        read(name)
    assert "\n" not in str(error.value)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(
        InputError, match=r"^gs://bucket/run needs google.cloud.storage: .*\[cloud\]"
    ):
        path_of("gs://bucket/run")
