"""Runs with damaged, missing or foreign files, by every entry that reads them."""

import json
import shutil
from pathlib import Path

import pytest

from mhe_jax.data import train_tokenizer
from mhe_jax.data.sources import Items

RESUME = "train.py tiny.py:{0} --workdir runs/{0}"
ENTRIES = {
    "resume": (RESUME.format("lm"), "lm"),
    "longer": (RESUME.format("lm") + " --train.num_steps 3", "lm"),
    "score": ("eval.py runs/lm --split validation", "lm"),
    "last": ("eval.py runs/lm --checkpoint last --average_checkpoints 2", "lm"),
    "translate": ("eval.py runs/translation --translate", "translation"),
    "generate": ("eval.py runs/lm --generate", "lm"),
    "init_from": (
        "train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlm",
        "mlm",
    ),
    "compare": ("eval.py compare runs/lm --out report", "lm"),
    "sweep": ("train.py tiny.py:lm --workdir runs/sweep --seeds 1", "lm"),
}
READERS = ["resume", "score", "translate", "generate", "init_from", "compare"]
CONFIGS = {
    "empty": ("", "not JSON: Expecting value"),
    "cut": ('{"task": "lm", "mod', "not JSON: "),
    "binary": (b"\x00\xff\xfe", "not JSON: "),
    "nested": ("[" * 100_000, "not JSON: "),
    "a list": ("[]", "not a config: takes a dictionary of fields"),
    "of another version": ('{"task": "lm", "model": {"rotary": true}}', "unknown field model.rot"),
    "of another type": ('{"train": {"num_steps": "2"}}', "train.num_steps is '2': takes a whole"),
    "of another task": ('{"task": "speech"}', "task is 'speech': takes one of mlm, lm, "),
}


@pytest.mark.parametrize("entry", READERS)
@pytest.mark.parametrize("fault", CONFIGS)
def test_config_json(run, refused, said, entry, fault):
    text, says = CONFIGS[fault]
    arguments, name = ENTRIES[entry]
    path = run(name) / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(arguments, said(f"runs/{name}/config.json: ", says))


@pytest.mark.parametrize("entry", ["score", "translate", "generate"])
def test_a_config_that_breaks_a_rule(run, change, refused, entry):
    arguments, name = ENTRIES[entry]
    change(run(name) / "config.json", **{"model.attention.num_heads": 3})
    refused(arguments, r"model\.attention\.num_heads is 3: must divide model\.features=16$")


def other_tokenizer(path):
    """As many pieces, but others."""
    text = Items("other", ["xyz xyz yzx uvw vwu wuv qrs rsq sqr kjh jhk hkj"] * 9, "text", "other")
    train_tokenizer(text, 300).save(path)


TOKENIZERS = {
    "missing": (Path.unlink, "no such file"),
    "empty": (lambda path: path.write_bytes(b""), "is not a sentencepiece model"),
    "cut": (
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        "is not a sentencepiece mod|pie",
    ),
    "a text": (lambda path: path.write_text("one dog"), "is not a sentencepiece model"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "another": (other_tokenizer, "is not the tokenizer that the checkpoint is of$"),
    "smaller": (
        lambda path: train_tokenizer(Items("o", ["one dog"], "text", "o"), 268).save(path),
        r"has 268 pieces, model\.vocabulary_size is 300; they must be equal$",
    ),
}


@pytest.mark.parametrize("entry", ["longer", "score", "last", "translate", "generate", "init_from"])
@pytest.mark.parametrize("fault", TOKENIZERS)
def test_tokenizer(run, refused, entry, fault):
    harm, says = TOKENIZERS[fault]
    arguments, name = ENTRIES[entry]
    harm(run(name) / "tokenizer.model")
    # Where a new run begins, its own files are there before the checkpoint is read.
    begun = (entry, fault) == ("init_from", "another")
    leaves = ["runs/new/tokenizer.model"] if begun else []
    refused(arguments, rf"runs/{name}/tokenizer\.model: ({says})", leaves=leaves)


def steps(run):
    return [step for kind in run.glob("checkpoints*") for step in kind.iterdir()]


def every(pattern, harm):
    """`harm` done to all files of all checkpoints that fit the pattern."""

    def make(run):
        found = [path for step in steps(run) for path in step.glob(pattern)]
        assert found
        for path in found:
            harm(path)

    return make


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def a_file_instead(run):
    for kind in list(run.glob("checkpoints*")):
        shutil.rmtree(kind)
        kind.write_text("not here")


def no_checkpoints(run):
    for kind in list(run.glob("checkpoints*")):
        shutil.rmtree(kind)


CHECKPOINTS = {
    "parameters cut": every("params/d/*", cut),
    "parameters empty": every("params/ocdbt.process_0/d/*", empty),
    "no parameters": every("params", shutil.rmtree),
    "no manifest": every("params/manifest.ocdbt", Path.unlink),
    "meta is no JSON": every("meta/metadata", lambda path: path.write_text("{")),
    "meta is a list": every("meta/metadata", lambda path: path.write_text("[1]")),
    "no meta": every("meta", shutil.rmtree),
    "files instead": a_file_instead,
}


@pytest.mark.parametrize("entry", ["longer", "score", "last", "translate", "init_from"])
@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_checkpoints(run, refused, entry, fault):
    arguments, name = ENTRIES[entry]
    CHECKPOINTS[fault](run(name))
    leaves = ["runs/new/tokenizer.model"] if entry == "init_from" else []
    refused(arguments, rf".*runs/{name}\b.*", leaves=leaves)


@pytest.mark.parametrize("entry", ["score", "last", "translate", "generate"])
def test_no_checkpoints(run, refused, entry):
    arguments, name = ENTRIES[entry]
    no_checkpoints(run(name))
    refused(arguments, rf"runs/{name} has no (checkpoint 'best'|2 checkpoints); there are: none$")


@pytest.mark.parametrize("entry", ["longer", "score", "translate", "generate"])
def test_parameters_of_another_shape(run, change, refused, entry):
    arguments, name = ENTRIES[entry]
    change(run(name) / "config.json", **{"model.mlp_features": 24})
    if entry == "longer":
        arguments += " --model.mlp_features 24"
    refused(arguments, rf".*runs/{name}/checkpoints.*can(not)? be read: .*shape")


@pytest.mark.parametrize("value", [{}, {"validation": None}, {"validation": {"loss": "low"}}])
@pytest.mark.parametrize("entry", ["score", "translate", "generate"])
def test_a_best_checkpoint_without_its_score(run, refused, entry, value):
    arguments, name = ENTRIES[entry]
    (path,) = (run(name) / "checkpoints_best").glob("*/meta/metadata")
    path.write_text(json.dumps(value))
    refused(arguments, rf".*runs/{name}/checkpoints_best/2: cannot be read: ")


JSON_FILES = {
    "cut": ('{"steps": 2, "lo', "not a result: "),
    "binary": (b"\xff\xfe\x00", "not a result: "),
    "a list": ("[2]", "not a result: takes an object"),
    "empty": ("", "not a result: "),
    "nested": ("[" * 100_000, "not a result: "),
}


@pytest.mark.parametrize("file", ["result.json", "eval_test.json"])
@pytest.mark.parametrize("fault", JSON_FILES)
def test_results_to_compare(run, refused, said, file, fault):
    text, says = JSON_FILES[fault]
    (run("lm") / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(ENTRIES["compare"][0], said(f"runs/lm/{file}: ", says))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"runs": 3}', '{"runs": [1]}', '{"runs": [{"name": "a"}]}', "\udcff"],
)
@pytest.mark.parametrize("entry", ["compare", "sweep"])
def test_the_list_of_a_sweep(run, place, refused, text, entry):
    run("lm")
    (place / "runs" / "sweep").mkdir()
    (place / "runs" / "sweep" / "sweep.json").write_text(text, errors="surrogateescape")
    arguments = ENTRIES[entry][0].replace("runs/lm", "runs/sweep")
    refused(arguments, r"runs/sweep/sweep\.json: is not what a sweep writes$")


def test_a_text_that_is_gone(place, refused):
    (place / "dev.en").unlink()
    for arguments in ("train.py tiny.py:lm --workdir runs/lm", "eval.py runs/lm"):
        refused(arguments, r"dev\.en: no such file$")
    refused("eval.py runs/translation", r"dev\.en: no such file$")


@pytest.mark.parametrize("name", ["lm", "translation", "labels"])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_that_the_run_does_not_have(run, change, refused, name, split):
    change(run(name) / "config.json", **{f"data.{split}": []})
    says = rf"data\.{split} is not set: it names the file or data set to read$"
    refused(f"eval.py runs/{name} --split {split}", says)
