"""What docs/atlas.md, docs/which_kind.md and README.md say of the atlas is what its records say."""

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import atlas, atlas_cases, atlas_picture, atlas_tables, sizes
from benchmarks.atlas_cases import LARGE, TASKS, Case, base_of, models
from benchmarks.atlas_tables import Measured, measured, with_error
from mhe_jax.attention import cost
from mhe_jax.cli.sweep.plan import CONFIG
from mhe_jax.config import Config
from mhe_jax.config.fields import load_json
from mhe_jax.model.layers import attention_module
from mhe_jax.tasks.cache import cached_numbers, sublayers

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records" / "atlas"


def page(name: str) -> str:
    """Without its line ends."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def found(task: str, name: str) -> Measured:
    """A case by REGIME/NAME, which must have three scored seeds."""
    case = Case(*name.split("/"))
    result = measured(atlas_tables.read(RECORDS, task), case)
    assert result is not None, case
    assert len(result.fresh) == 3, case
    return result


def score(task: str, name: str) -> float:
    return statistics.fmean(found(task, name).values(atlas_cases.SOURCES[task].score))


# Protocol and tables


def test_a_page_counts_the_runs_of_each_stage():
    """Three rates of each case, three seeds of controls and of the best; less what records have."""
    for stages in zip(*map(atlas_cases.stages, TASKS), strict=True):
        counts = [" and ".join(dict.fromkeys(str(3 * len(each.cases)) for each in stages))]
        for task, each in zip(TASKS, stages, strict=True):
            controls = [case for case in each.cases if case.name in atlas_cases.CONTROLS]
            others = min(each.best, len(each.cases) - len(controls))
            there = [
                found
                for case in each.cases
                if (task, case.regime) == ("translation", "shape")
                for found in atlas.RECORDS.glob(f"{case.name},*seed=[123]")
            ]
            counts.append(3 * (len(controls) + others) - len(there))
        short, lm, translation = counts
        assert f" | {short} | {lm} | {translation} |" in page("docs/atlas.md")
    hours = "{lm:g} for the language model and {translation:g} for translation."
    assert hours.format(**atlas.HOURS) in page("docs/atlas.md")
    assert sum(atlas.HOURS[task] for task in TASKS) == 25


def test_a_page_counts_the_hours_and_the_processors():
    lines = atlas_tables.read(RECORDS, "lm")
    assert f"They took {sum(line['hours'] for line in lines):.1f} of the 18 hours." in page(
        "docs/atlas.md"
    )
    short, whole = (
        [line["processor"] for line in lines if (line["seed"] == 0) == searching]
        for searching in (True, False)
    )

    def count(names: list[str], part: str) -> int:
        return sum(part in name for name in names)

    newer, xeon = "family 26", "Xeon"
    old = len(short) - count(short, newer) - count(short, xeon)
    said = f"Of the {len(short)} short runs of the language model, {count(short, newer)} used an "
    said += f"AMD EPYC with AVX-512, {old} an AMD EPYC whose model is not recorded, and "
    said += f"{count(short, xeon)} an Intel Xeon."
    assert said in page("docs/atlas.md")
    said = f"Of its {len(whole)} whole runs, {count(whole, newer)} used the EPYC with AVX-512"
    assert said in page("docs/atlas.md")
    assert f"and {count(whole, xeon)} the Xeon." in page("docs/atlas.md")


def test_a_page_has_the_tables_of_the_records():
    text = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    assert text.partition("## Results\n\n")[2] == atlas_tables.page(RECORDS) + "\n"


def test_a_page_has_the_pictures_of_the_records():
    for task in TASKS:
        drawn = atlas_picture.picture(atlas_tables.read(RECORDS, task), task)
        file = atlas_picture.IMAGES / f"atlas-{task}.svg"
        shown = f"images/{file.name}" in page("docs/atlas.md")
        assert (drawn is not None) == file.exists() == shown
        if drawn:
            assert file.read_text(encoding="utf-8") == drawn


# Sentences

LM = {
    # How much better the first is than the second in validation loss, and whether it surely is.
    "`mva` by {} in validation loss and 4.1 %": ("shape/mva", "shape/mha", True),
    "2 heads of 64 is better than with 8 by {}.": ("limits/mha, 2 heads", "shape/mha", True),
    "It is worse than `mva` by {} (38.07": ("shape/mva", "limits/mha, 2 heads", True),
    "heads of 32 it cannot be told from 8 ({}; 38": ("limits/mha, 4 heads", "shape/mha", False),
    "perplexity), and is worse than `mva` by {}. Attention": (
        "shape/mva",
        "limits/mha, 4 heads",
        True,
    ),
    "as it is and deeper, by {} or more in validation loss;": (
        "width/mva-narrow",
        "depth/mha",
        True,
    ),
    "with 2 heads, too, by {}.": ("width/mva-narrow", "limits/mha, 2 heads", True),
    "That is worse than `mva` by {} (": ("shape/mva", "limits/mha, 1 head", True),
    "and cannot be told from `mha` with 8 ({}).": ("limits/mha, 1 head", "shape/mha", False),
    "the two cannot be told apart ({})": ("width/mva-narrow", "shape/mva", False),
    "`mha-narrow`, is worse than `mha` by {}, and than": ("shape/mha", "width/mha-narrow", True),
    ", and than `mva-narrow` by {}: a wider": ("width/mva-narrow", "width/mha-narrow", True),
    "`mhe_add` is better than `sha` by {} in": ("shape/mhe_add", "shape/sha", True),
    "and `mhe_mul` by {}, for 2 %": ("shape/mhe_mul", "shape/sha", True),
    "do not help `mhe_add` ({});": ("shape/mhe_add-2-score-groups", "shape/mhe_add", False),
    "two groups do, by {}, with": ("shape/mhe_add-2-groups", "shape/mhe_add", True),
    "from `mha` ({} worse), with 44 %": ("shape/mha", "shape/mhe_add-2-groups", False),
    "from `mha` ({} worse, and in test perplexity": ("shape/mha", "shape/gqa", False),
    "and `mqa` is worse by {}.": ("shape/mha", "shape/mqa", True),
    "from it ({} worse). `mqa` has": ("shape/gqa", "shape/mhe_add-2-groups", False),
    "better than they are by {} and": ("shape/mqa", "shape/mhe_add", True),
    " and {}, and than `sha`": ("shape/mqa", "shape/mhe_mul", True),
    ", and than `sha` by {}.": ("shape/mqa", "shape/sha", True),
    "worse than the deeper `mha` by {}.": ("depth/mha", "depth/sha", True),
    "cache is the same, by {}.": ("depth/mqa", "depth/sha", True),
    "2 groups is better than `sha` by {}, with": ("depth/mhe_add-2-groups", "depth/sha", True),
}
LARGER = {
    "better than `mha` by {} in validation loss, and": ("shape/mva", "shape/mha", True),
    "is better than `mha` by {}, with 45 %": ("width/mva-narrow", "shape/mha", True),
    "better than `mha` too, by {}; it": ("width/mha-narrow", "shape/mha", True),
    "from `mva-narrow` ({} worse)": ("width/mva-narrow", "width/mha-narrow", False),
    "worse than `mva` by {}.": ("shape/mva", "width/mha-narrow", True),
}


@pytest.mark.parametrize(
    ("task", "said", "one", "other", "surely"),
    [
        *(("lm", said, *rest) for said, rest in LM.items()),
        *((LARGE, said, *rest) for said, rest in LARGER.items()),
    ],
)
def test_differences(task, said, one, other, surely):
    (mean, error), (than, its) = (
        with_error(found(task, name).values("validation_loss")) for name in (one, other)
    )
    gain, errors = than - mean, 2 * math.hypot(error, its)
    assert said.format(f"{gain:.3f} ± {errors:.3f}") in page("docs/atlas.md")
    assert (gain > errors) == surely
    assert gain > -errors


PERPLEXITIES = {
    # How much lower the test perplexity of the first is than that of the second, surely or not.
    "test perplexity by {}; with 62 %": ("shape/mha", "shape/gqa", True),
    "worse than both, by {} and": ("shape/mha", "depth/mqa", True),
    " and {}, and `mhe_add` with": ("depth/mha", "depth/mqa", True),
    "than `mha` as it is, by {}.": ("shape/mha", "depth/mhe_add-2-groups", True),
}


@pytest.mark.parametrize(
    ("said", "one", "other", "surely"), [(k, *v) for k, v in PERPLEXITIES.items()]
)
def test_differences_of_perplexities(said, one, other, surely):
    (mean, error), (than, its) = (
        with_error(found("lm", name).values("perplexity_per_token")) for name in (one, other)
    )
    gain, errors = than - mean, 2 * math.hypot(error, its)
    assert said.format(f"{gain:.2f} ± {errors:.2f}") in page("docs/atlas.md")
    assert (gain > errors) == surely


def test_kinds_of_one_more_layer_are_worse_than_two_wider_heads():
    two, its = with_error(found("lm", "limits/mha, 2 heads").values("validation_loss"))
    gains = []
    for kind in ("gqa", "gta", "mhe_add-2-groups", "mqa"):
        mean, error = with_error(found("lm", f"depth/{kind}").values("validation_loss"))
        gains.append(mean - two)
        assert gains[-1] > 2 * math.hypot(error, its)
    said = f"as many parameters, by {min(gains):.3f} to {max(gains):.3f};"
    assert f"All four are worse than `mha` with 2 heads, which has {said}" in page("docs/atlas.md")


def test_translation():
    """The bar is met: by BLEU, and in the language model by validation loss."""
    narrow, mha, deeper = "width/mva-narrow", "shape/mha", "depth/mha"
    bleu = {name: score("translation", name) for name in (narrow, mha, deeper)}
    text = page("docs/atlas.md")
    said = f"`mva-narrow` scores {bleu[narrow]:.2f} BLEU, `mha` {bleu[mha]:.2f} and the deeper "
    assert f"{said}`mha` {bleu[deeper]:.2f}:" in text
    record = atlas_tables.read(RECORDS, "translation")
    gain, errors = atlas_tables.gain(record, "translation", Case("width", "mva-narrow"))
    assert gain > errors
    assert f"better by {gain:.2f} ± {errors:.2f} BLEU or more, and than `mha` by" in text
    assert f"scores {bleu[narrow]:.2f} BLEU against {bleu[mha]:.2f}." in page("README.md")
    assert f"scores {bleu[narrow] - bleu[mha]:.1f} BLEU more than `mha`." in text
    (mean, error), (than, its) = (
        with_error(found("translation", name).values("validation_loss")) for name in (narrow, mha)
    )
    loss = f"{than - mean:.3f} ± {2 * math.hypot(error, its):.3f} in validation loss. It has 45 %"
    assert f"by {loss}" in text
    (mean, error), (than, its) = (
        with_error(found("translation", name).values("bleu")) for name in (mha, deeper)
    )
    worse = f"{mean - than:.2f} ± {2 * math.hypot(error, its):.2f} BLEU."
    assert f"the deeper one is worse by {worse}" in text
    control, two = "width/mha-narrow", "limits/mha, 2 heads"
    for name in ("README.md", "docs/which_kind.md"):
        assert f"{score('translation', two):.2f} BLEU" in page(name)
    for key, sign, digits, one, other, said, surely in (
        ("bleu", 1, 2, mha, two, "heads of 128 cannot be told from 8 in BLEU ({} less; 3", False),
        ("validation_loss", -1, 3, mha, two, "and is worse in validation loss by {}. Its", True),
        ("bleu", 1, 2, mha, control, "told from `mha` in BLEU ({} less) and", False),
        ("validation_loss", -1, 3, mha, control, "worse in validation loss by {};", True),
        ("bleu", 1, 2, narrow, control, "`mva-narrow` scores {} BLEU more than it.", True),
    ):
        (mean, error), (than, its) = (
            with_error(found("translation", name).values(key)) for name in (one, other)
        )
        gain, errors = sign * (mean - than), 2 * math.hypot(error, its)
        assert said.format(f"{gain:.{digits}f} ± {errors:.{digits}f}") in text
        assert (gain > errors) == surely
    rows = {
        row[1]: row
        for row in atlas_tables.decision(
            {task: atlas_tables.read(RECORDS, task) for task in TASKS}
        ).rows
    }
    assert [name for name, row in rows.items() if row[-1] == "yes"] == ["mva-narrow"]


def test_what_the_search_does_not_foretell():
    """The rank correlation of its losses with those of all steps."""
    lines = atlas_tables.read(RECORDS, "lm")
    cases = {Case(line["regime"], line["name"]) for line in lines if line["seed"]}
    every = [m for case in cases if (m := measured(lines, case)) and len(m.fresh) == 3]
    losses = [(m.search_loss, statistics.fmean(m.values("validation_loss"))) for m in every]
    ranks = [[sorted(each).index(x) for x in each] for each in zip(*losses, strict=True)]
    correlation = statistics.correlation(*ranks)
    said = f"over the {len(every)} cases of the language model with seeds at 8e-3, their rank "
    assert f"{said}correlation is {correlation:.2f}." in page("docs/atlas.md")
    assert {m.rate for m in every} == {"8e-3"}


PERCENT = {
    # How much lower the perplexity of the first is than that of the second, in percent.
    "docs/atlas.md": [("lm", "shape/mva", "shape/mha", "in validation loss and {} in test")],
    "docs/which_kind.md": [
        ("lm", "shape/mva", "limits/mha, 2 heads", "`mva` is better by {} in perplexity, and"),
        ("lm", "width/mva-narrow", "limits/mha, 2 heads", "with a wider MLP by {}."),
        ("lm", "shape/mhe_mul", "shape/sha", "small language model `mhe_mul` is better by {};"),
        ("lm", "shape/mhe_add", "shape/sha", "`mhe_mul` is better by {}; so is `mhe_add`"),
    ],
    "README.md": [
        ("lm", "shape/mva", "shape/mha", "`mva` is {} better in perplexity than `mha` with the 8"),
        ("lm", "shape/mva", "limits/mha, 2 heads", "and {} better than `mha` with 2 wider ones"),
        ("lm", "shape/mhe_mul", "shape/sha", "these are {} better than `sha`"),
        ("lm", "shape/mhe_add", "shape/sha", "these are {} better than `sha`"),
        ("lm", "width/mva-narrow", "shape/mha", "wider MLP is {} better in perplexity than `mha`"),
        ("lm", "width/mva-narrow", "limits/mha, 2 heads", "and {} than with 2, with 47 %"),
        (LARGE, "shape/mva", "shape/mha", "2026-11-27): `mva` is {} better than `mha`"),
        (LARGE, "width/mva-narrow", "shape/mha", "narrow `mva` is {} and"),
        (LARGE, "width/mha-narrow", "shape/mha", "narrow `mha` {} better;"),
    ],
}


@pytest.mark.parametrize(
    ("name", "task", "one", "other", "said"),
    [(name, *rest) for name, every in PERCENT.items() for rest in every],
)
def test_percents(name, task, one, other, said):
    less = 100 * (1 - score(task, one) / score(task, other))
    assert said.format(f"{less:.1f} %") in page(name)


def test_what_is_worse_than_mha():
    """In test perplexity, and surely so, but for `mhe_add` with two groups."""
    mha = found("lm", "shape/mha").values("perplexity_per_token")
    names = ("gqa", "mhe_add-2-groups", "mqa", "mhe_mul", "mhe_add")
    kinds = {name: f"shape/{name}" for name in names} | {"narrow": "width/mha-narrow"}
    worse = {
        name: against(found("lm", kind).values("perplexity_per_token"), mha, percent=True)
        for name, kind in kinds.items()
    }
    shown = {name: said.lstrip("+").rstrip(" †") for name, said in worse.items()}
    assert {name for name, said in worse.items() if "†" in said} == {"mhe_add-2-groups"}
    for said in (
        "25 % of the cache) is {gqa} worse than `mha` with 8 heads",
        "`mhe_add` with two groups (44 %, 25 %) {mhe_add-2-groups}, within chance.",
        "`mqa` (56 %) is {mqa} worse than `mha`,",
        "an `mha` as narrow with a wider MLP, is {narrow} worse than `mha`.",
    ):
        assert said.format(**shown) in page("README.md")
    both = f"{shown['mhe_mul'].removesuffix(' %')} to {shown['mhe_add']}"
    assert f"and the MHE kinds (35 %) {both}; these" in page("README.md")


def test_perplexities():
    text = page("docs/atlas.md")
    scores = {
        name: f"{score('lm', name):.2f}"
        for name in ("shape/mva", "shape/mha", "width/mva-narrow", "depth/mha", "shape/mhe_add")
        + ("shape/mhe_mul", "shape/sha", "limits/mha, 2 heads")
    }
    assert "({shape/mva} against {shape/mha})".format(**scores) in text
    one, four = (score("lm", f"limits/mha, {heads}") for heads in ("1 head", "4 heads"))
    assert f"({one:.2f} in test perplexity)" in text
    assert f"; {four:.2f} in test perplexity)" in text
    two = scores["limits/mha, 2 heads"]
    assert f"({two} in test perplexity)" in text
    said = "it has {width/mva-narrow}, they {shape/mha} and {depth/mha}."
    assert said.format(**scores) in text
    said = "they have {shape/mhe_add} and {shape/mhe_mul}, `sha` {shape/sha} (for "
    said += "`mhe_add` within chance), and `mha` {shape/mha}"
    assert said.format(**scores) in text
    mva, mha = (score(LARGE, f"shape/{kind}") for kind in ("mva", "mha"))
    assert f"with {mva:.2f} against {mha:.2f}, with 75 %" in text
    assert f"whose test perplexities are {mha:.1f} and {mva:.1f} per" in page(
        "configs/wikitext2_lm.py"
    )


def test_what_cannot_be_told_from_mha_by_depth():
    near = ("gqa", "gta", "mhe_add-2-groups", "mqa")
    record = atlas_tables.read(RECORDS, "lm")
    for name in near:
        gain, errors = atlas_tables.gain(record, "lm", Case("depth", name))
        assert -errors < gain < 0, name
    means = [with_error(found("lm", f"depth/{name}").values("validation_loss"))[0] for name in near]
    (whole, error), (deeper, other) = (
        with_error(found("lm", name).values("validation_loss"))
        for name in ("shape/mha", "depth/mha")
    )
    losses = f"{whole:.3f} ± {error:.3f} and, deeper, {deeper:.3f} ± {other:.3f}"
    assert f"({min(means):.3f} to {max(means):.3f} against {losses}," in page("docs/atlas.md")


@pytest.mark.parametrize(
    ("task", "name", "parameters", "cached"),
    [
        ("lm", "shape/mva", 77, 78),
        ("lm", "shape/mhe_add-2-groups", 44, 25),
        ("lm", "shape/gqa", 63, 25),
        ("lm", "shape/mqa", 56, 12),
        ("lm", "shape/mhe_add", 35, 12),
        ("lm", "width/mva-narrow", None, 47),
        ("translation", "width/mva-narrow", None, 45),
        (LARGE, "shape/mva", 75, 76),
        (LARGE, "width/mva-narrow", None, 45),
        (LARGE, "width/mha-narrow", None, 50),
    ],
)
def test_shares_of_mha(task, name, parameters, cached):
    """That the pages have; parameters are those of attention."""
    own, mha = found(task, name).fresh[0], found(task, "shape/mha").fresh[0]
    if parameters:
        share = own["parameters"]["attention"] / mha["parameters"]["attention"]
        assert 100 * share == pytest.approx(parameters, abs=0.51)
    assert 100 * own["cached"] / mha["cached"] == pytest.approx(cached, abs=0.51)


def test_shares_of_each_other():
    """`mha` has 2.9 times the attention parameters of the MHE kinds, `mqa` 1.61 times."""
    kinds = ("mha", "sha", "mhe_add", "mhe_mul", "mqa", "gqa", "mhe_add-2-groups")
    size = {
        kind: found("lm", f"shape/{kind}").fresh[0]["parameters"]["attention"] for kind in kinds
    }
    cached = {kind: found("lm", f"shape/{kind}").fresh[0]["cached"] for kind in kinds}
    assert size["mha"] / size["mhe_add"] == pytest.approx(2.9, abs=0.05)
    assert size["mhe_add"] / size["sha"] == pytest.approx(1.02, abs=0.005)
    assert size["mqa"] / size["mhe_add"] == pytest.approx(1.61, abs=0.005)
    assert size["mhe_add-2-groups"] / size["gqa"] == pytest.approx(0.71, abs=0.005)
    assert cached["gqa"] == cached["mhe_add-2-groups"] == cached["mha"] / 4
    assert cached["mqa"] == cached["sha"] == cached["mhe_add"] == cached["mhe_mul"]
    assert cached["mha"] == 8 * cached["sha"]


def test_widths_of_narrow_models():
    fields = models("lm")["width"]["mva-narrow"]
    assert fields["model.attention.qkv_features"] == 8 * 8
    widths = [fields[f"model.{x}"] for x in ("attention.score_features", "mlp_features")]
    fields = models("translation")["width"]["mva-narrow"]
    assert fields["model.attention.qkv_features"] == 8 * 16
    own = [fields[f"model.{x}"] for x in ("attention.score_features", "mlp_features")]
    said = "8 heads of 16, scores {} wide, and an MLP {} wide instead of 512.".format(*own)
    assert said in page("docs/atlas.md")
    assert "8 heads of 8, scores {} wide, and an MLP {} wide instead of 512".format(
        *widths
    ) in page("docs/atlas.md")


def test_the_larger_model():
    """Its runs are the config with another kind and seed, and took turns on the GPU."""
    names = ("shape/mha", "shape/mva", "width/mva-narrow", "width/mha-narrow")
    lines = [line for name in names for line in found(LARGE, name).fresh]
    assert {(line["best_step"], line["device"]) for line in lines} == {(1000, "NVIDIA H200")}
    rates = f"The rates are {', '.join(atlas.RATES[LARGE][:-1])} and {atlas.RATES[LARGE][-1]};"
    assert rates in page("docs/atlas.md")
    base = base_of(LARGE)
    steps: dict[str, dict[int, list[float]]] = {}
    for name in names:
        regime, kind = name.split("/")
        for seed in "123":
            run = RECORDS / LARGE / regime / f"{kind},4e-3,seed={seed}"
            wanted = sizes.changed(base, models(LARGE)[regime][kind])
            config = load_json(run / CONFIG)
            kept = {
                "workdir": config.workdir,
                "train.seed": int(seed),
                "optimizer.learning_rate": 4e-3,
            }
            assert config == sizes.changed(wanted, kept), name
            for text in (run / "metrics.jsonl").read_text().splitlines():
                if median := (line := json.loads(text)).get("step_seconds_p50"):
                    steps.setdefault(kind, {}).setdefault(line["step"], []).append(median)
    # Six were left to themselves: first those of `mha`, while the others compiled, then of `mva`.
    kinds = ("mha", "mha-narrow"), ("mva", "mva-narrow")
    mha, mva = (
        statistics.median([x for kind in six for x in steps[kind][at]])
        for six, at in zip(kinds, (100, 500), strict=True)
    )
    said = f"took {mha:.3f} s a step, six of `mva` and `mva-narrow` {mva:.3f} s, a third longer."
    assert said in page("docs/atlas.md")
    assert mva / mha == pytest.approx(4 / 3, abs=0.05)


def test_the_config_of_the_language_model_scores_what_its_page_says():
    """By three runs of the atlas, which are that config with other seeds."""
    runs = sorted((RECORDS / "lm" / "shape").glob("mhe_mul,8e-3,*"))
    base = base_of("lm")
    for run in runs:
        config = load_json(run / CONFIG)
        kept = {"workdir": config.workdir, "train.seed": config.train.seed}
        assert config == sizes.changed(base, kept)
    scores = [json.loads((run / "eval_test.json").read_text()) for run in runs]
    names = ("loss", "perplexity_per_token", "perplexity_per_word", "accuracy")
    nats, token, word, accuracy = (statistics.fmean(x[name] for x in scores) for name in names)
    told = f"{nats:.3f} | {token:.1f} a token, {word:.1f} a word | {100 * accuracy:.1f} %"
    assert f"| `wikitext2_lm.py` | 994,048 | 7.2 min | {told} |" in page("docs/experiments.md")
    config = page("configs/wikitext2_lm.py")
    assert f"test perplexity {token:.1f} per token, and {word:.0f} per word" in config
    assert f"{nats:.3f} nats per token" in config


# What docs/which_kind.md puts side by side: names in the atlas, and in docs/records/translation.
SIDE_BY_SIDE = {
    "`mva`, scores half as wide as the model": ("shape/mva", "mva"),
    "`mha`, 2 wider heads": ("limits/mha, 2 heads", None),
    "`mha`, 4 wider heads": ("limits/mha, 4 heads", None),
    "`mha`, 1 head": ("limits/mha, 1 head", None),
    "narrow `mva`, wider MLP": ("width/mva-narrow", None),
    "narrow `mha`, wider MLP": ("width/mha-narrow", None),
    "`gqa`, a quarter of the heads for keys and values": ("shape/gqa", "gqa"),
    "`mhe_add`, 2 groups": ("shape/mhe_add-2-groups", "mhe_add-2-groups"),
    "`mqa`": ("shape/mqa", "mqa"),
    "`mhe_mul`": ("shape/mhe_mul", "mhe_mul"),
    "`mhe_add`": ("shape/mhe_add", "mhe_add"),
    "`sha`": ("shape/sha", "sha"),
}


def bleus(kind: str) -> list[float]:
    """Of docs/records/translation, at the rate that the kind's search chose."""
    runs = (ROOT / "docs" / "records" / "translation").glob(f"{kind},2e-3,seed=*")
    return [json.loads((run / "eval_test.json").read_text())["bleu"] for run in runs]


def against(values: list[float], others: list[float], percent: bool) -> str:
    """By how much the first mean is above the second, with † if that may be chance."""
    mean, than = statistics.fmean(values), statistics.fmean(others)
    gain = 100 * (mean / than - 1) if percent else mean - than
    gain = f"{gain:+.1f}".replace("-", "−") if abs(gain) >= 0.05 else "0.0"
    gain += " %" * percent
    if len(values) == 1:
        return f"{gain}, one seed"
    errors = [statistics.stdev(each) / math.sqrt(len(each)) for each in (values, others)]
    return gain + " †" * (abs(mean - than) <= 2 * math.hypot(*errors))


def cell(task: str, name: str, older: str | None) -> str:
    if task == "translation" and older:
        return against(bleus(older), bleus("mha"), percent=False)
    if not (case := measured(atlas_tables.read(RECORDS, task), Case(*name.split("/")))):
        return "not measured"
    values = case.values(atlas_cases.SOURCES[task].score)
    if len(values) != 3:
        return "not measured"
    mha = found(task, "shape/mha").values(atlas_cases.SOURCES[task].score)
    return against(values, mha, percent=task != "translation")


def share(name: str, numbers: Callable[[Config], int]) -> str:
    """Of MHA's, in the least and the most of the three tasks."""
    shares = set()
    for task in (*TASKS, LARGE):
        own, mha = (
            numbers(sizes.changed(base_of(task), models(task)[regime][each]))
            for regime, each in (name.split("/"), ("shape", "mha"))
        )
        shares.add(round(100 * own / mha))
    return " to ".join(map(str, sorted({min(shares), max(shares)}))) + " %"


def of_attention(config: Config) -> int:
    return sum(
        count * cost.parameters(attention_module(config.model, role), config.model.features)
        for role, count in sublayers(config).items()
    )


def test_what_they_are_compared_with():
    bases = {task: score(task, "shape/mha") for task in (*TASKS, LARGE)}
    said = "perplexities of {lm:.2f} and {lm_large:.2f} a token".format(**bases)
    assert said in page("docs/which_kind.md")
    said = f"{bases['translation']:.2f} BLEU for `mha` and the narrow kinds"
    assert said in page("docs/which_kind.md")


@pytest.mark.parametrize("said", SIDE_BY_SIDE)
def test_kinds_side_by_side(said):
    name, older = SIDE_BY_SIDE[said]
    scores = cell("translation", name, older), cell("lm", name, None), cell(LARGE, name, None)
    row = said, share(name, of_attention), share(name, cached_numbers), *scores
    assert f"| {' | '.join(row)} |" in page("docs/which_kind.md")


def test_mha_of_translation_on_all_processors():
    """The same config and rate: here, in Experiments, and what `convert` began with."""
    file = ROOT / "docs" / "records" / "uptraining" / "translation.json"
    lines = json.loads(file.read_text())["lines"]
    whole = [x["bleu"] for x in lines if (x["attention"], x["start"]) == ("mha", "at once")]
    another = sorted({x["source"] for x in lines if "source" in x})
    here = [x["bleu"] for x in found("translation", "shape/mha").fresh if "from" not in x]
    every = [*whole, *another, *bleus("mha"), *here]
    assert len(every) == 3 + 3 + 3 + 1
    narrow = found("translation", "width/mva-narrow").values("bleu")
    said = f"Ten runs of that `mha` have a mean of {statistics.fmean(every):.2f} and at most "
    said += f"{max(every):.2f}, while each of `mva-narrow` has {min(narrow):.2f} or more: "
    (mean, error), (than, its) = with_error(narrow), with_error(every)
    better = f"{mean - than:.2f} ± {2 * math.hypot(error, its):.2f}."
    said += f"it is better than their mean by {better}"
    assert said in page("docs/atlas.md")
    means = [f"{statistics.fmean(three):.2f}" for three in (bleus("mha"), whole, another)]
    said = "score {} on one processor, and {} and {} on others".format(*means)
    assert said in page("docs/which_kind.md")


def test_encoders_beside_mha_on_sst2():
    """All five other kinds are surely worse, by the rule of the pages."""

    def scores(kind: str, task: str) -> tuple[float, float | None]:
        runs = (ROOT / "docs" / "records" / task).glob(f"{kind},seed=*")
        found = [json.loads((run / "eval_validation.json").read_text())["score"] for run in runs]
        assert len(found) == 3
        return with_error(found)

    def gain(one: str, other: str, task: str) -> tuple[float, bool]:
        (mean, error), (than, its) = scores(one, task), scores(other, task)
        return mean - than, mean - than > 2 * math.hypot(error, its)

    others = ("mqa", "mva", "mhe_mul", "mhe_add", "sha")
    gains = [gain("mha", other, "sst2") for other in others]
    assert all(surely for _, surely in gains)
    points = sorted(points for points, _ in gains)
    said = f"by {points[0]:.1f} to {points[-1]:.1f} points"
    assert f"`mha` is better than the five other kinds {said}" in page("docs/which_kind.md")
    assert f"is ahead of the five others {said}" in page("docs/experiments.md")
    # `mva` is worse on both, `mhe_mul` and `mhe_add` better than `sha` on CoLA and not on SST-2.
    assert gain("mha", "mva", "cola")[1]
    for kind in ("mhe_mul", "mhe_add"):
        assert gain(kind, "sha", "cola")[1]
        assert not gain(kind, "sha", "sst2")[1]
