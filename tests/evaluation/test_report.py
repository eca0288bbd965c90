"""The comparison of runs that are made up here: numbers by hand."""

import base64
import csv
import html
import json
import math
import re
import statistics

import pytest

pytest.importorskip("pandas")

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
from mhe_jax.report import report
from mhe_jax.report.pictures import front
from mhe_jax.report.runs import read_runs, sections

LM = Config(
    task="lm",
    model=ModelConfig(features=24, num_layers=2, attention=AttentionConfig(num_heads=4)),
    data=DataConfig(train=("train.txt",)),
    optimizer=OptimizerConfig(learning_rate=0.001),
    train=TrainConfig(num_steps=10),
)
PAIRS = set_field(set_field(LM, "task", "translation"), "data.train", ("a.en", "a.de"))
PARAMETERS = {"mha": 9000, "sha": 2000, "mhe_mul": 2100, "mqa": 5000}
KIND, RATE, SEED = "model.attention.kind", "optimizer.learning_rate", "train.seed"


@pytest.fixture
def leave(tmp_path):
    """Makes a run as train.py and eval.py leave it."""

    def leave(name, config, changes=None, /, *, loss=2.0, result=True, scores=None, more=None):
        place = tmp_path / "runs" / name
        place.mkdir(parents=True)
        for field, value in {**(changes or {}), "workdir": str(place)}.items():
            config = set_field(config, field, value)
        save_json(config, place / "config.json")
        count = PARAMETERS.get(config.model.attention.kind, 3000)
        about = {"parameters": {"total": 50_000 + count, "attention": count}, "device": "an abacus"}
        lines = [
            {"step": step, "split": split, "loss": loss + (10 - step) / 10, "tokens_per_second": 5}
            for step in (5, 10)
            for split in ("train", "validation")
        ]
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if result:
            found = {**about, "steps": 10, "best_validation_loss": loss, "best_step": 10}
            found |= {"training_seconds": 120.0, "tokens_per_second": 1000.0, **(more or {})}
            (place / "result.json").write_text(json.dumps(found))
        if scores:
            (place / "eval_test.json").write_text(json.dumps({**about, "steps": [10], **scores}))
        return place

    return leave


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """{group: row} of the first section, or with `whole` all that is returned.

    With `drawn`, pictures too; it takes a while.
    """

    def compare(*paths, whole=False, drawn=False, **settings):
        settings = {"out": str(tmp_path / "report"), **settings}
        if not drawn:
            monkeypatch.setattr(report, "pictures", lambda section: {})
        found = report.compare(paths or [tmp_path / "runs"], Comparison(**settings))
        if whole:
            return found
        return {row["attention"]: row for row in found["sections"][0]["groups"]}

    return compare


@pytest.fixture
def translations(leave, tmp_path):
    """Three kinds; two seeds of two of them."""
    bleus = {("mha", 0): 40.0, ("mha", 1): 42.0, ("sha", 0): 30.0}
    for (kind, seed), bleu in {**bleus, ("mhe_mul", 0): 38.0, ("mhe_mul", 1): 40.0}.items():
        scores = {"bleu": bleu, "chrf": bleu + 20, "sentences": 7, "seconds": 3.0}
        scores |= {"tokens_per_second": 9.0}  # that of the evaluation
        leave(f"{kind}-{seed}", PAIRS, {KIND: kind, SEED: seed}, scores=scores)
    return tmp_path / "runs"


def test_numbers_by_hand(translations, compare):
    found = compare(whole=True)
    assert found["runs"] == {"done": 5, "not finished": 0, "failed": 0}
    (section,) = json.loads(json.dumps(found))["sections"]
    assert section["metric"] == "bleu"
    groups = {row["attention"]: row for row in section["groups"]}
    assert list(groups) == ["mha", "mhe_mul", "sha"]
    mul, sha = groups["mhe_mul"], groups["sha"]
    assert (mul["seeds"], mul["parameters"], mul["in attention"]) == (2, 52_100, 2_100)
    assert mul["bleu"] == 39.0
    assert mul["± over seeds"] == pytest.approx(statistics.stdev([38, 40]))
    assert mul["% of mha"] == pytest.approx(100 * 2100 / 9000)
    assert mul["PRR"] == pytest.approx(100 * 39 / 41)
    assert mul["PEoP"] == pytest.approx(((39 - 30) / 30) / ((2100 - 2000) / 2000))
    assert (groups["mha"]["PRR"], groups["mha"]["against mha"]) == (100, None)
    assert (sha["PEoP"], sha["± over seeds"], sha["against mha"]) == (None, None, "one seed")
    # Two layers, each with its cache of the token and of the source: one key and one value head of
    # 6 numbers for mhe_mul, four of each for mha.
    cached = [groups[kind]["cached numbers a token"] for kind in ("mhe_mul", "mha")]
    assert cached == [2 * 2 * 12, 2 * 2 * 48]
    assert (mul["training minutes"], mul["training tokens/s"]) == (2.0, 1000.0)
    assert mul["best validation loss"] == 2.0


def test_the_page_and_the_tables_have_every_number(translations, leave, compare, tmp_path):
    place = leave("z<i>|&amp;$", set_field(LM, "data.train", ("<b>.txt",)))  # to be escaped
    compare(drawn=True)
    out = tmp_path / "report"
    assert {path.name for path in out.iterdir()} == {"report.html", "table.csv", "runs.csv"}
    page = (out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)  # it needs nothing from elsewhere
    cells = [html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>([^<]*)<", page)]
    assert str(place) in cells
    # The score and its difference first: on a narrow screen the table scrolls. 2.83 is 2 · √2.
    shown = ["mhe_mul", "2", "39.00", "1.41", "-2.00", "2.83", "two seeds"]
    shown += ["52,100", "2,100", "23.3", "95.1"]
    at = cells.index("mhe_mul")
    assert cells[at : at + 11] == shown
    assert cells.count("best validation loss") == 3  # of each section, and of the runs
    with (out / "runs.csv").open(newline="") as file:
        read = {row["path"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    assert read["mhe_mul-1"]["group"] == "mhe_mul"
    assert (float(read["mhe_mul-1"]["bleu"]), float(read["mhe_mul-1"]["chrf"])) == (40, 60)
    with (out / "table.csv").open(newline="") as file:
        rows = {row["attention"]: row for row in csv.DictReader(file) if row["bleu"]}
    mul = rows["mhe_mul"]
    assert (mul["title"], mul["against mha"]) == ("translation: a.en and a.de", "two seeds")
    numbers = {"bleu": 39, "minus mha": -2, "± 2 SE": math.sqrt(8)}
    assert {name: float(mul[name]) for name in numbers} == pytest.approx(numbers)


def test_the_csv_of_runs_tells_what_differs_as_text(translations, leave, compare, tmp_path):
    """Text has no quotes of JSON; times and numbers of parameters stay where all agree."""
    leave("ema", PAIRS, {"optimizer.ema_decay": 0.5, "data.cache_directory": "a cache"})
    compare()
    with (tmp_path / "report" / "runs.csv").open(newline="") as file:
        read = {row["path"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    mul, ema = read["mhe_mul-1"], read["ema"]
    assert (mul[KIND], mul["kind"], mul["seed"]) == ("mhe_mul", "mhe_mul", "1")
    assert (ema["optimizer.ema_decay"], ema["data.cache_directory"]) == ("0.5", "a cache")
    assert (mul["data.cache_directory"], mul["training_seconds"]) == ("", "120.0")
    assert float(mul["parameters.attention"]) == PARAMETERS["mhe_mul"]
    assert not {"task", "data.train", "data.batch_size", "optimizer.init_scale"} & {*mul}


@pytest.mark.parametrize(
    ("dataset", "named"),
    [("own", "accuracy"), ("mrpc", "the mean of accuracy and f1"), ("cola", "mcc")],
)
def test_the_score_of_a_data_set_has_its_metric(leave, compare, dataset, named):
    config = set_field(set_field(LM, "task", "classification"), "data.dataset", dataset)
    leave("a", config, scores={"score": 50.0})
    (section,) = compare(whole=True)["sections"]
    assert f"The score is {named}, in per cent." in section["notes"]


def test_pictures_fit_a_narrow_page_and_none_is_empty(leave, compare, tmp_path):
    """At 400 pixels a picture is as wide as the page: 5 inches of it are still read there."""
    long = {"model.attention.qkv_features": 24, "model.attention.use_bias": True}
    long |= {"model.mlp_features": 48, "optimizer.warmup_steps": 3, "optimizer.ema_decay": 0.125}
    for kind, changes in (("sha", {}), ("mha", long)):
        settings = {KIND: kind, **changes}
        leave(f"lm-{kind}", LM, settings, scores={"perplexity_per_word": 9.0})
        leave(kind, set_field(LM, "task", "classification"), settings, scores={"accuracy": 0.5})
    compare(drawn=True)
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<table") == page.count('<div class="table"><table')  # a box that scrolls
    found = re.findall(r'<img alt="(.+?)" src="data:image/svg\+xml;base64,(.+?)">', page)
    named = ["attention parameters (millions)", "learning curves", "marks"]  # of an encoder
    assert [name for name, _ in found] == [named[0], "cached numbers a token", *named[1:], *named]
    for name, data in found:
        svg = base64.b64decode(data).decode()
        (width,) = map(float, re.findall(r'<svg [^>]*width="([\d.]+)pt"', svg))
        assert width <= 5 * 72, name


def test_a_loss_is_better_when_lower(leave, compare):
    for kind, score in (("mha", 50.0), ("sha", 80.0), ("mhe_mul", 60.0)):
        leave(kind, LM, {KIND: kind}, scores={"perplexity_per_word": score})
    mul = compare()["mhe_mul"]
    assert (mul["perplexity per word"], mul["PRR"]) == (60, pytest.approx(80))
    assert mul["PEoP"] == pytest.approx(((80 - 60) / 80) / (100 / 2000))


@pytest.mark.parametrize(
    ("scores", "verdict", "difference", "errors"),
    [
        ((39.0, 42.0, 45.0), "within chance", 3, 2 * math.sqrt(1 / 3 + 9 / 3)),
        ((41.0, 42.0, 43.0), "better", 3, 2 * math.sqrt(1 / 3 + 1 / 3)),
        ((34.0, 35.0, 36.0), "worse", -4, 2 * math.sqrt(1 / 3 + 1 / 3)),
        ((35.0, 36.0), "two seeds", -3.5, 2 * math.sqrt(1 / 3 + 0.5 / 2)),
        ((42.0,), "one seed", 3, None),
        ((math.nan,), None, None, None),
    ],
)
@pytest.mark.parametrize("metric", ["bleu", "token_loss"])
def test_what_may_be_chance(leave, compare, scores, verdict, difference, errors, metric):
    """By two standard errors of the difference."""
    for kind, found in (("mha", (38.0, 39.0, 40.0)), ("sha", scores)):
        for seed, score in enumerate(found):
            leave(f"{kind}-{seed}", PAIRS, {KIND: kind, SEED: seed}, scores={metric: score})
    if metric == "token_loss":
        verdict = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    found = compare(metric=metric)["sha"]
    told = [found.get(name) for name in ("minus mha", "± 2 SE")]
    assert found.get("against mha") == verdict
    assert told == [x and pytest.approx(x) for x in (difference, errors)]


def test_what_is_missing(leave, compare):
    """It is no seed of a mean; the command that makes it is told."""
    for name, kind, seed, scores in (
        ("a", "mha", 0, {"bleu": 40.0}),
        ("b c", "mha", 1, None),
        ("d", "mha", 2, {"bleu": math.nan}),
        ("e", "sha", 0, None),
        ("f", "mhe_mul", 0, {"bleu": 1.0, "checkpoint": "best", "steps": [5]}),  # before the end
        ("g", "mqa", 0, {"bleu": 7.0, "checkpoint": "last", "steps": [6, 8, 10]}),  # a mean of them
    ):
        leave(name, PAIRS, {KIND: kind, SEED: seed}, scores=scores)
    scores = {"bleu": 9.0, "checkpoint": "best", "steps": [5]}
    leave("h", PAIRS, {KIND: "skv"}, scores=scores, more={"best_step": 5})
    found = compare(whole=True)["sections"][0]
    told = {row["attention"]: (row["seeds"], row["bleu"]) for row in found["groups"]}
    own = {"mha": (1, 40), "sha": (0, None), "mhe_mul": (0, None), "mqa": (1, 7), "skv": (1, 9)}
    assert told == own
    (note,) = [note for note in found["notes"] if "eval.py" in note]
    named = re.findall(r"`python eval.py \S*?/runs/(b c'|.) --split test`", note)
    assert named == ["b c'", "d", "e", "f"]


def test_without_scores_the_validation_loss_is_shown(leave, compare):
    """The lowest one, also where a score decides what is best."""
    leave("a", set_field(LM, "task", "classification"), loss=0.75, more={"best_validation_loss": 9})
    assert compare()["mha"]["best validation loss"] == 0.75


def test_what_differs_makes_groups_and_each_has_its_own_base(leave, compare):
    for rate in (0.001, 0.002):
        for kind, score in (("mha", 40.0), ("mhe_mul", 30.0)):
            scores = {"bleu": score + 1000 * rate}
            leave(f"{kind}-{rate}", PAIRS, {KIND: kind, RATE: rate}, scores=scores)
    wide = {KIND: "mhe_mul", "model.attention.num_groups": 2}
    leave("wide", PAIRS, wide, scores={"bleu": 36.0})
    leave("gqa", PAIRS, {KIND: "gqa", "model.attention.num_kv_heads": 2}, scores={"bleu": 1.0})
    found = {name: row["PRR"] for name, row in compare().items()}
    assert found == {
        "gqa, num_kv_heads=2, learning_rate=0.001": pytest.approx(100 / 41),
        "mha, learning_rate=0.001": 100,
        "mha, learning_rate=0.002": 100,
        "mhe_mul, learning_rate=0.001": pytest.approx(3100 / 41),
        "mhe_mul, learning_rate=0.002": pytest.approx(3200 / 42),
        "mhe_mul, num_groups=2, learning_rate=0.001": pytest.approx(3600 / 41),
    }


@pytest.mark.parametrize(("heads", "base"), [(4, 4), (2, 2), (8, None)])
def test_the_base_of_several_is_that_with_as_many_heads(leave, compare, heads, base):
    """None where no one of them is nearer than the others."""
    number = "model.attention.num_heads"
    for one in (4, 2):
        leave(f"mha-{one}", PAIRS, {number: one}, scores={"bleu": 10.0 * one})
    leave("sha", PAIRS, {number: heads, KIND: "sha"}, scores={"bleu": 10.0})
    assert compare()[f"sha, num_heads={heads}"]["PRR"] == (base and pytest.approx(100 / base))


def test_the_learning_rate_is_chosen_by_the_validation_loss_of_common_seeds(leave, compare):
    for kind, rate, seed, loss, bleu in (
        ("mha", 0.001, 0, 2.0, 10.0),
        ("mha", 0.002, 0, 1.9, 11.0),
        ("mha", 0.002, 1, 9.0, 13.0),  # a bad second seed that the other rate has not
        ("mhe_mul", 0.001, 0, 1.0, 8.0),
        ("mhe_mul", 0.002, 0, 2.5, 20.0),  # a better score is not asked
    ):
        changes = {KIND: kind, RATE: rate, SEED: seed}
        leave(f"{kind}-{rate}-{seed}", PAIRS, changes, loss=loss, scores={"bleu": bleu})
    groups = compare(choose=(RATE,))
    assert list(groups) == ["mha, learning_rate=0.002", "mhe_mul, learning_rate=0.001"]
    assert [row["seeds"] for row in groups.values()] == [2, 1]
    assert groups["mhe_mul, learning_rate=0.001"]["PRR"] == pytest.approx(100 * 8 / 12)
    for field in ("optimizer.learning_rat", SEED, "mesh.data", "model.attention.engine"):
        with pytest.raises(InputError, match=f"--choose {field}: "):
            compare(choose=(field,))
    with pytest.raises(InputError, match="--choose data.train: "):
        compare(choose=("data.train",))


def test_without_a_common_seed_each_learning_rate_counts_with_its_own(leave, compare):
    for rate, seed, loss in ((0.001, 0, 2.0), (0.002, 1, 1.0), (0.004, 2, 3.0)):
        leave(f"mha-{rate}", PAIRS, {RATE: rate, SEED: seed}, loss=loss, scores={"bleu": 1.0})
    assert list(compare(choose=(RATE,))) == ["mha, learning_rate=0.002"]


def test_fine_tuned_runs_have_the_base_that_started_as_they_did(leave, compare):
    for kind, score in (("mha", 40.0), ("mhe_mul", 30.0)):
        for start, less in ((f"runs/mlm-{kind}", 0), (None, 10)):
            changes = {KIND: kind, "train.init_from": start}
            leave(f"{kind}-{less}", PAIRS, changes, scores={"bleu": score - less})
    found = compare()
    assert found["mhe_mul, init_from=runs/mlm-mhe_mul"]["PRR"] == pytest.approx(75)
    assert found["mhe_mul"]["PRR"] == pytest.approx(100 * 20 / 30)


def test_what_is_no_seed_of_another(leave, compare, tmp_path):
    """Converted and not trained; changed in the middle of training; a copy of a run."""
    for name, kind, result, bleu in (
        ("mha", "mha", True, 40.0),
        ("copy", "mha", True, 42.0),
        ("converted-mha", "mha", False, 5.0),
        ("converted-mqa", "mqa", False, 10.0),
    ):
        leave(name, PAIRS, {KIND: kind}, result=result, scores={"bleu": bleu})
    changed = {"changed": ["step 5: optimizer.learning_rate 0.1 -> 0.001"]}
    leave("changed", PAIRS, {SEED: 1}, scores={"bleu": 50.0}, more=changed)
    told = {name: (row["seeds"], row["bleu"], row["PRR"]) for name, row in compare().items()}
    assert told == {
        f"mha, changed={changed['changed'][0]}": (1, 50, 100),
        "mqa, not trained here": (1, 10, pytest.approx(1000 / 41)),
        "mha, not trained here": (1, 5, pytest.approx(500 / 41)),
        "mha": (1, 41, 100),
    }
    # With none beside them that were trained, they need no other name.
    assert {*compare(*(tmp_path / "runs").glob("converted*"))} == {"mha", "mqa"}


# Another value of a part of the config, and of what makes no other experiment.
OTHERS = {
    "model.features": 32,
    "model.attention_by_role.decoder.use_bias": True,
    "data.batch_size": 16,
    "optimizer.ema_decay": 0.5,
    "train.num_steps": 11,
}
ALIKE = {
    "train.seed": 1,
    "train.checkpoint_every": 7,
    "train.log_every": 7,
    "data.directory": "./",
    "model.remat": True,
    "model.attention_by_role.decoder.engine": "blocked",
    "mesh.data": 2,
    "evaluation.beam_size": 2,
}


@pytest.mark.parametrize("name", OTHERS | ALIKE)
def test_seeds_are_runs_that_differ_in_nothing_else(leave, tmp_path, name):
    """Only they are averaged."""
    steps = {"more": {"steps": 11}} if name == "train.num_steps" else {}
    leave("a", LM)
    leave("b", LM, {name: (OTHERS | ALIKE)[name]}, **steps)
    found = sections(read_runs([tmp_path / "runs"], "test"), None)
    groups = [len(own) for section in found for _, own in section.runs.groupby("group")]
    assert groups == ([1, 1] if name in OTHERS else [2])


def test_what_was_not_done_alike_is_told(leave, compare):
    """All that times and scores depend on; an engine is a choice of the kind."""
    leave("none", set_field(LM, "task", "mlm"), {KIND: "mhe_mul"}, scores={"perplexity": 4.0})
    assert compare(whole=True)["sections"][0]["notes"] == []
    other = {"data.batch_size": 16, "data.sequence_length": 64, "model.max_length": 64}
    other |= {"data.length_buckets": (16, 64), "data.tokens_per_batch": 99, "model.remat": True}
    other |= {"mesh.tensor": 2, "data.tokenizer": "b.model", "model.attention.engine": "blocked"}
    for name, kind, changes in (("a", "mha", {"data.tokenizer": "a.model"}), ("b", "sha", other)):
        scores = {"bleu": 1.0, "beam_size": 5 if name == "a" else 4, "length_penalty": 0.6}
        leave(f"pairs-{name}", PAIRS, {KIND: kind} | changes, scores=scores)
    (found,) = (s for s in compare(whole=True)["sections"] if s["title"].startswith("translation"))
    (times,) = (note for note in found["notes"] if note.startswith("Times"))
    (of_scores,) = (note for note in found["notes"] if note.startswith("Scores"))
    for field in set(other) - {"data.tokenizer", "model.attention.engine"}:
        assert f"{field} is " in times
    assert "mesh.tensor is 1 (as mha" in times
    assert "beam_size is 5 (as mha" in of_scores
    assert '"a.model"' in of_scores
    assert "length_penalty" not in of_scores
    assert "engine" not in times + of_scores


def test_the_time_of_a_step_is_the_median_of_the_log(leave, compare):
    with (leave("a", LM) / "metrics.jsonl").open("a") as file:
        for step, seconds in ((1, 0.25), (2, 0.125), (3, 0.25), (4, 9.0), (5, math.inf)):
            line = {"step": step, "split": "train", "loss": 2.0, "step_seconds_p50": seconds}
            file.write(json.dumps(line) + "\n")
        file.write('{"step": "x", "spl')
    assert compare()["mha"]["ms a step"] == 250


@pytest.mark.parametrize(
    ("points", "lower", "kept"),
    [
        ([(3, 2), (2, 4), (1, 9), (4, 3)], True, [(1, 9), (2, 4), (3, 2)]),
        ([(1, 5), (1, 6)], False, [(1, 6)]),  # as cheap and better
        ([(1, 5), (1, 6)], True, [(1, 5)]),
        ([(2, 5), (1, 5)], False, [(1, 5)]),  # as good and cheaper
        ([], False, []),
    ],
)
def test_the_front_by_hand(points, lower, kept):
    assert front(points, lower) == kept


def test_failed_and_unfinished_runs_are_told(translations, leave, compare, tmp_path):
    leave("half", PAIRS, result=False)
    leave("longer", PAIRS, {"train.num_steps": 20}, scores={"bleu": 9.0})
    entry = {"name": "broken", "status": "failed", "reason": "data.train: | no such file"}
    (translations / "broken").mkdir()
    (translations / "sweep.json").write_text(json.dumps({"runs": [entry]}))
    found = compare(whole=True)
    assert found["runs"] == {"done": 5, "not finished": 2, "failed": 1}
    with (tmp_path / "report" / "runs.csv").open(newline="") as file:
        told = {row["path"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    assert (told["half"]["group"], told["longer"]["status"]) == ("", "not finished")
    assert (told["broken"]["status"], told["broken"]["reason"]) == ("failed", entry["reason"])
    assert told["sha-0"]["bleu"] == "30.0"
    assert (told["sha-0"]["seed"], told["broken"]["seed"]) == ("0", "")


def test_other_text_is_another_section(leave, compare):
    leave("a", LM, scores={"perplexity_per_word": 9.0})
    leave("b", LM, {"data.train": ("other.txt",)})
    leave("c", PAIRS)
    found = compare(whole=True)["sections"]
    assert [section["title"] for section in found] == [
        "lm: train.txt",
        "lm: other.txt",
        "translation: a.en and a.de",
    ]


def test_bad_places(translations, compare, tmp_path):
    out = tmp_path / "report"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(InputError, match="--out"):
        compare()
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    compare()
    compare()  # an earlier report is replaced
    for paths, named in (((tmp_path / "empty",), "empty"), ((tmp_path / "run",), "runs")):
        with pytest.raises(InputError, match=named):
            compare(*paths)
    for text in ("{", "[]", ""):
        (translations / "mha-0" / "result.json").write_text(text)
        with pytest.raises(InputError, match="mha-0/result.json"):
            compare()
