"""Every file in configs/: documented, allowed, with a variant for a laptop, found by its name."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest
from test_config import message

from experiments.paper.published import TRANSLATION
from mhe_jax.cli import commands
from mhe_jax.config import Config, KroneckerConfig
from mhe_jax.config.loading import about_config, load_config, shipped_configs
from mhe_jax.config.rules import check, check_devices
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS, resolve

CONFIGS = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.py"))
EACH = [
    pytest.param(path, variant, id=f"{path.stem}:{variant}" if variant else path.stem)
    for path in CONFIGS
    for variant in ("", *about_config(str(path))[1])
]
FILES = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def load(path: Path, variant: str) -> Config:
    return load_config(f"{path}:{variant}" if variant else str(path))


def parameters(config: Config) -> dict[str, int]:
    """How many the model has, `total` and in `attention`; nothing is computed."""
    config = resolve(config)
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    return count_parameters(jax.eval_shape(initialize, jax.random.key(0)))


@pytest.mark.parametrize(("path", "variant"), EACH)
def test_a_config_keeps_the_rules(path, variant):
    config = load(path, variant)
    check(config)
    check_devices(config, 1)
    assert config.data.validation
    assert config.data.test


@FILES
def test_a_config_has_a_variant_for_a_laptop(path):
    full, local = load(path, ""), load(path, "local")
    assert local.task == full.task
    assert local.train.num_steps <= 200
    assert parameters(local)["total"] < 500_000


@pytest.mark.parametrize(("name", "count"), [("bert_base", 256), ("wmt14", 8), ("wmt14:big", 8)])
def test_paper_shapes_lie_on_many_devices(name, count):
    check_devices(load_config(name), count)


def test_multi30k_has_at_most_four_million_parameters():
    config = load_config("multi30k")
    assert config.model.attention.kind == "mhe_mul"
    assert parameters(config)["total"] <= 4_000_000


@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
@pytest.mark.parametrize("name", ["base", "big"])
def test_wmt14_has_the_published_number_of_attention_parameters(name, kind):
    (row,) = (row for row in TRANSLATION if row.name == name)
    config = load_config("wmt14:big" if name == "big" else "wmt14")
    attention = dataclasses.replace(config.model.attention, kind=kind)
    model = dataclasses.replace(config.model, attention=attention)
    found = parameters(dataclasses.replace(config, model=model))
    assert found["attention"] == getattr(row, kind)


@pytest.mark.parametrize("name", ["shapeshifter", "shapeshifter:wmt"])
def test_shapeshifter_has_ten_times_fewer_parameters_than_its_dense_model(name):
    config = load_config(name)
    dense = dataclasses.replace(config.model, kronecker=KroneckerConfig())
    found = parameters(dataclasses.replace(config, model=dense))["total"]
    assert found >= 10 * parameters(config)["total"]


def test_bert_base_has_the_published_number_of_attention_parameters():
    assert parameters(load_config("bert_base"))["attention"] == 8_875_008


# By their names; `make package` tries the wheel itself.


def test_a_name_means_the_shipped_file(monkeypatch, tmp_path):
    file = shipped_configs()["multi30k"]
    monkeypatch.chdir(tmp_path)
    assert load_config("multi30k:small") == load_config(f"{file}:small")
    assert load_config("multi30k") != load_config("multi30k:small")
    assert about_config("multi30k:small")[0].partition("\n")[0].endswith("Multi30k.")
    assert "multi30k" in message(load_config, "multi3k")


def test_configs_are_listed_and_shown(capsysbinary):
    commands.main(["configs"])
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert [line.split()[0] for line in lines] == [*shipped_configs()]
    for line in lines:
        assert re.search(r" Time: (not measured|.*\d+ (minutes|seconds)[^.]*)\. .*:local\b", line)
    commands.main(["configs", "show", "demo"])
    shown = capsysbinary.readouterr().out
    assert shown == shipped_configs()["demo"].read_bytes()
