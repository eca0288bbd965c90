"""The picture of a run: what can be compared, on which axes, and what is marked."""

import json
import sys

import pytest

from mhe_jax.config.files import METRICS
from mhe_jax.tasks import TASKS
from mhe_jax.training import curve
from mhe_jax.training.curve import PICTURE, draw, learning_curve, new_figure


def train(step, loss, **more):
    return {"step": step, "split": "train", "loss": loss, **more}


def validation(step, loss, **more):
    return {"step": step, "split": "validation", "loss": loss, **more}


def drawn(lines, task="lm", best_step=None):
    """The axes, the points of each line by its name, and the names in the legend."""
    pytest.importorskip("matplotlib")
    figure = new_figure()
    draw(figure, lines, TASKS[task], best_step)
    points = {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for axes in figure.axes
        for line in axes.lines
    }
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return figure.axes, points, legend


def test_losses_without_smoothing_stand_beside_each_other():
    lines = [train(2, 2.0, smoothed_loss=3.0), train(4, 2.5), validation(4, 2.25)]
    (axes,), points, legend = drawn(lines)
    assert points["training loss"] == [(2, 2.0), (4, 2.5)]
    assert points["validation loss"] == [(4, 2.25)]
    assert legend == ["training loss", "validation loss"]
    assert axes.get_yscale() == "linear"


def test_a_single_loss_can_be_seen():
    for lines, marker in (([train(2, 3.0)], "o"), ([train(2, 3.0), train(4, 2.5)], "None")):
        (axes,), *_ = drawn(lines)
        assert axes.lines[0].get_marker() == marker


@pytest.mark.parametrize("last", [0.5, 0.0, -1.0])
def test_a_wide_loss_is_logarithmic_where_it_can_be(last):
    (axes,), *_ = drawn([train(2, 4.0), validation(4, last)])
    assert axes.get_yscale() == ("log" if last > 0 else "linear")
    if last > 0:
        assert [text.get_text() for text in axes.get_yticklabels()] == ["0.5", "1", "2", "5"]


def test_the_best_checkpoint_is_marked():
    _, points, legend = drawn([validation(step, 7.0 / step) for step in (3, 6)], best_step=3)
    name = "best checkpoint, step 3"
    assert [step for step, _ in points[name]] == [3, 3]
    assert legend == ["validation loss", name]


@pytest.mark.parametrize(
    ("task", "metric", "name"),
    [("translation", "bleu", "BLEU"), ("classification", "score", "score")],
)
def test_the_metric_of_the_task_has_an_axis_of_its_own(task, metric, name):
    lines = [validation(step, 2.0, perplexity=9.0, **{metric: 10.0 * step}) for step in (3, 6)]
    (_, right), points, legend = drawn(lines, task)
    assert right.get_ylabel() == name
    assert points[f"validation {name}"] == [(3, 30.0), (6, 60.0)]
    assert legend == ["validation loss", f"validation {name}"]


def test_perplexity_says_no_more_than_the_loss():
    axes, *_ = drawn([validation(3, 2.0, perplexity=9.0)], "mlm")
    assert len(axes) == 1


@pytest.mark.parametrize("lines", [[], [train(2, float("nan")), validation(2, float("inf"))]])
def test_no_numbers_are_an_empty_picture(lines):
    _, points, legend = drawn(lines)
    assert not any(points.values())
    assert not legend


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("translation", "loss (nats a token)"),
        ("classification", "loss (nats an example)"),
        ("span", "loss (nats a start or end)"),
        ("regression", "loss (squared error)"),
    ],
)
def test_the_picture_names_the_unit_of_the_task(task, name):
    axes, *_ = drawn([], task)
    assert axes[0].get_ylabel() == name


def test_it_is_written_whole(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / METRICS).write_text(json.dumps(train(2, 3.0)) + '\n{"step": 4, "spl')
    told = learning_curve(tmp_path, TASKS["lm"], None)
    assert told == f"learning curve: {tmp_path / PICTURE}"
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [PICTURE, METRICS]


def test_one_that_fails_leaves_nothing(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure

    def fails(self, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fails)
    told = learning_curve(tmp_path, TASKS["lm"], None)
    assert told.startswith(f"no {PICTURE}: cannot write {tmp_path / PICTURE}: No space left on de")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib" in curve.learning_curve(tmp_path, TASKS["lm"], None)
    assert not (tmp_path / PICTURE).exists()
