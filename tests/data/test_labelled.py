"""Labelled examples from files in the form of each task."""

import csv
import dataclasses
import gzip
import json
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from labelled_files import CONTEXT, FILES, QUOTED, write
from pyarrow import parquet

from mhe_jax.config import Config, DataConfig, InputError, ModelConfig
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.tasks import TASKS, check_sources, resolve
from mhe_jax.tasks.labelled.examples import _words, read_examples, read_questions
from mhe_jax.tasks.labelled.records import Record
from mhe_jax.tasks.labelled.rows import LabelledRows, shortened
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.multiple_choice import ChoiceRows

PAIR = tuple((f"first {i} {QUOTED}", f"second {i}") for i in range(3))
SINGLE = tuple((f"first {i} {QUOTED}",) for i in range(3))
# Texts and labels that the fixtures hold.
EXPECTED = {
    "cola": (SINGLE, [0, 1, 0]),
    "sst2": (tuple((f"{text} ",) for (text,) in SINGLE), [0, 1, 0]),
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
        data = DataConfig(
            directory=str(tmp_path / dataset),
            dataset=dataset,
            cache_directory=str(tmp_path / "cache"),
            sequence_length=changes.pop("sequence_length", 48),
        )
        names = [(name,) for name in write(dataset, tmp_path / dataset)] if dataset in FILES else []
        for split, name in zip(("train", "validation", "test"), names, strict=False):
            data = dataclasses.replace(data, **{split: name})
        task = TABLE[dataset].task if dataset in TABLE else "classification"
        task = changes.pop("task", task)
        data = dataclasses.replace(data, **changes)
        return Config(task=task, data=data, model=ModelConfig(vocabulary_size=400))

    return make


def files(tmp_path, **named):
    (tmp_path / "own").mkdir(exist_ok=True)
    for name, text in named.items():
        (tmp_path / "own" / name.replace("_", ".")).write_text(text)


def test_the_key_of_the_texts_changes_with_them(config, tmp_path):
    given = config("rte")
    task, path = TASKS["classification"], tmp_path / "rte/train.tsv"
    key = task.text(given).key
    path.touch()
    assert task.text(given).key == key
    path.write_text(path.read_text().replace("\n0\t", "\n0\tOther "))
    assert task.text(given).key != key


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


def test_every_data_set_has_files():
    assert set(FILES) == set(TABLE)


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
    examples = read_examples(given, "train")
    found = [tuple(e.texts[text][a:b] for text, a, b in e.spans) for e in examples]
    assert found == words
    # And in the row: the pieces under the marks are those of the words.
    rows = LabelledRows.read(given, tokenizer, "train")
    for number, expected in enumerate(words):
        row = rows.row(number, 160)
        for span, word in enumerate(expected, 1):
            assert tokenizer.decode(row["tokens"][row["marks"] == span]).strip() == word


def test_squad(config):
    for dataset, count in (("squad", 2), ("squad_v2", 3)):
        found = read_questions(config(dataset), "train")
        assert [question.index for question in found] == ["50", "51", "52"][:count]
        assert all(question.context == CONTEXT for question in found)
        start = CONTEXT.index("Rollo")
        assert found[0].answers[0] == ("Rollo", start)
    assert found[2].answers == ()


def test_several_files_and_packed_ones(config, tmp_path):
    given = config("rte")
    text = (tmp_path / "rte/dev.tsv").read_bytes()
    (tmp_path / "rte/more.tsv.gz").write_bytes(gzip.compress(text))
    data = dataclasses.replace(given.data, validation=("dev.tsv", "more.tsv.gz"))
    assert len(read_examples(dataclasses.replace(given, data=data), "validation")) == 6


def test_a_csv_without_a_header(config, tmp_path):
    given = config("stsb", train=("stsb.csv",))
    text = 'A plane,"A ""big"", blue\r\nplane",4.75\r\nOne,Two,0\r\n'
    (tmp_path / "stsb/stsb.csv").write_bytes(text.encode())
    first, second = read_examples(given, "train")
    assert (first.texts, first.label) == (("A plane", 'A "big", blue\r\nplane'), 4.75)
    assert (second.texts, second.label) == (("One", "Two"), 0.0)


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


LABELLED = {
    "a.TSV": ["text\tlabel", "yes\tx", "no\ty"],
    "a.csv": ["text,label", "yes,x", "no,y"],
    "a.ndjson": ['{"text": "yes", "label": "x"}', '{"text": "no", "label": "y"}'],
}


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("blank", ["\n", "\n\n", "\r\n", " \n"])
def test_blank_lines_are_no_records(config, tmp_path, name, blank):
    given = config(train=(name,))
    files(tmp_path)
    for text in (blank + "\n".join(LABELLED[name]), f"\n{blank}".join([*LABELLED[name], ""])):
        (tmp_path / "own" / name).write_bytes(text.encode())
        found = read_examples(resolve(given), "train")
        assert [(e.texts, e.label) for e in found] == [(("yes",), 0), (("no",), 1)]
    (tmp_path / "own" / name).write_text("\n".join(LABELLED[name]) + "\n\n{\n")
    with pytest.raises(InputError, match=rf"/{name}:{len(LABELLED[name]) + 2}: (?!.*line)"):
        resolve(given)


def test_a_blank_line_of_a_table_of_one_column_is_an_empty_cell(config, tmp_path):
    files(tmp_path, a_tsv="text\tlabel\nyes\tx\nno\ty\n", b_tsv="text\none\n\ntwo\n")
    given = resolve(config(train=("a.tsv",), test=("b.tsv",)))
    assert [e.texts for e in read_examples(given, "test")] == [("one",), ("",), ("two",)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_nested_fields(config, tmp_path, form):
    rows = [{"x": {"text": text, "mood": mood}} for text, mood in [("yes", "glad"), ("no", "sad")]]
    if form == "jsonl":
        files(tmp_path, a_jsonl="".join(json.dumps(row) + "\n" for row in rows))
    else:
        files(tmp_path)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "own" / "a.parquet")
    split = (f"a.{form}",)
    given = resolve(config(train=split, test=split, fields=("x.text",), label_field="x.mood"))
    for name in ("train", "test"):
        found = [(e.texts, e.label) for e in read_examples(given, name)]
        assert found == [(("yes",), 0), (("no",), 1)]


def test_a_long_cell_of_a_csv(config, tmp_path):
    limit = csv.field_size_limit()
    files(tmp_path, a_csv=f"text,label\n{'long ' * 30_000},x\nno,y\n")
    first, _ = read_examples(resolve(config(train=("a.csv",))), "train")
    assert len(first.texts[0]) == 150_000
    assert csv.field_size_limit() == limit


def test_own_numbers_and_choices(config, tmp_path):
    files(tmp_path, a_jsonl='{"text": "q", "x": "a", "y": "b", "z": "c", "label": 2}\n')
    given = config(train=("a.jsonl",), task="regression", fields=("text", "x"))
    assert read_examples(resolve(given), "train")[0].label == 2.0
    given = config(train=("a.jsonl",), task="multiple_choice", fields=("text", "x", "y", "z"))
    given = resolve(given)
    assert given.data.labels == ("0", "1", "2")
    assert read_examples(given, "train")[0].label == 2


def test_rows(config, tokenizer):
    row = LabelledRows.read(config("rte"), tokenizer, "train").row(1, 48)
    text = [tokenizer.encode(text) for text in PAIR[1]]
    whole = [BOS, *text[0], EOS, *text[1], EOS]
    assert len(whole) > 48
    kept = 48 - 3 - len(text[1])
    assert row["tokens"].tolist() == [BOS, *text[0][:kept], EOS, *text[1], EOS]
    assert row["token_types"].tolist() == [0] * (kept + 2) + [1] * (len(text[1]) + 1)
    assert (row["labels"], row["weights"], row["index"]) == (1, 1.0, 1)
    row = LabelledRows.read(config("rte", sequence_length=90), tokenizer, "train").row(1, 90)
    assert row["tokens"].tolist() == whole + [PAD] * (90 - len(whole))
    row = LabelledRows.read(config("cola", sequence_length=20), tokenizer, "test").row(2, 20)
    assert row["tokens"].tolist() == [BOS, *tokenizer.encode(SINGLE[2][0])[:18], EOS]
    assert row["weights"] == 0.0
    row = ChoiceRows.read(config("copa", sequence_length=90), tokenizer, "train").row(0, 90)
    assert row["tokens"].shape == (2, 90)
    assert row["tokens"][1, : row["token_types"][1].argmax()].tolist() == [
        BOS,
        *tokenizer.encode(f"first 0 {QUOTED} What was the cause of this?"),
        EOS,
    ]
    assert tokenizer.decode(row["tokens"][1][row["token_types"][1] == 1]) == "third 0"


@pytest.mark.parametrize(("split", "told"), [("train", ", 2 broken lines left out"), ("test", "")])
def test_broken_lines_are_counted(config, tokenizer, split, told):
    """A line break inside a text makes two lines of one."""
    rows = LabelledRows.read(config("qqp"), tokenizer, split)
    assert rows.describe() == f"3 examples (3 cut{told})"


def test_a_blank_line_is_not_a_broken_one(config, tmp_path):
    given, left_out = config("qqp"), []
    path = tmp_path / "qqp/train.tsv"
    path.write_text(path.read_text().replace("\n7", "\n\n7") + "\n\n")
    assert len(read_examples(given, "train", left_out)) == 3
    assert left_out == [f"{path}:{number}" for number in (4, 5)]


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


def test_tfds_numbers_become_names(config, monkeypatch):
    from mhe_jax.data import tfds_source

    rows = [
        {"premise": b"a", "hypothesis": b"b", "label": np.int64(2), "idx": np.int32(7)},
        {"premise": b"c", "hypothesis": b"d", "label": np.int64(-1), "idx": np.int32(8)},
    ]
    monkeypatch.setattr(tfds_source, "open_rows", lambda written, cache: rows)
    given = config("mnli", train=("tfds:glue/mnli:train",), test=("tfds:glue/mnli:test",))
    found = read_examples(given, "test")
    assert [(e.texts, e.label, e.index) for e in found] == [
        (("a", "b"), 2, 7),
        (("c", "d"), None, 8),
    ]
    with pytest.raises(InputError, match="example 1: label is -1: takes 0 to 2"):
        read_examples(given, "train")
    answers = {"text": np.array([b"Rollo"], object), "answer_start": np.array([66], np.int32)}
    rows[:] = [{"id": b"5", "question": b"Who?", "context": CONTEXT.encode(), "answers": answers}]
    given = config("squad", train=("tfds:squad:train",))
    assert read_questions(given, "train")[0].answers == (("Rollo", CONTEXT.index("Rollo")),)
    index = {"paragraph": 1, "question": 2, "answer": 3}
    rows[:] = [{"paragraph": b"p", "question": b"q", "answer": b"a", "label": 1, "idx": index}]
    given = config("multirc", train=("tfds:super_glue/multirc:train",))
    (example,) = read_examples(given, "train")
    assert (example.texts, example.index, example.label) == (("p", "q a"), (1, 2, 3), 1)


def classes(names, numbers):
    """A column of classes and what `datasets` writes of it."""
    feature = {"names": names, "_type": "ClassLabel"}
    return pa.array(numbers, pa.int64()), {"info": {"features": {"label": feature}}}


def write_rows(path, about=None, **fields):
    table = pa.table(fields)
    if about is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, path)


def test_columns_of_published_data_sets_are_those_of_tfds(config, tmp_path):
    label, about = classes(["entailment", "neutral", "contradiction"], [2, -1])
    texts = {"premise": ["a", "c"], "hypothesis": ["b", "d"], "idx": [7, 8]}
    given = config("mnli", train=("a.parquet",), test=("a.parquet",))
    write_rows(tmp_path / "mnli" / "a.parquet", about, label=label, **texts)
    found = read_examples(given, "test")
    assert [(e.texts, e.label, e.index) for e in found] == [
        (("a", "b"), 2, 7),
        (("c", "d"), None, 8),
    ]
    with pytest.raises(InputError, match="a.parquet:row 2: label is -1: takes 0 to 2"):
        read_examples(given, "train")
    answers = [{"text": ["Rollo"], "answer_start": [CONTEXT.index("Rollo")]}]
    asked = {"id": ["5"], "question": ["Who?"], "context": [CONTEXT], "answers": answers}
    given = config("squad", train=("squad.parquet",))
    write_rows(tmp_path / "squad" / "squad.parquet", **asked)
    assert read_questions(given, "train")[0].answers == (("Rollo", CONTEXT.index("Rollo")),)


def test_columns_of_own_examples(config, tmp_path):
    """The name of a class where its number has one, in one file or several."""
    label, about = classes(["bad", "good"], [1, 0])
    many = tmp_path / "own" / "many"
    many.mkdir(parents=True)
    write_rows(many / "0.parquet", about, text=["fine", "poor"], label=label)
    write_rows(many / "1.parquet", text=["well"], label=["good"])
    given = resolve(config("own", train=("many",)))
    assert given.data.labels == ("bad", "good")
    assert [(e.texts, e.label) for e in read_examples(given, "train")] == [
        (("fine",), 1),
        (("poor",), 0),
        (("well",), 1),
    ]
    label, about = classes(["bad", "good"], [1, -1])  # -1: no label
    write_rows(tmp_path / "own" / "test.parquet", about, text=["fine", "poor"], label=label)
    unlabelled = config("own", train=("many",), test=("test.parquet",), labels=("bad", "good"))
    assert [e.label for e in read_examples(unlabelled, "test")] == [1, None]
    (many / "1.parquet").write_bytes(b"")
    with pytest.raises(InputError, match="1.parquet: is empty"):
        read_examples(given, "train")
    (many / "1.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="1.parquet: is not a Parquet file, or is damaged"):
        read_examples(given, "train")
    (many / "1.parquet").unlink()
    (many / "1.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(InputError, match="1.parquet: no such file"):
        read_examples(given, "train")


NAN, INF = float("nan"), float("inf")
TYPED = ("jsonl", "parquet", "arrow", "tfds")


def labelled_as(form, values, directory, monkeypatch):
    """A source with these labels, of the name that is returned."""
    if form == "tfds":
        from mhe_jax.data import tfds_source

        rows = [{"text": b"a", "x": b"b", "y": b"c", "label": np.asarray(v)[()]} for v in values]
        monkeypatch.setattr(tfds_source, "open_rows", lambda written, cache: rows)
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
        if form == "parquet":
            parquet.write_table(table, path)
        else:
            with pa.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
    return path.name


@pytest.mark.parametrize(
    ("values", "forms", "names", "numbers"),
    [
        ([1.0, 0.0, 1.0], (*TYPED, "csv"), ("0", "1"), [1, 0, 1]),
        ([1, 1.0, "1", "1.0 ", "1e0", "+1", -0.0], ("jsonl", "tsv"), ("0", "1"), [1] * 6 + [0]),
        ([10**30, 1e30, 3], ("jsonl",), ("1" + "0" * 30, "3"), [0, 0, 1]),
        ([Decimal("2.50"), Decimal("2.00")], ("parquet", "csv"), ("2", "2.5"), [1, 0]),
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


def test_labels_that_a_config_names_are_numbers_too(config, tmp_path, monkeypatch):
    for names, values in ((("0", "1"), [1.0, 0.0]), (("0.0", "1.0"), ["1", "0"])):
        name = labelled_as("parquet", values, tmp_path / "own", monkeypatch)
        given = resolve(config(train=(name,), labels=names))
        assert given.data.labels == names
        assert [e.label for e in read_examples(given, "train")] == [1, 0]


@pytest.mark.parametrize("task", ["classification", "regression", "multiple_choice"])
@pytest.mark.parametrize("form", [*TYPED, "tsv", "csv"])
@pytest.mark.parametrize("missing", [None, NAN, "", " ", "NAN", "<NA>"], ids=repr)
def test_a_missing_label_is_missing(config, tmp_path, monkeypatch, task, form, missing):
    """Refused where a label is needed; of a test split it is not known."""
    if missing is None and form in ("tsv", "csv", "tfds"):
        return
    values = [1.0, missing, 0.0] if not isinstance(missing, str) else ["1", missing, "0"]
    name = labelled_as(form, values, tmp_path / "own", monkeypatch)
    fields = ("text", "x", "y") if task == "multiple_choice" else ("text",)
    given = config(train=(name,), validation=(name,), test=(name,), task=task, fields=fields)
    with pytest.raises(InputError, match=r"(:3|:2|row 2|example 1): .*label.*takes a"):
        check_sources(resolve(given))
    labels = ("0", "1") if task == "classification" else ()
    given = dataclasses.replace(given, data=dataclasses.replace(given.data, labels=labels))
    with pytest.raises(InputError, match=r"(:3|:2|row 2|example 1): .*label.*takes a"):
        read_examples(given, "validation")
    assert [e.label for e in read_examples(given, "test")] == [1, None, 0]


def test_tfds_marks_a_missing_class_by_a_number(config, monkeypatch, tmp_path):
    name = labelled_as("tfds", [1, -1], tmp_path, monkeypatch)
    with pytest.raises(InputError, match="example 1: .*label.* -1"):
        resolve(config(train=(name,)))
    found = read_examples(config(test=(name,), labels=("0", "1")), "test")
    assert [e.label for e in found] == [1, None]
    found = read_examples(config(test=(name,), task="regression"), "test")
    assert [e.label for e in found] == [1, -1]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("value", "form", "task"),
    [
        *[(value, "jsonl", "classification") for value in ([1], {"a": 1}, INF, "\ud83d")],
        *[(value, "parquet", "classification") for value in (b"a", date(2020, 1, 2))],
        *[(v, "jsonl", "regression") for v in (INF, "inf", True, "3,5", [1], "x", 10**400)],
        *[(value, "parquet", "regression") for value in (b"3", date(2020, 1, 2))],
        *[(v, "jsonl", "multiple_choice") for v in (2, -1, 0.5, True, "x", [0])],
    ],
    ids=lambda value: f"{value!r:.12}",
)
def test_what_is_no_label(config, tmp_path, monkeypatch, value, form, task, split):
    name = labelled_as(form, [value], tmp_path / "own", monkeypatch)
    fields = ("text", "x", "y") if task == "multiple_choice" else ("text",)
    labels = ("0", "1") if task == "classification" else ()
    given = config(**{split: (name,)}, task=task, fields=fields, labels=labels)
    with pytest.raises(InputError, match=r"(:|row )1: .*label.*takes") as caught:
        read_examples(given, split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("split", "value", "number"),
    [
        *[("train", 1, 1), ("test", -1, None), ("test", None, None)],
        *[("train", value, ...) for value in (-1, None, 2, [0])],
        *[("test", value, ...) for value in (2, [0])],
    ],
)
def test_numbers_of_classes(config, tmp_path, split, value, number, nested):
    """They have names, whatever columns are beside them; another number is refused."""
    label = {"names": ["no", "yes"], "_type": "ClassLabel"}
    words = [{"dtype": "string", "_type": "Value"}]
    features = {"meta": {"label": label}, "words": words} if nested else {"label": label}
    values = [[0] if isinstance(value, list) else 0, value]
    column = {"meta": [{"label": one} for one in values]} if nested else {"label": values}
    field = "meta.label" if nested else "label"
    (tmp_path / "own").mkdir()
    told = {"info": {"features": features}}
    write_rows(tmp_path / "own" / "a.parquet", told, text=["a", "b"], **column)
    given = config(**{split: ("a.parquet",)}, label_field=field, labels=("no", "yes"))
    if number is ...:
        with pytest.raises(InputError, match=r"a\.parquet:row \d: .*label.* is .*: takes"):
            read_examples(given, split)
    else:
        assert [e.label for e in read_examples(given, split)] == [0, number]


ROLLO = {"text": "Rollo", "answer_start": CONTEXT.index("Rollo")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "answers"),
        ({"answers": None}, "answers"),
        ({"answers": NAN}, "answers"),
        ({"answers": {"text": None, "answer_start": None}}, "answers"),
        ({"answers": {"text": "Rollo", "answer_start": 66}}, "answers"),
        ({"answers": {"text": ["Rollo"], "answer_start": []}}, "answer_start"),
        ({"answers": [ROLLO | {"text": None}]}, "text"),
        ({"answers": [ROLLO | {"answer_start": NAN}]}, "answer_start"),
        ({"answers": [ROLLO], "is_impossible": True}, "is_impossible"),
        ({"answers": [ROLLO], "is_impossible": NAN}, None),
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
            assert [len(q.answers) for q in read_questions(given, split)] == [1]
            continue
        with pytest.raises(InputError, match=f"question '5': .*{said}"):
            read_questions(given, split)


def changed(record, **values):
    return json.dumps(json.loads(record.splitlines()[0]) | values) + "\n"


BAD = {
    "no column": (
        "rte",
        "index\tsentence1\tlabel\n",
        r"train.tsv:1: has no column 'sentence2'; it",
    ),
    "columns": ("rte", FILES["rte"]["train.tsv"] + "3\ta\n", r"train.tsv:5: has 2 columns, not 4"),
    "more columns in qqp": (
        "qqp",
        FILES["qqp"]["dev.tsv"].rstrip("\n") + "\textra\n",
        r"train.tsv:4: has 7 columns, not 6",
    ),
    "unknown label": (
        "rte",
        FILES["rte"]["train.tsv"].replace("\tnot_entailment", "\tmaybe"),
        r"train.tsv:3: label is 'maybe': takes one of entailment, not_entailment",
    ),
    "no label": ("rte", FILES["rte"]["test.tsv"], r"train.tsv:2: has no 'label'; it has 'index'"),
    "not a number": (
        "stsb",
        FILES["stsb"]["train.tsv"].replace("5.000", "nan"),
        r"train.tsv:2: score is 'nan': takes a number",
    ),
    "only a header": ("rte", "index\tsentence1\tsentence2\tlabel\n", "train.tsv: no examples"),
    "not utf-8": (
        "rte",
        b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tx\n",
        ":2: is not UTF-8",
    ),
    "not json": ("cb", '{"premise": \n', r"train.jsonl:1: is not JSON"),
    "a list": ("cb", "[1]\n", r"train.jsonl:1: is not a JSON object"),
    "no field": (
        "cb",
        '{"premise": "a"}\n',
        r"train.jsonl:1: has no 'hypothesis'; it has 'premise'",
    ),
    "not a text": (
        "cb",
        '{"premise": 1, "hypothesis": "b", "label": "neutral"}\n',
        r"train.jsonl:1: field 'premise' is not a string",
    ),
    "copa": (
        "copa",
        changed(FILES["copa"]["train.jsonl"], question="why"),
        r"question is 'why': takes cause or effect",
    ),
    "wic": (
        "wic",
        changed(FILES["wic"]["train.jsonl"], end2=999),
        "start2, end2 is not a range of the text",
    ),
    "wsc": (
        "wsc",
        changed(FILES["wsc"]["train.jsonl"], target={"span1_text": "a", "span1_index": 99}),
        "span1_index is 99: the text has 16 words",
    ),
    "multirc": ("multirc", '{"idx": 1, "passage": {}}\n', r":1: is not a passage of MultiRC"),
    "squad format": ("squad", '{"data": {}}', "is not in SQuAD's format: no list 'data'"),
    "answer elsewhere": (
        "squad",
        FILES["squad"]["train.json"].replace('"text": "Rollo"', '"text": "Charles"'),
        r"question '50': answer 'Charles' is not in the context at 66",
    ),
    "no answer": ("squad", FILES["squad_v2"]["train.json"], r"question '52': has no answer"),
    "twice": (
        "squad",
        FILES["squad"]["train.json"].replace('"51"', '"50"'),
        r"data.train: question '50' occurs twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_line(config, tmp_path, case):
    dataset, content, said = BAD[case]
    given = config(dataset)
    path = tmp_path / dataset / given.data.train[0]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=said) as caught:
        check_sources(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "changes", "said"),
    [
        (
            "rte",
            {"task": "regression"},
            "data.dataset is 'rte': takes task classification, not reg",
        ),
        ("rte", {"fields": ("a",)}, "data.fields is set: data.dataset rte names its own"),
        (
            "rte",
            {"train": ("a.txt",)},
            r"a.txt: takes .tsv, .csv, .jsonl \(also as .gz or .xz\), .parquet, .arrow",
        ),
        ("rte", {"train": ("gone.tsv",)}, r"gone.tsv: no such file"),
        ("rte", {"labels": ("a", "b")}, r"data.labels is \('a', 'b'\): data.dataset rte has"),
        ("squad", {"train": ("a.tsv",)}, r"a.tsv: takes .json"),
        ("own", {"task": "span"}, "data.dataset is 'own': task span takes squad or squad_v2"),
        ("own", {"fields": ("a", "b", "c")}, r"task classification takes one or two texts"),
        ("own", {"train": ("a.tsv",)}, r"data.train: has one label, 'x': takes two or more"),
        ("own", {"train": ("a.tsv",), "label_field": "mood"}, r"a.tsv:2: has no 'mood'; it has"),
    ],
)
def test_bad_configs_are_one_line(config, tmp_path, dataset, changes, said):
    files(tmp_path, a_tsv="text\tlabel\nyes\tx\n")
    with pytest.raises(InputError, match=said) as caught:
        check_sources(resolve(config(dataset, **changes)))
    assert "\n" not in str(caught.value)


def test_a_span_that_the_text_writes_otherwise_has_as_many_words():
    """WSC counts words; the letters of a span may differ from those of its text."""
    record = Record("here", {"span1_text": "the big-dog", "span1_index": 2})
    text = "He saw the Big dog run"
    _, start, end = _words(record, text, 1)
    assert text[start:end] == "the Big"
