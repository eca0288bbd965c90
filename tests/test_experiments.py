"""What benchmarks/experiments.py runs, by a stand-in for train.py and eval.py."""

import json
import lzma
import sys
from pathlib import Path

import pytest
from command_lines import parsed

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import experiment_tables, experiments, workplace
from mhe_jax.cli.sweep.plan import CONFIG, RESULT
from mhe_jax.config import EvaluationConfig
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import save_json
from mhe_jax.config.loading import load_config
from mhe_jax.data.tokenizer import Tokenizer
from mhe_jax.report.comparison import main_table
from mhe_jax.report.groups import sections
from mhe_jax.report.runs import read_runs

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records"
NAMES = ("mhe_mul", "sha", "mqa")
LOSSES = {1e-3: 2.5, 2e-3: 2.0, 4e-3: 3.0}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """(command, experiment/run) of each call; one training run fails. Few cases of each kind."""
    found: list[tuple[str, str]] = []

    def stand_in(command, stdout, **_):
        _, program, *arguments = command
        if program == "-m":
            name, run = "factorize", Path(arguments[3])
        elif Path(program).name == "train.py":
            name, run = "train", Path(arguments[arguments.index("--workdir") + 1])
        else:
            name, run = "eval", Path(arguments[0])
        found.append((name, f"{run.parent.name}/{run.name}"))
        if run.name == "sha,1e-3,seed=0":
            stdout.write("training\nerror: no such luck\n")
            stdout.flush()
            return 1, 1.0
        run.mkdir(parents=True, exist_ok=True)
        if name == "train":
            with workplace.PARSING:
                config = parsed(tuple(arguments))
            save_json(config, run / CONFIG)
            loss = LOSSES.get(config.optimizer.learning_rate)
            done = {"steps": config.train.num_steps, "best_validation_loss": loss}
            (run / RESULT).write_text(json.dumps(done))
        elif name == "factorize":
            (run / CONFIG).write_text("{}")
        else:
            asked = dict(zip(arguments[1::2], arguments[2::2], strict=True))
            noise = float(asked.get("--spelling_noise", 0))
            what = result_name(EvaluationConfig(split=asked["--split"], spelling_noise=noise))
            (run / f"eval_{what}.json").write_text(json.dumps(arguments))
        return 0, 1.0

    monkeypatch.setattr(workplace, "timed", stand_in)
    monkeypatch.setattr(workplace, "parse_train_arguments", lambda given: parsed(tuple(given)))
    monkeypatch.setattr(experiments, "pieces", lambda at: at.directory / "tokenizer.model")
    for experiment, count in (("encoders", 1), ("hashes", 1), ("matrices", 5)):
        monkeypatch.setitem(experiments.CASES, experiment, experiments.CASES[experiment][:count])
    few = [case for case in experiments.CASES["translation"] if case.keywords["name"] in NAMES]
    monkeypatch.setitem(experiments.CASES, "translation", few)
    return found


def run(tmp_path: Path, monkeypatch, experiment: str) -> int:
    command = ["experiments.py", experiment, "--workdir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        experiments.main()
    return int(stop.value.code or 0)


def test_translation(calls, tmp_path, monkeypatch, capsys):
    """The rate by validation loss, then its seeds and scores; a failure stops no other case."""
    assert run(tmp_path, monkeypatch, "translation") == 1
    assert "sha,1e-3,seed=0: exit status 1: no such luck (see " in capsys.readouterr().err
    rates = [f"translation/mhe_mul,{rate},seed=0" for rate in experiments.RATES]
    seeds = [f"translation/mhe_mul,2e-3,seed={seed}" for seed in "12"]
    mine = [call for call in calls if "mhe_mul," in call[1]]
    assert [run for name, run in mine if name == "train"] == rates + seeds
    assert [run for name, run in mine if name == "eval"] == [rates[1], *seeds]
    assert ("eval", "translation/mqa,2e-3,seed=0") in calls
    assert ("train", "translation/mqa,2e-3,seed=1") not in calls
    done = len(calls)
    assert done == (5 + 3) + (3 + 1) + 1
    assert run(tmp_path, monkeypatch, "translation") == 1
    assert calls[done:] == [("train", "translation/sha,1e-3,seed=0")]


@pytest.mark.parametrize(
    ("experiment", "trainings"),
    # MLM, two tasks with three seeds and from nothing; two pre-trainings and two tasks; `mha` at
    # three rates, three ranks, `mhe_mul` at three rates and one rank, one retrained.
    [("encoders", 1 + 2 * 4), ("hashes", 2 + 2), ("matrices", 3 + 3 + 3 + 1 + 1)],
)
def test_what_is_done_is_not_repeated(calls, tmp_path, monkeypatch, experiment, trainings):
    assert run(tmp_path, monkeypatch, experiment) == 0
    done = len(calls)
    assert len([call for call in calls if call[0] == "train"]) == trainings
    assert run(tmp_path, monkeypatch, experiment) == 0
    assert len(calls) == done
    for run_of_task in tmp_path.glob("*-hashes/*/"):
        for rate in experiments.NOISE:
            scores = run_of_task / f"eval_{experiments.misspelt(rate)}.json"
            assert json.loads(scores.read_text())[-1] == rate
        assert "--spelling_noise" not in (run_of_task / "eval_validation.json").read_text()


def test_pieces_are_named_from_the_data(calls, tmp_path, monkeypatch):
    """So that a record holds where data and runs lie together, wherever that is."""
    assert run(tmp_path, monkeypatch, "encoders") == 0
    for name in ("mlm/mha", "sst2/mha,nothing,seed=0", "cola/mha,nothing,seed=0"):
        data = json.loads((tmp_path / name / CONFIG).read_text())["data"]
        assert data["tokenizer"].startswith("..")
        there = Path(data["directory"]).resolve() / data["tokenizer"]
        assert there.resolve() == tmp_path / "tokenizer.model"


def test_pieces(tmp_path, monkeypatch):
    """Of all texts, trained once."""
    monkeypatch.setattr(experiments, "VOCABULARY_SIZE", 280)
    files = {
        "wikitext-2/train.txt.xz": "a wiki wiki wiki\n",
        "glue/SST-2/train.tsv.xz": "sentence\tlabel\nmovie movie movie\t1\n",
        "glue/CoLA/in_domain_train.tsv.xz": "ks08\t1\t\twhither whither whither\n",
    }
    for name, text in files.items():
        (file := tmp_path / name).parent.mkdir(parents=True)
        file.write_bytes(lzma.compress(text.encode()))
    at = workplace.Workplace(tmp_path / "runs", tmp_path, 2)
    tokenizer = Tokenizer.load(path := experiments.pieces(at))
    assert all(len(tokenizer.encode(word)) < 5 for word in ("wiki", "movie", "whither"))
    path.write_text("as it was")
    assert experiments.pieces(at).read_text() == "as it was"


def test_ctrl_c_ends_all(calls, tmp_path, monkeypatch):
    """What train.py says of Ctrl-C, which reaches every process of a terminal."""
    monkeypatch.setattr(workplace, "timed", lambda *_, **__: (calls.append(()) or 130, 0.0))
    assert run(tmp_path, monkeypatch, "translation") == 130
    assert len(calls) <= 2


def test_a_signal_ends_all(calls, tmp_path, monkeypatch, struck):
    assert run(tmp_path, monkeypatch, "translation") == 130
    assert len(struck) <= 2


def test_tables(tmp_path, monkeypatch, capsys):
    """Numbers of each run in its row; what is not there is told."""
    for run, file, scores in [
        ("mlm/sha", "eval_test.json", {"parameters": {"attention": 67584}, "perplexity": 90.25}),
        ("sst2/sha,seed=0", "eval_validation.json", {"score": 80.0}),
        ("sst2/sha,seed=2", "eval_validation.json", {"score": 82.0}),
        ("cola/sha,nothing,seed=0", "eval_validation.json", {"score": -1.5}),
        ("hashes/md_proj", "eval_test.json", {"auc": 0.75, "loss": 0.5, "accuracy": 0.875}),
        ("hashes/md_proj,alone", "eval_test.json", {"loss": 0.625, "accuracy": 0.8125}),
        ("sst2-hashes/md_proj", "eval_validation.json", {"score": 60.0}),
        ("sst2-hashes/md_proj", "eval_validation_misspelt_0.2_0.json", {"score": 55.0}),
        ("sst2-hashes/pieces", "eval_validation.json", {"score": 80.0}),
        ("warm/64", "before.json", {"bleu": 10.0, "parameters": {"total": 1234}}),
    ]:
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
        (tmp_path / run / file).write_text(json.dumps(scores))
    hashformer = load_config(str(ROOT / "configs/hashformer.py"))
    save_json(hashformer, tmp_path / "hashes/md_proj" / CONFIG)
    monkeypatch.setattr(sys, "argv", ["experiment_tables.py", str(tmp_path)])
    experiment_tables.main()
    rows = capsys.readouterr().out.splitlines()
    assert "| sha | 67,584 | 90.2 | 81.00 | 1.41 | - | - | - | -1.50 |" in rows
    # The projection of 128 bits to 128 numbers, and a row for each type of token.
    size = f"{128 * 128 + 6 * 128:,}"
    assert f"| md_proj | {size} | 0.750 | 0.5000 | 87.50 | 0.6250 | 81.25 |" in rows
    assert "| md_proj | 60.00 | 75.0 | - | 55.00 |" in rows
    assert "| pieces | 80.00 | 100.0 | - | - |" in rows
    assert "| 64 | 1,234 | 10.00 | - |" in rows


def test_a_page_has_the_tables_of_the_records():
    """What is printed of runs is what they have left, but for memory, which is of no run."""
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    choose = ["optimizer.learning_rate"]
    (section,) = sections(read_runs([RECORDS / "translation"], "test"), "bleu", choose)
    tables = [
        main_table(section, {"forward": {}, "with gradients": {}}, "", "test"),
        experiment_tables.encoders(RECORDS),
        experiment_tables.pretraining(RECORDS),
        *experiment_tables.tasks(RECORDS),
        experiment_tables.warm(RECORDS),
    ]
    for table in tables:
        rows = [line for line in table.markdown().splitlines() if line.startswith("|")]
        assert "\n".join(rows) in page
    for name in experiments.TRANSLATION:
        runs = [RECORDS / f"translation/{name},{rate},seed=0" for rate in experiments.RATES]
        losses = [f"{experiments.loss(run):.3f}" for run in runs]
        assert f"| {' | '.join([name, *losses])} |" in page
    scores = {group.name.split(", learning_rate")[0]: group for group in section.groups}
    page = " ".join((ROOT / "docs" / "which_kind.md").read_text(encoding="utf-8").split())
    groups, control = (
        f"{scores[name].mean('bleu'):.2f} ± {scores[name].spread('bleu'):.2f}"
        for name in ("mhe_add, num_groups=2", "sha")
    )
    assert f"({groups} against {control}, standard deviations over three seeds" in page
    assert f"narrow kinds, and {scores['mha'].mean('bleu'):.2f} for the others" in page
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    bleu = {name: f"{group.mean('bleu'):.2f}" for name, group in scores.items()}
    counts = {name: group.parameters("attention") or 0 for name, group in scores.items()}
    share = {name: f"{100 * count / counts['mha']:.0f} %" for name, count in counts.items()}
    assert share["mhe_mul"] == share["mhe_add"]
    for said in (
        f"`mhe_mul` and `mhe_add` have {share['mhe_mul']} of the attention parameters of `mha`",
        f"({bleu['mhe_mul']} and {bleu['mhe_add']} BLEU against {bleu['mha']})",
        f"one head without embeddings ({bleu['sha']})",
        "with two groups ({}, {})".format(*(x["mhe_add, num_groups=2"] for x in (bleu, share))),
        f"`mva` ({bleu['mva']}, {share['mva']}) score more",
    ):
        assert said in page
