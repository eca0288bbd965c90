"""Three examples a split of each data set, with the fields of TFDS and of the hub of `datasets`."""

import json

import pyarrow as pa
from pyarrow import parquet

QUOTED = 'He said "no" \'twice\' at 5\\" – naïve'
FIRST, SECOND = [f"first {i} {QUOTED}" for i in range(3)], [f"second {i}" for i in range(3)]


def rows(labels, first, second=None):
    """Examples of one text or two."""
    texts = {first: FIRST} if second is None else {first: FIRST, second: SECOND}
    return [
        {**{name: of[i] for name, of in texts.items()}, "label": labels[i], "idx": i}
        for i in range(3)
    ]


COPA = [
    {
        "premise": FIRST[i],
        "choice1": SECOND[i],
        "choice2": f"third {i}",
        "question": ["cause", "effect", "cause"][i],
        "label": i % 2,
        "idx": i,
    }
    for i in range(3)
]
MULTIRC = [
    {
        "paragraph": f"<b>Sent 1: </b>first {QUOTED}",
        "question": question,
        "answer": f"answer {answer}",
        "label": label,
        "idx": {"paragraph": 2, "question": number, "answer": answer},
    }
    for question, number, answer, label in (
        ("Who?", 4, 9, 1),
        ("Who?", 4, 10, 0),
        ("Why?", 5, 11, 0),
    )
]


def wic():
    sentences = [
        ("Do you want to come over to my place later?", "A political system with no place"),
        ("Approach a task.", "To approach the city."),
        ("naïve naïve run", "They run."),
    ]
    found = []
    for i, (texts, word) in enumerate(zip(sentences, ["place", "approach", "run"], strict=True)):
        row: dict = {"word": word, "idx": i, "label": 1 - i % 2}
        for n, text in enumerate(texts, 1):
            start = text.lower().index(word)
            row |= {f"sentence{n}": text, f"start{n}": start, f"end{n}": start + len(word)}
        found.append(row)
    return found


def wsc():
    text = 'Mark told Pete many lies about "himself", which Pete included in his book. He was bold.'
    spans = [("Pete", 2, "his", 11), ("Mark", 0, "He", 13), ("many lies", 3, "himself", 6)]
    names = ("span1_text", "span1_index", "span2_text", "span2_index")
    return [
        {"text": text, **dict(zip(names, span, strict=True)), "idx": i, "label": 1 - i % 2}
        for i, span in enumerate(spans)
    ]


CONTEXT = (
    "The Normans were a people – naïve? – of the 10th century. In 911, Rollo came to Normandy."
)


def squad(version_2=False):
    def question(i, text, *answers, impossible=False):
        found = [{"text": a, "answer_start": CONTEXT.index(a)} for a in answers]
        row = {"id": f"5{i}", "question": text, "answers": found}
        if version_2:
            row["is_impossible"] = impossible
            if impossible:
                row["plausible_answers"] = [{"text": "Rollo", "answer_start": 66}]
        return row

    asked = [
        question(0, "Who came?", "Rollo", "In 911, Rollo"),
        question(1, "When?", "the 10th century"),
    ]
    if version_2:
        asked.append(question(2, "Who left?", impossible=True))
    paragraphs = [{"context": CONTEXT, "qas": asked}]
    return json.dumps(
        {
            "version": "v2.0" if version_2 else "1.1",
            "data": [{"title": "N", "paragraphs": paragraphs}],
        }
    )


SENTENCES, NLI = ("sentence1", "sentence2"), ("premise", "hypothesis")
ROWS = {
    "cola": rows([0, 1, 0], "sentence"),
    "sst2": rows([0, 1, 0], "sentence"),
    "mrpc": rows([0, 1, 0], *SENTENCES),
    "qqp": rows([0, 1, 0], "question1", "question2"),
    "stsb": rows([5.0, 0.0, 3.8], *SENTENCES),
    "mnli": rows([1, 0, 2], *NLI),
    "qnli": rows([0, 1, 0], "question", "sentence"),
    "rte": rows([0, 1, 0], *SENTENCES),
    "wnli": rows([0, 1, 0], *SENTENCES),
    "boolq": rows([1, 0, 1], "question", "passage"),
    "cb": rows([2, 1, 0], *NLI),
    "copa": COPA,
    "multirc": MULTIRC,
    "superglue_rte": rows([0, 1, 0], *NLI),
    "wic": wic(),
    "wsc": wsc(),
}
SQUAD = {"squad": squad(), "squad_v2": squad(True)}
DATASETS = [*ROWS, *SQUAD]


def write_rows(path, found, about=None):
    """A Parquet file, with what `datasets` writes of its fields."""
    table = pa.Table.from_pylist(found)
    if about is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, path)


def write(dataset, directory):
    """Writes the files of a data set; returns the names of train, validation and test."""
    directory.mkdir(exist_ok=True)
    if dataset in SQUAD:
        for name in ("train.json", "dev.json"):
            (directory / name).write_text(SQUAD[dataset])
        return ["train.json", "dev.json", "dev.json"]
    unlabelled = [row | {"label": type(row["label"])(-1)} for row in ROWS[dataset]]
    for split in ("train", "validation"):
        write_rows(directory / f"{split}.parquet", ROWS[dataset])
    if dataset == "stsb":  # numbers have no mark
        unlabelled = [row | {"label": None} for row in unlabelled]
    write_rows(directory / "test.parquet", unlabelled)
    return ["train.parquet", "validation.parquet", "test.parquet"]
