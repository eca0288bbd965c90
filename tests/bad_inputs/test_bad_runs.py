"""Runs with damaged, missing or foreign files, by every entry that reads them."""

import json
import shutil
from pathlib import Path

import pytest

from mhe_jax.config import InputError
from mhe_jax.data import train_tokenizer
from mhe_jax.data.sources import Items
from mhe_jax.report.runs import read_runs

RESUME = "train.py tiny.py:{0} --workdir runs/{0}"
ENTRIES = {
    "resume": (RESUME.format("lm"), "lm"),
    "longer": (RESUME.format("lm") + " --train.num_steps 3", "lm"),
    "score": ("eval.py runs/lm --split validation", "lm"),
    "last": ("eval.py runs/lm --checkpoint last --average_checkpoints 2", "lm"),
    "translate": ("eval.py runs/translation --translate", "translation"),
    "generate": ("eval.py runs/lm --generate", "lm"),
    "predict": ("eval.py runs/labels --predict", "labels"),
    "init_from": (
        "train.py tiny.py:labels --workdir runs/new --train.init_from runs/mlm",
        "mlm",
    ),
    "compare": ("eval.py compare runs/lm --out report", "lm"),
    "sweep": ("train.py tiny.py:lm --workdir runs/sweep --seeds 1", "lm"),
    "export": ("mhe_jax/__main__.py export runs/translation out --to ctranslate2", "translation"),
}
READERS = ["resume", "score", "translate", "generate", "predict", "init_from", "compare"]
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


@pytest.mark.covering(1)
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


@pytest.mark.parametrize(
    ("field", "value", "old"),
    [("learning_rate", "0.5", "0.001"), ("weight_decay", "0.1", "0.0"), ("schedule", "linear", "")],
)
def test_a_complete_run_does_not_take_the_numbers_of_another(run, refused, field, value, old):
    """Its record would say that it was trained with them."""
    refused(
        f"{ENTRIES['resume'][0]} --optimizer.{field} {value}",
        rf"optimizer\.{field}: .*{old}.* -> .*{value}.*: all 2 steps of runs/lm are done, so that "
        r"the new value would train nothing: give more train\.num_steps, or another --workdir$",
    )


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
    "another": (other_tokenizer, "is not the tokenizer of the checkpoint$"),
    "smaller": (
        lambda path: train_tokenizer(Items("o", ["one dog"], "text", "o"), 268).save(path),
        r"has 268 pieces, model\.vocabulary_size is 300; they must be equal$",
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "entry", ["longer", "score", "last", "translate", "generate", "init_from", "export"]
)
@pytest.mark.parametrize("fault", TOKENIZERS)
def test_tokenizer(run, refused, entry, fault):
    harm, says = TOKENIZERS[fault]
    arguments, name = ENTRIES[entry]
    harm(run(name) / "tokenizer.model")
    refused(arguments, rf"runs/{name}/tokenizer\.model: ({says})")


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


def without_checksums(harm):
    """As in a run from before there were any: what is read must still be right in itself."""

    def make(run):
        for step in steps(run):
            for path in [step / "checksums", *step.glob("*/checksums.*")]:
                path.unlink()
        harm(run)

    return make


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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
    "a bit of the parameters": every("params/ocdbt.process_0/d/*", flip),
    "parameters cut": without_checksums(every("params/d/*", cut)),
    "parameters empty": without_checksums(every("params/ocdbt.process_0/d/*", empty)),
    "no parameters": every("params", shutil.rmtree),
    "no manifest": without_checksums(every("params/manifest.ocdbt", Path.unlink)),
    "meta is no JSON": without_checksums(every("meta/metadata", lambda path: path.write_text("{"))),
    "meta is a list": without_checksums(
        every("meta/metadata", lambda path: path.write_text("[1]"))
    ),
    "no meta": every("meta", shutil.rmtree),
    "files instead": a_file_instead,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "entry", ["longer", "score", "last", "translate", "predict", "init_from", "export"]
)
@pytest.mark.parametrize("fault", CHECKPOINTS)
def test_checkpoints(run, refused, entry, fault):
    arguments, name = ENTRIES[entry]
    CHECKPOINTS[fault](run(name))
    refused(arguments, rf".*runs/{name}\b.*")


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


@pytest.mark.parametrize(
    ("name", "to", "says"),
    [
        ("mlm", "ctranslate2", r"task is 'mlm': CTranslate2 takes runs of translation or lm"),
        ("translation", "huggingface", r"model\.norm_position is 'pre': Marian, .* only$"),
    ],
)
def test_what_has_no_home_in_a_format(refused, name, to, says):
    pytest.importorskip(
        {"huggingface": "safetensors"}.get(to, to), reason="needs the extra `export`"
    )
    refused(f"mhe_jax/__main__.py export runs/{name} out --to {to}", says, compiles=True)


@pytest.mark.parametrize("value", [{}, {"validation": None}, {"validation": {"loss": "low"}}])
@pytest.mark.parametrize("entry", ["score", "translate", "generate"])
def test_a_best_checkpoint_without_its_score(run, refused, entry, value):
    arguments, name = ENTRIES[entry]
    without_checksums(every("meta/metadata", lambda path: path.write_text(json.dumps(value))))(
        run(name)
    )
    refused(arguments, rf".*runs/{name}/checkpoints_best/2: cannot be read: ")


JSON_FILES = {
    "cut": ('{"steps": 2, "lo', "not a result: "),
    "binary": (b"\xff\xfe\x00", "not a result: "),
    "a list": ("[2]", "not a result: takes an object"),
    "empty": ("", "not a result: "),
    "nested": ("[" * 100_000, "not a result: "),
}


NUMBERS = {
    '{"steps": "two"}': "steps is 'two': takes numbers or null$",
    '{"steps": [2, "3"]}': "steps is '3': takes numbers or null$",
    '{"steps": 1' + "0" * 400 + "}": "steps is 10+ ...: takes numbers or null$",
    '{"steps": 1' + "0" * 5000 + "}": "not a result: Exceeds the limit",
    '{"best_validation_loss": "low"}': "best_validation_loss is 'low': takes a number or null$",
    '{"training_seconds": [1]}': r"training_seconds is \[1\]: takes a number or null$",
    '{"tokens_per_second": true}': "tokens_per_second is True: takes a number or null$",
    '{"best_step": {}}': r"best_step is \{\}: takes a number or null$",
    '{"parameters": 7}': "parameters is 7: takes an object of numbers or null$",
    '{"parameters": {"total": "many"}}': r"parameters is \{.*\}: takes an object of numbers or nul",
    '{"checkpoint": [1]}': r"checkpoint is \[1\]: takes a string or null$",
    '{"metric": 3}': "metric is 3: takes a string or null$",
    '{"bleu": ' + "[" * 31 + "]" * 31 + "}": "not a result: is nested more than 30 deep$",
}


@pytest.mark.parametrize("file", ["result.json", "eval_test.json"])
@pytest.mark.parametrize("text", NUMBERS)
def test_what_is_no_number_to_compare(run, refused, file, text):
    (run("lm") / file).write_text(text)
    refused(ENTRIES["compare"][0], rf"runs/lm/{file}: {NUMBERS[text]}")


def test_a_config_to_compare_that_breaks_a_rule(run, change, refused):
    change(run("lm") / "config.json", **{"model.features": 10**12})
    refused(ENTRIES["compare"][0], r"runs/lm/config\.json: model\.features is 10+: takes at most")


def test_a_file_that_is_too_large(run):
    with (run("lm") / "result.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(InputError, match=r"result\.json: not a result: has over 67,108,864 bytes"):
        read_runs(["runs/lm"], "test")


@pytest.mark.parametrize("file", ["result.json", "eval_test.json"])
@pytest.mark.parametrize("fault", JSON_FILES)
def test_results_to_compare(run, refused, said, file, fault):
    text, says = JSON_FILES[fault]
    (run("lm") / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(ENTRIES["compare"][0], said(f"runs/lm/{file}: ", says))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"runs": 3}',
        '{"runs": [1]}',
        '{"runs": [{"name": "a"}]}',
        '{"runs": [{"name": ["a"], "status": "done"}]}',
        '{"runs": [{"name": "a", "status": 1}]}',
        '{"runs": [{"name": "a", "status": "failed", "reason": [1]}]}',
        "[" * 100_000,
        "\udcff",
    ],
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
    training = "train.py tiny.py:lm --workdir runs/lm"
    refused(training, r"dev\.en: no such file \(data\.validation\)$")
    for arguments in ("eval.py runs/lm", "eval.py runs/translation"):
        refused(arguments, r"dev\.en: no such file$")


@pytest.mark.parametrize("name", ["lm", "translation", "labels"])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_that_the_run_does_not_have(run, change, refused, name, split):
    change(run(name) / "config.json", **{f"data.{split}": []})
    says = rf"data\.{split} is not set: it names the file or data set to read$"
    refused(f"eval.py runs/{name} --split {split}", says)
