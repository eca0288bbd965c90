"""The models that docs/atlas.md compares: sizes, costs, and the order of the stages."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import atlas, atlas_cases, atlas_tables, sizes
from benchmarks.atlas_cases import LARGE, TASKS, Case, base_of, models
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.config.rules import check
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS as MODELS
from mhe_jax.tasks.cache import cached_numbers

ROOT = Path(__file__).parents[1]


def described(task: str, fields: dict) -> dict[str, int]:
    """Counts of the parameters that the model really makes."""
    config = sizes.changed(base_of(task), fields)
    initialize = MODELS[config.task].initializer(MODELS[config.task].model(config.model), 2)
    return count_parameters(jax.eval_shape(initialize, jax.random.key(0)))


@pytest.mark.parametrize("task", TASKS)
def test_models_of_the_same_number_of_parameters(task):
    """By the closed form and by the model as it is made, to 1 % of MHA's."""
    wanted = described(task, models(task)["shape"]["mha"])["total"]
    for regime in ("depth", "width"):
        for name, fields in models(task)[regime].items():
            made = described(task, fields)["total"]
            assert made == sizes.parameters(sizes.changed(base_of(task), fields)), (regime, name)
            assert abs(made / wanted - 1) < 0.01, (regime, name)
            assert ("model.num_layers" in fields) == (regime == "depth")


@pytest.mark.parametrize("task", TASKS)
def test_closed_form_of_the_rivals(task):
    for name in atlas_cases.RIVALS:
        fields = models(task)["shape"][name]
        made = described(task, fields)["total"]
        assert made == sizes.parameters(sizes.changed(base_of(task), fields)), name


def test_depth_is_at_least_a_layer_more():
    """Of the language model with `mha` too, whose MLP pays for it; sides grow in turn."""
    base = base_of("lm")
    for name, fields in models("lm")["depth"].items():
        assert fields["model.num_layers"] == base.model.num_layers + 1
        assert fields["model.mlp_features"] < base.model.mlp_features, name
    fields = models("translation")["depth"]
    sides = {
        name: (own["model.num_layers"], own["model.num_decoder_layers"])
        for name, own in fields.items()
    }
    assert sides["mha"] == (3, 2)
    assert sides["mhe_add-2-groups"] == (3, 3)
    assert sides["sha"] == (4, 3)


def test_the_cache_of_all_layers():
    """2·M numbers a layer of `mha`, and as many again of its cross-attention; no encoder's."""
    deep = {task: models(task)["depth"]["mha"] for task in TASKS}
    assert cached_numbers(sizes.changed(base_of("lm"), deep["lm"])) == 4 * 256
    config = sizes.changed(base_of("translation"), deep["translation"])
    assert cached_numbers(config) == 2 * (512 + 512)


@pytest.mark.parametrize("task", TASKS)
def test_what_decides_has_at_most_half_of_the_cache(task):
    base = base_of(task)
    mha = cached_numbers(sizes.changed(base, models(task)["shape"]["mha"]))
    for regime in ("depth", "width"):
        for name, fields in models(task)[regime].items():
            if name != "mha":
                assert cached_numbers(sizes.changed(base, fields)) <= mha / 2, name


@pytest.mark.parametrize("task", TASKS)
def test_the_same_flops(task):
    base, mha = base_of(task), models(task)["shape"]["mha"]
    budget = base.train.num_steps * sizes.flops(sizes.changed(base, mha))
    for name, fields in models(task)["flops"].items():
        config = sizes.changed(base, fields)
        one = sizes.flops(config)
        assert abs(config.train.num_steps * one - budget) <= one / 2, name


@pytest.mark.parametrize("task", TASKS)
def test_every_case_is_a_config_and_has_its_stage(task):
    """No case is forgotten, none is planned twice, and train.py takes each."""
    planned = [case for stage in atlas_cases.stages(task) for case in stage.cases]
    every = [Case(regime, name) for regime, own in models(task).items() for name in own]
    assert sorted(planned) == sorted(every)
    assert set(atlas_tables.REGIMES) == set(models(task))
    base = base_of(task)
    for regime, name in every:
        if regime != "shape":
            assert (config := sizes.changed(base, models(task)[regime][name])) != base
            check(config)
    fields = list(models(task)["limits"].values())[-1]
    flags = [part for field, value in fields.items() for part in (f"--{field}", str(value))]
    path = ROOT / "configs" / atlas.SOURCES[task].config
    assert parse_train_arguments([str(path), *flags]) == sizes.changed(base, fields)


def test_the_larger_model():
    """Its cases are those of the language model; what it adds is in its config and its table."""
    larger, smaller = ({c for s in atlas_cases.stages(t) for c in s.cases} for t in (LARGE, "lm"))
    assert larger < smaller
    base = base_of(LARGE)
    check(base)
    m = base.model
    assert (m.features, m.num_layers, m.dtype) == (512, 8, "bfloat16")
    wanted = described(LARGE, models(LARGE)["shape"]["mha"])["total"]
    for name in atlas_cases.NARROW:
        made = described(LARGE, models(LARGE)["width"][name])["total"]
        assert abs(made / wanted - 1) < 0.01
    table = atlas_tables.large([])
    names = ["mha", "mva", "mva-narrow, wider MLP", "mha-narrow, wider MLP"]
    names += [*atlas_cases.WIDE, "sha", "gqa", "mhe_mul", "mhe_add"]
    assert [row[0] for row in table.rows] == names
    for each in atlas_cases.stages(LARGE):  # all have fresh seeds
        controls = [case for case in each.cases if case.name in atlas_cases.CONTROLS]
        assert len(controls) + each.best == len(each.cases)
    assert base.workdir != base_of("lm").workdir
    assert {row[-1] for row in table.rows} == {"not measured"}
