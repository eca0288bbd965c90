"""Every file in configs/: documented, allowed, with a variant for a laptop."""

import ast
import dataclasses
import importlib.util
import re
import typing
from pathlib import Path

import jax
import pytest

from mhe_jax.config import Config, KroneckerConfig
from mhe_jax.config.loading import load_config
from mhe_jax.config.rules import check, check_devices
from mhe_jax.model import count_parameters
from mhe_jax.report.paper import TRANSLATION
from mhe_jax.tasks import TASKS, resolve

CONFIGS = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.py"))
DEVICES = {"bert_base": 256, "wmt14_base": 8, "wmt14_big": 8}


def variants(path: Path) -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return typing.get_args(typing.get_type_hints(module.get_config)["variant"])


EACH = [
    pytest.param(path, variant, id=f"{path.stem}:{variant}" if variant else path.stem)
    for path in CONFIGS
    for variant in variants(path)
]


def load(path: Path, variant: str) -> Config:
    return load_config(f"{path}:{variant}" if variant else str(path))


def parameters(config: Config) -> dict[str, int]:
    """How many the model has, `total` and in `attention`; nothing is computed."""
    config = resolve(config)
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    return count_parameters(jax.eval_shape(initialize, jax.random.key(0)))


def test_all_are_there():
    expected = (
        "bert_base demo glue hashformer llama_lm multi30k ptb_lm shapeshifter squad superglue "
    )
    expected += "wikitext103_lm wikitext2_lm wikitext2_mlm wmt14_base wmt14_big"
    assert {path.stem for path in CONFIGS} == set(expected.split())


@pytest.mark.parametrize(("path", "variant"), EACH)
def test_a_config_keeps_the_rules(path, variant):
    config = load(path, variant)
    check(config)
    check_devices(config, 1)
    assert config.data.validation
    assert config.data.test


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_a_document(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python train.py configs/{path.name}" in text
    assert "Expected time:" in text
    assert "Expected score:" in text
    # A command of the docstring names fields that exist.
    fields = re.findall(r"--(\w+(?:\.\w+)+)", text)
    for name in fields:
        part = load(path, "")
        for step in name.split("."):
            part = getattr(part, step)


def test_commands_of_the_pages_say_where_ones_own_files_lie():
    """A config has a directory and a test file of its own: a command that names others sets all."""
    root = Path(__file__).parent.parent
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = text.replace("\\\n", " ").splitlines()
    own = [line for line in commands if line.startswith("python train.py") and ".train " in line]
    assert len(own) == 6
    for line in own:
        for field in ("directory", "validation", "test"):
            assert f"--data.{field} " in line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_a_variant_for_a_laptop(path):
    assert "local" in variants(path)
    full, local = load(path, ""), load(path, "local")
    assert local.task == full.task
    assert local.train.num_steps <= 200
    assert parameters(local)["total"] < 500_000


@pytest.mark.parametrize("name", DEVICES)
def test_paper_shapes_lie_on_many_devices(name):
    (path,) = (path for path in CONFIGS if path.stem == name)
    check_devices(load(path, ""), DEVICES[name])


def test_multi30k_has_at_most_four_million_parameters():
    (path,) = (path for path in CONFIGS if path.stem == "multi30k")
    config = load(path, "")
    assert config.model.attention.kind == "mhe_mul"
    assert parameters(config)["total"] <= 4_000_000


@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
@pytest.mark.parametrize("name", ["base", "big"])
def test_wmt14_has_the_published_number_of_attention_parameters(name, kind):
    (path,) = (path for path in CONFIGS if path.stem == f"wmt14_{name}")
    (row,) = (row for row in TRANSLATION if row.name == name)
    config = load(path, "")
    attention = dataclasses.replace(config.model.attention, kind=kind)
    model = dataclasses.replace(config.model, attention=attention)
    found = parameters(dataclasses.replace(config, model=model))
    assert found["attention"] == getattr(row, kind)


@pytest.mark.parametrize("variant", ["", "wmt"])
def test_shapeshifter_has_ten_times_fewer_parameters_than_its_dense_model(variant):
    (path,) = (path for path in CONFIGS if path.stem == "shapeshifter")
    config = load(path, variant)
    dense = dataclasses.replace(config.model, kronecker=KroneckerConfig())
    found = parameters(dataclasses.replace(config, model=dense))["total"]
    assert found >= 10 * parameters(config)["total"]


def test_bert_base_has_the_published_number_of_attention_parameters():
    (path,) = (path for path in CONFIGS if path.stem == "bert_base")
    assert parameters(load(path, ""))["attention"] == 8_875_008
