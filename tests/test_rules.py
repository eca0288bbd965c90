"""Rules between the fields of a config: what is taken, what is not, and the field that is named."""

import ast

import pytest
from test_config import LM, changed, full, message

from mhe_jax.config import Config, DataConfig, rules
from mhe_jax.config.rules import check_devices
from mhe_jax.model.layers import check_attention

PAIRS = Config(task="translation", data=DataConfig(train=("a.en", "a.de")))
LABELS = Config(task="classification", data=DataConfig(train=("a.tsv",)))
SPAN = Config(task="span", data=DataConfig(train=("a.json",), dataset="squad", question_length=16))
MLM = Config(data=DataConfig(train=("a.txt",)))


CONFIGS = {"LM": LM, "PAIRS": PAIRS, "LABELS": LABELS, "SPAN": SPAN, "MLM": MLM}
CONFIGS["ROTARY"] = changed(LM, {"model.positions": "rotary"})
CONFIGS["TURNED"] = changed(PAIRS, {"model.positions": "rotary"})
CONFIGS["LAST"] = changed(LM, {"evaluation.checkpoint": "last"})
CONFIGS["TENSOR"] = changed(LM, {"mesh.data": 1, "mesh.tensor": 8})


# What is taken | what more is refused | the field that is named, where not the first of those.
# `a.` is the attention of all, `by.decoder.` that of one role.

RULES = """
LM | a.num_heads=4 | a.num_heads=7
LM | by.decoder.num_heads=4 | by.decoder.num_heads=7
LM | a.kind=el | a.qkv_features=64
LM | a.kind=gqa a.num_kv_heads=4 | a.num_kv_heads=3
LM | a.kind=gqa a.num_kv_heads=4 | a.num_kv_heads=None
LM | a.kind=gta a.num_kv_heads=4 | a.qkv_features=24 | a.num_heads
LM | a.kind=mhe_add a.num_groups=2 | a.num_groups=3
LM | a.kind=mhe_add a.score_groups=2 | a.num_groups=2 | a.score_groups
LM | a.kind=mla a.latent_groups=2 | a.latent_features=9 | a.latent_groups
LM | a.kind=mla a.qkv_features=24 a.latent_groups=4 | a.latent_groups=8
LM | a.kind=mfa a.query_rank=13 | a.kind=mha | a.query_rank
LM | a.kind=gta a.num_kv_heads=2 | by.decoder.kind=gqa | by.decoder.num_kv_heads
LM | by.decoder.kind=mqa | by.cross.kind=mqa | by.cross
LM | a.kind=mhe_add optimizer.head_embedding_rate=3.0 | a.kind=mha | optimizer.head_embedding_rate
LM | a.kind=mhe_mul a.form=folded | a.form=shared
LM | a.kind=mhe_add a.form=folded | a.normalize_qk=True | a.form
LM | a.kind=mva a.form=shared a.normalize_qk=True | a.form=folded
LM | model.positions=sinusoidal model.features=520 | model.features=505
ROTARY | model.rotary_base=5e5 | model.positions=learned | model.rotary_base
LM | | model.rotary_pairs=interleaved
LM | | model.rotary_scaling=2.0
ROTARY | model.features=32 | model.features=24 | a.num_heads
ROTARY | a.kind=gta a.num_kv_heads=4 a.qkv_features=32 | a.qkv_features=48 | a.num_heads
ROTARY | a.kind=mva a.score_features=14 | a.score_features=13
LM | a.kind=mha a.score_features=24 | a.score_features=12
ROTARY | a.kind=mha a.score_features=16 | a.score_features=24
LM | a.kind=mva a.use_key_bias=False | a.kind=mqa | a.use_key_bias
ROTARY | a.kind=mva a.form=shared | a.kind=mhe_add | a.form
LM | a.kind=mlra a.latent_branches=2 | a.latent_branches=3
LM | a.kind=mlra a.latent_groups=16 a.latent_branches=2 | a.latent_branches=1
LM | a.kind=mlra a.latent_features=12 | a.latent_features=10 | a.latent_groups
LM | a.kind=mlra a.form=absorbed | a.normalize_qk=True | a.form
LM | a.kind=ghla a.num_groups=4 a.num_kv_heads=2 | a.num_groups=1 | a.num_kv_heads
LM | a.kind=ghla a.num_groups=4 a.latent_features=16 | a.latent_features=24
ROTARY | a.kind=mla a.rotary_features=6 | a.rotary_features=7
ROTARY | a.kind=mla a.rotary_features=6 | model.positions=learned | a.rotary_features
ROTARY | a.kind=mla a.num_heads=128 | a.num_heads=256
ROTARY | a.kind=mlra a.num_heads=128 | a.num_heads=256
TURNED | by.cross.kind=mhe_mul by.cross.qkv_features=24 | by.encoder.qkv_features=24 | a.num_heads
TURNED | a.kind=mla a.rotary_features=8 | by.cross.rotary_features=8
MLM | model.hashing=md_emb | task=lm | model.hashing
MLM | model.context=token | task=lm | model.context
MLM | data.packing=True | model.context=token | data.packing
MLM | data.packing=True | model.hashing=lsh_emb | data.packing
MLM | data.packing=True | task=shuffle_random | data.packing
LM | model.output_bias=True | task=mlm | model.output_bias
MLM | data.tokenizer=m model.hashing=lsh_emb | model.hashing=md_emb | data.tokenizer
LABELS | model.hashing=md_pool | task=mlm | model.hashing
LABELS | model.hashing=md_pool | model.kronecker.embedding=2
LM | data.sequence_length=512 | data.sequence_length=513
PAIRS | data.length_buckets=(16,128) | data.length_buckets=(16,64)
PAIRS | data.length_buckets=(16,128) | data.length_buckets=(16,16,128)
PAIRS | data.length_buckets=(16,128) | data.length_buckets=(0,128)
PAIRS | data.length_buckets=(16,128) | data.packing=True | data.length_buckets
LM | | data.length_buckets=(128,)
LM | optimizer.accumulate_steps=16 | optimizer.accumulate_steps=3
PAIRS | optimizer.accumulate_steps=8 | optimizer.accumulate_steps=16
SPAN | data.window_stride=109 | data.window_stride=110
SPAN | model.hashing=md_pool data.window_stride=108 | data.window_stride=109
LM | | data.train=()
LM | | data.train=("a","b")
LM | | data.fields=("a","b")
LM | data.train=("a","b") data.train_weights=(1.0,2.0) | data.train_weights=(1.0,)
LM | data.train=("a","b") data.train_weights=(1.0,2.0) | data.train_weights=(1.0,0.0)
PAIRS | data.train=("a.tsv.xz",) | data.test=("a","b","c")
PAIRS | data.train=("a.en","a.de","b.tsv") data.train_weights=(1.0,2.0) | data.train_weights=(1.0,)
PAIRS | data.train=("x","y") data.train_weights=(1.0,2.0) | data.train=("a.en","a.de") \
 | data.train_weights
PAIRS | data.train=("tfds:x/de-en:train",) | train.eval_batches=9
LM | train.eval_batches=9 | data.dataset=cola
LABELS | | data.train_weights=(1.0,)
LABELS | optimizer.label_smoothing=0.1 | task=regression | optimizer.label_smoothing
LM | train.init_from=runs/a | data.tokenizer=m
LM | workdir=gs://b/a | workdir=s3://b/a
LM | | workdir=
LM | train.profile_steps=(2,3) | train.profile_steps=(3,2)
LM | train.profile_steps=(2,2) | train.profile_steps=(2,)
LM | train.profile_steps=(2,3) | workdir=gs://b/a | train.profile_steps
PAIRS | data.validation=("b","c") train.eval_translate=9 | data.validation=() | train.eval_translate
LM | | train.eval_translate=9
LM | evaluation.checkpoint="500" | evaluation.checkpoint="-5"
LM | evaluation.stride=128 | evaluation.stride=129
LM | evaluation.stride=128 | task=mlm | evaluation.stride
LM | evaluation.quantize=int8 model.kronecker.embedding=4 | model.kronecker.mlp=4 | evaluation.q
LABELS | evaluation.spelling_noise=0.1 | data.dataset=wic | evaluation.spelling_noise
LABELS | evaluation.spelling_noise=0.1 | data.dataset=wsc | evaluation.spelling_noise
LM | | evaluation.spelling_noise=0.1
LM | evaluation.temperature=1.0 evaluation.top_k=3 | evaluation.temperature=0.0 | evaluation.top_k
LAST | evaluation.average_checkpoints=3 | evaluation.average_checkpoints=4
LM | | evaluation.average_checkpoints=2
"""
MESHES = """
LM | mesh.data=2 mesh.fsdp=2 mesh.tensor=2 | mesh.fsdp=1
LM | mesh.fsdp=2 | mesh.fsdp=3
LM | mesh.data=4 mesh.fsdp=2 mesh.tensor=-1 | mesh.data=-1
LM | | mesh.data=0
LM | data.batch_size=16 | data.batch_size=12
PAIRS | data.row_multiple=16 | data.row_multiple=12
LM | optimizer.accumulate_steps=4 | optimizer.accumulate_steps=8 | data.batch_size
LM | mesh.data=1 mesh.fsdp=8 | model.features=12
LM | mesh.data=1 mesh.fsdp=8 | data.batch_size=12
TENSOR | | a.num_heads=4
TENSOR | | by.decoder.num_heads=4
TENSOR | model.vocabulary_size=100 model.vocabulary_multiple=8 | model.vocabulary_size=96 \
 model.vocabulary_multiple=1 model.vocabulary_size=100
TENSOR | | model.mlp_features=9
TENSOR | mesh.length=tensor | data.sequence_length=60
TENSOR | mesh.length=everywhere | data.sequence_length=72
TENSOR | task=classification mesh.length=tensor data.length_buckets=(64,128) | \
 data.length_buckets=(60,128)
TENSOR | task=translation mesh.length=tensor data.length_buckets=(64,128) | data.length_buckets=()
"""


def check(config, trains=True):
    """What is checked before anything is compiled."""
    rules.check(config, trains=trains)
    check_attention(config)


def rows(table):
    return table.strip().replace("\\\n", "").splitlines()


def taken_and_refused(row):
    """Both configs of a row, and the dotted name that the complaint must begin with."""
    name, taken, refused, *field = (part.strip() for part in row.split("|"))
    config = changed(CONFIGS[name], values(taken))
    first = next(iter(values(refused)))
    return config, lambda: changed(config, values(refused)), full(*(field or [first]))


def values(text):
    found = {}
    for part in text.split():
        name, _, value = part.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


@pytest.mark.parametrize("row", rows(RULES))
def test_a_rule(row):
    config, refused, field = taken_and_refused(row)
    check(config)
    assert message(lambda: check(refused())).startswith(field)


@pytest.mark.parametrize("row", rows(MESHES))
def test_a_mesh_of_eight_devices(row):
    config, refused, field = taken_and_refused(row)
    check_devices(config, 8)
    assert field in message(lambda: check_devices(refused(), 8))


def test_a_run_without_its_text_can_be_evaluated():
    check(changed(PAIRS, {"train.eval_batches": 9, "data.train": ()}), trains=False)
