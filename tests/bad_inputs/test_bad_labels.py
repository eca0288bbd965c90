"""Labelled examples that are none: every format, in training, validation and scoring."""

import json

import pytest
from labelled_files import FILES, squad

LABELS = "train.py tiny.py:labels --workdir runs/new"
TRAIN = f"{LABELS} --data.train {{}}"
ENTRIES = {
    "train": TRAIN,
    "validation": f"{LABELS} --data.validation {{}}",
    "score": "eval.py runs/labels --sources {}",
}
HEAD = "text\tlabel\n"
# A file, its contents, and what is said of it after its name.
FAULTS = {
    "no text column": (
        "x.tsv",
        "label\ta\nx\ty\n",
        ":1: has no column 'text'; it has 'label', 'a'",
    ),
    "too many columns": ("x.tsv", HEAD + "one\ta\nred\tb\tc\n", ":3: has 3 columns, not 2"),
    "too few columns": ("x.tsv", HEAD + "one\ta\nred\n", ":3: has 1 columns, not 2"),
    "header alone": ("x.tsv", HEAD, ": no examples"),
    "empty": ("x.tsv", "", ": is empty"),
    "no such file": ("x.tsv", None, ": no such file"),
    "another format": (
        "x.txt",
        HEAD,
        ": takes .tsv, .csv, .jsonl (also as .gz or .xz), .parquet, .arrow or tfds:",
    ),
    "open quote": ("x.csv", 'text,label\n"one,a\nred,b\n', ":3: is not CSV ("),
    "half an object": ("x.jsonl", '{"text": "one", "label": "a"}\n{"te\n', ":2: is not JSON ("),
    "no object": ("x.jsonl", '[["one", "a"]]\n', ":1: is not a JSON object"),
    "text is a number": (
        "x.jsonl",
        '{"text": 1, "label": "a"}\n',
        ":1: field 'text' is not a string",
    ),
    "no text": ("x.jsonl", '{"txt": "one", "label": "a"}\n', ":1: has no 'text'; it has 'txt', 'l"),
    "not UTF-8": ("x.tsv", HEAD.encode() + b"on\xe9\ta\n", ":2: is not UTF-8 ("),
    "no label": (
        "x.jsonl",
        '{"text": "one", "label": "a"}\n{"text": "two", "label": null}\n',
        ":2: field 'label' is empty: takes a label",
    ),
    "half a surrogate": (
        "x.jsonl",
        '{"text": "\\ud83d", "label": "a"}\n',
        ":1: field 'text' has half a surrogate pair",
    ),
    "half a surrogate in bytes": (
        "x.jsonl",
        b'{"text": "\xed\xa0\x80", "label": "a"}\n',
        ":1: is not UTF-8 (",
    ),
    "only a mark": ("x.tsv", b"\xef\xbb\xbf", ": has no text, only blank lines"),
    "line of 10 MB": ("x.tsv", HEAD + "one " * 2_500_000 + "\n", ":2: has 1 columns, not 2"),
}


def write(place, name, text):
    if text is not None:
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.covering(1)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_texts_and_labels(place, refused, said, fault, entry):
    name, text, says = FAULTS[fault]
    if name.endswith("jsonl") and ":1:" in says and entry == "train":
        # The labels are read first, and are two.
        first = '{"text": "red", "label": "b"}\n{"text": "big", "label": "a"}\n'
        text = first.encode() + (text if isinstance(text, bytes) else text.encode())
        says = says.replace(":1:", ":3:")
    write(place, name, text)
    refused(ENTRIES[entry].format(name), said(name, says, or_field=True))


@pytest.mark.parametrize("entry", ["validation", "score"])
def test_a_label_that_training_does_not_have(place, refused, entry):
    write(place, "x.tsv", HEAD + "one\ta\nred\tc\n")
    field = r" \(data\.validation\)" if entry == "validation" else ""
    says = r"x\.tsv:3: label is 'c': takes one of a, b"
    refused(ENTRIES[entry].format("x.tsv"), f"{says}{field}$")


@pytest.mark.parametrize("entry", ["train", "validation"])
def test_no_label(place, refused, entry):
    write(place, "x.tsv", "text\tmood\none\ta\n")
    field = r" \(data\.validation\)" if entry == "validation" else ""
    says = r"x\.tsv:2: has no 'label'; it has 'text', 'mood'"
    refused(ENTRIES[entry].format("x.tsv"), f"{says}{field}$")


@pytest.mark.parametrize("fault", ["no such file", "header alone", "not UTF-8"])
def test_labels_for_compiling(place, refused, said, fault):
    name, text, says = FAULTS[fault]
    write(place, name, text)
    arguments = f"{TRAIN.format(name)} --compile_only --topology v5e:2x2"
    refused(arguments, said(name, says, or_field=True))


def test_one_label_only(place, refused):
    write(place, "x.tsv", HEAD + "one\ta\nred\ta\n")
    refused(TRAIN.format("x.tsv"), r"data\.train: has one label, 'a': takes two or more$")


@pytest.mark.parametrize("value", ["much", "nan", "", "1e999"])
def test_a_number_that_is_none(place, refused, value):
    write(place, "x.tsv", f"{HEAD}one\t0.5\nred\t{value}\n")
    refused(
        f"{TRAIN.format('x.tsv')} --task regression",
        rf"x\.tsv:3: label is '{value}': takes a number$",
    )


def test_a_choice_that_is_none(place, refused):
    write(place, "x.tsv", "q\ta\tb\tlabel\none\tx\ty\t0\nred\tx\ty\t2\n")
    refused(
        f"{TRAIN.format('x.tsv')} --task multiple_choice --data.fields q a b",
        r"x\.tsv:3: label is '2': takes one of 0, 1$",
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--data.dataset rte",
            r"labels\.tsv:1: has no column 'sentence1'; it has 'text', 'label'$",
        ),
        ("--data.dataset squad", r"data\.dataset is 'squad': takes task span, not classification$"),
        ("--task span", r"data\.dataset is 'own': task span takes squad or squad_v2$"),
        (
            "--task multiple_choice",
            r"data\.fields is \('text',\): task multiple_choice takes a text",
        ),
        ("--model.num_classes 3", r"model\.num_classes is 3: data\.dataset own has 2$"),
        ("--model.num_spans 1", r"model\.num_spans is 1: data\.dataset own has 0$"),
        ("--data.packing True", r"data\.packing is True: not for task classification$"),
        ("--data.train", r"data\.train is not set: takes the text to train on$"),
    ],
)
def test_data_sets(refused, flags, says):
    refused(f"{LABELS} {flags}", says)


def questions(change):
    """A SQuAD file after `change` of its first paragraph."""
    found = json.loads(squad())
    change(found["data"][0]["paragraphs"][0])
    return json.dumps(found)


def second_like_first(paragraph):
    paragraph["qas"][1]["id"] = paragraph["qas"][0]["id"]


def elsewhere(paragraph):
    paragraph["qas"][0]["answers"][0]["answer_start"] += 1


SQUAD = {
    "half a file": (squad()[:100], "is not JSON ("),
    "a list": ("[]", "is not in SQuAD's format: no list 'data' where one must be"),
    "no paragraphs": ('{"data": [{}]}', "is not in SQuAD's format: no list 'paragraphs'"),
    "no questions": ('{"data": [{"paragraphs": [{}]}]}', "is not in SQuAD's format: no list 'qas'"),
    "a question is a text": (
        questions(lambda p: p.update(qas=["Who?"])),
        "a question is not a JSON object",
    ),
    "nothing": ('{"data": []}', "no examples"),
    "same id twice": (questions(second_like_first), "data.train: question '50' occurs twice"),
    "no id": (questions(lambda p: p["qas"][0].pop("id")), "question None: has no 'id'; it has "),
    "no context": (questions(lambda p: p.pop("context")), "question '50': field 'context' is not"),
    "empty context": (
        questions(lambda p: p.update(context=" ")),
        "question '50': has an empty con",
    ),
    "answers are a text": (
        questions(lambda p: p["qas"][0].update(answers="Rollo")),
        "question '50': answers is not a list",
    ),
    "no answer": (
        questions(lambda p: p["qas"][0].update(answers=[])),
        "question '50': has no answer; data.dataset squad_v2 allows it",
    ),
    "answer elsewhere": (
        questions(elsewhere),
        "question '50': answer 'Rollo' is not in the contex",
    ),
    "no place": (
        questions(lambda p: p["qas"][0]["answers"][0].pop("answer_start")),
        "question '50': has no 'answer_start'; it has 'text'",
    ),
}


@pytest.mark.parametrize("fault", SQUAD)
def test_questions(place, refused, said, fault):
    text, says = SQUAD[fault]
    write(place, "x.json", text)
    refused(
        "train.py tiny.py:span --workdir runs/new --data.train x.json",
        said("", says) if says.startswith("data.") else said("x.json", f": {says}", or_field=True),
    )


def test_no_question_of_validation_has_an_answer(place, refused):
    found = json.loads(squad(True))
    for question in found["data"][0]["paragraphs"][0]["qas"]:
        question |= {"answers": [], "is_impossible": True}
    write(place, "x.json", json.dumps(found))
    refused(
        "train.py tiny.py:span --workdir runs/new --data.validation x.json",
        r"data\.validation: no question has an answer$",
    )


def twice(row):
    row["passage"]["questions"][0]["answers"][1]["idx"] = 9


def superglue(place, dataset, change):
    first = [json.loads(line) for line in FILES[dataset]["train.jsonl"].splitlines()]
    change(first[0])
    write(place, "x.jsonl", "".join(json.dumps(row) + "\n" for row in first))


@pytest.mark.parametrize(
    ("dataset", "change", "says"),
    [
        (
            "cb",
            lambda row: row.update(label="maybe"),
            "label is 'maybe': takes one of entailment, ",
        ),
        (
            "copa",
            lambda row: row.update(question="why"),
            "question is 'why': takes cause or effect",
        ),
        ("wic", lambda row: row.update(end1=999), "start1, end1 is not a range of the text"),
        (
            "wic",
            lambda row: row.update(start2="0"),
            "field 'start2' is '0': takes a whole number, 0 or",
        ),
        ("wsc", lambda row: row.update(target=3), "has no 'span1_text'; it has nothing"),
        (
            "wsc",
            lambda row: row["target"].update(span1_index=99),
            "span1_index is 99: the text has ",
        ),
        ("multirc", lambda row: row.update(passage=[]), "is not a passage of MultiRC ("),
        ("multirc", lambda row: row.pop("passage"), "has no 'passage'; it has "),
        ("multirc", twice, "idx (2, 4, 9) occurs twice"),
    ],
)
def test_records_of_superglue(place, refused, said, dataset, change, says):
    superglue(place, dataset, change)
    task = "multiple_choice" if dataset == "copa" else "classification"
    flags = f"--task {task} --data.dataset {dataset}"
    refused(f"{TRAIN.format('x.jsonl')} {flags}", said("x.jsonl", f":1: {says}"))
