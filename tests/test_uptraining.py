"""What benchmarks/uptraining.py runs, by a stand-in for train.py, eval.py and convert."""

import dataclasses
import json
import math
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from command_lines import parsed

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import uptraining, uptraining_picture, workplace
from mhe_jax.cli.convert import parse
from mhe_jax.cli.sweep.plan import CONFIG, RESULT
from mhe_jax.config import AttentionConfig
from mhe_jax.config.fields import load_json, save_json, set_field

LOSSES = {5e-4: 2.5, 1e-3: 2.0, 2e-3: 2.5, 4e-3: 3.0}
BLEU = {0: 1.0, 2100: 40.0, 105: 10.0, 210: 20.0, 525: 30.0}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """(command, run) of each call, which leaves what that command would."""
    found = []

    def stand_in(command, **_):
        _, program, *arguments = command
        with workplace.PARSING:
            if program == "-m":
                source, run, wanted = parse(arguments[2:])
                config = load_json(source / CONFIG)
                fields = {k: v for k, v in vars(wanted).items() if k != "rows"}
                attention = AttentionConfig(**fields)
                save_json(set_field(config, "model.attention", attention), run / CONFIG)
                done = "convert"
            elif Path(program).name == "train.py":
                config = parsed(tuple(arguments))
                run, done = Path(config.workdir), "train"
                save_json(config, run / CONFIG)
                steps = config.train.num_steps
                scores = {"best_validation_loss": LOSSES[config.optimizer.learning_rate]}
                (run / RESULT).write_text(json.dumps({"steps": steps, **scores}))
            else:
                run, done = Path(arguments[0]), "eval"
                result = run / RESULT
                steps = json.loads(result.read_text())["steps"] if result.exists() else 0
                assert ("--checkpoint" in arguments) == (steps == 0)
                scores = {"bleu": BLEU[steps] + load_json(run / CONFIG).train.seed}
                (run / "eval_test.json").write_text(json.dumps(scores))
        found.append((done, str(run.relative_to(tmp_path / "uptraining" / "translation"))))
        return 0, 1.0

    monkeypatch.setattr(workplace, "timed", stand_in)
    monkeypatch.setattr(workplace, "parse_train_arguments", lambda given: parsed(tuple(given)))
    monkeypatch.setattr(uptraining, "NAMES", ("gqa",))
    return found


@pytest.fixture
def few(monkeypatch):
    """One share and one rate: each run that is planned takes a command line to parse."""
    monkeypatch.setattr(uptraining, "SHARES", (0.25,))
    monkeypatch.setattr(uptraining, "RATES", ("1e-3",))


def failing(what):
    """The stand-in, but that commands with `what` in them fail."""
    given = workplace.timed

    def call(command, stdout, **rest):
        if what in str(command):
            stdout.write("error: no such luck\n")
            stdout.flush()
            return 1, 1.0
        return given(command, stdout=stdout, **rest)

    return call


def run(tmp_path, monkeypatch, *flags):
    command = ["uptraining.py", "translation", "--workdir", str(tmp_path), *flags]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        uptraining.main()
    return stop.value.code


def test_every_share_has_its_rate_and_all_seeds(calls, tmp_path, monkeypatch, capsys):
    assert not run(tmp_path, monkeypatch, "--jobs", "1")
    gqa = [name for done, name in calls if done == "train" and name.startswith("gqa")]
    for share in ("0.05", "0.1", "0.25"):
        of_share = [name for name in gqa if name.startswith(f"gqa,share={share}")]
        tried = [f"gqa,share={share},rate={rate},seed=0" for rate in ("5e-4", "1e-3", "2e-3")]
        assert of_share == tried + [f"gqa,share={share},rate=1e-3,seed={seed}" for seed in "12"]
    assert [name for name in gqa if "nothing" in name][
        -1
    ] == "gqa,nothing,share=0.25,rate=1e-3,seed=2"
    assert [name for done, name in calls if done == "convert"] == [
        f"gqa,seed={i}" for i in range(3)
    ]
    chosen = load_json(tmp_path / "uptraining/translation/gqa,share=0.1,rate=1e-3,seed=2" / CONFIG)
    assert (chosen.train.num_steps, chosen.optimizer.warmup_steps) == (210, 21)
    assert chosen.train.init_from == str(tmp_path / "uptraining/translation/gqa,seed=2")
    assert (chosen.model.attention.kind, chosen.model.attention.num_kv_heads) == ("gqa", 2)
    control = load_json(tmp_path / "uptraining/translation/mha,share=0.1,rate=1e-3,seed=2" / CONFIG)
    assert control.train.init_from == str(tmp_path / "uptraining/translation/mha,seed=2")
    told = capsys.readouterr()
    assert "uptraining/translation/gqa,seed=0: convert\n" in told.err
    row = next(line for line in told.out.splitlines() if line.startswith("| gqa"))
    cells = [cell.strip() for cell in row.split("|")[3:-1]]
    assert cells[:5] == [
        "2.00 ± 1.00",
        "11.00 ± 1.00",
        "21.00 ± 1.00",
        "31.00 ± 1.00",
        "31.00 ± 1.00",
    ]
    assert cells[5] == "33.36"  # docs/records
    record = json.loads((tmp_path / "uptraining/translation.json").read_text())
    assert len(record["lines"]) == 2 * (3 + 3 * 3 + 3)
    for line in record["lines"]:  # the `mha` run of the seed, but from nothing
        assert line.get("source") == (None if line["start"] == "nothing" else 40.0 + line["seed"])
    losses = [line["losses"] for line in record["lines"] if "losses" in line]
    assert len(losses) == 2 * (3 + 1)
    assert losses[0] == {"5e-4": 2.5, "1e-3": 2.0, "2e-3": 2.5}
    done = len(calls)
    assert not run(tmp_path, monkeypatch, "--jobs", "1")
    assert len(calls) == done


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (2.5e-4, ["5e-4", "1e-3", "2e-3", "0.00025", "0.000125"]),
        (4e-3, ["5e-4", "1e-3", "2e-3", "0.004", "0.008"]),
    ],
)
def test_no_rate_is_taken_at_the_edge_of_those_tried(calls, tmp_path, monkeypatch, best, tried):
    losses = {rate: 2 + abs(math.log2(rate / best)) for rate in map(float, tried)}
    monkeypatch.setattr(sys.modules[__name__], "LOSSES", losses)
    monkeypatch.setattr(uptraining, "SHARES", (0.25,))
    source = dataclasses.replace(uptraining.SOURCES["translation"], nothing=uptraining.RATES)
    monkeypatch.setitem(uptraining.SOURCES, "translation", source)
    assert not run(tmp_path, monkeypatch, "--jobs", "1", "--seeds", "2")
    runs = [n for done, n in calls if done == "train" and n.startswith("gqa,share=0.25")]
    wanted = [(rate, 0) for rate in tried] + [(tried[3], 1)]
    assert runs == [f"gqa,share=0.25,rate={rate},seed={seed}" for rate, seed in wanted]


def test_a_case_that_no_step_helps_ends():
    """As of a run that has converged: the lower the rate, the better, without end."""
    tried = []
    losses = workplace.search_rates(["1", "2", "4"], lambda r: tried.append(r) or float(r))
    assert min(losses, key=losses.__getitem__) == "0.125"
    assert list(losses) == tried == ["1", "2", "4", "0.5", "0.25", "0.125"]
    assert not workplace.beyond(tried, "0.125")


def test_kinds_that_a_record_has_are_not_repeated_without_the_runs(
    calls, few, tmp_path, monkeypatch, capsys
):
    assert not run(tmp_path, monkeypatch, "--seeds", "1")
    first = capsys.readouterr().out
    shutil.rmtree(tmp_path / "uptraining" / "translation")
    done = len(calls)
    assert not run(tmp_path, monkeypatch, "--seeds", "1")
    assert len(calls) == done
    assert capsys.readouterr().out == first
    monkeypatch.setattr(uptraining, "NAMES", ("gqa", "mqa"))
    assert not run(tmp_path, monkeypatch, "--seeds", "1")
    new = {name for _, name in calls[done:]}
    assert {name.split(",")[0] for name in new} == {"mha", "mqa"}
    assert {name for name in new if name.startswith("mha")} == {"mha,seed=0"}


def test_a_record_of_other_steps_is_refused(calls, few, tmp_path, monkeypatch, capsys):
    assert not run(tmp_path, monkeypatch, "--seeds", "1")
    capsys.readouterr()
    assert run(tmp_path, monkeypatch, "--seeds", "2") == 1
    assert "translation.json was not measured with" in capsys.readouterr().err


def test_a_trial_has_few_steps_and_seeds(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BLEU", dict.fromkeys(range(99), 1.0))
    assert not run(tmp_path, monkeypatch, "--steps", "40", "--seeds", "1")
    steps = {
        load_json(tmp_path / "uptraining/translation" / name / CONFIG).train.num_steps
        for done, name in calls
        if done == "train"
    }
    assert steps == {40, 2, 4, 10}


def test_a_failure_is_told_and_stops_no_other_kind(calls, few, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uptraining, "NAMES", ("mqa", "gqa"))
    monkeypatch.setattr(workplace, "timed", failing("mqa"))
    assert run(tmp_path, monkeypatch, "--seeds", "1") == 1
    told = capsys.readouterr()
    assert "no such luck" in told.err
    assert "| gqa" in told.out
    assert "| mqa" not in told.out


def test_what_a_kind_has_is_kept_before_all_of_it_is_done(calls, few, tmp_path, monkeypatch):
    """And not made again, without the runs too."""
    record = tmp_path / "uptraining/translation.json"
    with monkeypatch.context() as changed:
        changed.setattr(workplace, "timed", failing("nothing"))
        assert run(tmp_path, monkeypatch, "--seeds", "1", "--jobs", "1") == 1
    first = json.loads(record.read_text())["lines"]
    assert [(x["attention"], x["start"], x["bleu"]) for x in first] == [
        ("mha", "at once", 40.0),
        ("gqa", "at once", 1.0),
        ("gqa", "uptrained", 30.0),
        ("mha", "uptrained", 30.0),
    ]
    shutil.rmtree(tmp_path / "uptraining" / "translation")
    calls.clear()
    assert not run(tmp_path, monkeypatch, "--seeds", "1", "--jobs", "1")
    lines = json.loads(record.read_text())["lines"]
    assert lines[:4] == first
    assert [(x["attention"], x["start"]) for x in lines[4:]] == [
        ("gqa", "nothing"),
        ("mha", "nothing"),
    ]
    trained = {name.rpartition(",rate=")[0] or name for done, name in calls if done == "train"}
    assert trained == {"gqa,nothing,share=0.25", "mha,nothing,share=0.25"}  # want no `mha` run


def test_a_signal_ends_all(calls, tmp_path, monkeypatch, struck):
    assert run(tmp_path, monkeypatch) == 130
    assert len(struck) <= 2


def test_the_page_has_the_table_and_the_picture_of_the_record():
    lines = json.loads(uptraining_picture.RECORD.read_text())["lines"]
    table = uptraining.table(lines, "bleu").markdown()
    rows = [row for row in table.splitlines() if row.startswith("|")]
    page = (Path(__file__).parents[1] / "docs" / "uptraining.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page
    assert uptraining_picture.OUT.read_text(encoding="utf-8") == uptraining_picture.picture(lines)


def test_what_the_page_says_of_the_record_is_so():
    lines = json.loads(uptraining_picture.RECORD.read_text())["lines"]
    page = (Path(__file__).parents[1] / "docs" / "uptraining.md").read_text(encoding="utf-8")
    page = " ".join(page.split())

    def mean(name: str, start: str = "uptrained", share: float = 0.25) -> float:
        case = (name, start, share)
        own = [x for x in lines if (x["attention"], x["start"], x["share"]) == case]
        return statistics.fmean(x["bleu"] for x in own)

    kinds = ("mva", "gqa", "mhe_add-2-groups", "mhe_mul")
    base, control = mean("mha", "at once", 0.0), mean("mha")
    for said, of in (
        (
            "After 25 % of the steps, `mva` scores what the `mha` runs scored ({mva}, {} %). `gqa` "
            "scores {} % of it. `mhe_add` with 2 groups scores {} %, with 44 % of the attention "
            "parameters and a quarter of the cache, and `mhe_mul` {} %, with 35 % and an eighth.",
            base,
        ),
        (
            "Compared with the control, `mva` has {} %, `gqa` {} %, `mhe_add` with 2 groups {} % "
            "and `mhe_mul` {} %.",
            control,
        ),
    ):
        shares = [f"{100 * mean(kind) / of:.2f}" for kind in kinds]
        assert said.format(*shares, mva=f"{mean('mva'):.2f}") in page
    assert f"gains {control - base:.2f} BLEU by 25 % of the steps ({control:.2f})" in page
    first = {x["seed"]: x["bleu"] for x in lines if (x["attention"], x["share"]) == ("mha", 0.0)}
    anew = {x["seed"]: x["source"] for x in lines if x["attention"] == "mqa" and "source" in x}
    told = " instead of ".join(
        "{:.2f}, {:.2f} and {:.2f}".format(*(scores[seed] for seed in range(3)))
        for scores in (anew, first)
    )
    assert f"the same seeds score {told}." in page
    base_anew = statistics.fmean(anew.values())
    assert f"Those `mha` runs score {base - base_anew:.2f} BLEU less" in page
    for kind, said in (
        ("mqa", "After 25 % of the steps `mqa` has {:.2f} % ({:.2f}), with 56 % of the"),
        ("mhe_add", "and `mhe_add` {:.2f} % ({:.2f}), with 35 % and an eighth."),
    ):
        assert {x["source"] for x in lines if x["attention"] == kind and "source" in x} == {
            *anew.values()
        }
        assert said.format(100 * mean(kind) / base_anew, mean(kind)) in page
    nothing = [mean(kind, "nothing") for kind in ("mha", *uptraining.NAMES)]
    assert f"are worth {min(nothing):.1f} to {max(nothing):.1f} BLEU" in page
    bases = dict.fromkeys(kinds, base) | dict.fromkeys(("mqa", "mhe_add"), base_anew)
    at_once = {kind: mean(kind, "at once", 0.0) / of for kind, of in bases.items()}
    assert f"worth using at once, with {100 * at_once['gqa']:.2f} %" in page
    lost = {kind: 1 - share for kind, share in at_once.items() if kind != "gqa"}
    assert 0.3 < lost["mhe_add"] < 0.35  # a third
    # The others lose a sixth to a fifth.
    assert all(1 / 6 < lost[kind] < 0.205 for kind in lost if kind != "mhe_add")
    for kind in ("mhe_mul", "mva", "mqa", "mhe_add"):
        gained = mean(kind, share=0.05) - mean(kind, "at once", 0.0)
        assert gained > lost[kind] * bases[kind] / 2
    control_runs = [x for x in lines if (x["attention"], x["start"]) == ("mha", "uptrained")]
    losses = {x["share"]: x["losses"] for x in control_runs if "losses" in x}
    for share in (0.05, 0.1):
        by_rate = sorted(losses[share].items(), key=lambda item: float(item[0]))
        assert [loss for _, loss in by_rate] == sorted(losses[share].values())
        assert min(losses[share].values()) > 2.032
        assert len(by_rate) == 6
    assert f"falls from 2.032 to {min(losses[0.25].values()):.3f} (seed 0)" in page


def test_the_page_has_what_the_language_model_scores():
    root = Path(__file__).parents[1]
    lines = json.loads((root / "docs/records/uptraining/lm.json").read_text())["lines"]
    table = uptraining.table(lines, "perplexity_per_token").markdown()
    page = " ".join((root / "docs" / "uptraining.md").read_text(encoding="utf-8").split())
    assert " ".join(row for row in table.splitlines() if row.startswith("|")) in page

    def mean(name: str, start: str, share: float) -> float:
        case = (name, start, share)
        own = [x for x in lines if (x["attention"], x["start"], x["share"]) == case]
        return statistics.fmean(x["perplexity_per_token"] for x in own)

    kinds = ("gqa", "mva", "mqa", "mhe_add-2-groups", "mhe_mul", "mhe_add")
    source, control = mean("mha", "at once", 0.0), mean("mha", "uptrained", 0.25)
    after = {name: mean(name, "uptrained", 0.25) for name in kinds}
    # All but `mhe_add` without groups are better than the `mha` runs were.
    assert [name for name in kinds if after[name] > source] == ["mhe_add"]
    assert control < source
    said = "`gqa` is {:.1f} % worse, `mva` {:.1f} %, `mqa` {:.1f} %, `mhe_add` with 2 groups "
    said += "{:.1f} %, `mhe_mul` {:.1f} % and `mhe_add` without groups {:.1f} %, with {}, {}, {}, "
    said += "{}, {} and {} % of its attention parameters."
    parameters = {x["attention"]: x["parameters"]["attention"] for x in lines}
    shares = [int(100 * parameters[name] / parameters["mha"] + 0.5) for name in kinds]
    assert said.format(*(100 * (x / control - 1) for x in after.values()), *shares) in page
    said = "At once `gqa` is {:.1f} % worse than the runs that it was made of, `mva` {:.1f} %,"
    said += " `mqa` {:.1f} %, `mhe_add` with 2 groups {:.1f} %, `mhe_mul` {:.1f} % and `mhe_add` "
    said += "without groups {:.1f} %."
    assert said.format(*(100 * (mean(name, "at once", 0.0) / source - 1) for name in kinds)) in page

    def anew(*names: str) -> list[str]:
        scores = {
            x["seed"]: x["source"] for x in lines if x["attention"] in names and "source" in x
        }
        return [f"{scores[seed]:.2f}" for seed in range(3)]

    first = [x for x in lines if (x["attention"], x["start"]) == ("mha", "at once")]
    was = [f"{x['perplexity_per_token']:.2f}" for x in first]
    said = "{}, {} and {} on the EPYC and {}, {} and {} on that Xeon, instead of {}, {} and {}."
    assert said.format(*anew("mhe_mul", "mhe_add-2-groups"), *anew("mhe_add", "mqa"), *was) in page
    nothing = [mean(name, "nothing", 0.25) for name in (*kinds, "mha")]
    assert f"give {min(nothing):.1f} to {max(nothing):.1f}." in page
    assert {x["rate"] for x in lines if x["start"] == "nothing"} == {"0.008"}
    whole = statistics.fmean(uptraining._recorded("mha", "perplexity_per_token"))
    assert f"at 8e-3 score {whole:.2f}." in page
    assert whole < min(*after.values(), control)
    new = {
        name: statistics.fmean(uptraining._recorded(name, "perplexity_per_token"))
        for name in ("mva", "gqa", "mhe_add-2-groups", "mqa", "mhe_mul", "mhe_add")
    }
    assert [*new.values()] == sorted(new.values())
    scores = [f"{score:.2f}" for score in new.values()]
    said = f"score {', '.join(scores[:-1])} and {scores[-1]}, each better than"
    assert said in page
    assert all(score < after[name] for name, score in new.items())
    assert new["mva"] < whole
