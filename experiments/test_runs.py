"""Runs that are not repeated, and records; what atlas, paper and uptraining run of them.

By a stand-in for train.py, eval.py, convert and factorize.
"""

import json
import lzma
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from experiments import runs
from experiments.atlas import atlas, cases, linux_text, sizes
from experiments.atlas.cases import Case, Stage
from experiments.paper import paper
from experiments.uptraining import uptraining
from mhe_jax.config.fields import save_json
from mhe_jax.data.tokenizer import Tokenizer

LOSSES = {"5e-4": 2.4, "1e-3": 2.5, "2e-3": 2.0, "4e-3": 2.2, "8e-3": 3.0}
# Added to the loss of a kind.
WORSE = {"sha": 0.3, "mhe_mul": 0.2, "mqa": 0.4}
PROGRAMS = {"atlas": atlas, "paper": paper, "uptraining": uptraining}


@pytest.fixture
def calls(monkeypatch):
    """Commands leave what they would: `calls` are (command, run), `failing` those that fail."""
    found = []

    def stand_in(self, command, output):
        program, *given = command[1:]
        if program == "-m":
            name, run, flags = given[1], Path(given[3]), given[4:]
        else:
            name, flags = Path(program).stem, given[1:]
            run = Path(given[0] if name == "eval" else given[given.index("--workdir") + 1])
        asked = dict(zip(flags[::2], flags[1::2], strict=False))
        label = f"{run.parent.name}/{run.name}"
        found.append((name, label))
        if (status := stand_in.failing.get(label, 0)) or label in stand_in.failing:
            output.write("error: no such luck\n")
            output.flush()
            return status
        run.mkdir(parents=True, exist_ok=True)
        if name == "train":
            (run / "flags.json").write_text(json.dumps(asked))
            rate = asked.get("--optimizer.learning_rate", "2e-3")
            loss = LOSSES.get(rate, 4.0) + WORSE.get(asked.get("--model.attention.kind", ""), 0.0)
            result = {"best_validation_loss": loss, "steps": 7, "best_step": 1, "parameters": {}}
            result |= {"training_seconds": 1.0, "device": "cpu", "jax": "0"}
            (run / "result.json").write_text(json.dumps(result))
            curve = [{"step": 7, "split": s, "loss": loss} for s in ("train", "validation")]
            (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, curve)))
            base = cases.base_of("translation" if "multi30k" in given[0] else "lm")
            save_json(base, run / "config.json")
        elif name == "eval":
            noise = asked.get("--spelling_noise")
            what = asked["--split"] + (f"_misspelt_{noise}_0" if noise else "")
            scores = {"bleu": 30.0, "perplexity_per_token": 40.0, "score": 1.0, "asked": asked}
            (run / f"eval_{what}.json").write_text(json.dumps(scores))
        else:
            (run / "config.json").write_text("{}")
        return 0

    stand_in.failing = {}
    monkeypatch.setattr(runs.Runs, "wait", stand_in)
    monkeypatch.setattr(paper, "pieces", lambda at: at.directory / "tokenizer.model")
    monkeypatch.setattr(paper, "named", lambda at, data, file: file)
    stand_in.calls = found
    return stand_in


def run(monkeypatch, tmp_path, program: str, *flags: str) -> int:
    command = [program, *flags, "--workdir", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", command)
    return PROGRAMS[program].main()


def stage(monkeypatch, *names: str, best: int = 1) -> None:
    only = Stage([Case("depth", name) for name in names], best)
    monkeypatch.setattr(atlas, "stages", lambda task: [only])


def lines_of(tmp_path, task="lm"):
    return json.loads((tmp_path / f"atlas/{task}.json").read_text())["lines"]


def test_atlas_takes_the_rate_by_one_seed_and_the_score_by_three_others(
    calls, monkeypatch, tmp_path
):
    """Fresh seeds of the control and of the best kind, `gqa`, not of `mhe_mul`."""
    stage(monkeypatch, "mha", "mhe_mul", "gqa")
    assert run(monkeypatch, tmp_path, "atlas", "translation") == 0
    rates = ("1e-3", "2e-3", "4e-3")
    searched = [
        ("train", f"depth/{name},{rate},seed=0")
        for name in ("mha", "mhe_mul", "gqa")
        for rate in rates
    ]
    fresh = [
        (done, f"depth/{name},2e-3,seed={seed}")
        for name in ("mha", "gqa")
        for seed in "123"
        for done in ("train", "eval")
    ]
    assert calls.calls == searched + fresh
    lines = lines_of(tmp_path, "translation")
    assert [line.get("bleu") for line in lines] == [None] * 9 + [30.0] * 6  # no test set before
    assert [line["fields"]["train.num_steps"] for line in lines] == [525] * 9 + [2100] * 6
    assert lines[0]["fields"]["optimizer.warmup_steps"] == 37
    # With the record alone, nothing is repeated; what is new is run.
    for path in tmp_path.glob("atlas/translation/depth/*/*"):
        path.unlink()
    before = len(calls.calls)
    stage(monkeypatch, "gqa", "mqa")
    assert run(monkeypatch, tmp_path, "atlas", "translation") == 0
    assert {name.split(",")[0] for _, name in calls.calls[before:]} == {"depth/mqa"}
    with pytest.raises(SystemExit, match="was not measured with"):
        run(monkeypatch, tmp_path, "atlas", "translation", "--steps", "40")


def test_the_controls_try_two_rates_with_all_steps(calls, monkeypatch, tmp_path):
    """No rate beyond them, though the lowest is best; then new seeds of all, of one stage only."""
    assert run(monkeypatch, tmp_path, "atlas", "lm_controls", "--stages", "1") == 0
    names = "shape/mha", "width/mva-narrow", "width/mha-thin-narrow"
    tried = [("train", f"{name},{rate},seed=0") for name in names for rate in ("4e-3", "8e-3")]
    fresh = [
        (done, f"{name},4e-3,seed={seed}")
        for name in names
        for seed in "456"
        for done in ("train", "eval")
    ]
    assert calls.calls[:6] == tried
    assert sorted(calls.calls[6:]) == sorted(fresh)
    assert {line["fields"]["train.num_steps"] for line in lines_of(tmp_path, "lm_controls")} == {
        2000
    }


def test_one_pass_goes_case_by_case_with_two_seeds_and_keeps_curves(calls, monkeypatch, tmp_path):
    """Three rates by a quarter of the steps, and none beyond them, though the lowest is best."""
    assert run(monkeypatch, tmp_path, "atlas", "lm_pass", "--stages", "2", "--minutes", "9") == 0
    found = lines_of(tmp_path, "lm_pass")
    assert [line["name"] for line in found] == ["mha"] * 5 + ["mva-narrow"] * 5
    assert [(line["rate"], line["seed"]) for line in found[:5]] == [
        ("2e-3", 0), ("4e-3", 0), ("8e-3", 0), ("2e-3", 4), ("2e-3", 5),
    ]  # fmt: skip
    assert [line["fields"]["train.num_steps"] for line in found[:5]] == [768] * 3 + [3072] * 2
    assert found[0]["curve"] == [[7, 2.0]]


def test_commands_get_ctrl_c_when_time_is_up_and_no_more_begin(tmp_path):
    at = runs.Runs(runs.parser("").parse_args(["--workdir", str(tmp_path)]), minutes=0.02)
    code = (
        "import pathlib, time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('saved'); raise"
    )
    (tmp_path / "one.py").write_text(code)
    with pytest.raises(runs.OutOfTime):
        at.call(tmp_path / "run", str(tmp_path / "one.py"))
    assert "saved" in (tmp_path / "run.log").read_text()
    with pytest.raises(runs.OutOfTime):
        at.call(tmp_path / "other", str(tmp_path / "one.py"))
    assert "saved" not in (tmp_path / "other.log").read_text()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_linux_text(monkeypatch, tmp_path):
    """Each `.c` file of the archive in the package is whole in one split."""
    tree = tmp_path / "linux/drivers"
    tree.mkdir(parents=True)
    texts = {f"f{i}.c": f"int f{i}(void)\n{{\n\treturn {i};\n}}\n" for i in range(300)}
    for name, text in {**texts, "f.h": "header", "README": "words"}.items():
        (tree / name).write_text(text)
    place = tmp_path / "package/usr/src"
    place.mkdir(parents=True)
    with tarfile.open(place / "linux.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "linux", "linux")
    (control := tmp_path / "package/DEBIAN/control").parent.mkdir()
    control.write_text("Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n")
    package = tmp_path / "x.deb"
    subprocess.run(["dpkg-deb", "-b", tmp_path / "package", package], check=True, stdout=-3)
    monkeypatch.setattr(linux_text, "PARTS", 10)
    small = sizes.changed(cases.base_of("lm_pass"), {"model.vocabulary_size": 300})
    monkeypatch.setattr(linux_text, "base_of", lambda task: small)
    monkeypatch.setattr(sys, "argv", ["x", str(package), str(tmp_path / "out"), "--parts", "8"])
    linux_text.main()
    files = [tmp_path / f"out/{name}.txt.xz" for name in ("train", "valid", "test")]
    found = [lzma.decompress(file.read_bytes()).decode() for file in files]
    assert all(sum(text in split for split in found) == 1 for text in texts.values())
    assert [split.count("return") > 0 for split in found] == [True] * 3
    assert sum(split.count("return") for split in found) == 300
    assert Tokenizer.load(tmp_path / "out/tokenizer.model").vocabulary_size == 300


def test_atlas_goes_beyond_the_edge_and_takes_the_lowest_rate_in_a_tie(
    calls, monkeypatch, tmp_path
):
    stage(monkeypatch, "gqa")
    assert run(monkeypatch, tmp_path, "atlas", "lm") == 0  # 2e-3 is best, and the lowest of three
    rates = [line["rate"] for line in lines_of(tmp_path)]
    assert rates == ["2e-3", "4e-3", "8e-3", "0.001", "2e-3", "2e-3", "2e-3"]
    assert atlas.chosen({"2e-3": 2.0019, "4e-3": 2.0, "0.016": 3.0}) == "2e-3"
    assert atlas.chosen({"2e-3": 2.0021, "4e-3": 2.0}) == "4e-3"
    assert atlas.chosen({"0.016": 2.0, "8e-3": 2.001}) == "8e-3"


@pytest.mark.parametrize("status", [1, 2, -9])
def test_atlas_records_what_fails_by_itself_alone(calls, monkeypatch, tmp_path, status):
    """Not what was killed or refused, whose case has no seeds; the others go on."""
    calls.failing = {"depth/mqa,4e-3,seed=0": status}
    stage(monkeypatch, "mqa", "gqa", best=2)
    assert run(monkeypatch, tmp_path, "atlas", "translation") == (status != 1)
    found = lines_of(tmp_path, "translation")
    assert ["no such luck"] * (status == 1) == [x["failed"] for x in found if "failed" in x]
    seeded = {line["name"] for line in found if line["seed"]}
    assert seeded == {"gqa", "mqa"} if status == 1 else {"gqa"}
    calls.failing = {}
    before = len(calls.calls)
    assert run(monkeypatch, tmp_path, "atlas", "translation") == 0
    assert (len(calls.calls) > before) == (status != 1)


def test_translation(calls, monkeypatch, tmp_path, capsys):
    """The rate by validation loss, then its seeds and scores; a failure stops no other case."""
    few = [case for case in paper.CASES["translation"] if case.keywords["name"] in WORSE]
    monkeypatch.setitem(paper.CASES, "translation", few)
    calls.failing = {"translation/sha,1e-3,seed=0": 1}
    assert run(monkeypatch, tmp_path, "paper", "translation") == 1
    assert "sha,1e-3,seed=0: exit status 1: no such luck (see " in capsys.readouterr().err
    rates = [f"translation/mhe_mul,{rate},seed=0" for rate in paper.RATES]
    seeds = [f"translation/mhe_mul,2e-3,seed={seed}" for seed in "12"]
    mine = [call for call in calls.calls if "mhe_mul," in call[1]]
    assert [run for name, run in mine if name == "train"] == rates + seeds
    assert [run for name, run in mine if name == "eval"] == [rates[1], *seeds]
    assert ("eval", "translation/mqa,2e-3,seed=0") in calls.calls
    assert ("train", "translation/mqa,2e-3,seed=1") not in calls.calls
    done = len(calls.calls)
    assert run(monkeypatch, tmp_path, "paper", "translation") == 1
    assert calls.calls[done:] == [("train", "translation/sha,1e-3,seed=0")]


@pytest.mark.parametrize(
    ("experiment", "count", "trainings"),
    # MLM, two tasks with three seeds and from nothing; two pre-trainings and two tasks; `mha` at
    # three rates, three ranks, `mhe_mul` at three rates and one rank, one retrained.
    [("encoders", 1, 1 + 2 * 4), ("hashes", 1, 2 + 2), ("matrices", 5, 3 + 3 + 3 + 1 + 1)],
)
def test_what_is_done_is_not_repeated(calls, monkeypatch, tmp_path, experiment, count, trainings):
    monkeypatch.setitem(paper.CASES, experiment, paper.CASES[experiment][:count])
    assert run(monkeypatch, tmp_path, "paper", experiment) == 0
    done = len(calls.calls)
    assert len([call for call in calls.calls if call[0] == "train"]) == trainings
    assert run(monkeypatch, tmp_path, "paper", experiment) == 0
    assert len(calls.calls) == done
    for run_of_task in tmp_path.glob("*-hashes/*/"):
        for rate in paper.NOISE:
            scores = runs.read(run_of_task / f"eval_{paper.misspelt(rate)}.json")
            assert scores["asked"]["--spelling_noise"] == rate
    # Pieces are named from the data, so that a record holds wherever both lie together.
    for flags in tmp_path.glob("mlm/*/flags.json"):
        asked = json.loads(flags.read_text())
        there = Path(asked["--data.directory"]).resolve() / asked["--data.tokenizer"]
        assert there.resolve() == tmp_path / "tokenizer.model"


def test_other_flags_make_a_run_anew(calls, tmp_path):
    args = runs.parser("").parse_args(["--workdir", str(tmp_path)])
    at = runs.Runs(args)
    for flags in ((), (), ("--train.seed", "1")):
        at.train("a/b", "demo.py", "demo", *flags)
    assert calls.calls == [("train", "a/b")] * 2


def test_uptraining(calls, monkeypatch, tmp_path, capsys):
    """Each part of each kind, at the best rate; with the record alone nothing is repeated."""
    monkeypatch.setattr(uptraining, "NAMES", ("gqa", "mha"))
    flags = ["translation", "--steps", "40", "--seeds", "2"]
    assert run(monkeypatch, tmp_path, "uptraining", *flags) == 0
    made = [name for done, name in calls.calls if done == "train"]
    assert made.count("translation/gqa,share=0.25,rate=2e-3,seed=1") == 1
    assert "translation/gqa,nothing,share=0.25,rate=2e-3,seed=1" in made
    assert ("convert", "translation/gqa,seed=1") in calls.calls
    assert len([name for name in made if name.startswith("translation/mha,seed")]) == 2
    at = tmp_path / "uptraining/translation"
    read = {file.parent.name: runs.read(file) for file in at.glob("*/flags.json")}
    asked = read["gqa,share=0.1,rate=2e-3,seed=1"]
    assert asked["--train.num_steps"] == "4"
    assert asked["--train.init_from"] == str(at / "gqa,seed=1")
    assert read["mha,share=0.1,rate=2e-3,seed=0"]["--train.init_from"] == str(at / "mha,seed=0")
    assert read["gqa,nothing,share=0.25,rate=2e-3,seed=1"]["--model.attention.num_kv_heads"] == "2"
    lines = runs.read(tmp_path / "uptraining/translation.json")["lines"]
    assert len(lines) == 2 * 5 * 2
    assert {line["rate"] for line in lines if line["share"]} == {"2e-3"}
    assert {line["source"] for line in lines if line["start"] != "nothing"} == {30.0}
    assert "| gqa | - | 30.00 ± 0.00 |" in capsys.readouterr().out
    done = len(calls.calls)
    assert run(monkeypatch, tmp_path, "uptraining", *flags) == 0
    assert len(calls.calls) == done


def test_pieces(tmp_path, monkeypatch):
    """Of all texts, trained once."""
    monkeypatch.setattr(paper, "VOCABULARY_SIZE", 280)
    files = {
        "wikitext-2/train.txt.xz": "a wiki wiki wiki\n",
        "glue/SST-2/train.tsv.xz": "sentence\tlabel\nmovie movie movie\t1\n",
        **dict.fromkeys(
            (
                f"glue/CoLA/{part}.tsv.xz"
                for part in ("in_domain_train", "in_domain_dev", "out_of_domain_dev")
            ),
            "ks08\t1\t\twhither whither whither\n",
        ),
    }
    for name, text in files.items():
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lzma.compress(text.encode()))
    given = ["--workdir", str(tmp_path / "runs"), "--data.directory", str(tmp_path)]
    at = runs.Runs(runs.parser("").parse_args(given))
    tokenizer = Tokenizer.load(path := paper.pieces(at))
    assert all(len(tokenizer.encode(word)) < 5 for word in ("wiki", "movie", "whither"))
    path.write_text("as it was")
    assert paper.pieces(at).read_text() == "as it was"
