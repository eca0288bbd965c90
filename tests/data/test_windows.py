"""Windows over contexts: every answer is in one, and places lead back to the characters."""

import dataclasses
import json
import random

import numpy as np
import pytest
from text_for_tests import experiment

from mhe_jax.config import DataConfig, EvaluationConfig
from mhe_jax.config.data import BOS, EOS
from mhe_jax.tasks import of
from mhe_jax.tasks.labelled.examples import read_examples
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import WindowRows, best_spans

PIECES = [
    *("der", "hund", "läuft", "house", "dog", "a", "xyz", "日本", "–", "“", "naïve", "e\u0301"),
    *("1,000", "\u2581", "🙂", "U.S.", "\u00a0", "\t", "  ", "'"),
]
LENGTH, STRIDE, ASKED = 40, 9, 6
ROOM = LENGTH - ASKED - 3


def texts(draw):
    return "".join(draw.choice(["", " ", " "]) + draw.choice(PIECES) for _ in range(90)).strip()


@pytest.fixture(scope="module")
def windows(tmp_path_factory, tokenizer):
    """Questions with answers at random places of random texts, some without an answer."""
    draw = random.Random(0)
    directory = tmp_path_factory.mktemp("squad")
    paragraphs = []
    for number in range(40):
        context = texts(draw)
        questions = []
        for i in range(3):
            start = draw.randrange(len(context))
            answer = context[start : start + draw.randint(1, 12)]
            start += len(answer) - len(answer.lstrip())
            found = [{"text": answer.strip(), "answer_start": start}] if answer.strip() else []
            asked = "who " * draw.randint(0, 8)
            questions.append({"id": f"{number}-{i}", "question": asked, "answers": found})
        paragraphs.append({"context": context, "qas": questions})
    (directory / "train.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    fields = {"dataset": "squad_v2", "train": ("train.json",), "sequence_length": LENGTH}
    fields |= {"window_stride": STRIDE, "question_length": ASKED}
    config = experiment(directory, "span", **fields)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(answer_length=ROOM))
    return of(config).rows(config, tokenizer, read_examples(config.data, row_of(config), "train"))


def of_questions(windows):
    """{question number: its rows}."""
    rows = {}
    for number in range(len(windows.lengths)):
        row = windows.row(number, LENGTH)
        rows.setdefault(int(windows._windows[number, 0]), []).append((number, row))
    return rows


def test_offsets_are_exact(tokenizer):
    draw = random.Random(1)
    for text in ["", " ", "\u2581", *(texts(draw) for _ in range(200))]:
        ids = tokenizer.encode(text)
        places = tokenizer.offsets(text, ids)
        assert places.shape == (len(ids), 2)
        if not len(ids):
            continue
        # Pieces cover the text without a gap; those that share characters are bytes of one.
        assert places[0, 0] == 0
        assert places[-1, 1] == len(text)
        for (_, end), (start, stop), id in zip(places, places[1:], ids[1:], strict=False):
            assert start == end or (stop == end and stop - start == 1)
            if start == end and stop > start:
                piece = tokenizer.decode([id])
                assert "\ufffd" in piece or piece.strip() == text[start:stop].strip()


def test_every_answer_is_found_and_leads_back(windows):
    answered = 0
    for question, rows in of_questions(windows).items():
        example = windows.examples[question]
        spans = [(n, *row["labels"].tolist()) for n, row in rows if row["labels"].any()]
        if not example.answers:
            assert not spans
            continue
        (answer, start), context = example.answers[0], example.texts[1]
        answered += 1
        assert spans, example
        for number, first, last in spans:
            found = windows.span(number, first, last)[0]
            assert answer in found or answer.strip() in found
            # Nothing is in it but pieces that the answer touches.
            places = windows._offsets[windows._context[question]]
            cut = [p for p in places if p[1] > start and p[0] < start + len(answer)]
            assert found == context[cut[0][0] : cut[-1][1]].strip()
    assert answered > 100


def test_windows_hold_the_context(windows, tokenizer):
    for question, rows in of_questions(windows).items():
        asked, ids = map(tokenizer.encode, windows.examples[question].texts)
        asked = asked[:ASKED]
        begin = len(asked) + 2
        for i, (_, row) in enumerate(rows):
            held = ids[i * STRIDE : i * STRIDE + LENGTH - begin - 1]
            whole = [BOS, *asked, EOS, *held, EOS]
            assert row["tokens"][: len(whole)].tolist() == whole
            assert not row["tokens"][len(whole) :].any()
            assert row["marks"].nonzero()[0].tolist() == [0, *range(begin, begin + len(held))]
            assert row["marks"][row["labels"]].all()  # a label is where an answer may be
            assert row["token_types"].nonzero()[0].tolist() == [
                *range(begin, begin + len(held) + 1)
            ]
        assert held[-1:] == ids[-1:]


def test_the_best_span_is_the_best_of_all():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(30, 2, 11)).astype(np.float32)
    scores, firsts, lasts = best_spans(logits, 4)
    for row, score, first, last in zip(logits, scores, firsts, lasts, strict=True):
        spans = [(i, j) for i in range(1, 11) for j in range(i, min(i + 4, 11))]
        best = max(spans, key=lambda span: float(row[0, span[0]]) + float(row[1, span[1]]))
        assert (first, last) == best
        assert score == pytest.approx(float(row[0, first]) + float(row[1, last]))


def test_right_logits_give_right_answers(windows):
    """The window that holds the answer wins over those that do not; bos decides on no answer."""
    found = []
    for number in range(len(windows.lengths)):
        row = windows.row(number, LENGTH)
        logits = np.where(row["marks"] > 0, 0.0, -1e9)[None].repeat(2, axis=0)
        for side, label in enumerate(row["labels"]):
            logits[side, label] += 5.0
        found.append(logits.astype(np.float32))
    order = np.random.default_rng(0).permutation(len(windows.lengths))
    found = [(part, np.stack([found[i] for i in part])) for part in np.array_split(order, 9)]
    for question, answer in zip(windows.examples, windows.predictions(found), strict=True):
        if not question.answers:
            assert answer.no_answer == pytest.approx(10.0)
            continue
        assert question.answers[0][0] in answer.text
        # Windows without the answer give bos 10, the one with it gives it 0.
        assert answer.no_answer == pytest.approx(-10.0)


def test_a_window_has_the_answers_that_it_holds_whole(windows):
    """Those too that begin with its first token or end with its last."""
    at_first = at_last = 0
    for number, (question, start, stop, first, last) in enumerate(windows._windows.tolist()):
        holds = first >= 0 and start <= first <= last < stop
        labels = windows.row(number, LENGTH)["labels"].tolist()
        begin = 1 + min(len(windows._asked[question]), ASKED) + 1
        assert labels == ([first - start + begin, last - start + begin] if holds else [0, 0])
        at_first += holds and first == start
        at_last += holds and last == stop - 1
    assert at_first > 3
    assert at_last > 3


@pytest.mark.parametrize(("name", "left"), [("squad", False), ("squad_v2", True)])
def test_only_version_2_leaves_a_question_without_an_answer(windows, tokenizer, name, left):
    row = dataclasses.replace(windows.dataset, name=name)
    sizes = {"sequence_length": LENGTH, "window_stride": STRIDE, "question_length": ASKED}
    given = DataConfig(**sizes), EvaluationConfig(no_answer_threshold=-1.0)
    rows = WindowRows(row, tokenizer, windows.examples[:6], *given)
    numbers = np.arange(len(rows.lengths))
    marks = np.stack([rows.row(number, LENGTH)["marks"] for number in numbers])
    sides = np.outer([-0.001, 0.001], np.arange(LENGTH))  # long answers are the best
    logits = np.where(marks[:, None], sides, -1e9)
    outputs = [(numbers, logits)]
    answers = rows.predictions(outputs)
    assert [answer.text == "" for answer in answers] == [left] * 6
    files = {of: json.loads(text) for of, text in rows.files(outputs).items()}
    names = [example.index for example in rows.examples]
    assert files["predictions.json"] == {n: a.text for n, a in zip(names, answers, strict=True)}
    assert ("no_answer.json" in files) == left
