"""Configs from files and JSON, and their rules; every mistake is one line."""

import json

import pytest

from mhe_jax.config import (
    AttentionByRole,
    AttentionConfig,
    AttentionOverride,
    Config,
    DataConfig,
    InputError,
    MeshConfig,
    fields,
    loading,
    rules,
)

LM = Config(task="lm", data=DataConfig(train=("a.txt",), validation=("b.txt",)))
PAIRS = Config(task="translation", data=DataConfig(train=("a.en", "a.de")))

DECODER_KIND = "model.attention_by_role.decoder.kind"
CONFIG_FILE = """
from typing import Literal

from mhe_jax.config import Config, DataConfig


def get_config(variant: Literal["", "local"] = "") -> Config:
    return Config(task="lm", workdir=f"runs/{variant or 'full'}", data=DataConfig(train=("a.txt",)))
"""


def changed(config, **values):
    for name, value in values.items():
        config = fields.set_field(config, name.replace("__", "."), value)
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
    assert loading.load_config(str(config_file)).workdir == "runs/full"
    assert loading.load_config(f"{config_file}:local").workdir == "runs/local"


def test_load_config_without_variants(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("from mhe_jax.config import Config\n\ndef get_config():\n    return Config()\n")
    assert loading.load_config(str(path)) == Config()


def test_missing_config_names_its_neighbours(config_file):
    near = config_file.with_name("langauge.py")
    assert message(loading.load_config, str(near)) == (
        f"no config file {near}; did you mean {config_file}?"
    )
    assert str(config_file) in message(loading.load_config, str(config_file)[:-3])
    assert str(config_file) in message(loading.load_config, str(config_file.parent))
    nowhere = config_file.parent / "nowhere" / "x.py"
    assert "there is no directory" in message(loading.load_config, str(nowhere))


def test_the_nearest_config_is_that_of_the_nearest_name(config_file):
    for other in ("demo.py", "glue.py", "multi30k.py", "squad.py"):
        config_file.with_name(other).touch()
    typed = config_file.with_name("multi31k.py")
    found = config_file.with_name("multi30k.py")
    assert message(loading.load_config, str(typed)).endswith(f"; did you mean {found}?")


def test_unknown_variant_names_the_variants(config_file):
    assert message(loading.load_config, f"{config_file}:big").endswith(
        "no variant 'big': one of local, or none"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\ny = = 2\n", ":2: invalid syntax"),
        ("x = 1\n\nx / 0\n", ":3: ZeroDivisionError: division by zero"),
        (
            "from mhe_jax.config import Config\ndef get_config(variant=''):\n"
            "    return Config(tusk='lm')\n",
            ":3: TypeError: ",
        ),
        (
            "from mhe_jax.config import InputError\ndef get_config():\n"
            "    raise InputError('set DATA\\nfirst')\n",
            ":3: set DATA first",
        ),
        (
            "def get_config():\n    return half(3)\n\n\ndef half(n):\n    return n / 0\n",
            ":6: ZeroDivisionError: ",
        ),
        ("import no_such_module_anywhere\n", ":1: ModuleNotFoundError: No module named"),
        ("x = 1\n", ": has no function get_config"),
        ("def get_config():\n    return {}\n", ": get_config() returned dict, not a Config"),
    ],
)
def test_config_that_fails_names_its_line(tmp_path, text, complaint):
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert f"{path}{complaint}" in message(loading.load_config, str(path))


# JSON


def test_json_round_trip(tmp_path):
    config = changed(
        PAIRS,
        data__length_buckets=(16, 32, 128),
        model__attention_by_role__cross__kind="mqa",
        optimizer__clip_norm=None,
    )
    fields.save_json(config, tmp_path / "config.json")
    assert fields.load_json(tmp_path / "config.json") == config
    assert fields.from_dict(fields.to_dict(config)) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_json_keeps_text_that_is_not_ascii(tmp_path):
    config = changed(LM, workdir="runs/größer")
    fields.save_json(config, tmp_path / "config.json")
    assert fields.load_json(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"tusk": "lm"}, "unknown field tusk; did you mean task?"),
        (
            {"model": {"attention": {"knd": "mha"}}},
            "unknown field model.attention.knd; did you mean model.attention.kind",
        ),
        ({"model": 3}, "model is 3: takes a dictionary of its fields"),
        ({"task": "speech"}, "task is 'speech': takes one of mlm, lm, translation"),
        ({"train": {"num_steps": 1.5}}, "train.num_steps is 1.5: takes a whole number"),
        ({"train": {"num_steps": True}}, "train.num_steps is True: takes a whole number"),
        ({"train": {"num_steps": "5"}}, "train.num_steps is '5': takes a whole number"),
        ({"model": {"remat": 1}}, "model.remat is 1: takes True or False"),
        ({"data": {"train": "a.txt"}}, "data.train is 'a.txt': takes any number of strings"),
        ({"data": {"train": ["a", 1]}}, "data.train is ['a', 1]: takes any number of strings"),
        ({"optimizer": {"learning_rate": None}}, "learning_rate is None: takes a number"),
        ({"optimizer": {"learning_rate": True}}, "learning_rate is True: takes a number"),
    ],
)
def test_json_mistakes(values, complaint):
    assert complaint in message(fields.from_dict, values)


def test_json_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "config.json"
    assert "cannot read" in message(fields.load_json, path)
    path.write_text("{")
    assert f"{path}: not JSON" in message(fields.load_json, path)
    path.write_text("[]")
    assert f"{path}: not a config" in message(fields.load_json, path)
    path.write_text(json.dumps({"task": "lm", "tusk": 1}))
    assert message(fields.load_json, path).startswith(f"{path}: unknown field tusk")


def test_the_config_of_another_program_is_no_run(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"add_source_bos": False}))
    assert (
        message(fields.load_json, path)
        == f"{path}: not the config of a run, but of another program"
    )
    path.write_text(json.dumps({"architectures": ["A"], "model_type": "gpt2"}))
    told = message(fields.load_json, path)
    assert told.startswith(f"{path}: not the config of a run, but of another program; `convert ")
    assert f"`convert {tmp_path} NEW`" in told


def test_whole_numbers_fit_fields_of_numbers():
    config = fields.from_dict({"optimizer": {"learning_rate": 1}})
    assert type(config.optimizer.learning_rate) is float


def test_set_field():
    config = fields.set_field(Config(), "model.attention_by_role.cross.num_heads", 4)
    assert config.model.attention_by_role.cross.num_heads == 4
    assert fields.set_field(config, "model.attention", AttentionConfig("sha")).model.attention == (
        AttentionConfig("sha")
    )
    assert fields.set_field(config, "data.train", ["a", "b"]).data.train == ("a", "b")
    assert "did you mean model.attention.kind" in message(
        fields.set_field, config, "model.attention.kid", "mha"
    )
    assert "unknown field task.kind" in message(fields.set_field, config, "task.kind", "mha")
    assert "model.features is '8': takes a whole number" in message(
        fields.set_field, config, "model.features", "8"
    )


# Rules between fields


@pytest.mark.parametrize(("hashing", "room"), [(None, 45), ("md_pool", 44)])
def test_windows_hold_a_question_and_what_stands_between(hashing, room):
    """bos, the question, eos (hashed words: two), the context, eos."""
    data = DataConfig(dataset="squad", train=("a.json",), sequence_length=64, question_length=16)
    config = changed(Config(task="span", data=data), model__num_spans=None, model__hashing=hashing)
    rules.check(changed(config, data__window_stride=room))
    told = message(rules.check, changed(config, data__window_stride=room + 1))
    assert told.startswith(f"data.window_stride is {room + 1}: at most data.sequence_length - ")
    assert told.endswith(f" = {room}")


def with_attention(**attention):
    return fields.set_field(LM, "model.attention", AttentionConfig(**attention))


def with_role(config, role, **override):
    by_role = AttentionByRole(**{role: AttentionOverride(**override)})
    return fields.set_field(config, "model.attention_by_role", by_role)


def rotary(config=LM, **changes):
    return changed(config, model__positions="rotary", **changes)


ACCEPTED = [
    LM,
    PAIRS,
    with_attention(kind="gqa", num_kv_heads=4),
    with_attention(kind="mhe_mul", form="folded", head_embedding_stddev=0.5),
    with_role(
        changed(with_attention(kind="mha"), optimizer__head_embedding_rate=3.0),
        "decoder",
        kind="mhe_add",
    ),
    with_attention(kind="mha", num_heads=3, qkv_features=33),
    with_attention(kind="collaborative", score_features=13, head_embedding_stddev=0.1),
    with_attention(kind="mfa", query_rank=13, reuse_keys=True),
    with_attention(kind="gta", num_kv_heads=4),
    rotary(with_attention(kind="gta", num_kv_heads=4)),
    with_role(LM, "decoder", kind="gqa", num_kv_heads=2),
    with_role(PAIRS, "cross", kind="mhe_add", form="materialized"),
    changed(PAIRS, data__length_buckets=(16, 128)),
    changed(PAIRS, data__train=("a.tsv.xz",)),
    changed(PAIRS, data__train=("demo:train",)),
    changed(PAIRS, data__train=("tfds:x/de-en:train",), data__fields=("en", "de")),
    changed(LM, evaluation__checkpoint="500"),
    rotary(model__rotary_base=5e5, model__rotary_pairs="interleaved", model__rotary_scaling=4.0),
    rotary(with_attention(kind="mhe_add", form="materialized")),
    rotary(with_attention(kind="mva", form="shared", score_features=14, num_heads=8)),
    rotary(with_attention(kind="mla", form="absorbed", rotary_features=6, query_rank=5)),
    rotary(with_role(PAIRS, "decoder", kind="mla", num_heads=1, qkv_features=5, rotary_features=4)),
    with_attention(kind="mla", latent_groups=2, latent_features=6),
    rotary(with_attention(kind="tpa", form="factored", query_rank=3, key_rank=1, value_rank=4)),
    # Cross-attention is not rotated: any form and any width.
    rotary(with_role(PAIRS, "cross", kind="mhe_mul", form="folded", qkv_features=24)),
    changed(LM, evaluation__checkpoint="last", evaluation__average_checkpoints=3),
    # A directory or a pattern may be one of `.tsv`, which needs no fields.
    changed(PAIRS, data__train=("shards",), data__validation=("part-*",)),
]


@pytest.mark.parametrize("config", ACCEPTED)
def test_accepted(config):
    rules.check(config)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (with_attention(num_heads=7), "model.attention.num_heads is 7: must divide model.features"),
        (
            with_attention(num_heads=8, qkv_features=33),
            "model.attention.num_heads is 8: must divide model.attention.qkv_features=33",
        ),
        (with_attention(num_heads=0), "model.attention.num_heads is 0: takes 1 or more"),
        (with_attention(dropout_rate=1.0), "model.attention.dropout_rate is 1.0"),
        (with_attention(kind="gqa"), "model.attention.num_kv_heads is not set: kind gqa needs"),
        (
            with_attention(kind="gqa", num_kv_heads=3),
            "model.attention.num_kv_heads is 3: must divide model.attention.num_heads=8",
        ),
        (
            with_attention(kind="mqa", num_kv_heads=1),
            "num_kv_heads is 1: kinds gqa, gta only, not mqa",
        ),
        (with_attention(kind="gta"), "model.attention.num_kv_heads is not set: kind gta needs"),
        (
            with_attention(kind="gta", num_kv_heads=4, qkv_features=24),
            "model.attention.num_heads is 8: kind gta takes heads of an even width, not 3",
        ),
        (
            with_attention(kind="mqa", query_rank=8),
            "model.attention.query_rank is 8: kinds mfa, mla, tpa only, not mqa",
        ),
        (with_attention(kind="mfa", query_rank=0), "query_rank is 0: takes 1 or more"),
        (
            with_attention(kind="gta", num_kv_heads=4, reuse_keys=True),
            "model.attention.reuse_keys is True: kind mfa only, not gta",
        ),
        (
            with_attention(kind="collaborative", form="shared"),
            "form is 'shared': kind collaborative takes auto, materialized",
        ),
        (
            with_attention(form="folded"),
            "form is 'folded': kinds mhe_add, mhe_mul, mva, collaborative, mla, tpa only, not mha",
        ),
        (
            with_attention(kind="mhe_mul", form="shared"),
            "form is 'shared': kind mhe_mul takes auto, folded, materialized",
        ),
        (
            with_attention(kind="mva", score_groups=2),
            "score_groups is 2: kind mhe_add only, not mva",
        ),
        (
            with_attention(kind="mhe_add", num_groups=3, num_heads=8),
            "num_groups is 3: must divide model.attention.num_heads=8",
        ),
        (
            changed(with_attention(kind="mqa"), optimizer__head_embedding_rate=3.0),
            "optimizer.head_embedding_rate is 3.0: kinds mhe_add, mhe_mul, collaborative only",
        ),
        (
            with_attention(kind="sha", head_embedding_stddev=0.1),
            "head_embedding_stddev is 0.1: kinds mhe_add, mhe_mul, collaborative only, not sha",
        ),
        (
            with_attention(kind="mhe_add", form="folded", normalize_qk=True),
            "model.attention.form is 'folded': not with model.attention.normalize_qk",
        ),
        (
            with_attention(kind="tpa", form="factored", normalize_qk=True),
            "model.attention.form is 'factored': not with model.attention.normalize_qk",
        ),
        (
            with_attention(kind="mla", form="factored"),
            "form is 'factored': kind mla takes auto, absorbed, materialized",
        ),
        (
            with_attention(kind="tpa", latent_features=8),
            "latent_features is 8: kind mla only, not tpa",
        ),
        (with_attention(query_rank=8), "query_rank is 8: kinds mfa, mla, tpa only, not mha"),
        (with_attention(kind="tpa", value_rank=0), "value_rank is 0: takes 1 or more"),
        (
            with_attention(kind="mla", latent_groups=3),
            "latent_groups is 3: must divide model.attention.num_heads=8",
        ),
        (
            with_attention(kind="mla", latent_groups=2, latent_features=9),
            "latent_groups is 2: must divide model.attention.latent_features=9",
        ),
        (
            with_attention(kind="mla", rotary_features=8),
            "rotary_features is 8: model.positions rotary only, not learned",
        ),
        (
            rotary(with_attention(kind="mla", rotary_features=7)),
            "model.attention.rotary_features is 7: model.positions rotary takes queries and keys",
        ),
        (
            rotary(with_attention(kind="mla", num_heads=256)),
            "num_heads is 256: model.positions rotary takes queries and keys of an even width, not",
        ),
        (with_attention(kind="el", qkv_features=64), "kind el needs model.features=512"),
        (
            with_role(LM, "cross", kind="mha"),
            "model.attention_by_role.cross is set: task lm has only decoder",
        ),
        (
            with_role(LM, "decoder", num_heads=7),
            "model.attention_by_role.decoder.num_heads is 7: must divide",
        ),
        (  # what the common kind has is not the role's
            with_role(with_attention(kind="gta", num_kv_heads=2), "decoder", kind="gqa"),
            "model.attention_by_role.decoder.num_kv_heads is not set: kind gqa needs a divisor of",
        ),
        (
            rotary(with_role(PAIRS, "cross", kind="mla", rotary_features=8)),
            "cross.rotary_features is 8: takes None: cross-attention is not rotated",
        ),
        (changed(LM, data__sequence_length=513), "at most model.max_length=512"),
        (
            changed(PAIRS, train__eval_batches=9),
            "train.eval_batches is 9: must be None: the first batches of a translation split have",
        ),
        (
            changed(LM, data__sequence_length=1),
            "data.sequence_length is 1: task lm takes 2 or more",
        ),
        (
            changed(LM, task="mlm", data__sequence_length=3, data__packing=True),
            "data.sequence_length is 3: task mlm takes 4 or more with data.packing",
        ),
        (changed(LM, data__length_buckets=(128,)), "buckets is (128,): not for task lm"),
        (changed(PAIRS, data__length_buckets=(64, 32, 128)), "in increasing order"),
        (changed(PAIRS, data__length_buckets=(16, 16, 128)), "in increasing order"),
        (changed(PAIRS, data__length_buckets=(0, 128)), "lengths above 0"),
        (changed(PAIRS, data__length_buckets=(16, 64)), "must be data.sequence_length=128"),
        (
            changed(LM, optimizer__accumulate_steps=3),
            "optimizer.accumulate_steps is 3: must divide data.batch_size=32",
        ),
        (
            changed(PAIRS, optimizer__accumulate_steps=3),
            "optimizer.accumulate_steps is 3: must divide data.row_multiple=8",
        ),
        (changed(LM, data__train=()), "data.train is not set"),
        (changed(LM, data__train=("a", "b")), "takes one source"),
        (changed(LM, data__fields=("a", "b")), "data.fields is ('a', 'b'): task lm takes one"),
        (changed(PAIRS, data__test=("a", "b", "c")), "data.test is ('a', 'b', 'c'): takes one"),
        (changed(LM, train__num_steps=0), "train.num_steps is 0: takes 1 or more"),
        (changed(LM, optimizer__learning_rate=float("inf")), "learning_rate is inf"),
        (changed(LM, optimizer__learning_rate=float("nan")), "learning_rate is nan"),
        (changed(LM, model__dropout_rate=1.0), "model.dropout_rate is 1.0"),
        (changed(LM, model__positions="sinusoidal", model__features=511), "even"),
        (
            changed(LM, model__rotary_base=500000.0),
            "model.rotary_base is 500000.0: model.positions rotary only, not learned",
        ),
        (
            changed(LM, model__positions="sinusoidal", model__rotary_pairs="interleaved"),
            "rotary_pairs is 'interleaved': model.positions rotary only, not sinusoidal",
        ),
        (changed(LM, model__rotary_scaling=2.0), "model.rotary_scaling is 2.0: model.positions"),
        (
            rotary(model__rotary_scaling=0.0),
            "model.rotary_scaling is 0.0: takes a finite float32 number",
        ),
        (
            rotary(model__rotary_base=-1.0),
            "model.rotary_base is -1.0: takes a finite float32 number",
        ),
        (
            rotary(model__features=24),
            "model.attention.num_heads is 8: model.positions rotary takes queries and keys of an "
            "even width, not 3",
        ),
        (
            rotary(with_attention(kind="gta", num_kv_heads=4, qkv_features=48)),
            "model.attention.num_heads is 8: model.positions rotary takes halves of queries and "
            "keys of an even width, not 3",
        ),
        (
            rotary(with_attention(kind="mva", score_features=13)),
            "model.attention.score_features is 13: model.positions rotary takes queries and keys",
        ),
        (
            rotary(with_attention(kind="mhe_add", form="shared")),
            "model.attention.form is 'shared': takes auto or materialized with",
        ),
        (
            rotary(with_role(LM, "decoder", kind="mhe_mul", form="folded")),
            "model.attention_by_role.decoder.form is 'folded': takes auto or materialized with",
        ),
        (changed(LM, evaluation__beam_size=0), "evaluation.beam_size is 0: takes 1 or more"),
        (changed(LM, evaluation__checkpoint="-5"), "takes best, last or a step number"),
        (changed(LM, evaluation__average_checkpoints=2), "needs evaluation.checkpoint last"),
        (
            changed(LM, evaluation__checkpoint="last", evaluation__average_checkpoints=4),
            "at most train.keep_checkpoints=3",
        ),
        (changed(LM, workdir=""), "workdir is empty"),
    ],
)
def test_refused(config, complaint):
    assert complaint in message(rules.check, config)


def test_a_translator_that_was_validated_on_its_shortest_pairs_can_be_evaluated():
    rules.check(changed(PAIRS, train__eval_batches=9), trains=False)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (LM, 8),
        (changed(LM, mesh=MeshConfig(2, 2, 2)), 8),
        (changed(LM, mesh=MeshConfig(-1, 4, 2)), 16),
        (changed(PAIRS, optimizer__accumulate_steps=2), 4),
    ],
)
def test_devices_accepted(config, devices):
    rules.check_devices(config, devices)


@pytest.mark.parametrize(
    ("config", "devices", "complaint"),
    [
        (
            changed(LM, mesh=MeshConfig(2, 1, 2)),
            8,
            "mesh.data=2 · mesh.fsdp=1 · mesh.tensor=2 is 4",
        ),
        (changed(LM, mesh=MeshConfig(-1, 3, 1)), 8, "must divide the 8 devices"),
        (changed(LM, mesh=MeshConfig(-1, -1, 1)), 8, "mesh.data and mesh.fsdp are both -1"),
        (changed(LM, mesh=MeshConfig(0, 1, 1)), 8, "mesh.data is 0: takes 1 or more"),
        (changed(LM, data__batch_size=12), 8, "data.batch_size is 12: must be a multiple of"),
        (changed(PAIRS, data__row_multiple=12), 8, "data.row_multiple is 12"),
        (changed(LM, optimizer__accumulate_steps=8), 8, "= 8 · 1 · 8 = 64"),
        (
            changed(LM, mesh=MeshConfig(1, 8, 1), model__features=12),
            8,
            "model.features is 12: must be a multiple of mesh.fsdp=8",
        ),
        (
            changed(LM, mesh=MeshConfig(1, 1, 16)),
            16,
            "model.attention.num_heads is 8: must be a multiple of mesh.tensor=16",
        ),
        (
            with_role(changed(LM, mesh=MeshConfig(1, 1, 8)), "decoder", num_heads=4),
            8,
            "model.attention_by_role.decoder.num_heads is 4",
        ),
        (
            changed(LM, mesh=MeshConfig(1, 1, 8), model__vocabulary_size=100),
            8,
            "model.vocabulary_size is 100",
        ),
        (
            changed(LM, mesh=MeshConfig(1, 1, 8), model__mlp_features=9),
            8,
            "model.mlp_features is 9",
        ),
    ],
)
def test_devices_refused(config, devices, complaint):
    assert complaint in message(rules.check_devices, config, devices)
