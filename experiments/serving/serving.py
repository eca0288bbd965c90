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
translate: Callable[[list[str]], list[str]]  # of a process of `pools`
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
    note = f"{kinds}; beam {args.beam}, {args.threads} threads, batches of {args.batch_size}"
    left_out = timing.LeftOut()
    return reports.finish(args.out, about, COLUMNS, results, left_out, note, kinds=config.kinds)


def measured(args, config, exported: Path) -> list[dict[str, Any]]:
    """A row for each case, the fastest first."""
    from mhe_jax.data import open_split
    from mhe_jax.tasks.metrics import translation_scores

    pairs = itertools.islice(open_split(config, "test"), args.sentences)
    texts, references = map(list, zip(*pairs, strict=True))
    # OpenMP of CTranslate2 would wait actively beside the others' turns.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "passive"}
    given = {name: getattr(args, name) for name in ("beam", "batch_size", "threads")}
    given |= {"run": str(args.run), "exported": str(exported), "longest": config.model.max_length}
    spawn = multiprocessing.get_context("spawn")
    pools, found, cases = {}, {}, []
    try:
        for case in CASES:
            begin = time.perf_counter()
            pools[case] = ProcessPoolExecutor(1, spawn, start, (given | {"case": case},))

            def call(case=case) -> None:
                found[case] = pools[case].submit(work, texts).result()

            call()
            about = {"case": case, "first_s": time.perf_counter() - begin}
            cases.append(timing.Case(about, call))
        rows = timing.measure(cases, args.rounds, timing.LeftOut(), calls=1)
    finally:
        for pool in pools.values():
            pool.shutdown()
    ours, _ = found[OURS]
    for row in rows:
        texts_of_row, row["memory_bytes"] = found[row["case"]]
        scores = translation_scores(texts_of_row, references, config.evaluation.bleu_tokenizer)
        row["sentences"], row["bleu"] = len(texts), scores["bleu"]
        row["sentences_per_second"] = 1e3 * len(texts) / row["median_ms"]
        row["same"] = sum(a == b for a, b in zip(texts_of_row, ours, strict=True))
        row["speed"] = rows[0]["median_ms"] / row["median_ms"]
    return sorted(rows, key=lambda row: row["median_ms"])


def start(given: dict[str, Any]) -> None:
    """In the process of a case, first."""
    global translate
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["threads"]])
    translate = ours(given) if given["case"] == OURS else served(given)


def work(texts: list[str]) -> tuple[list[str], int]:
    """In the process of a case: the translations, and its most bytes so far."""
    found = translate(texts)
    # Of this program alone: `ru_maxrss` of a child begins with what its parent had.
    memory = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    return found, 1024 * int(memory)


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
