"""Files of every task, in the form in which they are distributed: three examples a split."""

import json

QUOTED = 'He said "no" \'twice\' at 5\\" – naïve'  # quotes mean nothing in GLUE's files


def tsv(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def glue(header, rows, label, test_header=None):
    """Files with a header; the test has no label and starts with `index`."""
    header = header.split()
    at = header.index(label)
    without = [[cell for i, cell in enumerate(row) if i != at] for row in [header, *rows]]
    if header[0] != "index" and header[0] != "id":
        numbers = ["index", *map(str, range(len(rows)))]
        without = [[number, *row] for number, row in zip(numbers, without, strict=True)]
    return {
        "train.tsv": tsv(header, *rows),
        "dev.tsv": tsv(header, *rows),
        "test.tsv": tsv(*without),
    }


def two(labels):
    """Rows of index, two texts and label."""
    return [[str(i), f"first {i} {QUOTED}", f"second {i}", labels[i]] for i in range(3)]


def mrpc():
    # With a byte order mark, as it comes; the identities stand before the texts.
    header = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [[str(i % 2), "70", "71", f"first {i} {QUOTED}", f"second {i}"] for i in range(3)]
    test = [["index", *header[1:]], *([str(i), *row[1:]] for i, row in enumerate(rows))]
    text = "\ufeff" + tsv(header, *rows)
    return {"train.tsv": text, "dev.tsv": text, "test.tsv": "\ufeff" + tsv(*test)}


def mnli():
    names = ["index", "promptID", "pairID", "genre"]
    names += [f"sentence{i}{part}" for part in ("_binary_parse", "_parse", "") for i in (1, 2)]
    labels = ["neutral", "entailment", "contradiction"]
    rows = [
        [str(i), "1", "1n", "fiction", "( a )", "( b )", "(A a)", "(B b)", f"first {i} {QUOTED}"]
        + [f"second {i}"]
        for i in range(3)
    ]
    train = [[*row, label, label] for row, label in zip(rows, labels, strict=True)]
    five = [f"label{i}" for i in range(1, 6)]
    dev = [[*row, *["neutral"] * 5, label] for row, label in zip(rows, labels, strict=True)]
    return {
        "train.tsv": tsv([*names, "label1", "gold_label"], *train),
        "dev.tsv": tsv([*names, *five, "gold_label"], *dev),
        "test.tsv": tsv(names, *rows),
    }


def qqp():
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    rows = [[str(i), "1", "2", f"first {i} {QUOTED}", f"second {i}", str(i % 2)] for i in range(3)]
    broken = [["7", "1", "2", "a line that ends"], ["inside its text", "second", "0"]]
    test = [["id", "question1", "question2"], *([row[0], *row[3:5]] for row in rows)]
    return {
        "train.tsv": tsv(header, rows[0], *broken, *rows[1:]),
        "dev.tsv": tsv(header, *rows),
        "test.tsv": tsv(*test),
    }


def stsb():
    header = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
    start = ["main-news", "MSRpar", "2012test", "0004", "none", "none"]
    rows = [
        [str(i), *start, f"first {i} {QUOTED}", f"second {i}", ["5.000", "0.0", "3.8"][i]]
        for i in range(3)
    ]
    return glue(header, rows, "score")


def cola():
    rows = [["gj04", str(i % 2), "*" * (1 - i % 2), f"first {i} {QUOTED}"] for i in range(3)]
    test = [["index", "sentence"], *([str(i), row[3]] for i, row in enumerate(rows))]
    return {"train.tsv": tsv(*rows), "dev.tsv": tsv(*rows), "test.tsv": tsv(*test)}


def sst2():
    rows = [[f"first {i} {QUOTED} ", str(i % 2)] for i in range(3)]
    return glue("sentence label", rows, "label")


def superglue(rows):
    """A record a line; the test has no label."""
    unlabelled = [{name: row[name] for name in row if name != "label"} for row in rows]
    return {
        "train.jsonl": jsonl(*rows),
        "val.jsonl": jsonl(*rows),
        "test.jsonl": jsonl(*unlabelled),
    }


def pairs(first, second, labels):
    return superglue(
        [
            {first: f"first {i} {QUOTED}", second: f"second {i}", "label": labels[i], "idx": i}
            for i in range(3)
        ]
    )


def copa():
    return superglue(
        [
            {
                "premise": f"first {i} {QUOTED}",
                "choice1": f"second {i}",
                "choice2": f"third {i}",
                "question": ["cause", "effect", "cause"][i],
                "label": i % 2,
                "idx": i,
            }
            for i in range(3)
        ]
    )


def multirc(test=False):
    def answer(i, label):
        return {"text": f"answer {i}", "idx": i} | ({} if test else {"label": label})

    questions = [
        {"question": "Who?", "idx": 4, "answers": [answer(9, 1), answer(10, 0)]},
        {"question": "Why?", "idx": 5, "answers": [answer(11, 0)]},
    ]
    passage = {"text": f"<b>Sent 1: </b>first {QUOTED}", "questions": questions}
    return jsonl({"idx": 2, "version": 1.1, "passage": passage})


def wic():
    sentences = [
        ("Do you want to come over to my place later?", "A political system with no place"),
        ("Approach a task.", "To approach the city."),
        ("naïve naïve run", "They run."),
    ]
    words = ["place", "approach", "run"]
    rows = []
    for i, (texts, word) in enumerate(zip(sentences, words, strict=True)):
        row: dict = {"word": word, "idx": i, "label": i % 2 == 0, "version": 1.1}
        for n, text in enumerate(texts, 1):
            start = text.lower().index(word)
            row |= {f"sentence{n}": text, f"start{n}": start, f"end{n}": start + len(word)}
        rows.append(row)
    return superglue(rows)


def wsc():
    text = 'Mark told Pete many lies about "himself", which Pete included in his book. He was bold.'
    spans = [("Pete", 2, "his", 11), ("Mark", 0, "He", 13), ("many lies", 3, "himself", 6)]
    return superglue(
        [
            {
                "text": text,
                "target": {
                    "span1_text": one,
                    "span1_index": i,
                    "span2_text": other,
                    "span2_index": j,
                },
                "idx": number,
                "label": number % 2 == 0,
            }
            for number, (one, i, other, j) in enumerate(spans)
        ]
    )


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


BOTH = ["entailment", "not_entailment", "entailment"]
FILES = {
    "cola": cola(),
    "sst2": sst2(),
    "mrpc": mrpc(),
    "qqp": qqp(),
    "stsb": stsb(),
    "mnli": mnli(),
    "qnli": glue("index question sentence label", two(BOTH), "label"),
    "rte": glue("index sentence1 sentence2 label", two(BOTH), "label"),
    "wnli": glue("index sentence1 sentence2 label", two(["0", "1", "0"]), "label"),
    "boolq": pairs("question", "passage", [True, False, True]),
    "cb": pairs("premise", "hypothesis", ["neutral", "contradiction", "entailment"]),
    "copa": copa(),
    "multirc": {"train.jsonl": multirc(), "val.jsonl": multirc(), "test.jsonl": multirc(True)},
    "superglue_rte": pairs("premise", "hypothesis", BOTH),
    "wic": wic(),
    "wsc": wsc(),
    "squad": {"train.json": squad(), "dev.json": squad()},
    "squad_v2": {"train.json": squad(True), "dev.json": squad(True)},
}


def write(dataset, directory):
    """Writes the files of a data set; returns the names of train, dev and test (or dev again)."""
    directory.mkdir(exist_ok=True)
    for name, text in FILES[dataset].items():
        (directory / name).write_bytes(text.encode())
    names = list(FILES[dataset])
    return [*names, names[-1]][:3]
