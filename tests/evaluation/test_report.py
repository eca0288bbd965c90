"""The comparison of runs that are made up here: numbers by hand, groups, files, mistakes."""

import csv
import json
import math
import os
import re
import statistics
from pathlib import Path

import pytest

from mhe_jax.cli.compare import parse
from mhe_jax.config import (
    AttentionConfig,
    Comparison,
    Config,
    DataConfig,
    InputError,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from mhe_jax.config.fields import save_json, set_field
from mhe_jax.report import plots, report
from mhe_jax.report.groups import VARIANTS, sections
from mhe_jax.report.results import sweep_table
from mhe_jax.report.runs import RunRecord, read_runs

LM = Config(
    task="lm",
    model=ModelConfig(features=24, num_layers=2, attention=AttentionConfig(num_heads=4)),
    data=DataConfig(train=("train.txt",)),
    optimizer=OptimizerConfig(learning_rate=0.001),
    train=TrainConfig(num_steps=10),
)
PAIRS = set_field(set_field(LM, "task", "translation"), "data.train", ("a.en", "a.de"))
PARAMETERS = {"mha": 9000, "sha": 2000, "mhe_mul": 2100, "mqa": 5000}


def leave(place, config, *, loss=2.0, attention=None, result=True, scores=None, **changes):
    """A run as train.py and eval.py leave it."""
    place.mkdir(parents=True)
    for name, value in changes.items():
        config = set_field(config, name.replace("__", "."), value)
    config = set_field(config, "workdir", str(place))
    save_json(config, place / "config.json")
    count = attention or PARAMETERS[config.model.attention.kind]
    about = {"parameters": {"total": 50_000 + count, "attention": count}, "device": "an abacus"}
    lines = [
        {"step": step, "split": split, "loss": loss + (10 - step) / 10, "tokens_per_second": 5.0}
        for step in (5, 10)
        for split in ("train", "validation")
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        found = {**about, "steps": 10, "best_validation_loss": loss, "best_step": 10}
        found |= {"training_seconds": 120.0, "tokens_per_second": 1000.0}
        (place / "result.json").write_text(json.dumps(found))
    if scores:
        (place / "eval_test.json").write_text(json.dumps({**about, "steps": [10], **scores}))
    return place


@pytest.fixture
def translations(tmp_path):
    """Three kinds; two seeds of two of them."""
    runs = tmp_path / "runs"
    for kind, seed, bleu in (
        ("mha", 0, 40.0),
        ("mha", 1, 42.0),
        ("sha", 0, 30.0),
        ("mhe_mul", 0, 38.0),
        ("mhe_mul", 1, 40.0),
    ):
        leave(
            runs / f"{kind}-{seed}",
            PAIRS,
            scores={"bleu": bleu, "chrf": bleu + 20, "sentences": 7, "seconds": 3.0},
            model__attention__kind=kind,
            train__seed=seed,
        )
    return runs


def compare(tmp_path, *paths, **settings):
    settings = {"out": str(tmp_path / "report"), "lengths": (), **settings}
    return report.compare([str(path) for path in paths], Comparison(**settings))


def report_of(tmp_path):
    return (tmp_path / "report" / "report.md").read_text()


def rows(found, section=0):
    return {row["attention"]: row for row in found["sections"][section]["groups"]}


def test_numbers_by_hand(translations, tmp_path):
    found = compare(tmp_path, translations)
    assert found["runs"] == {"done": 5, "not finished": 0, "failed": 0}
    (section,) = found["sections"]
    assert section["metric"] == "bleu"
    groups = rows(found)
    assert list(groups) == ["mha", "mhe_mul", "sha"]
    mul, sha = groups["mhe_mul"], groups["sha"]
    assert mul["seeds"] == 2
    assert (mul["parameters"], mul["in attention"]) == (52_100, 2_100)
    assert mul["bleu"] == 39.0
    assert mul["± over seeds"] == pytest.approx(statistics.stdev([38, 40]))
    assert mul["% of mha"] == pytest.approx(100 * 2100 / 9000)
    assert mul["PRR"] == pytest.approx(100 * 39 / 41)
    assert mul["PEoP"] == pytest.approx(((39 - 30) / 30) / ((2100 - 2000) / 2000))
    assert groups["mha"]["PRR"] == 100
    assert (sha["PEoP"], sha["± over seeds"]) == (None, None)
    # Two layers, each with its cache of the token and of the source: one key and one value head of
    # 6 numbers for mhe_mul, four of each for mha.
    cached = [groups[kind]["cached numbers a token"] for kind in ("mhe_mul", "mha")]
    assert cached == [2 * 2 * 12, 2 * 2 * 48]
    assert "of a token and a source token in all layers" in report_of(tmp_path)
    assert (mul["training minutes"], mul["training tokens/s"]) == (2.0, 1000.0)


def test_files_have_the_same_numbers(translations, tmp_path):
    found = compare(tmp_path, translations)
    out = tmp_path / "report"
    names = {path.name for path in out.iterdir()}
    assert names == {
        "report.html", "report.md", "comparison.csv", "scores.csv", "runs.csv",
        "published-encoders.csv", "published-translation.csv",
    }  # fmt: skip
    with (out / "comparison.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    for name in ("bleu", "PRR", "PEoP"):  # in full, however the page rounds them
        numbers = [float(row[name]) if row[name] else None for row in read]
        assert numbers == [row[name] for row in rows(found).values()]
    text = (out / "report.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| mhe_mul"))
    assert line.split(" | ")[1:8] == ["2", "52,100", "2,100", "23.3", "39.00", "1.41", "95.1"]
    # All that is published stands there, and says that it is.
    assert "| mhe_mul | 8,875,008 | 80.6 | 98.3 | 5.53 |" in text
    assert "not comparable in absolute terms" in text
    html = (out / "report.html").read_text()
    # Learning curves, scores against parameters and cached numbers, and three marks of the legend.
    assert html.count("<img ") == 1 + 2 + 3
    assert "Not shown, without time of a step: all." in html
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert "http" not in re.sub(r"<meta http-equiv|base64,[\w+/=]+", "", html)
    scores = (out / "scores.csv").read_text().splitlines()
    assert scores[0] == "attention,bleu,±,chrf,±"


@pytest.mark.parametrize("base", ["mha", "sha", None])
def test_ratios_are_explained_where_there_are_any(tmp_path, base):
    for kind in ("mqa", "mhe_mul", base):
        if kind:
            leave(tmp_path / kind, PAIRS, scores={"bleu": 9.0}, model__attention__kind=kind)
    compare(tmp_path, tmp_path)
    text = report_of(tmp_path).partition("## Published")[0]
    assert ("PRR" in text) == ("PEoP" in text) == ("mha" in text) == (base is not None)


def test_a_loss_is_better_when_lower(tmp_path):
    for kind, score in (("mha", 50.0), ("sha", 80.0), ("mhe_mul", 60.0)):
        leave(
            tmp_path / kind,
            LM,
            scores={"perplexity_per_word": score, "perplexity_per_token": 3.0},
            model__attention__kind=kind,
        )
    found = compare(tmp_path, *(tmp_path / kind for kind in ("mha", "sha", "mhe_mul")))
    mul = rows(found)["mhe_mul"]
    assert mul["perplexity per word"] == 60
    assert mul["PRR"] == pytest.approx(80)
    assert mul["PEoP"] == pytest.approx(((80 - 60) / 80) / (100 / 2000))
    assert "Lower is better here" in report_of(tmp_path)


def test_without_scores_the_validation_loss_is_shown(tmp_path):
    leave(tmp_path / "runs" / "a", LM, loss=3.0)
    found = compare(tmp_path, tmp_path / "runs")
    assert found["sections"][0]["metric"] == "best_validation_loss"
    assert rows(found)["mha"]["best validation loss"] == 3.0
    assert f"`python eval.py {tmp_path}/runs/a --split test`" in report_of(tmp_path)


def test_what_is_not_scored_is_named_with_its_command(tmp_path):
    """And is not counted among the seeds of a mean."""
    runs = tmp_path / "runs"
    for name, kind, seed, scores in (
        ("a", "mha", 0, {"bleu": 40.0}),
        ("b c", "mha", 1, None),
        ("d", "mha", 2, {"bleu": math.nan}),
        ("e", "sha", 0, None),
    ):
        leave(runs / name, PAIRS, scores=scores, model__attention__kind=kind, train__seed=seed)
    found = compare(tmp_path, runs, split="test")
    assert (rows(found)["mha"]["seeds"], rows(found)["mha"]["bleu"]) == (1, 40.0)
    assert (rows(found)["sha"]["seeds"], rows(found)["sha"].get("bleu")) == (0, None)
    (note,) = [note for note in found["sections"][0]["notes"] if "eval.py" in note]
    assert f"python eval.py '{runs}/b c' --split test" in note
    assert f"python eval.py {runs}/e --split test" in note
    assert f"{runs}/d (bleu" in note
    assert f"{runs}/a" not in note


def test_a_run_that_was_changed_in_the_middle_is_in_no_mean_with_others(tmp_path):
    told = ["step 5: optimizer.learning_rate 0.1 -> 0.001"]
    for seed, bleu in enumerate((40.0, 42.0, 50.0)):
        place = leave(tmp_path / f"{seed}", PAIRS, scores={"bleu": bleu}, train__seed=seed)
    leave(tmp_path / "sha", PAIRS, scores={"bleu": 20.0}, model__attention__kind="sha")
    result = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps({**result, "changed": told}))
    found = rows(compare(tmp_path, *(tmp_path / name for name in ("0", "1", "2", "sha"))))
    whole, changed, sha = found.values()
    assert (whole["seeds"], whole["bleu"], changed["bleu"]) == (2, 41.0, 50.0)
    assert told[0] in next(name for name, row in found.items() if row is changed)
    assert (sha["PRR"], changed.get("PRR")) == (pytest.approx(100 * 20 / 41), 100.0)
    assert f"done: {told[0]} |" in report_of(tmp_path)
    (place / "result.json").write_text(json.dumps({**result, "changed": "5"}))
    with pytest.raises(InputError, match="changed"):
        compare(tmp_path, place)


def test_the_lowest_loss_is_the_lowest_where_a_score_decides(tmp_path):
    place = leave(tmp_path / "a", set_field(LM, "task", "classification"), loss=0.75)
    result = {"steps": 10, "best_step": 5, "best_validation_score": 83.0, "loss_at_best_step": 1.25}
    (place / "result.json").write_text(json.dumps(result))
    assert rows(compare(tmp_path, place))["mha"]["best validation loss"] == 0.75
    assert "score 83.0000" in sweep_table([{"name": "a", "status": "done", "result": result}])


def test_any_named_metric(tmp_path):
    """A result can name its score; --metric takes another."""
    scores = {"metric": "mcc", "mcc": 0.5, "accuracy": 0.8}
    leave(tmp_path / "runs" / "a", LM, scores=scores)
    found = compare(tmp_path, tmp_path / "runs")
    assert rows(found)["mha"]["mcc"] == 0.5
    found = compare(tmp_path, tmp_path / "runs", metric="accuracy")
    assert rows(found)["mha"]["accuracy"] == 0.8
    with pytest.raises(
        InputError, match="--metric accurcy: no run has it; takes one of .*accuracy"
    ):
        compare(tmp_path, tmp_path / "runs", metric="accurcy")


def test_what_differs_makes_groups_and_each_has_its_own_base(tmp_path):
    runs = tmp_path / "runs"
    for rate in (0.001, 0.002):
        for kind, score in (("mha", 40.0), ("mhe_mul", 30.0)):
            leave(
                runs / f"{kind}-{rate}",
                PAIRS,
                scores={"bleu": score + 1000 * rate},
                model__attention__kind=kind,
                optimizer__learning_rate=rate,
            )
    leave(
        runs / "wide", PAIRS, scores={"bleu": 36.0}, model__attention__kind="mhe_mul",
        model__attention__num_groups=2,
    )  # fmt: skip
    found = rows(compare(tmp_path, runs))
    assert set(found) == {
        "mha, learning_rate=0.001",
        "mha, learning_rate=0.002",
        "mhe_mul, learning_rate=0.001",
        "mhe_mul, learning_rate=0.002",
        "mhe_mul, num_groups=2, learning_rate=0.001",
    }
    assert found["mhe_mul, learning_rate=0.002"]["PRR"] == pytest.approx(100 * 32 / 42)
    assert found["mhe_mul, num_groups=2, learning_rate=0.001"]["PRR"] == pytest.approx(3600 / 41)


def test_a_variant_of_a_kind_is_named_even_where_it_is_the_only_one(tmp_path):
    runs = tmp_path / "runs"
    leave(runs / "mha", PAIRS, model__attention__kind="mha")
    add = {"model__attention__kind": "mhe_add", "model__attention__num_groups": 2}
    leave(runs / "add", PAIRS, attention=3000, **add)
    gqa = {"model__attention__kind": "gqa", "model__attention__num_kv_heads": 2}
    leave(runs / "gqa", PAIRS, attention=6000, **gqa)
    assert set(rows(compare(tmp_path, runs))) == {"mha", "mhe_add, num_groups=2", "gqa"}


def test_fields_that_make_a_variant():
    assert sorted(VARIANTS) == ["latent_groups", "num_groups", "reuse_keys", "score_groups"]


def test_one_attention_is_one_group_wherever_it_is_set(tmp_path):
    one = {"model__attention__kind": "mhe_mul"}
    roles = ("encoder", "decoder", "cross")
    other = {f"model__attention_by_role__{role}__kind": "mhe_mul" for role in roles}
    for seed, changes in enumerate((one, other)):
        leave(tmp_path / str(seed), PAIRS, attention=9, train__seed=seed, **changes)
    leave(tmp_path / "2", PAIRS, train__seed=2)
    found = rows(compare(tmp_path, *map(str, sorted(tmp_path.glob("[0-9]")))))
    assert {name: row["seeds"] for name, row in found.items()} == {"mhe_mul": 2, "mha": 1}


def test_no_two_groups_have_one_name(tmp_path):
    """Each has its own line of every table."""
    by_role = "model__attention_by_role__"
    for name, kind, changes in (
        ("a", "mha", {f"{by_role}decoder__kind": "mqa"}),
        ("b", "mqa", {f"{by_role}encoder__kind": "mha", f"{by_role}cross__kind": "mha"}),
    ):
        leave(tmp_path / "runs" / name, PAIRS, model__attention__kind=kind, **changes)
    found = compare(tmp_path, tmp_path / "runs")["sections"][0]["groups"]
    by_role = "model.attention_by_role."
    kinds = "encoder:mha decoder:mqa cross:mha, "
    assert [row["attention"].removeprefix(kinds) for row in found] == [
        f"model.attention.kind=mha, {by_role}decoder.kind=mqa",
        f"model.attention.kind=mqa, {by_role}encoder.kind=mha, {by_role}cross.kind=mha",
    ]


def test_the_learning_rate_is_chosen_by_the_validation_loss_of_common_seeds(tmp_path):
    runs = tmp_path / "runs"
    for kind, rate, seed, loss, bleu in (
        ("mha", 0.001, 0, 2.0, 10.0),
        ("mha", 0.002, 0, 1.9, 11.0),
        ("mha", 0.002, 1, 9.0, 13.0),  # a bad second seed that the other rate has not
        ("mhe_mul", 0.001, 0, 1.0, 8.0),
        ("mhe_mul", 0.002, 0, 2.5, 20.0),  # a better score is not asked
    ):
        leave(
            runs / f"{kind}-{rate}-{seed}",
            PAIRS,
            loss=loss,
            scores={"bleu": bleu},
            model__attention__kind=kind,
            optimizer__learning_rate=rate,
            train__seed=seed,
        )
    found = compare(tmp_path, runs, choose=("optimizer.learning_rate",))
    groups = rows(found)
    assert list(groups) == ["mha, learning_rate=0.002", "mhe_mul, learning_rate=0.001"]
    assert groups["mha, learning_rate=0.002"]["seeds"] == 2
    assert groups["mhe_mul, learning_rate=0.001"]["PRR"] == pytest.approx(100 * 8 / 12)
    with pytest.raises(InputError, match="learning_rat: no such field; did you mean optimizer"):
        compare(tmp_path, runs, choose=("optimizer.learning_rat",))


@pytest.mark.parametrize(
    "field", ["train.seed", "mesh.data", "model.attention.engine", "data.train", "data.tokenizer"]
)
def test_what_makes_no_groups_is_not_chosen(tmp_path, field):
    leave(tmp_path / "runs" / "a", PAIRS)
    with pytest.raises(InputError, match=f"--choose {field}: makes no groups; takes a field of"):
        compare(tmp_path, tmp_path / "runs", choose=(field,))
    compare(tmp_path, tmp_path / "runs", choose=("data.length_buckets",))


def test_fine_tuned_runs_are_compared_though_each_starts_from_its_own_encoder(tmp_path):
    for kind, score in (("mha", 40.0), ("mhe_mul", 30.0)):
        for start in (f"runs/mlm-{kind}", None):
            leave(
                tmp_path / "runs" / f"{kind}-{start is None}",
                PAIRS,
                scores={"bleu": score - 10 * (start is None)},
                model__attention__kind=kind,
                train__init_from=start,
            )
    found = rows(compare(tmp_path, tmp_path / "runs"))
    assert found["mhe_mul, init_from=runs/mlm-mhe_mul"]["PRR"] == pytest.approx(75)
    assert found["mhe_mul"]["PRR"] == pytest.approx(100 * 20 / 30)
    found = rows(compare(tmp_path, *sorted((tmp_path / "runs").glob("*False"))))
    assert set(found) == {"mha", "mhe_mul"}
    assert found["mhe_mul"]["PRR"] == pytest.approx(75)


def test_a_run_that_was_only_converted_is_no_seed(tmp_path):
    runs = tmp_path / "runs"
    for name, kind, result, bleu in (
        ("mha", "mha", True, 40.0),
        ("mqa", "mqa", True, 30.0),
        ("converted-mha", "mha", False, 5.0),
        ("converted-mqa", "mqa", False, 10.0),
    ):
        scores = {"bleu": bleu}
        leave(runs / name, PAIRS, result=result, scores=scores, model__attention__kind=kind)
    for choose in ((), ("model.features",)):
        found = rows(compare(tmp_path, runs, choose=choose))
        told = {name: (row["seeds"], row["bleu"], row["PRR"]) for name, row in found.items()}
        assert told == {
            "mha": (1, 40, 100),
            "mqa": (1, 30, 75),
            "mha, not trained here": (1, 5, 12.5),  # the base is what was trained
            "mqa, not trained here": (1, 10, 25),
        }
    # With none beside them that were trained, they need no other name.
    found = rows(compare(tmp_path, *sorted(runs.glob("converted*"))))
    assert {name: row["PRR"] for name, row in found.items()} == {"mha": 100, "mqa": 200}


def test_scores_of_an_earlier_step_are_left_out(tmp_path):
    for kind, then in (("mha", 10), ("mhe_mul", 5)):
        leave(
            tmp_path / "runs" / kind,
            PAIRS,
            scores={"bleu": 40.0, "checkpoint": "best", "steps": [then]},
            model__attention__kind=kind,
        )
    found = compare(tmp_path, tmp_path / "runs")
    assert rows(found)["mha"]["bleu"] == 40
    assert rows(found)["mhe_mul"]["bleu"] is None
    told = report_of(tmp_path)
    assert "done: eval_test.json is left out, it is of step 5, not 10: run `python eval.py" in told


@pytest.mark.parametrize("steps", [5, [], [None], None])
def test_scores_that_do_not_say_which_steps_they_are_of(tmp_path, steps):
    leave(tmp_path / "a", PAIRS, scores={"bleu": 4.0, "checkpoint": "best", "steps": steps})
    (found,) = read_runs([tmp_path / "a"], "test")
    assert found.scores == {}
    assert "not 10: run `python eval.py" in found.reason


def test_a_mean_of_checkpoints_is_of_its_last(tmp_path):
    scores = {"bleu": 4.0, "checkpoint": "last", "average_checkpoints": 3, "steps": [6, 8, 10]}
    leave(tmp_path / "a", PAIRS, scores=scores)
    (found,) = read_runs([tmp_path / "a"], "test")
    assert (found.value("bleu"), found.reason) == (4.0, "")


def test_what_was_not_evaluated_alike_is_told(tmp_path):
    for kind, beams in (("mha", 5), ("mhe_mul", 1)):
        leave(
            tmp_path / "runs" / kind,
            PAIRS,
            scores={"bleu": 40.0, "beam_size": beams, "length_penalty": 0.6},
            model__attention__kind=kind,
        )
    compare(tmp_path, tmp_path / "runs")
    told = report_of(tmp_path)
    assert "Not evaluated alike: beam_size is 5 (as mha), 1 (as mhe_mul)." in told
    assert "length_penalty" not in told


def test_a_setting_that_a_result_does_not_name_is_not_told(tmp_path):
    """An earlier version left it out."""
    for kind, scores in (("mha", {"extra_length": 50}), ("mhe_mul", {})):
        fields = {"scores": {"bleu": 40.0, **scores}, "model__attention__kind": kind}
        leave(tmp_path / "runs" / kind, PAIRS, **fields)
    compare(tmp_path, tmp_path / "runs")
    assert "Not evaluated alike" not in report_of(tmp_path)


def test_that_losses_are_of_several_tokenizers_is_told(tmp_path):
    """Where their files lie makes no groups, and what is in them is not known here."""
    for seed, name in ((0, "a.model"), (1, "b.model"), (2, "b.model")):
        leave(tmp_path / "runs" / str(seed), LM, train__seed=seed, data__tokenizer=name)
    compare(tmp_path, tmp_path / "runs")
    path = tmp_path / "runs"
    told = f'data.tokenizer is "a.model" (as {path}/0), "b.model" (as {path}/2): numbers per token'
    assert told in report_of(tmp_path)
    compare(tmp_path, path / "1", path / "2")
    assert "data.tokenizer" not in report_of(tmp_path)


def test_the_speed_is_that_of_training(tmp_path):
    leave(
        tmp_path / "runs" / "a", LM, scores={"perplexity_per_word": 9.0, "tokens_per_second": 7.0}
    )
    assert rows(compare(tmp_path, tmp_path / "runs"))["mha"]["training tokens/s"] == 1000


def test_the_time_of_a_step_is_the_median_of_the_log(tmp_path):
    place = leave(tmp_path / "runs" / "a", LM)
    with (place / "metrics.jsonl").open("a") as file:
        for step, seconds in ((1, 0.25), (2, 0.125), (3, 0.25), (4, 9.0), (5, math.inf)):
            line = {"step": step, "split": "train", "loss": 2.0, "step_seconds_p50": seconds}
            file.write(json.dumps(line) + "\n")
    assert rows(compare(tmp_path, tmp_path / "runs"))["mha"]["ms a step"] == 250
    assert "Medians of training on an abacus." in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"model__kronecker__attention": 4},
        {"model__positions": "rotary"},  # for which mhe_add takes another form
        {"model__dtype": "bfloat16"},
    ],
)
def test_other_modules_have_memory_of_their_own(tmp_path, changes):
    add = set_field(LM, "model.attention.kind", "mhe_add")
    leave(tmp_path / "runs" / "a", add, attention=2100)
    leave(tmp_path / "runs" / "b", add, attention=2100, **changes)
    compare(tmp_path, tmp_path / "runs", lengths=(64,))
    with (tmp_path / "report" / "memory.csv").open() as file:
        one, other = list(csv.reader(file))[1:]
    assert one[1:] != other[1:]


def test_equal_modules_are_compiled_once(tmp_path, capsys):
    for rate in (0.1, 0.2):
        leave(tmp_path / "runs" / str(rate), LM, optimizer__learning_rate=rate)
    compare(tmp_path, tmp_path / "runs", lengths=(64,))
    assert capsys.readouterr().err.count("memory: ") == 2  # forward, with gradients


@pytest.mark.parametrize(
    ("kind", "engine"), [("mha", "cudnn"), ("mha", "splash"), ("mva", "pallas"), ("mva", "mosaic")]
)
def test_memory_of_an_engine_that_is_for_another_device(tmp_path, kind, engine):
    """As `auto` would take it here; the run may have been trained there."""
    of_kind = set_field(LM, "model.attention.kind", kind)
    for place in (engine, "auto"):
        leave(tmp_path / place, of_kind, attention=9, model__attention__engine=place)
    told = []
    for place in (engine, "auto"):
        (section,) = sections(read_runs([tmp_path / place], "test"), None)
        told.append(report.memory_of(section, (16,)))
    assert told[0] == told[1]


def test_other_text_is_another_section(tmp_path):
    runs = tmp_path / "runs"
    leave(runs / "a", LM, scores={"perplexity_per_word": 9.0})
    leave(runs / "b", LM, data__train=("other.txt",))
    leave(runs / "c", PAIRS)
    # Where the same text lies does not matter, nor how often one looked.
    leave(runs / "d", LM, data__cache_directory="x", train__seed=3, train__log_every=7)
    found = compare(tmp_path, runs)
    assert [len(section["groups"]) for section in found["sections"]] == [1, 1, 1]
    assert rows(found)["mha"]["seeds"] == 1  # of two, one has no score
    assert (tmp_path / "report" / "comparison-3.csv").exists()


@pytest.mark.parametrize(
    ("changes", "benchmark"),
    [
        ({}, None),
        ({"task": "mlm"}, None),
        ({"task": "translation", "data.train": ("demo:train",)}, None),
        (
            {"task": "translation", "data.directory": "multi30k", "data.train": ("a.en", "a.de")},
            None,
        ),
        ({"task": "translation", "data.train": ("tfds:wmt14_translate/fr-en:train",)}, None),
        (
            {"task": "translation", "data.directory": "wmt14", "data.train": ("dev.fr", "dev.en")},
            None,
        ),
        (
            {"task": "translation", "data.train": ("tfds:wmt14_translate/de-en:train",)},
            "WMT14 English to German",
        ),
        (
            {"task": "translation", "data.directory": "WMT14", "data.train": ("a.en", "a.de")},
            "WMT14 English to German",
        ),
        (
            {
                "task": "translation",
                "data.train": ("tfds:wmt14_translate/de-en:train",),
                "data.fields": ("en", "de"),
            },
            "WMT14 English to German",
        ),
        (  # from German
            {
                "task": "translation",
                "data.train": ("tfds:wmt14_translate/de-en:train",),
                "data.fields": ("de", "en"),
            },
            None,
        ),
        (
            {"task": "translation", "data.directory": "WMT14", "data.train": ("a.de", "a.en")},
            None,
        ),
        (
            {"task": "translation", "data.train": ("wmt14/de-en/t.de.gz", "wmt14/de-en/t.en.gz")},
            None,
        ),
        (
            {"task": "translation", "data.train": ("wmt14/de-en/t.en.gz", "wmt14/de-en/t.de.gz")},
            "WMT14 English to German",
        ),
        ({"task": "classification"}, None),
        ({"task": "classification", "data.dataset": "cola"}, "GLUE"),
        ({"task": "classification", "data.dataset": "cb"}, "SuperGLUE"),
        ({"task": "span", "data.dataset": "squad"}, "SQuAD v1.1"),
        ({"task": "span", "data.dataset": "squad_v2"}, "SQuAD v2.0"),
    ],
)
@pytest.mark.parametrize("scored", [True, False])
def test_published_marks_only_where_the_task_is_of_the_paper(tmp_path, changes, benchmark, scored):
    pytest.importorskip("matplotlib")
    config = LM
    for name, value in changes.items():
        config = set_field(config, name, value)
    metric = "bleu" if config.task == "translation" else "score"
    leave(tmp_path / "runs", config, scores={metric: 30.0} if scored else None)
    (section,) = sections(read_runs([tmp_path / "runs"], "test"), None)
    expected = benchmark if scored and section.metric == metric else None
    assert plots.published_for(section) == expected
    if expected is None:
        return
    figure = plots.beside_the_paper(section, expected)
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    hollow = [name for name in names if "published" in name]
    assert all(name.endswith(f" on {expected}") for name in hollow)
    assert len(hollow) == (1 if "WMT14" in expected else 7)
    assert "Hollow" in report._pictures(section, {"forward": {}})[1].caption


@pytest.mark.parametrize(
    ("task", "unit"), [("lm", "nats a token"), ("regression", "squared error")]
)
def test_curves_name_the_unit_of_the_task(tmp_path, task, unit):
    pytest.importorskip("matplotlib")
    leave(tmp_path / "runs", set_field(LM, "task", task))
    (section,) = sections(read_runs([tmp_path / "runs"], "test"), None)
    (axes,) = plots.learning_curves(section).axes
    assert axes.get_ylabel() == f"validation loss ({unit})"


def test_curves_of_each_group_are_named_once(tmp_path):
    """Where the first run has lost its log, and where it has not."""
    pytest.importorskip("matplotlib")
    for kind in ("mha", "sha"):
        for seed in range(3):
            changes = {"model__attention__kind": kind, "train__seed": seed}
            leave(tmp_path / "runs" / f"{kind}-{seed}", LM, **changes)
    (tmp_path / "runs" / "mha-0" / "metrics.jsonl").unlink()
    (section,) = sections(read_runs([tmp_path / "runs"], "test"), None)
    figure = plots.learning_curves(section)
    assert [len(axes.get_lines()) for axes in figure.axes] == [5]
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert names == ["mha", "sha"]


def test_failed_and_unfinished_runs_are_told(translations, tmp_path):
    half = translations / "half"
    leave(half, PAIRS, result=False)
    broken = translations / "broken"
    broken.mkdir()
    entry = {"name": "broken", "workdir": str(broken), "values": {}, "status": "failed"}
    (translations / "sweep.json").write_text(
        json.dumps({"runs": [{**entry, "reason": "data.train: | no such file"}]})
    )
    found = compare(tmp_path, translations)
    assert found["runs"] == {"done": 5, "not finished": 1, "failed": 1}
    text = report_of(tmp_path)
    assert f"| {half} | - | 0 | not finished: logged 10 of 10 steps |" in text
    assert f"| {broken} | - | - | failed: data.train: \\| no such file |" in text
    assert len(rows(found)) == 3


def test_runs_are_found_below_and_each_once(translations):
    found = read_runs([translations, translations / "mha-0", translations.parent], "test")
    assert len(found) == 5
    assert len(sections(found, None)[0].groups) == 3


def test_records_of_the_docs_can_be_read():
    """The tables of docs/experiments.md can be made again."""
    runs = read_runs([Path(__file__).parents[2] / "docs/records"], "test")
    assert {run.status for run in runs} == {"done"}
    assert sections(runs, None, ("optimizer.learning_rate",))
    assert runs[0].fields is runs[0].fields  # hundreds of runs ask thousands of times


def test_memory_of_each_kind(translations, tmp_path):
    found = compare(tmp_path, translations, lengths=(8, 32))
    groups = rows(found)
    sizes = {kind: row["MB with gradients, T = 32"] for kind, row in groups.items()}
    assert all(size > 0 for size in sizes.values())
    with (tmp_path / "report" / "memory.csv").open(newline="") as file:
        table = {row["attention"]: row for row in csv.DictReader(file)}
    for kind, row in table.items():
        assert float(row["with gradients, T = 32"]) == sizes[kind]
        # An output of 32 tokens of 24 numbers of 4 bytes at least, and more with gradients.
        assert float(row["forward, T = 32"]) >= 32 * 24 * 4 / 1e6
        assert float(row["with gradients, T = 32"]) > float(row["forward, T = 32"])
        assert float(row["forward, T = 32"]) > float(row["forward, T = 8"])
    assert "against the length T" in (tmp_path / "report" / "report.html").read_text()


def test_a_directory_of_something_else_is_left_alone(translations, tmp_path):
    out = tmp_path / "report"
    out.mkdir()
    (out / "report.md").write_text("mine")
    with pytest.raises(InputError, match="holds something other than a report"):
        compare(tmp_path, translations)
    assert [(p.name, p.read_text()) for p in out.iterdir()] == [("report.md", "mine")]
    (out / "report.md").unlink()
    compare(tmp_path, translations)
    compare(tmp_path, translations)  # an earlier report is replaced
    with pytest.raises(InputError, match="is a file"):
        compare(tmp_path, translations, out=str(out / "report.md"))


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_result_is_named(translations, tmp_path, content):
    (translations / "mha-0" / "result.json").write_text(content)
    with pytest.raises(InputError, match="mha-0/result.json: not a result"):
        compare(tmp_path, translations)
    assert not (tmp_path / "report").exists()


def test_no_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no runs below"):
        compare(tmp_path, tmp_path / "empty")
    with pytest.raises(InputError, match="there is no .*emty; did you mean .*empty"):
        compare(tmp_path, tmp_path / "emty")


def test_arguments():
    fields = ["optimizer.learning_rate", "train.num_steps"]
    paths, settings = parse(["a", "b/c", "--out", "o", "--choose", *fields, "--lengths", "8", "16"])
    assert paths == ["a", "b/c"]
    assert settings == Comparison(out="o", choose=tuple(fields), lengths=(8, 16))
    assert parse(["a", "--lengths"])[1].lengths == ()
    for arguments, complaint in (
        ("--out x", "no runs given; usage: eval.py compare"),
        ("a --ot x", "unknown field --ot; did you mean --out"),
        ("a --split train", "--split is 'train': takes one of validation, test"),
        ("a --lengths 0", "takes 1 or more"),
        ("a --lengths x", "--lengths is 'x': takes any number of whole numbers"),
    ):
        with pytest.raises(InputError, match=re.escape(complaint)):
            parse(arguments.split())


def test_cells_and_marks_are_escaped(tmp_path):
    runs = tmp_path / "<b>&runs"
    for name, start in (("a", None), ("b", '"><b>')):
        leave(runs / name, LM, train__init_from=start)
    compare(tmp_path, runs)
    html = Path(tmp_path / "report" / "report.html").read_text()
    assert "&lt;b&gt;&amp;runs" in html
    assert 'aria-label="mha, init_from=&quot;&gt;&lt;b&gt;\n' in html
    assert "<b>" not in html


def test_odd_names_of_runs_and_fields(tmp_path):
    """Half a surrogate pair, which is no character; a formula that is none; a line break."""
    pytest.importorskip("matplotlib")
    for number, name in enumerate((b"\xff$\\x$", b"a\nb|c")):
        leave(
            tmp_path / "runs" / os.fsdecode(name),
            PAIRS,
            scores={"bleu": 40.0},
            train__init_from=f"$\\frac{number} \udc80",
            optimizer__warmup_steps=1 + number,
        )
    compare(tmp_path, tmp_path / "runs")
    text = report_of(tmp_path)
    assert "runs/a b\\|c |" in text
    assert r"runs/\udcff$\x$" in text


def test_numbers_that_are_none(tmp_path):
    """NaN is no loss to choose by, and no score."""
    for rate, loss, bleu in ((0.001, math.nan, 11.0), (0.002, 3.0, math.nan)):
        place = leave(
            tmp_path / "runs" / str(rate),
            PAIRS,
            loss=loss,
            scores={"bleu": bleu, "chrf": 30.0},
            optimizer__learning_rate=rate,
        )
        with (place / "metrics.jsonl").open("a") as file:
            file.write('{"step": "x", "split": [1], "loss": 0.5}\n')
    found = read_runs([tmp_path / "runs"], "test")
    assert [run.validation_loss for run in found] == [None, 3.0]
    assert [run.value("bleu") for run in found] == [11.0, None]
    groups = rows(compare(tmp_path, tmp_path / "runs", choose=("optimizer.learning_rate",)))
    assert list(groups) == ["mha, learning_rate=0.002"]


def test_links_below_a_path_lead_to_runs_only(translations, tmp_path):
    """Each of two that lead up again would double the directories at every level."""
    for name in ("up", "again"):
        (translations / name).symlink_to(translations.parent)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one").symlink_to(translations / "mha-0")
    assert len(read_runs([translations], "test")) == 5
    (found,) = read_runs([tmp_path / "more"], "test")
    assert found.path == tmp_path / "more" / "one"
    # What the user names may be a link.
    assert len(read_runs([translations / "up" / "runs"], "test")) == 5


# Another value of every part of the config, and not of the seed.
OTHERS = {
    "model.features": 32,
    "model.mlp_features": 31,
    "model.num_layers": 3,
    "model.attention.num_heads": 2,
    "model.attention.dropout_rate": 0.5,
    "model.attention_by_role.decoder.use_bias": True,
    "model.kronecker.mlp": 5,
    "model.dropout_rate": 0.5,
    "model.dtype": "bfloat16",
    "model.tie_embeddings": False,
    "data.sequence_length": 64,
    "data.batch_size": 16,
    "data.packing": True,
    "data.train_weights": (2.0,),
    "data.mask_rate": 0.25,
    "optimizer.name": "adafactor",
    "optimizer.learning_rate": 0.5,
    "optimizer.weight_decay": 0.5,
    "optimizer.head_embedding_rate": 2.0,
    "optimizer.accumulate_steps": 2,
    "optimizer.ema_decay": 0.5,
    "optimizer.label_smoothing": 0.5,
    "train.num_steps": 11,
    "train.skip_nonfinite": 3,
    "train.init_from": "runs/other",
}
# What makes no other experiment.
ALIKE = {
    "train.seed": 1,
    "train.eval_every": 7,
    "train.eval_batches": 7,
    "train.checkpoint_every": 7,
    "train.keep_checkpoints": 7,
    "train.log_every": 7,
    "data.directory": "./",
    "data.cache_directory": "x",
    "data.tokenizer": "x",
    "train.profile_steps": (2, 3),
    "train.tensorboard": True,
    "train.wandb": True,
    "model.remat": True,
    "model.kronecker.apply": "factored",
    "model.attention.engine": "xla",
    "model.attention_by_role.decoder.engine": "blocked",
    "model.attention.form": "materialized",
    "mesh.data": 2,
    "evaluation.beam_size": 2,
}


@pytest.mark.parametrize("name", OTHERS | ALIKE)
def test_seeds_are_runs_that_differ_in_nothing_else(tmp_path, name):
    """Only they are averaged."""
    config = set_field(LM, "workdir", "a")
    other = set_field(config, name, (OTHERS | ALIKE)[name])
    found = [
        RunRecord(tmp_path / str(i), one, "done", "", {}, {}, {})
        for i, one in enumerate((config, other))
    ]
    groups = [group for section in sections(found, None) for group in section.groups]
    assert [len(group.runs) for group in groups] == ([1, 1] if name in OTHERS else [2])


def made_up(path, **changes):
    config = LM
    for name, value in changes.items():
        config = set_field(config, name.replace("__", "."), value)
    result = {"best_validation_loss": 2.0}
    return RunRecord(path, config, "done", "", result, {}, {})


def test_runs_of_a_group_stand_by_seed(tmp_path):
    """Not by their names, of which seed=10 comes before seed=9."""
    (section,) = sections([made_up(tmp_path, train__seed=seed) for seed in (10, 9, 0)], None)
    assert [run.seed for run in section.groups[0].runs] == [0, 9, 10]


@pytest.mark.parametrize(("heads", "base"), [(4, 0), (2, 1), (8, None)])
def test_the_base_of_several_is_that_with_as_many_heads(tmp_path, heads, base):
    """None where no one of them is nearer than the others."""
    many = [made_up(tmp_path, model__attention__num_heads=number) for number in (4, 2)]
    one = {"model__attention__kind": "sha", "model__attention__num_heads": heads}
    (section,) = sections([*many, made_up(tmp_path, **one)], None)
    *bases, group = section.groups
    assert section.base(group, "mha") is (None if base is None else bases[base])


def test_a_run_that_was_lengthened_is_not_finished(tmp_path):
    """Its result is of before; train.py saves the longer config first."""
    place = leave(tmp_path / "a", LM, scores={"perplexity_per_word": 9.0})
    save_json(set_field(LM, "train.num_steps", 20), place / "config.json")
    (found,) = read_runs([place], "test")
    assert (found.status, found.reason) == ("not finished", "logged 10 of 20 steps")


def test_a_copy_of_a_run_is_no_second_seed(tmp_path):
    for name, seed in (("a", 0), ("copy", 0), ("b", 1)):
        leave(tmp_path / "runs" / name, PAIRS, scores={"bleu": 4.0 + seed}, train__seed=seed)
    (row,) = rows(compare(tmp_path, tmp_path / "runs")).values()
    assert (row["seeds"], row["bleu"]) == (2, 4.5)
