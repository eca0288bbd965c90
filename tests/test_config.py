"""Configs from files and JSON, and their rules; every mistake is one line that names the field."""

import json
import re

import pytest

from mhe_jax.config import AttentionConfig, Config, DataConfig, InputError
from mhe_jax.config.fields import checked, hints_of, load_json, save_json, set_field, to_dict
from mhe_jax.config.loading import load_config

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


def test_every_number_has_a_range():
    beyond = {int: 2**63, int | None: 2**63, float: 1e39, float | None: 1e39}
    numbers = {name: beyond[hint] for name, hint in hints_of(Config).items() if hint in beyond}
    assert set(beyond.values()) == set(numbers.values())
    for name, most in numbers.items():
        for value in (-most, most, float("nan")):
            assert f"{name} is " in message(changed, Config(), {name: value})
