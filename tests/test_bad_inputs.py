"""What users give wrong, by every command: one line that names the field or file, and no harm.

Exit status 2, nothing on standard output, nothing compiled, every file as it was, and no other.
"""

import contextlib
import gzip
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import jax
import pytest
from labelled_files import squad

import mhe_jax
from mhe_jax.cli import commands
from mhe_jax.config.fields import load_json, save_json, set_field
from mhe_jax.config.loading import load_config
from mhe_jax.data import Text, train_tokenizer
from mhe_jax.training.loop import train

ROOT = Path(__file__).parents[1]
CONFIG = """
from typing import Literal

from mhe_jax.config import *

FILES = {"translation": ("train.en", "train.de"), "labels": ("labels.tsv",)}


def get_config(variant: Literal["lm", "mlm", "translation", "labels", "span"]):
    files = ("squad.json",) if variant == "span" else FILES.get(variant, ("train.en",))
    return Config(
        task="classification" if variant == "labels" else variant,
        workdir=f"runs/{variant}",
        model=ModelConfig(vocabulary_size=300, features=16, mlp_features=16, num_layers=1,
                          attention=AttentionConfig(num_heads=2), max_length=16),
        data=DataConfig(train=files, validation=files, test=files, sequence_length=16, batch_size=8,
                        tokens_per_batch=256, cache_directory="cache",
                        dataset="squad" if variant == "span" else "own",
                        window_stride=4, question_length=8),
        optimizer=OptimizerConfig(warmup_steps=1),
        train=TrainConfig(num_steps=2, checkpoint_every=1, keep_checkpoints=2, log_every=1),
        evaluation=EvaluationConfig(batch_size=8),
    )
"""
WORDS = {
    "en": "one small dog runs over the green meadow and a man with red hat watches him",
    "de": "ein kleiner hund läuft über die grüne wiese und einer mit rotem hut sieht ihm",
}


def text_of(language):
    """200 lines of three words, all different."""
    words = WORDS[language].split()
    lines = ([words[i % 15], words[i // 15 % 15], words[7 * i % 15]] for i in range(200))
    return "".join(" ".join(line) + "\n" for line in lines)


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """Texts, `tiny.py`, and runs: two are trained, the others have a config alone."""
    place = tmp_path_factory.mktemp("good")
    (place / "tiny.py").write_text(CONFIG)
    for language in WORDS:
        (place / f"train.{language}").write_text(text_of(language), encoding="utf-8")
    rows = (f"{line}\t{'ab'[i % 2]}\n" for i, line in enumerate(text_of("en").splitlines()))
    (place / "labels.tsv").write_text("text\tlabel\n" + "".join(rows))
    (place / "squad.json").write_text(squad())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("lm", "mlm"):
            train(load_config(f"tiny.py:{name}"), jax.devices()[:1])
        for name in ("translation", "labels"):
            Path("runs", name).mkdir()
            save_json(load_config(f"tiny.py:{name}"), f"runs/{name}/config.json")
    shutil.rmtree(place / "cache")
    return place


@pytest.fixture
def place(good, tmp_path, monkeypatch):
    """A copy of what is good, to spoil; everything is started in it."""
    shutil.copytree(good, copy := tmp_path / "place")
    monkeypatch.chdir(copy)
    monkeypatch.setenv("MHE_JAX_CACHE", "cache")
    return copy


COMPILED = []


@pytest.fixture(scope="module", autouse=True)
def count_compilations():
    def heard(name, seconds, *, fun_name="", **about):
        # A number that becomes an array is a program too, unless another test made one before.
        if name.endswith("backend_compile_duration") and fun_name != "jit(convert_element_type)":
            COMPILED.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)


def contents(place):
    """{path: bytes} of all below `place` but the cache, where good texts may leave an index."""
    found = {}
    for path in (Path(top, name) for top, _, names in os.walk(place) for name in names):
        if "cache" not in path.relative_to(place).parts:
            found[path] = os.readlink(path) if path.is_symlink() else path.read_bytes()
        else:
            assert path.suffix != ".tmp", f"{path} was left"
    return found


@pytest.fixture
def refused(monkeypatch, capfd):
    """`refused("train.py ...", "what the line names")`, a regular expression, in this place."""

    def check(arguments, named, *, stdin=b"", may_compile=False):
        script, *arguments = arguments.split()
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        before = contents(Path.cwd())
        COMPILED.clear()
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        out, err = capfd.readouterr()
        assert re.fullmatch(rf"error: .*({named}).*\n", err), err
        assert stop.value.code == 2
        assert out == ""
        assert contents(Path.cwd()) == before
        assert may_compile or not COMPILED

    return check


# Arguments | what the line names. `T` trains tiny.py:lm in a new directory.
ARGUMENTS = """
train.py | usage: python train\\.py CONFIG
train.py tin.py | tin\\.py.*multi30k
train.py tiny.py:big | tiny\\.py.*'big'.*'lm'
T --model.attention.kind mhx | 'mhx'.*--model\\.attention\\.kind.*'mhe_add'
T --data.batch_size 1.5 | --data\\.batch_size.*'1\\.5'
T --data.batch_size | --data\\.batch_size
T --train.num_steps ten | --train\\.num_steps: .*'ten'(?!.*did you mean)
T --lr 1 | --lr; --help
T --sweep kind=mha,sha | --kind; did you mean --model\\.attention\\.kind
T --evaluate | --evaluate .*--sweep
T --seeds 2 --workdir train.en | workdir=train\\.en: is a file
T --workdir train.en | workdir=train\\.en: is a file
T --optimizer.learning 1 | learning; did you mean --optimizer\\.learning_rate
T more | more
T --mesh.data 3 | mesh\\.data=3.*8 devices
T --compile_only | --topology
T --topology v5e:2x2 | --compile_only
T --compile_only --topology v5e | --topology.*'v5e'
T --data.tokenizer none.model | none\\.model: no such file
T --data.tokenizer train.en | train\\.en: is not a sentencepiece model
T --data.tokenizer runs/mlm/tokenizer.model --model.vocabulary_size 400 | vocabulary_size.*400
train.py tiny.py:labels --workdir runs/new --task span | data\\.dataset is 'own'
train.py tiny.py:labels --workdir runs/new --model.num_classes 3 | model\\.num_classes is 3
T --model.vocabulary_size 261 | model\\.vocabulary_size=261
T --model.vocabulary_size 9999 | model\\.vocabulary_size=9999.* --model\\.vocabulary_size \\d
T --data.validation tfds:x | tfds:x: .*tfds:NAME
T --data.train tfds:no_such_set:train | tfds:no_such_set:train
T --train.init_from runs/mlm | train\\.init_from.*runs/mlm
train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlmm | init_from: .*runs/mlmm
train.py tiny.py:labels --workdir runs/new --train.init_from runs/lm | train\\.init_from.*runs/lm
train.py tiny.py:lm --workdir runs/lm --model.mlp_features 8 | runs/lm .*model\\.mlp_features=16.*8
train.py tiny.py:mlm --workdir runs/lm | runs/lm .*'lm', not 'mlm'
train.py tiny.py:lm --workdir runs/lm --train.num_steps 1 | train\\.num_steps is 1.*runs/lm
train.py tiny.py:lm --workdir runs/lm --optimizer.weight_decay 0.5 | optimizer\\.weight_decay
train.py tiny.py:lm --workdir train.en/new | train\\.en/new: Not a directory
T --data.cache_directory ~nobody-at-all/x | data\\.cache_directory=~nobody-at-all
eval.py | usage: python eval\\.py RUN
eval.py runs/lmm | runs/lmm: .*config\\.json
eval.py runs | runs: .*config\\.json.* runs/labels
eval.py runs/lm --splt test | --splt; did you mean --split
eval.py runs/lm --checkpoint newest | evaluation\\.checkpoint is 'newest'
eval.py runs/lm --checkpoint 7 | '7'; there are: 1, 2
eval.py runs/lm --sources a.txt b.txt | data\\.test
eval.py runs/lm --translate | runs/lm .*task lm
eval.py runs/lm --translate --generate | --translate and --generate
eval.py runs/lm --generate --sources a b | --sources .*--generate
eval.py runs/lm --generate --split validation | --split .*--generate
eval.py compare runs/lm --out runs/lm | --out runs/lm
eval.py compare runs/lm --out train.en | --out train\\.en: is a file
mhe_jax/__main__.py | train, eval, compare
mhe_jax/__main__.py evil runs/lm | evil.*eval
mhe_jax/__main__.py convert runs/lm | usage: .* convert RUN NEW
mhe_jax/__main__.py configs shw demo | shw
mhe_jax/__main__.py configs show dmo | dmo.*demo
mhe_jax/__main__.py convert runs/lm new | --kind is not set
mhe_jax/__main__.py convert runs/lm new --kind mhe_mull | 'mhe_mull'.*--kind.*'mhe_mul'
mhe_jax/__main__.py convert runs/lm new --kind gqa | model\\.attention\\.num_kv_heads is not set
mhe_jax/__main__.py convert runs/lm runs/mlm --kind mqa | runs/mlm is there already
mhe_jax/__main__.py factorize runs/lm runs/lm/new --mlp 1 | runs/lm/new lies in runs/lm
mhe_jax/__main__.py factorize runs/lm new | --attention
mhe_jax/__main__.py export runs/lm out | --to .*safetensors
mhe_jax/__main__.py export runs/lm out --to ctranslate | 'ctranslate'.*ctranslate2
"""


@pytest.mark.parametrize("row", ARGUMENTS.strip().splitlines())
def test_arguments(good, refused, monkeypatch, row):
    monkeypatch.chdir(good)
    arguments, _, named = row.partition(" | ")
    refused(re.sub("^T ", "train.py tiny.py:lm --workdir runs/new ", arguments), named)


# Files


TEXT = b"one small dog\n" * 3000
HEAD = b"text\tlabel\n"
NEW = "train.py tiny.py:{} --workdir runs/new "
LABELLED = NEW.format("labels") + "--data.train {}"
# Ways to name a file, and what cannot be read: its name, what is in it, and what the line names.
# More of what a reader refuses: tests/data/test_readers.py.
WAYS = {
    "lm": NEW.format("lm") + "--data.train {}",
    "validation": NEW.format("mlm") + "--data.validation {}",
    "mixture": NEW.format("lm") + "--data.train train.en {} --data.train_weights 1 2",
    "packed": NEW.format("mlm") + "--data.packing True --data.train {}",
    "parallel": NEW.format("translation") + "--data.train train.en {}",
    "score": "eval.py runs/lm --sources {}",
    "pairs": NEW.format("translation") + "--data.fields en de --data.validation {}",
    "labels": LABELLED,
    "labels of validation": NEW.format("labels") + "--data.validation {}",
    "numbers": LABELLED + " --task regression",
    "choices": LABELLED + " --task multiple_choice --data.fields q a b",
    "rte": LABELLED + " --data.dataset rte",
    "span": NEW.format("span") + "--data.train {}",
}
TEXTS = [
    ("validation", "bad.txt", None, "bad.txt"),
    ("score", "bad.txt", b"", "bad.txt"),
    ("mixture", "bad.txt", Path.mkdir, "bad.txt"),
    ("packed", "bad.txt", b"\xef\xbb\xbf\r\n \n\t\n", "bad.txt"),
    ("parallel", "bad.txt", b"one\n" * 9 + b"on\xe9\n" + TEXT, "bad.txt:10"),
    ("lm", "bad.txt", lambda path: path.symlink_to("bad.txt"), "bad.txt"),
    ("score", "a" * 300, None, "a" * 300),
    ("score", "bad.txt.gz", gzip.compress(TEXT + b"\xff\n", mtime=0), "bad.txt.gz:3001"),
    ("packed", "bad.txt.gz", gzip.compress(TEXT, mtime=0) + TEXT, "bad.txt.gz"),
    ("parallel", "short.de", b"ein Hund\n", "train.en has more lines than short.de, which has 1"),
    ("pairs", "bad.jsonl", b'{"en": "x", "fr": ""}', "bad.jsonl:1.*'de'.*'fr'"),
    ("labels", "x.tsv", HEAD + b"one\ta\nred\tb\tc\n", "x.tsv:3.* 3 "),
    ("labels", "x.tsv", HEAD + b"one\ta\nred\ta\n", "data.train.*'a'"),
    ("labels of validation", "x.tsv", HEAD + b"one\ta\nred\tc\n", "x.tsv:3.*'c'.* a, b"),
    ("numbers", "x.tsv", HEAD + b"one\t0.5\nred\tnan\n", "x.tsv:3.*'nan'"),
    ("choices", "x.tsv", b"q\ta\tb\tlabel\nx\ty\tz\t0\nx\ty\tz\t2\n", "x.tsv:3.*'2'.* 0, 1"),
    ("rte", "x.tsv", HEAD + b"one\ta\n", "x.tsv:2.*'sentence1'"),
    ("labels", "x.tsv", b"text\tverdict\none\ta\n", "x.tsv:2: .*'verdict'.*--data.label_field"),
    ("labels", "x.tsv", b"said\tlabel\na\t1\nb\t0\n", "x.tsv:2: .*'said'.*--data.fields"),
    ("labels", "x.txt", HEAD, "x.txt:1: has no 'label'"),
    ("labels", "x.csv", b'text,label\n"one,a\nred,b\n', "x.csv:3"),
    ("labels", "x.jsonl", b'{"text": "two", "label": null}\n', "x.jsonl:1.*'label'"),
    ("span", "x.json", squad()[:100].encode(), "x.json"),
]


@pytest.mark.parametrize(("way", "name", "made", "named"), TEXTS)
def test_a_text(place, refused, way, name, made, named):
    if callable(made):
        made(place / name)
    elif made is not None:
        (place / name).write_bytes(made)
    refused(WAYS[way].format(name), named)


CONFIGS = {
    ":2: ": "x = 1\ny = = 2\n",
    "has no function get_config": "x = 1\n",
    "returned dict": "def get_config():\n    return {}\n",
    ":2: ZeroDivisionError": "def get_config():\n    return 1 / 0\n",
    ":2: SystemExit: no way": "import sys\nsys.exit('no\\nway')\n",
    ":2: TypeError: .*tsk": "from mhe_jax.config import *\nget_config = lambda: Config(tsk='lm')\n",
    "workdir is 3": "from mhe_jax.config import *\nget_config = lambda: Config(workdir=3)\n",
    ": ": "x = 1\n\0",
}


@pytest.mark.parametrize("named", CONFIGS)
def test_a_config_file(place, refused, named):
    (place / "bad.py").write_text(CONFIGS[named])
    refused("train.py bad.py --workdir runs/new", rf"bad\.py.*{named}")


# Runs

READERS = [
    "train.py tiny.py:lm --workdir runs/lm --train.num_steps 3",
    "eval.py runs/lm",
    "eval.py runs/lm --generate",
    "eval.py compare runs/lm --out report",
    "train.py tiny.py:labels --workdir runs/new --train.init_from runs/lm",
    "mhe_jax/__main__.py export runs/lm out --to safetensors",
]
JSON = {
    "Invalid": b'{"task": "lm", "mod',
    "Invalid JSON": b"[" * 100_000,
    "should be an object": b"[]",
    "unknown field architectures; it is not": b'{"architectures": ["A"], "model_type": "gpt2"}',
}


@pytest.mark.parametrize(
    ("reader", "named"),
    [*((reader, "Invalid") for reader in READERS), *(("eval.py runs/lm", named) for named in JSON)],
)
def test_config_json(place, refused, named, reader):
    (place / "runs/lm/config.json").write_bytes(JSON[named])
    refused(reader, rf"runs/lm/config\.json: .*{named}")


def other_tokenizer(path):
    """As many pieces, but others."""
    text = Text.of("other", [("xyz xyz yzx uvw vwu wuv qrs rsq sqr kjh jhk hkj",)] * 9)
    train_tokenizer([(text, 1.0)], 300).save(path)


TOKENIZERS = {
    "no such file": Path.unlink,
    "is not a sentencepiece model": lambda path: path.write_text("one dog"),
    "is not a sentencepiece mod|pie": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "not the tokenizer of the checkpoint": other_tokenizer,
}


@pytest.mark.parametrize("reader", [*READERS[:3:2], READERS[5]])
@pytest.mark.parametrize("named", TOKENIZERS)
def test_the_tokenizer_of_a_run(place, refused, named, reader):
    TOKENIZERS[named](place / "runs/lm/tokenizer.model")
    refused(reader, rf"runs/lm/tokenizer\.model: .*({named})")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(step):
    return max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


CHECKPOINTS = {
    "a bit": lambda step: flip(largest(step / "params")),
    "cut": lambda step: os.truncate(largest(step / "params"), 300),
    "no parameters": lambda step: shutil.rmtree(step / "params"),
    "no meta": lambda step: shutil.rmtree(step / "meta"),
    "a file": lambda step: (shutil.rmtree(step), step.write_text("not here")),
    "none": lambda step: shutil.rmtree(step.parent, ignore_errors=True),
}


@pytest.mark.parametrize("reader", READERS[1:3])
@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_the_checkpoints_of_a_run(place, refused, fault, reader):
    for step in list(place.glob("runs/lm/checkpoints*/*")):
        if step.exists():
            CHECKPOINTS[fault](step)
    refused(reader, "runs/lm")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model.attention.num_heads", 3, "model.attention.num_heads is 3"),
        ("model.mlp_features", 24, "runs/lm/checkpoints.*shape"),
        ("data.test", [], "data.test is not set"),
    ],
)
def test_a_config_that_does_not_go_with_the_run(place, refused, field, value, named):
    path = place / "runs/lm/config.json"
    save_json(set_field(load_json(path), field, value), path)
    refused("eval.py runs/lm", named)


@pytest.mark.parametrize("file", ["result.json", "eval_test.json"])
@pytest.mark.parametrize("text", ['{"steps": 2, "lo', "[2]"])
def test_results_to_compare(place, refused, file, text):
    (place / "runs/lm" / file).write_text(text)
    refused("eval.py compare runs/lm --out report", rf"runs/lm/{file}")


def test_standard_input_that_is_no_text(place, refused):
    named = "standard input, line 1: is not UTF-8"
    refused("eval.py runs/lm --generate", named, stdin=b"\x80\n", may_compile=True)


# A stranger's run

# What is called (`load` is Python's), and what it leaves in the run.
CALLS = {
    "eval runs/lm": {"eval_test.json"},
    "eval runs/lm --sources secret.txt": {"eval_secret_txt.json"},
    "eval runs/lm --generate": set(),
    "load": set(),
    "export runs/lm new --to safetensors": set(),
    "convert runs/lm new --kind mqa --rows 8": set(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_strangers_config_writes_nothing_elsewhere(place, tmp_path, monkeypatch, call):
    """Only in the run, the caller's cache, and the new directory where one is asked for."""
    monkeypatch.setenv("MHE_JAX_CACHE", str(place / "cache"))
    outside, run = tmp_path / "outside", place / "runs/lm"
    outside.mkdir()
    (outside / "secret.txt").write_text("one dog runs\n" * 70)
    config = load_json(run / "config.json")
    for name, value in {
        "workdir": str(outside / "x"),
        "data.cache_directory": str(outside / "x"),
        "data.directory": str(outside),
        "data.train": ("secret.txt",),
        "data.test": ("secret.txt",),
    }.items():
        config = set_field(config, name, value)
    save_json(config, run / "config.json")
    (run / "eval_test.json").symlink_to(place / "tiny.py")  # a link is replaced, not followed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one dog runs\n")))
    before = contents(tmp_path)
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        if call == "load":
            mhe_jax.load("runs/lm").log_probs(["one dog"])
        else:
            commands.main(call.split())
    after = contents(tmp_path)
    assert set(before) <= set(after)
    changed = {p for p in after if after[p] != before.get(p)}
    assert {p.name for p in changed if p.is_relative_to(run)} == CALLS[call]
    assert {p.relative_to(place).parts[0] for p in changed} <= {"runs", "new"}
