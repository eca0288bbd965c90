"""Configs from files and JSON, and their rules; every mistake is one line that names the field."""

import json
import re

import pytest

from mhe_jax.config import AttentionConfig, Config, DataConfig, InputError
from mhe_jax.config.fields import checked, hints_of, load_json, save_json, set_field, to_dict
from mhe_jax.config.loading import load_config

LM = Config(task="lm", data=DataConfig(train=("a.txt",), validation=("b.txt",)))
CONFIG_FILE = """
from typing import Literal

from mhe_jax.config import Config, DataConfig


def get_config(variant: Literal["", "local"] = "") -> Config:
    return Config(task="lm", workdir=f"runs/{variant or 'full'}", data=DataConfig(train=("a.txt",)))
"""


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


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "language.py"
    path.write_text(CONFIG_FILE)
    return path


# Files


def test_load_config(config_file):
    assert load_config(str(config_file)).workdir == "runs/full"
    assert load_config(f"{config_file}:local").workdir == "runs/local"
    assert "local" in message(load_config, f"{config_file}:big")


def test_a_missing_config_names_its_neighbours(config_file):
    for other in ("demo.py", "glue.py", "squad.py"):
        config_file.with_name(other).touch()
    near = config_file.with_name("langauge.py")
    assert message(load_config, str(near)).endswith(f"; did you mean {config_file}?")


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
        ({"train": {"num_steps": True}}, "train.num_steps is True"),
        ({"train": {"num_steps": "5"}}, "train.num_steps is '5'"),
        ({"train": {"num_steps": None}}, "train.num_steps is None"),
        ({"model": {"remat": 1}}, "model.remat is 1"),
        ({"workdir": 1}, "workdir is 1"),
        ({"data": {"train": "a.txt"}}, "data.train is 'a.txt'"),
        ({"data": {"train": ["a", 1]}}, "data.train.1 is 1"),
        ({"optimizer": {"learning_rate": True}}, "optimizer.learning_rate is True"),
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

TINY, LARGEST = 1e-30, 3.4028234663852886e38
SHARE, RATE, POSITIVE, OTHER = (0.0, 0.999), (TINY, 0.999), (TINY, LARGEST), (0.0, LARGEST)
RANGES = {
    (1, 2**31 - 1): """
        model.vocabulary_size model.vocabulary_multiple model.features model.mlp_features
        model.num_layers model.num_decoder_layers model.max_length model.kronecker.attention
        model.kronecker.mlp model.kronecker.embedding model.num_classes data.sequence_length
        data.batch_size data.tokens_per_batch data.row_multiple data.lsh_pieces data.window_stride
        data.question_length optimizer.accumulate_steps train.num_steps train.eval_every
        train.eval_batches train.checkpoint_every train.keep_checkpoints train.log_every
        evaluation.average_checkpoints evaluation.batch_size evaluation.beam_size
        evaluation.stride evaluation.top_k evaluation.answer_length a.num_heads a.num_kv_heads
        a.num_groups a.score_groups a.score_features a.qkv_features a.query_rank a.key_rank
        a.value_rank a.latent_features a.latent_groups a.rotary_features by.cross.num_heads""",
    (0, 2**31 - 1): """
        model.num_token_types model.num_spans optimizer.warmup_steps train.eval_translate
        train.skip_nonfinite evaluation.min_length evaluation.extra_length""",
    (0, 2**63 - 1): "train.seed evaluation.seed",
    (-1, 2**31 - 1): "mesh.data mesh.fsdp mesh.tensor",
    SHARE: """model.dropout_rate a.dropout_rate by.decoder.dropout_rate optimizer.beta1
        optimizer.beta2 optimizer.label_smoothing""",
    RATE: "data.mask_rate data.corruption_rate optimizer.ema_decay",
    POSITIVE: """model.layer_norm_epsilon model.rotary_base model.rotary_scaling
        optimizer.learning_rate optimizer.head_embedding_rate optimizer.epsilon
        optimizer.clip_norm""",
    OTHER: """a.head_embedding_stddev optimizer.weight_decay evaluation.length_penalty
        evaluation.temperature""",
    (0.0, 1.0): "evaluation.spelling_noise",
    (TINY, 1.0): "evaluation.top_p",
    (-LARGEST, LARGEST): "evaluation.no_answer_threshold",
}


@pytest.mark.parametrize("ends", RANGES)
def test_a_field_takes_its_range(ends):
    least, most = ends
    for name in RANGES[ends].split():
        changed(changed(Config(), {name: least}), {name: most})
        more = most + 1 if isinstance(most, int) else 1.0 if most == 0.999 else most * 1.01
        less = least - 1 if isinstance(least, int) else -most if least == 0 else 2 * least - most
        for value in (less if least != TINY else 0.0, more, float("nan")):
            told = message(changed, Config(), {name: value})
            assert f".{name.rpartition('.')[2]} is " in told


def test_every_number_has_a_range():
    named = {
        name.replace("a.", "model.attention.") if name[:2] == "a." else name
        for names in RANGES.values()
        for name in names.split()
    }
    numbers = {
        name
        for name, hint in hints_of(Config).items()
        if hint in (int, float, int | None, float | None) and "by_role" not in name
    }
    assert numbers <= named
