"""Labelled examples from files in the form of each task."""

import dataclasses
import json
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from labelled_files import CONTEXT, DATASETS, FIRST, QUOTED, ROWS, SECOND, SQUAD, write, write_rows
from pyarrow import parquet
from text_for_tests import experiment

from mhe_jax.config import InputError
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.tasks import check_sources, resolve
from mhe_jax.tasks.labelled import examples
from mhe_jax.tasks.labelled.examples import Record, _words
from mhe_jax.tasks.labelled.rows import LabelledRows, shortened
from mhe_jax.tasks.labelled.table import TABLE, row_of


def read_examples(config, split):
    return examples.read_examples(config.data, row_of(config), split)


def rows_of(config, tokenizer, split="train"):
    found = read_examples(config, split)
    return LabelledRows(row_of(config), tokenizer, found, config.data.sequence_length)


PAIR, SINGLE = tuple(zip(FIRST, SECOND, strict=True)), tuple(zip(FIRST, strict=True))
# Texts and labels that the fixtures hold.
EXPECTED = {
    "cola": (SINGLE, [0, 1, 0]),
    "sst2": (SINGLE, [0, 1, 0]),
    "mrpc": (PAIR, [0, 1, 0]),
    "qqp": (PAIR, [0, 1, 0]),
    "stsb": (PAIR, [5.0, 0.0, 3.8]),
    "mnli": (PAIR, [1, 0, 2]),
    "qnli": (PAIR, [0, 1, 0]),
    "rte": (PAIR, [0, 1, 0]),
    "wnli": (PAIR, [0, 1, 0]),
    "boolq": (PAIR, [1, 0, 1]),
    "cb": (PAIR, [2, 1, 0]),
    "superglue_rte": (PAIR, [0, 1, 0]),
}


@pytest.fixture
def config(tmp_path):
    def make(dataset="own", **changes):
        names = write(dataset, tmp_path / dataset) if dataset in DATASETS else ()
        splits = zip(("train", "validation", "test"), names, strict=False)
        task = TABLE[dataset].task if dataset in TABLE else "classification"
        fields = {"dataset": dataset, "sequence_length": 48, **{s: (name,) for s, name in splits}}
        task = changes.pop("task", task)
        return experiment(tmp_path / dataset, task, **fields | changes)

    return make


def files(tmp_path, **named):
    (tmp_path / "own").mkdir(exist_ok=True)
    for name, text in named.items():
        (tmp_path / "own" / name.replace("_", ".")).write_text(text)


@pytest.mark.parametrize("dataset", EXPECTED)
def test_texts_and_labels(config, dataset):
    given = config(dataset)
    check_sources(given)
    texts, labels = EXPECTED[dataset]
    for split in ("train", "validation"):
        found = read_examples(given, split)
        assert tuple(example.texts for example in found) == texts
        assert [example.label for example in found] == labels
    test = read_examples(given, "test")
    assert tuple(example.texts for example in test) == texts
    assert [example.label for example in test] == [None] * 3
    assert [example.index for example in test] == [0, 1, 2]


def test_files_with_the_names_of_tfds(config, tmp_path):
    """As GLUE and SuperGLUE distribute many of theirs: classes by name, in TSV and JSONL."""
    (tmp_path / "rte").mkdir()
    lines = ["index\tsentence1\tsentence2\tlabel", "4\ta\tb\tnot_entailment", "5\tc\td\tentailment"]
    (tmp_path / "rte" / "a.tsv").write_text("\n".join(lines) + "\n")
    found = read_examples(config("rte", train=("a.tsv",)), "train")
    assert [(e.texts, e.label) for e in found] == [(("a", "b"), 1), (("c", "d"), 0)]
    row = {"question": "q", "passage": "p", "label": True, "idx": 0}
    (tmp_path / "boolq").mkdir()
    (tmp_path / "boolq" / "a.jsonl").write_text(json.dumps(row) + "\n")
    (example,) = read_examples(config("boolq", train=("a.jsonl",)), "train")
    assert (example.texts, example.label) == (("q", "p"), 1)


def test_every_data_set_has_files():
    assert set(DATASETS) == set(TABLE)


def test_copa(config):
    first, second, _ = read_examples(config("copa"), "train")
    assert first.texts == (f"first 0 {QUOTED} What was the cause of this?", "second 0", "third 0")
    assert second.texts[0].endswith(" What happened as a result?")
    assert (first.label, second.label) == (0, 1)


def test_multirc(config):
    found = read_examples(config("multirc"), "train")
    passage = f"<b>Sent 1: </b>first {QUOTED}"
    assert [example.texts for example in found] == [
        (passage, "Who? answer 9"),
        (passage, "Who? answer 10"),
        (passage, "Why? answer 11"),
    ]
    assert [example.index for example in found] == [(2, 4, 9), (2, 4, 10), (2, 5, 11)]
    assert [example.label for example in found] == [1, 0, 0]
    assert [example.label for example in read_examples(config("multirc"), "test")] == [None] * 3


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("wic", [("place", "place"), ("Approach", "approach"), ("run", "run")]),
        ("wsc", [("Pete", "his"), ("Mark", "He"), ("many lies", "himself")]),
    ],
)
def test_spans_are_the_words(config, dataset, words, tokenizer):
    given = config(dataset, sequence_length=160)
    found = [
        tuple(e.texts[text][a:b] for text, a, b in e.spans) for e in read_examples(given, "train")
    ]
    assert found == words
    # And in the row: the pieces under the marks are those of the words.
    rows = rows_of(given, tokenizer)
    for number, expected in enumerate(words):
        row = rows.row(number, 160)
        for span, word in enumerate(expected, 1):
            assert tokenizer.decode(row["tokens"][row["marks"] == span]).strip() == word


def test_squad(config):
    for dataset, count in (("squad", 2), ("squad_v2", 3)):
        found = read_examples(config(dataset), "train")
        assert [question.index for question in found] == ["50", "51", "52"][:count]
        assert all(question.texts[1] == CONTEXT for question in found)
        start = CONTEXT.index("Rollo")
        assert found[0].answers[0] == ("Rollo", start)
    assert found[2].answers == ()


def test_own_examples(config, tmp_path):
    files(
        tmp_path,
        a_tsv="text\tmood\nyes\tglad\nno\tsad\n",
        a_csv='mood,text\nsad,"a, b"\n',
        a_jsonl='{"text": "yes", "mood": "glad"}\n',
    )
    given = config(train=("a.tsv",), validation=("a.csv", "a.jsonl"), label_field="mood")
    given = resolve(given)
    assert given.data.labels == ("glad", "sad")
    assert given.model.num_classes == 2
    assert resolve(given) == given
    check_sources(given)
    assert [e.label for e in read_examples(given, "train")] == [0, 1]
    assert [(e.texts, e.label) for e in read_examples(given, "validation")] == [
        (("a, b",), 1),
        (("yes",), 0),
    ]


def test_a_long_cell_of_a_csv(config, tmp_path):
    files(tmp_path, a_csv=f"text,label\n{'long ' * 30_000},x\nno,y\n")
    first, _ = read_examples(resolve(config(train=("a.csv",))), "train")
    assert len(first.texts[0]) == 150_000


def test_own_numbers_and_choices(config, tmp_path):
    files(tmp_path, a_jsonl='{"text": "q", "x": "a", "y": "b", "z": "c", "label": 2}\n')
    given = config(train=("a.jsonl",), task="regression", fields=("text", "x"))
    assert read_examples(resolve(given), "train")[0].label == 2.0
    choices = {"task": "multiple_choice", "fields": ("text", "x", "y", "z")}
    given = resolve(config(train=("a.jsonl",), **choices))
    assert given.data.labels == ("0", "1", "2")
    assert read_examples(given, "train")[0].label == 2


def test_rows(config, tokenizer):
    row = rows_of(config("rte"), tokenizer).row(1, 48)
    text = [tokenizer.encode(text) for text in PAIR[1]]
    whole = [BOS, *text[0], EOS, *text[1], EOS]
    assert len(whole) > 48
    kept = 48 - 3 - len(text[1])
    assert row["tokens"].tolist() == [BOS, *text[0][:kept], EOS, *text[1], EOS]
    assert row["token_types"].tolist() == [0] * (kept + 2) + [1] * (len(text[1]) + 1)
    assert (row["labels"], row["weights"], row["index"]) == (1, 1.0, 1)
    row = rows_of(config("rte", sequence_length=90), tokenizer).row(1, 90)
    assert row["tokens"].tolist() == whole + [PAD] * (90 - len(whole))
    row = rows_of(config("cola", sequence_length=20), tokenizer, "test").row(2, 20)
    assert row["tokens"].tolist() == [BOS, *tokenizer.encode(SINGLE[2][0])[:18], EOS]
    assert row["weights"] == 0.0
    row = rows_of(config("stsb", sequence_length=90), tokenizer).row(2, 90)
    assert row["labels"] == np.float32(3.8)
    row = rows_of(config("copa", sequence_length=90), tokenizer).row(0, 90)
    assert row["tokens"].shape == (2, 90)
    assert row["tokens"][1, : row["token_types"][1].argmax()].tolist() == [
        BOS,
        *tokenizer.encode(f"first 0 {QUOTED} What was the cause of this?"),
        EOS,
    ]
    assert tokenizer.decode(row["tokens"][1][row["token_types"][1] == 1]) == "third 0"


def test_the_longer_text_is_cut_first():
    for first in range(12):
        for second in range(12):
            a, b = first, second
            while a + b > 10:  # one piece at a time from the longer, as published
                if a > b:
                    a -= 1
                else:
                    b -= 1
            assert shortened(first, second, 10) == (a, b)


def of_tfds(monkeypatch, rows):
    from mhe_jax.data import tfds_source

    def read():
        return ((f"x: example {i}", tfds_source.plain(row)) for i, row in enumerate(rows))

    monkeypatch.setattr(tfds_source, "open_split", lambda written: ([], read))


def classes(names, numbers):
    """A column of classes and what `datasets` writes of it."""
    feature = {"names": names, "_type": "ClassLabel"}
    return pa.array(numbers, pa.int64()), {"info": {"features": {"label": feature}}}


def columns(path, about=None, **fields):
    names = list(fields)
    found = zip(
        *(of.to_pylist() if hasattr(of, "to_pylist") else of for of in fields.values()), strict=True
    )
    write_rows(path, [dict(zip(names, row, strict=True)) for row in found], about)


@pytest.mark.parametrize("form", ["tfds", "parquet"])
def test_published_examples(config, tmp_path, monkeypatch, form):
    """Columns of the hub of `datasets` are those of TFDS."""
    answers = {"text": ["Rollo"], "answer_start": [CONTEXT.index("Rollo")]}
    asked = {"id": "5", "question": "Who?", "context": CONTEXT, "answers": answers}
    rows = [
        {"premise": "a", "hypothesis": "b", "label": 2, "idx": 7},
        {"premise": "c", "hypothesis": "d", "label": -1, "idx": 8},
    ]

    def given(dataset, found):
        name = "tfds:x:train" if form == "tfds" else "a.parquet"
        if form == "parquet":
            _, about = classes(["entailment", "neutral", "contradiction"], [])
            (tmp_path / dataset).mkdir(exist_ok=True)
            write_rows(tmp_path / dataset / name, found, about)
        of_tfds(monkeypatch, [{k: as_tfds(v) for k, v in row.items()} for row in found])
        return config(dataset, train=(name,), test=(name,))

    found = read_examples(given("mnli", rows), "test")
    assert [(e.texts, e.label, e.index) for e in found] == [
        (("a", "b"), 2, 7),
        (("c", "d"), None, 8),
    ]
    with pytest.raises(InputError, match="(example 1|a.parquet:2): field 'label' is None"):
        read_examples(given("mnli", rows), "train")
    (example,) = read_examples(given("squad", [asked]), "train")
    assert example.answers == (("Rollo", CONTEXT.index("Rollo")),)


def as_tfds(value):
    if isinstance(value, dict):
        texts = np.array([text.encode() for text in value["text"]], object)
        return {"text": texts, "answer_start": np.array(value["answer_start"], np.int32)}
    return value.encode() if isinstance(value, str) else np.int64(value)


def test_columns_of_own_examples(config, tmp_path):
    """The name of a class where its number has one, in one file or several."""
    label, about = classes(["bad", "good"], [1, 0])
    many = tmp_path / "own" / "many"
    many.mkdir(parents=True)
    columns(many / "0.parquet", about, text=["fine", "poor"], label=label)
    columns(many / "1.parquet", text=["well"], label=["good"])
    given = resolve(config("own", train=("many",)))
    assert given.data.labels == ("bad", "good")
    assert [(e.texts, e.label) for e in read_examples(given, "train")] == [
        (("fine",), 1),
        (("poor",), 0),
        (("well",), 1),
    ]
    label, about = classes(["bad", "good"], [1, -1])  # -1: no label
    columns(tmp_path / "own" / "test.parquet", about, text=["fine", "poor"], label=label)
    unlabelled = config("own", train=("many",), test=("test.parquet",), labels=("bad", "good"))
    assert [e.label for e in read_examples(unlabelled, "test")] == [1, None]
    columns(tmp_path / "own" / "train.parquet", text=["a", "b"], label=["x", "y"], index=[7, 5])
    numbered = config("own", train=("train.parquet",), labels=("x", "y"))
    assert [e.index for e in read_examples(numbered, "train")] == [7, 5]


NAN, INF = float("nan"), float("inf")
TYPED = ("jsonl", "parquet", "tfds")


def labelled_as(form, values, directory, monkeypatch):
    """A source with these labels, of the name that is returned."""
    if form == "tfds":
        rows = [{"text": b"a", "x": b"b", "y": b"c", "label": np.asarray(v)[()]} for v in values]
        of_tfds(monkeypatch, rows)
        return "tfds:ours:train"
    directory.mkdir(exist_ok=True)
    path = directory / f"a.{form}"
    rows = [{"text": "a", "x": "b", "y": "c", "label": value} for value in values]
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form in ("tsv", "csv"):
        lines = [rows[0], *(row.values() for row in rows)]
        between = "\t" if form == "tsv" else ","
        path.write_text("".join(between.join(map(str, line)) + "\n" for line in lines))
    else:
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, path)
    return path.name


@pytest.mark.parametrize(
    ("values", "forms", "names", "numbers"),
    [
        ([1.0, 0.0, 1.0], (*TYPED, "csv"), ("0", "1"), [1, 0, 1]),
        ([1, 1.0, "1", "1.0 ", 0.0], ("jsonl", "tsv"), ("0", "1"), [1] * 4 + [0]),
        ([Decimal("2.50"), Decimal("2.00")], ("parquet", "csv"), ("2", "2.50"), [1, 0]),
        ([-1, 1], ("jsonl", "tsv", "parquet"), ("-1", "1"), [0, 1]),
        ([True, False], TYPED, ("false", "true"), [1, 0]),
        (["pos ", "pos", " neg"], (*TYPED, "tsv"), ("neg", "pos"), [1, 1, 0]),
        (["007", "7", "e5", "NA"], (*TYPED, "csv"), ("007", "7", "NA", "e5"), [0, 1, 3, 2]),
    ],
    ids=str,
)
def test_names_of_classes(config, tmp_path, monkeypatch, values, forms, names, numbers):
    for form in forms:
        given = config(train=(labelled_as(form, values, tmp_path / "own", monkeypatch),))
        given = resolve(given)
        assert given.data.labels == names
        assert [e.label for e in read_examples(given, "train")] == numbers


@pytest.mark.parametrize("task", ["classification", "regression", "multiple_choice"])
def test_a_missing_label_is_missing(config, tmp_path, monkeypatch, task):
    """Refused where a label is needed; of a test split it is not known."""
    fields = ("text", "x", "y") if task == "multiple_choice" else ("text",)
    missing = [("jsonl", None), ("parquet", NAN), ("tfds", " "), ("tfds", NAN)]
    for form, value in [*missing, ("jsonl", ""), ("tsv", " "), ("csv", "NAN"), ("tsv", "<NA>")]:
        values = ["1", value, "0"] if isinstance(value, str) else [1.0, value, 0.0]
        name = labelled_as(form, values, tmp_path / "own", monkeypatch)
        given = config(train=(name,), validation=(name,), test=(name,), task=task, fields=fields)
        labels = ("0", "1") if task == "classification" else ()
        with_labels = dataclasses.replace(given.data, labels=labels)
        with_labels = dataclasses.replace(given, data=with_labels)
        for read in (
            lambda given=given: check_sources(resolve(given)),
            lambda given=with_labels: read_examples(given, "validation"),
        ):
            with pytest.raises(InputError, match=r"(:3|:2|example 1): .*label.*takes a"):
                read()
        assert [e.label for e in read_examples(with_labels, "test")] == [1, None, 0]


@pytest.mark.parametrize(
    ("task", "form", "values"),
    [
        ("classification", "jsonl", ([1], {"a": 1})),
        ("classification", "parquet", (b"a", date(2020, 1, 2))),
        ("regression", "jsonl", (INF, "inf", True, "3,5", [1], "x", 10**400)),
        ("regression", "parquet", (b"3", date(2020, 1, 2))),
        ("multiple_choice", "jsonl", (2, -1, 0.5, True, "x", [0])),
    ],
)
def test_what_is_no_label(config, tmp_path, monkeypatch, task, form, values):
    fields = ("text", "x", "y") if task == "multiple_choice" else ("text",)
    labels = ("0", "1") if task == "classification" else ()
    for value in values:
        name = labelled_as(form, [value], tmp_path / "own", monkeypatch)
        for split in ("train", "test"):
            given = config(**{split: (name,)}, task=task, fields=fields, labels=labels)
            with pytest.raises(InputError, match=r":1: .*label.*takes"):
                read_examples(given, split)


ROLLO = {"text": "Rollo", "answer_start": CONTEXT.index("Rollo")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "answers"),
        ({"answers": None}, "answers"),
        ({"answers": {"text": "Rollo", "answer_start": 66}}, "answers"),
        ({"answers": {"text": ["Rollo"], "answer_start": []}}, "answer_start"),
        ({"answers": [ROLLO | {"text": None}]}, "text"),
        ({"answers": [ROLLO], "is_impossible": None}, None),
    ],
)
def test_answers_that_are_none(config, tmp_path, changes, said):
    """A question of version 2.0 without answers says so by an empty list."""
    given = config("squad_v2")
    asked = {"id": "5", "question": "Who?"} | changes
    data = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [asked]}]}]}
    for name in (*given.data.train, *given.data.validation):
        (tmp_path / "squad_v2" / name).write_text(json.dumps(data))
    for split in ("train", "validation"):
        if said is None:
            assert [len(q.answers) for q in read_examples(given, split)] == [1]
            continue
        with pytest.raises(InputError, match=f":1: .*{said}"):
            read_examples(given, split)


def changed(dataset, **values):
    return [ROWS[dataset][0] | values, *ROWS[dataset][1:]]


def without(dataset, field):
    return [{name: row[name] for name in row if name != field} for row in ROWS[dataset]]


# A data set, its training file, and where and what must be said.
BAD = [
    ("rte", without("rte", "sentence2"), ":1: has no 'sentence2'"),
    ("rte", changed("rte", label=2), ":1: label is 2: takes one of"),
    ("rte", without("rte", "label"), ":1: has no 'label'; it has [^-]*$"),
    ("stsb", changed("stsb", label=float("nan")), ":1: field 'label' is nan"),
    ("cb", changed("cb", premise=None), ":1: field 'premise'"),
    ("copa", changed("copa", question="why"), ":1: question is 'why'"),
    ("wic", changed("wic", start1=-1), ":1: field 'start1' is -1"),
    ("squad", '{"data": [{}]}', "train.json:question 1: is not in SQuAD's format"),
    ("squad", SQUAD["squad"].replace('"text": "Rollo"', '"text": "Charles"'), ":1: .*'Charles'"),
    ("squad", SQUAD["squad_v2"], ":3: has no answer"),
]


@pytest.mark.parametrize(("dataset", "content", "said"), BAD)
def test_bad_files_are_one_line(config, tmp_path, dataset, content, said):
    given = config(dataset)
    path = tmp_path / dataset / given.data.train[0]
    path.write_text(content) if isinstance(content, str) else write_rows(path, content)
    with pytest.raises(InputError, match=said) as caught:
        check_sources(given)
    assert "\n" not in str(caught.value)


def test_a_span_that_the_text_writes_otherwise_has_as_many_words():
    """WSC counts words; the letters of a span may differ from those of its text."""
    record = Record("here", {"span1_text": "the big-dog", "span1_index": 2})
    text = "He saw the Big dog run"
    _, start, end = _words(record, text, 1)
    assert text[start:end] == "the Big"
