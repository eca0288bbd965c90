"""Scores against costs: who is on the front, what is drawn, what is told, and what is left out."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhe_jax.config import AttentionConfig, Config, DataConfig, ModelConfig, TrainConfig
from mhe_jax.config.fields import set_field
from mhe_jax.report import atlas
from mhe_jax.report.comparison import main_table
from mhe_jax.report.groups import sections
from mhe_jax.report.runs import RunRecord

PARAMETERS, CACHE, TIME = atlas.COSTS
PAIRS = Config(
    task="translation",
    model=ModelConfig(features=24, num_layers=2, attention=AttentionConfig(num_heads=4)),
    data=DataConfig(train=("a.en", "a.de")),
    train=TrainConfig(num_steps=10),
)


@pytest.mark.parametrize(
    ("points", "lower", "kept"),
    [
        ([(1, 5), (2, 7), (3, 6)], False, [0, 1]),
        ([(1, 5), (2, 7), (3, 6)], True, [0]),
        ([(3, 2), (2, 4), (1, 9), (4, 3)], True, [2, 1, 0]),
        ([(1, 5), (1, 6)], False, [1]),  # as cheap and better
        ([(2, 5), (1, 5)], False, [1]),  # as good and cheaper
        ([(1, 5), (1, 5), (2, 5)], False, [0, 1]),  # equal ones do not beat each other
        ([(1, 5)], False, [0]),
        ([], False, []),
    ],
)
def test_the_front_by_hand(points, lower, kept):
    assert atlas.front(points, lower) == kept


@pytest.mark.parametrize("lower", [False, True])
def test_all_else_is_beaten_by_the_front(lower):
    points = np.random.default_rng(0).integers(0, 13, size=(67, 2)).tolist()
    # Not the best corner, which beats all.
    points = [(x, y) for x, y in points if x + (y if lower else 12 - y) > 7]
    kept = [points[i] for i in atlas.front(points, lower)]

    def beats(one, other):
        better = one[1] < other[1] if lower else one[1] > other[1]
        level = one[1] == other[1]
        return (one[0] < other[0] and (better or level)) or (one[0] == other[0] and better)

    assert not any(beats(*pair) for pair in itertools.permutations(kept, 2))
    assert all(point in kept or any(beats(k, point) for k in kept) for point in points)
    assert 2 < len(kept) < len(points)
    assert kept == sorted(kept)


def section(*runs, task="translation"):
    """Of (kind, attention parameters, scores, seconds of a step, fields)."""
    found = []
    for kind, count, scores, seconds, fields in runs:
        for seed, score in enumerate(scores):
            config = set_field(set_field(PAIRS, "task", task), "train.seed", seed)
            for name, value in {"model.attention.kind": kind, **fields}.items():
                config = set_field(config, name, value)
            result = {"parameters": {"attention": count}, "device": fields.get("workdir", "cpu")}
            found.append(
                RunRecord(Path(config.workdir), config, "done", "", result, score, {}, seconds)
            )
    (one,) = sections(found, None)
    return one


def bleu(*scores):
    return [{"bleu": score} for score in scores]


@pytest.fixture
def drawn(monkeypatch):
    """The axes of a picture."""
    monkeypatch.setattr(atlas, "svg", lambda figure: figure)

    def axes(section, cost):
        figure: Any = atlas.picture(section, cost).svg
        return figure.axes[0]

    return axes


def marks(axes):
    """(x, y) -> line of each mark."""
    return {
        (line.get_xdata()[0], line.get_ydata()[0]): line
        for line in axes.get_lines()
        if line.get_marker() not in ("None", "_", "|")
    }


THREE = (
    ("mha", 9_000_000, bleu(40.0, 42.0), 0.25, {}),
    ("sha", 2_000_000, bleu(30.0), 0.125, {}),
    ("mqa", 5_000_000, bleu(28.0, 29.0, 30.0), 0.2, {}),
)


def test_bars_are_of_the_seeds(drawn):
    """One deviation of a sample to either side: of 40 and 42 the root of 2; 1 of 28, 29 and 30."""
    axes = drawn(section(*THREE), PARAMETERS)
    (mha,), (mqa,) = (bars.get_segments() for bars in axes.collections)
    assert mha == pytest.approx(np.array([[9, 41 - 2**0.5], [9, 41 + 2**0.5]]))
    assert mqa == pytest.approx(np.array([[5, 28], [5, 30]]))


def test_one_seed_is_hollow_and_mha_a_cross(drawn):
    found = marks(drawn(section(*THREE), PARAMETERS))
    hollow = {point for point, line in found.items() if line.get_markerfacecolor() == "white"}
    cross = {point for point, line in found.items() if line.get_marker() == "X"}
    assert set(found) == {(9, 41), (2, 30), (5, 29)}
    assert (hollow, cross) == ({(2, 30)}, {(9, 41)})


def test_the_line_goes_through_the_front(drawn):
    axes = drawn(section(*THREE), PARAMETERS)
    (line,) = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
    assert line.get_xydata().tolist() == [[2, 30], [9, 41], [9, 41]]
    assert axes.get_ylabel() == "bleu (higher is better)"


def test_of_losses_the_lowest_are_the_front(drawn):
    runs = (("mha", 9_000_000, 2.0), ("sha", 2_000_000, 3.0), ("mqa", 12_000_000, 3.5))
    loss = [
        (kind, count, [{"metric": "token_loss", "token_loss": score}], None, {})
        for kind, count, score in runs
    ]
    axes = drawn(section(*loss), PARAMETERS)
    (line,) = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
    assert line.get_xydata().tolist() == [[2, 3], [9, 2], [12, 2]]
    assert axes.get_ylabel() == "token loss (lower is better)"


def test_time_has_bars_of_its_own(drawn):
    one = section(("mha", 9, bleu(40.0, 40.0), 0.25, {}))
    for run, seconds in zip(one.groups[0].runs, (0.25, 0.35), strict=True):
        object.__setattr__(run, "step_seconds", seconds)
    assert [len(group.runs) for group in one.groups] == [2]
    flat, _ = (bars.get_segments() for bars in drawn(one, TIME).collections)
    assert flat[0] == pytest.approx(np.array([[300 - 5000**0.5, 40], [300 + 5000**0.5, 40]]))
    assert "time of a step (ms): 300 ± 71" in atlas.picture(one, TIME).spots[0][2]


def test_spots_lie_on_the_marks():
    """Where the SVG puts them, in % of it; its other uses are ticks and ends of bars."""
    found = atlas.picture(section(*THREE), CACHE)
    ((width, height),) = re.findall(r'viewBox="0 0 (\S+) (\S+)"', found.svg)
    places = re.findall(r'<use xlink:href="#\w+" x="(\S+)" y="(\S+)"', found.svg)
    places = [(100 * float(x) / float(width), 100 * float(y) / float(height)) for x, y in places]
    for left, top, _ in found.spots:
        assert any(abs(left - x) < 0.2 and abs(top - y) < 0.2 for x, y in places)
    (mha, sha, mqa) = found.spots
    # mha caches four times what sha and mqa do, and is the best; 29 is below 30.
    assert mha[0] > sha[0] == mqa[0]
    assert mha[1] < sha[1] < mqa[1]


def test_what_is_told_at_a_mark():
    found = atlas.picture(section(*THREE), PARAMETERS)
    assert [text for _, _, text in found.spots] == [
        "mha\nbleu: 41 ± 1.4\nattention parameters (millions): 9\n2 seeds",
        "sha\nbleu: 30\nattention parameters (millions): 2\none seed",
        "mqa\nbleu: 29 ± 1\nattention parameters (millions): 5\n3 seeds",
    ]
    assert "nothing beats sha; mha." in found.caption


@pytest.mark.parametrize(
    ("scores", "verdict", "told"),
    [
        ((39.0, 42.0, 45.0), "within chance", "Within chance: mha and sha."),  # 3 < 2 · 1.83
        ((41.0, 42.0, 43.0), "better", None),  # 3 > 2 · 0.82
        ((35.0, 36.0, 37.0), "worse", None),
        ((42.0,), "one seed", "With one seed, chance is not known: mha and sha."),
        ((math.nan,), None, None),
    ],
)
@pytest.mark.parametrize("metric", ["bleu", "token_loss"])
def test_what_may_be_chance_is_told(scores, verdict, told, metric):
    """By two standard errors of the difference."""

    def scored(*values):
        return [{"metric": metric, metric: value} for value in values]

    base = scored(38.0, 39.0, 40.0)
    one = section(("sha", 2, base, None, {}), ("mha", 9, scored(*scores), None, {}))
    mha, sha = sorted(one.groups, key=lambda group: group.name)
    if metric == "token_loss":
        verdict = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert mha.against(sha, metric) == verdict
    caption = atlas.picture(one, PARAMETERS).caption
    assert ("chance" in caption) == (told is not None)
    assert told is None or told in caption


def test_a_copy_of_a_run_is_no_second_seed():
    one = section(("sha", 2, bleu(38.0, 40.0), None, {}), ("sha", 2, bleu(38.0), None, {}))
    assert one.groups[0].values("bleu") == [38.0, 40.0]


def test_who_has_no_mark_is_named():
    one = section(
        ("mha", 9, bleu(40.0), 0.25, {}),
        ("sha", 2, bleu(30.0), None, {}),
        ("mqa", 5, [{}], 0.25, {}),
    )
    found = atlas.picture(one, TIME)
    assert [text.partition("\n")[0] for _, _, text in found.spots] == ["mha"]
    assert found.caption == (
        "bleu against time of a step. Medians of training on cpu. "
        "Not shown, without time of a step: sha. Not shown, without bleu: mqa."
    )


def test_encoders_have_no_cache():
    scores = [{"metric": "accuracy", "accuracy": 0.5}]
    found = atlas.picture(section(("mha", 9, scores, None, {}), task="mlm"), CACHE)
    assert (found.svg, found.spots) == ("", ())
    assert found.caption.endswith("Not shown, without cached numbers a token: all.")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"workdir": "an abacus"}, 'device is "cpu" (as mha), "an abacus" (as sha).'),
        (
            {"data.batch_size": 7},
            "data.batch_size is 32 (as mha, batch_size=32), 7 (as sha, batch_size=7).",
        ),
        (
            {"data.tokens_per_batch": 64},
            "data.tokens_per_batch is 4096 (as mha, tokens_per_batch=4096), "
            "64 (as sha, tokens_per_batch=64).",
        ),
        ({"model.remat": True}, "model.remat is false (as mha), true (as sha)."),
    ],
)
def test_times_of_other_conditions_are_not_drawn(fields, told):
    runs = (("mha", 9, bleu(40.0), 0.25, {}), ("sha", 2, bleu(30.0), 0.125, fields))
    found = atlas.picture(section(*runs), TIME)
    assert (found.svg, found.spots) == ("", ())
    assert found.caption.endswith(f"Not drawn: the times do not compare, {told}")
    assert atlas.picture(section(*runs), PARAMETERS).svg


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("model.attention.form", "shared", "materialized"),
        ("model.attention.engine", "xla", "blocked"),
        ("model.attention_by_role.cross.engine", None, "xla"),
        ("model.kronecker.apply", "factored", "materialized"),
        ("mesh.tensor", 1, 2),
    ],
)
def test_a_bar_is_of_seeds_and_of_nothing_else(field, one, other):
    """Forms and engines make no other group, and other times."""
    mva = {"model.attention.score_features": 2}
    runs = [("mva", 9, bleu(40.0), time, {**mva, field: x}) for x, time in ((one, 1), (other, 3))]
    (group,) = section(*runs).groups
    assert len(group.runs) == 2
    found = atlas.picture(section(*runs), TIME)
    assert not found.svg
    assert f"do not compare, {field} is " in found.caption
    # Between kinds it is no difference of conditions.
    apart = [runs[0], ("mha", *runs[1][1:4], {} if "form" in field else {field: other})]
    assert bool(atlas.picture(section(*apart), TIME).svg) == (field != "mesh.tensor")


def test_times_that_do_not_compare_are_told_below_the_table():
    """Of training too: its minutes and tokens stand there."""
    none = {"forward": {}, "with gradients": {}}
    for seconds, result in ((0.25, {}), (None, {"training_seconds": 9.0})):
        runs = (
            ("mha", 9, bleu(40.0), seconds, {}),
            ("sha", 2, bleu(30.0), seconds, {"workdir": "an abacus"}),
        )
        one = section(*runs)
        for group in one.groups:
            group.runs[0].result.update(result)
        told = 'Times do not compare: device is "cpu" (as mha), "an abacus" (as sha).'
        assert told in main_table(one, none, "comparison", "test").notes
    alike = main_table(section(*THREE), none, "comparison", "test").notes
    assert not [note for note in alike if "compare" in note]


def test_several_devices_are_another():
    def run(**result):
        return RunRecord(Path(PAIRS.workdir), PAIRS, "done", "", result, {}, {})

    assert run(device="TPU v4", num_devices=4).device == "4 x TPU v4"
    assert run(device="cpu", num_devices=1).device == run(device="cpu").device == "cpu"
    assert run().device is None


def test_the_atlas_of_a_section():
    found = atlas.atlas(section(*THREE))
    assert [picture.caption.partition(". ")[0] for picture in found.pictures] == [
        "bleu against attention parameters",
        "bleu against cached numbers a token",
        "bleu against time of a step",
    ]
    assert [name for _, name in found.legend] == ["mha", "sha", "mqa"]
    assert all(picture.svg for picture in found.pictures)
    assert "standard deviation over seeds" in found.note
    assert found.note.endswith(" The cross is mha.")
    assert "cross" not in atlas.atlas(section(*THREE[1:])).note
