"""The models and rules of protocol.md, and how records become tables and pictures."""

import json
import statistics

import jax
import pytest

from experiments import pictures
from experiments.atlas import cases, sizes, tables
from experiments.atlas.cases import Case
from experiments.reports import rows_of
from mhe_jax.config import Config
from mhe_jax.config.rules import check
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cost import cached_numbers


def parameters(config: Config) -> int:
    """Of the model that is really made; asserts that the closed forms give the same."""
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    made = count_parameters(jax.eval_shape(initialize, jax.random.key(0)))
    assert made["total"] == sizes.parameters(config)
    assert made["attention"] == sizes.of_attention(config)
    return made["total"]


def lines(regime, name, losses, scores, score="perplexity_per_token"):
    """A search whose best rate is in the middle, and the fresh seeds."""
    who = {"regime": regime, "name": name, "rate": "4e-3"}
    edges = [who | {"rate": rate, "seed": 0, "validation_loss": 9.0} for rate in ("2e-3", "8e-3")]
    fresh = [
        who | {"seed": seed, "steps": 2000, "validation_loss": loss, score: value}
        for seed, (loss, value) in enumerate(zip(losses, scores, strict=True), 1)
    ]
    return [*edges, who | {"seed": 0, "validation_loss": 1.0}, *fresh]


def assert_all_are_planned(task: str) -> None:
    planned = [case for stage in cases.stages(task) for case in stage.cases]
    models = cases.models(task).items()
    assert sorted(planned) == sorted(Case(r, name) for r, own in models for name in own)


@pytest.mark.parametrize("task", cases.TASKS)
def test_models_of_the_same_number_of_parameters(task):
    """To 1 % of MHA's, with half its cache."""
    base, models = cases.base_of(task), cases.models(task)
    mha = sizes.changed(base, models["shape"]["mha"])
    wanted, cached = parameters(mha), cached_numbers(mha)
    for regime in ("depth", "width"):
        for name, fields in models[regime].items():
            config = sizes.changed(base, fields)
            check(config)
            assert abs(parameters(config) / wanted - 1) < 0.01, (regime, name)
            assert ("model.num_layers" in fields) == (regime == "depth")
            assert name == "mha" or cached_numbers(config) <= cached / 2, name
    for name in cases.RIVALS:
        parameters(sizes.changed(base, models["shape"][name]))
    assert_all_are_planned(task)


@pytest.mark.parametrize("task", cases.PLANS)
def test_models_of_the_controls(task):
    """To 1 % of MHA's, with SwiGLU and RMSNorm too; the caches are as the protocol says."""
    base, models = cases.base_of(task), cases.models(task)
    wanted = parameters(sizes.changed(base, models["shape"]["mha"]))
    cached: dict[str, int] = {}
    for regime, own in models.items():
        for name, fields in own.items():
            config = sizes.changed(base, fields)
            check(config)
            cached[name] = cached_numbers(config)
            assert abs(parameters(config) / wanted - 1) < 0.01, name
            assert ("model.mlp_features" in fields) == (regime == "width"), name
    heads = 8 * (base.model.num_layers if task != "translation_controls" else 2 * 2)
    for name in {"mha-thin-narrow", "mva-narrow-no-bias"} & cached.keys():
        assert cached[name] == cached["mva-narrow"] - heads
    assert all(cached[name] <= cached["mva-narrow"] for name in {"gqa", "mqa"} & cached.keys())
    assert_all_are_planned(task)


def test_comparisons_of_the_controls(tmp_path):
    """By two rates with all steps; two standard errors of three seeds are (0.01 / √3) · √2 · 2."""
    found: list[dict] = []
    for name, loss in (("mva-narrow", 2.0), ("mha-thin-narrow", 2.01), ("gqa", 2.1), ("mqa", 1.9)):
        who = {"regime": "width", "name": name, "rate": "4e-3", "steps": 2000}
        found += [
            who | {"rate": rate, "seed": 0, "validation_loss": 3.0} for rate in ("4e-3", "8e-3")
        ]
        losses = enumerate((loss - 0.01, loss, loss + 0.01), 4)
        found += [who | {"seed": seed, "validation_loss": value} for seed, value in losses]
    (tmp_path / "lm_controls.json").write_text(json.dumps({"lines": found}))
    page = tables.page(tmp_path)
    (thin, others, results), texts = page, [*page.values()]
    assert thin == "Is a thin `mha` as good?"
    assert others == "Would another control do?"
    assert results == "Results: controls, language model"
    start, sized = "| language model | mva-narrow |", "1.12, 1.12 |"
    row, left = texts[0].splitlines()[2::2]
    assert row == f"{start} mha-thin-narrow | +0.010 ± 0.016 | not told apart | 47, 44 | {sized}"
    assert left == (
        "Not measured: language model: mha-thin-narrow against mha; "
        "translation: mva-narrow against mha-thin-narrow; translation: mha-thin-narrow against mha."
    )
    assert f"{start} gqa | +0.100 ± 0.016 | better | 47, 25 | {sized}" in texts[1]
    assert f"{start} mqa | -0.100 ± 0.016 | worse | 47, 12 | {sized}" in texts[1]
    assert "Not measured: language model: mva-narrow against mha-narrow-2-heads;" in texts[1]
    names = [row.split(" | ")[0] for row in rows_of(texts[2])]
    assert names == ["| attention", "| mqa", "| mva-narrow", "| mha-thin-narrow", "| gqa"]
    # Two seeds of three decide nothing.
    two = [line for line in found if (line["name"], line["seed"]) != ("mqa", 6)]
    (tmp_path / "lm_controls.json").write_text(json.dumps({"lines": two}))
    _, others, results = tables.page(tmp_path).values()
    assert "against mqa" in others.split("Not measured")[1]
    assert "\n\nSeeds begun: mqa.\n\n" in results
    one = [line for line in found if line["rate"] != "8e-3"]
    assert tables.measured(one, Case("width", "gqa"), "lm_controls") is None


def test_sides_grow_in_turn():
    fields = cases.models("translation")["depth"]
    sides = {n: (f["model.num_layers"], f["model.num_decoder_layers"]) for n, f in fields.items()}
    assert sides["mha"] == (3, 2)
    assert sides["mhe_add-2-groups"] == (3, 3)
    assert sides["sha"] == (4, 3)


def test_rows_of_results():
    found = lines("depth", "gqa", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    # A seed at another rate, such as one that was best until a line was deleted, does not count.
    other = found[-1] | {"rate": "2e-3", "validation_loss": 9.0}
    failed = found[-1] | {"seed": 4, "failed": "no memory"}
    only = lines("depth", "mla", [], [])
    table = tables.results([*found, other, failed, *only], "lm")
    error = 2 * statistics.stdev([2.0, 2.1, 2.2]) / 3**0.5
    (row,) = rows_of(table)[1:]
    cells = ("gqa, deeper", "4", "416", "1,122,688", "256", "33", "7.00", "4e-3")
    assert row == f"| {' | '.join(cells)} | 2.100 ± {error:.3f} | 41.00 ± 1.15 |"
    assert "\n\nSearched for its rate alone: mla, deeper.\n\nNot measured: mha; " in table
    # The best first; what all rows share is said below them.
    both = tables.results([*found, *lines("shape", "gqa", [1.9] * 3, [1.0, 2.0, 3.0])], "lm")
    assert [row.split(" | ")[0] for row in rows_of(both)[1:]] == ["| gqa", "| gqa, deeper"]
    assert "\n\nIn all rows: learning rate 4e-3.\n\n" in both
    # A search that has not ended says nothing, nor one in which every rate failed.
    assert tables.measured(found[1:], Case("depth", "gqa")) is None
    assert tables.results(found[1:], "lm") == ""
    none = [line | {"validation_loss": None} for line in found[:3]]
    assert tables.measured(none, Case("depth", "gqa")) is None


@pytest.mark.parametrize(
    ("bleu", "deep", "bar"),
    [
        ([36.0, 36.1, 36.2], [33.0, 33.1, 33.2], "yes"),
        # As good as the error allows; better than one `mha` and not than the other.
        ([33.2, 34.2, 35.2], [33.0, 33.1, 33.2], "no"),
        ([36.0, 36.1, 36.2], [37.0, 37.1, 37.2], "no"),
        ([], [33.0, 33.1, 33.2], "not measured"),
    ],
)
def test_the_bar(bleu, deep, bar):
    """Better than both `mha`, in both tasks, by more than two standard errors of the difference."""
    records: dict = {
        "lm": [
            *lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1]),
            *lines("depth", "mha", [2.1, 2.11, 2.12], [1, 1, 1]),
            *lines("depth", "gqa", [1.9, 1.91, 1.92], [1, 1, 1]),
        ],
        "translation": [
            *lines("shape", "mha", [1, 1, 1], [33.4, 33.5, 33.6], score="bleu"),
            *lines("depth", "mha", [1, 1, 1], deep, score="bleu"),
            *lines("depth", "gqa", [1] * len(bleu), bleu, score="bleu"),
        ],
    }
    (row,) = rows_of(tables.decision(records))[1:]
    # (0.01 / √3) · √2 · 2
    assert row.startswith("| gqa, deeper | +0.100 ± 0.016 |")
    assert row.endswith(f" {bar} |")


def test_one_pass_at_equal_tokens_flops_and_time():
    """`mva-narrow` has three quarters of the FLOPs of `mha` a token, and takes twice as long."""
    lines = []
    for name, flops, seconds, losses in (
        ("mha", 4.0, 50.0, (5, 3)),
        ("mva-narrow", 3.0, 100.0, (4, 2)),
    ):
        regime = "shape" if name == "mha" else "width"
        who = {"regime": regime, "name": name, "steps": 100, "flops": flops, "rate": "4e-3"}
        for rate in ("2e-3", "4e-3", "8e-3"):
            loss = 3.0 + (rate != "4e-3")
            lines.append(who | {"rate": rate, "seed": 0, "validation_loss": loss})
        for seed in (4, 5):
            curve = [[50, losses[0]], [100, losses[1] + seed / 10]]
            lines.append(who | {"seed": seed, "training_seconds": seconds, "curve": curve})
    mha, narrow = rows_of(tables.one_pass(lines))[1:]
    assert mha == "| mha | 3.400, 3.500 | 4.200, 4.250 | 3.400, 3.500 | 100 |"
    assert narrow.startswith("| mva-narrow | 2.400, 2.500 | 2.400, 2.500 | 4.000, 4.000 |")


def test_the_picture_of_the_controls_has_their_seeds(tmp_path):
    """Hollow: older ones of `mha` and of what they lack. Without all its runs none is drawn."""
    old = [
        line
        for regime, name in (("shape", "mha"), ("depth", "gqa"), ("depth", "mqa"))
        for line in lines(regime, name, [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    ]
    new = []
    for regime, name in (("shape", "mha"), ("width", "gqa"), ("width", "mva")):
        who = {"regime": regime, "name": name, "rate": "4e-3"}
        rates = ("4e-3", "8e-3")[: 1 if name == "mva" else 2]
        new += [who | {"rate": rate, "seed": 0, "validation_loss": 3.0} for rate in rates]
        new += [who | {"seed": seed, "validation_loss": seed - 4.0} for seed in (4, 5, 6)]
    (tmp_path / "lm.json").write_text(json.dumps({"lines": old}))
    seen = [(p.name, p.y, p.hollow) for p in pictures.of_atlas(tmp_path, "lm")]
    names = ("mha", "gqa, deeper", "mqa, deeper")
    assert seen == [(name, pytest.approx(2.1), False) for name in names]
    (tmp_path / "lm_controls.json").write_text(json.dumps({"lines": new}))
    seen = [(p.name, p.y, p.hollow) for p in pictures.of_atlas(tmp_path, "lm")]
    old = [(name, pytest.approx(2.1), True) for name in ("mha", "mqa, deeper")]
    assert seen == [("mha", 1, False), ("gqa", 1, False), *old]
