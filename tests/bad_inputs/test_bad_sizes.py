"""Sizes that no machine holds are refused before anything of that size is made."""

import pytest

from mhe_jax.config import AttentionConfig, Config, DataConfig, InputError, ModelConfig
from mhe_jax.config.fields import from_dict, hints_of, set_field
from mhe_jax.config.rules import check
from mhe_jax.config.rules.ranges import RANGES

LM = Config(task="lm", data=DataConfig(train=("a.txt",)))
PAIRS = Config(task="translation", data=DataConfig(train=("a.tsv",)))
GROUPED = Config(
    data=DataConfig(train=("a.txt",)),
    model=ModelConfig(attention=AttentionConfig(kind="gqa", num_kv_heads=2)),
)
WHOLE = [
    name
    for name, hint in hints_of(Config).items()
    if hint in (int, int | None) and "seed" not in name and "mesh" not in name
]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("config", [LM, PAIRS, GROUPED], ids=["lm", "translation", "gqa"])
def test_every_whole_number_has_a_limit(config, name):
    check(config)
    field = "model.attention" if "by_role" in name else name.rpartition(".")[2]
    for size in (10**12, 10**300):
        with pytest.raises(InputError) as caught:
            check(set_field(config, name, size))
        said = str(caught.value)
        assert field in said
        assert any(word in said for word in ("takes", "must", "only"))
        assert len(said) < 500


@pytest.mark.parametrize("name", ["train.num_steps", "data.tokens_per_batch", "evaluation.top_k"])
def test_the_largest_is_taken(name):
    config = set_field(LM, "evaluation.temperature", 1.0)
    _, most = RANGES[name]
    assert most is not None
    check(set_field(config, name, most))
    with pytest.raises(InputError, match=rf"{name} is \d+: takes at most {most:,}$"):
        check(set_field(config, name, most + 1))


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (LM, {"model.vocabulary_size": 2**26, "model.features": 2**17}, "model is too large: "),
        (LM, {"model.num_layers": 2**12, "model.mlp_features": 2**20}, "model is too large: "),
        (
            PAIRS,
            {"model.num_decoder_layers": 2**12, "model.mlp_features": 2**20},
            r"model is too large: \(vocabulary_size 8,000 \+ max_length 512 \+ layers 4,102 ",
        ),
        (LM, {"data.batch_size": 2**20, "data.sequence_length": 512}, "data.batch_size is 1048576"),
        (
            PAIRS,
            {"data.row_multiple": 2**20, "data.sequence_length": 512},
            "data.row_multiple is 1048576: times data.sequence_length=512 must be at most",
        ),
        (
            LM,
            {"evaluation.batch_size": 2**20, "data.sequence_length": 512},
            "evaluation.batch_size is 1048576: times data.sequence_length=512 must be",
        ),
        (
            PAIRS,
            {"evaluation.batch_size": 2**20, "evaluation.beam_size": 512},
            "evaluation.batch_size is 1048576: times evaluation.beam_size=512 must be",
        ),
    ],
)
def test_sizes_that_are_too_large_together(config, changes, says):
    for name, value in changes.items():
        check(set_field(config, name, value))
    for name, value in changes.items():
        config = set_field(config, name, value)
    with pytest.raises(InputError, match=says):
        check(config)


def test_weights_whose_sum_is_infinite():
    data = DataConfig(train=("a", "b"), train_weights=(1e308, 1e308))
    with pytest.raises(InputError, match="data.train_weights is .*: their sum is not finite$"):
        check(Config(task="lm", data=data))
    check(Config(task="lm", data=DataConfig(train=("a", "b"), train_weights=(8e307, 8e307))))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"optimizer": {"learning_rate": 10**400}}, "learning_rate is 1000.* takes a number$"),
        ({"data": {"train_weights": [1, 10**309]}}, "train_weights is .*: takes any number of"),
        ({"task": "x" * 10_000}, "task is 'x+ ...: takes one of"),
        ({"model": [0] * 10_000}, "model is .*: takes a dictionary of its fields"),
    ],
)
def test_values_too_long_to_be_shown(values, says):
    with pytest.raises(InputError, match=says) as caught:
        from_dict(values)
    assert len(str(caught.value)) < 500
