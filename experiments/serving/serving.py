"""A translation run as this code searches with it, and as CTranslate2 serves it.

    python experiments/serving/serving.py runs/multi30k --out serving.json
    python experiments/serving/serving.py runs/demo --sentences 20 --rounds 2 --beam 2    # a trial

The same sentences of the test set, by beam search without length penalty, on a CPU: by
`run.translate`, and by CTranslate2 with what `python -m mhe_jax export RUN OUT --to ctranslate2`
writes, in float32 and in int8. Each is a process of its own on --threads cores, which translates
once to warm up (and to compile) and then all sentences when it is its turn, once a round.

    sentences/s   sentences / the median of the rounds
    speed         sentences/s over those of run.translate
    BLEU          of these sentences, by sacreBLEU as eval.py takes it
    same          sentences that are letter for letter those of run.translate
    memory        the largest resident set of the process, with Python and the libraries
    first         seconds from its start to all translations of the first time, compiling included
"""

import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line, reports, timing
from mhe_jax.config import InputError

OURS = "mhe_jax float32"
translate: Callable[[list[str]], list[str]]  # of the process of a `Worker`
CASES = (OURS, "CTranslate2 float32", "CTranslate2 int8")
COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda row: row["case"],
    "sentences/s": lambda row: f"{row['sentences_per_second']:.1f}",
    "median ms": reports.milliseconds,
    "quartiles": reports.quartiles,
    "speed": lambda row: f"{row['speed']:.2f}",
    "BLEU": lambda row: f"{row['bleu']:.2f}",
    "same": lambda row: f"{row['same']} of {row['sentences']}",
    "memory MB": reports.megabytes,
    "first s": lambda row: f"{row['first_s']:.1f}",
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    positive = command_line.positive
    parser.add_argument("run", type=Path, help="of task translation")
    parser.add_argument("--sentences", type=positive, default=1000, help="at most")
    parser.add_argument("--beam", type=positive, default=5)
    parser.add_argument("--batch_size", type=positive, default=32, help="sentences at once")
    parser.add_argument("--threads", type=positive, default=2, help="and cores")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(arguments)
    from mhe_jax.config.loading import config_of
    from mhe_jax.interchange import export

    try:
        config = config_of(args.run)
        if config.task != "translation":
            raise InputError(f"{args.run} is a run of task {config.task}: takes translation")
        with tempfile.TemporaryDirectory() as place:
            export(args.run, exported := Path(place, "exported"), "ctranslate2")
            results = measured(args, config, exported)
    except InputError as error:
        parser.error(str(error))
    about = reports.header(__file__, "float32", arguments)
    about["versions"]["ctranslate2"] = reports.version_of("ctranslate2")
    kinds = ", ".join(f"{kind} ({role})" for role, kind in config.kinds.items())
    print(*reports.header_lines(about), sep="\n\n", end="\n\n")
    print(
        f"{kinds}; {results[0]['sentences']} sentences, beam {args.beam}, {args.threads} threads, "
        f"batches of {args.batch_size}, {args.rounds} rounds\n"
    )
    print(reports.table(COLUMNS, results))
    reports.save(args.out, {"header": about, "kinds": config.kinds, "results": results})
    return 0


def measured(args, config, exported: Path) -> list[dict[str, Any]]:
    """A row for each case, the fastest first."""
    from mhe_jax.data import open_split
    from mhe_jax.tasks.metrics import translation_scores

    pairs = itertools.islice(open_split(config, "test"), args.sentences)
    texts, references = map(list, zip(*pairs, strict=True))
    # OpenMP of CTranslate2 would wait actively beside the others' turns.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "passive"}
    workers = [Worker(case, args, exported, texts, config.model.max_length) for case in CASES]
    try:
        order = random.Random(0)
        for _ in range(args.rounds):
            for worker in order.sample(workers, len(workers)):
                worker.translate()
    finally:
        for worker in workers:
            worker.pool.shutdown()
    rows, ours = [], workers[0].found
    for worker in workers:
        case = timing.Case({"case": worker.case}, lambda: None, memory=worker.memory)
        summary = timing.summary(case, worker.seconds)
        scores = translation_scores(worker.found, references, config.evaluation.bleu_tokenizer)
        rows.append(
            {
                **{name: value for name, value in summary.items() if not name.startswith("flops")},
                "sentences": len(texts),
                "sentences_per_second": 1e3 * len(texts) / summary["median_ms"],
                "bleu": scores["bleu"],
                "same": sum(a == b for a, b in zip(worker.found, ours, strict=True)),
                "first_s": worker.first,
            }
        )
    for row in rows:
        row["speed"] = row["sentences_per_second"] / rows[0]["sentences_per_second"]
    return sorted(rows, key=lambda row: row["median_ms"])


class Worker:
    """A process that translates all texts each time it is asked."""

    def __init__(self, case: str, args, exported: Path, texts: list[str], longest: int):
        self.case, self.texts, self.seconds = case, texts, []
        given = {name: getattr(args, name) for name in ("beam", "batch_size", "threads")}
        given |= {"case": case, "run": str(args.run), "exported": str(exported), "longest": longest}
        begin = time.perf_counter()
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start, (given,))
        self.found, self.memory, _ = self.pool.submit(work, texts).result()
        self.first = time.perf_counter() - begin  # it is warm

    def translate(self) -> None:
        self.found, self.memory, seconds = self.pool.submit(work, self.texts).result()
        self.seconds.append(seconds)


def start(given: dict[str, Any]) -> None:
    """In the process of a `Worker`, first."""
    global translate
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["threads"]])
    translate = ours(given) if given["case"] == OURS else served(given)


def work(texts: list[str]) -> tuple[list[str], int, float]:
    """In the process of a `Worker`: the translations, its most bytes so far, and seconds."""
    begin = time.perf_counter()
    found = translate(texts)
    seconds = time.perf_counter() - begin
    # Of this program alone: `ru_maxrss` of a child begins with what its parent had.
    memory = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    return found, 1024 * int(memory), seconds


def ours(given: dict[str, Any]) -> Callable[[list[str]], list[str]]:
    """By `run.translate`."""
    import mhe_jax

    run = mhe_jax.load(given["run"])
    settings = {"beam_size": given["beam"], "batch_size": given["batch_size"]}
    return lambda texts: run.translate(texts, length_penalty=0.0, **settings)


def served(given: dict[str, Any]) -> Callable[[list[str]], list[str]]:
    """By CTranslate2, with pieces from sentencepiece."""
    import ctranslate2
    import sentencepiece

    place, threads = given["exported"], given["threads"]
    pieces: Any = sentencepiece.SentencePieceProcessor(model_file=f"{place}/tokenizer.model")
    how = given["case"].split()[1]
    translator = ctranslate2.Translator(
        place, device="cpu", compute_type=how, intra_threads=threads
    )

    def translate(texts: list[str]) -> list[str]:
        found = translator.translate_batch(
            pieces.encode(texts, out_type=str),
            beam_size=given["beam"],
            max_batch_size=given["batch_size"],
            length_penalty=0,
            max_input_length=given["longest"],
            max_decoding_length=given["longest"],
            disable_unk=True,
            suppress_sequences=[["<pad>"], ["<s>"], ["<mask>"]],
        )
        return pieces.decode([translation.hypotheses[0] for translation in found])

    return translate


if __name__ == "__main__":
    sys.exit(main())
