"""A translation run as this code searches with it, and as CTranslate2 serves it.

    python benchmarks/serving.py runs/multi30k --out benchmarks/records/serving_cpu.json
    python benchmarks/serving.py runs/demo --sentences 20 --rounds 2 --beam 2    # a trial

The same sentences of the test set, by beam search without length penalty, on a CPU: by
`run.translate`, and by CTranslate2 with what `python -m mhe_jax export RUN OUT --to ctranslate2`
writes, in float32 and in int8. Each is a process of its own on --threads cores, which translates
once to warm up (and to compile) and then all sentences when it is its turn, once a round.

    sentences/s   sentences / the median of the rounds
    speed         sentences/s over those of run.translate
    BLEU          of these sentences, by sacreBLEU as eval.py takes it
    same          sentences that are letter for letter those of run.translate
    memory        the largest resident set of the process, with Python and the libraries

Before them, a fresh process --rounds times: from its start to the first translation of one short
sentence by `run.translate`, with Python, imports, loading and compiling, and the time of a second.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, reports, timing
from mhe_jax.config import InputError

OURS = "mhe_jax float32"
SENTENCE = "A man rides a bicycle."
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
}


def parse(arguments: list[str] | None):
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("run", type=Path, help="of task translation")
    parser.add_argument("--sentences", type=command_line.positive, default=1000, help="at most")
    parser.add_argument("--beam", type=command_line.positive, default=5)
    parser.add_argument(
        "--batch_size", type=command_line.positive, default=32, help="sentences at once"
    )
    parser.add_argument("--threads", type=command_line.positive, default=2, help="and cores")
    parser.add_argument("--rounds", type=command_line.positive, default=7)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(arguments)
    if args.threads > len(os.sched_getaffinity(0)):
        parser.error(f"--threads {args.threads}: there are {len(os.sched_getaffinity(0))} cores")
    return parser, args


def main(arguments: list[str] | None = None) -> int:
    parser, args = parse(arguments)
    from mhe_jax.config.loading import config_of
    from mhe_jax.interchange import export

    try:
        config = config_of(args.run)
        if config.task != "translation":
            raise InputError(f"{args.run} is a run of task {config.task}: takes translation")
        with tempfile.TemporaryDirectory() as place:
            exported = Path(place, "exported")
            export(args.run, exported, "ctranslate2")
            content = measured(args, config, exported, arguments)
    except InputError as error:
        parser.error(str(error))
    reports.save(args.out, content)
    return 0


def measured(args, config, exported: Path, arguments: list[str] | None) -> dict[str, Any]:
    """Measures and prints; the JSON."""
    from mhe_jax.data.opening import open_split
    from mhe_jax.tasks.metrics import translation_scores

    about = reports.header(__file__, "float32", arguments)
    about["versions"]["ctranslate2"] = reports.version_of("ctranslate2")
    source = open_split(config, "test")
    pairs = [source[number] for number in range(min(args.sentences, len(source)))]
    texts, references = map(list, zip(*pairs, strict=True))
    longest, tokenizer = config.model.max_length, config.evaluation.bleu_tokenizer
    start = started(args.run, args.rounds)
    workers = [Worker(case, args, exported, texts, longest) for case in CASES]
    try:
        order = random.Random(0)
        for _ in range(args.rounds):
            for worker in order.sample(workers, len(workers)):
                worker.translate()
    finally:
        for worker in workers:
            worker.end()
    results, first = [], workers[0]
    for worker in workers:
        summary = timing.summary(
            timing.Case({"case": worker.case}, lambda: None, memory=worker.memory), worker.seconds
        )
        results.append(
            {
                **{name: value for name, value in summary.items() if not name.startswith("flops")},
                "sentences": len(texts),
                "sentences_per_second": 1e3 * len(texts) / summary["median_ms"],
                "bleu": translation_scores(worker.found, references, tokenizer)["bleu"],
                "same": sum(a == b for a, b in zip(worker.found, first.found, strict=True)),
            }
        )
    for row in results:
        row["speed"] = row["sentences_per_second"] / results[0]["sentences_per_second"]
    results.sort(key=lambda row: row["median_ms"])
    kinds = ", ".join(f"{kind} ({role})" for role, kind in config.kinds.items())
    print(*reports.header_lines(about), sep="\n\n", end="\n\n")
    print(
        f"{kinds}; {len(texts)} sentences, beam {args.beam}, {args.threads} threads, batches of "
        f"{args.batch_size}, {args.rounds} rounds\n"
    )
    print(reports.table(COLUMNS, results), end="\n\n")
    print(told(start))
    return {"header": about, "kinds": config.kinds, "results": results, "start": start}


def started(run: Path, rounds: int) -> dict[str, list[float]]:
    """Of each fresh process, seconds to the first translation, and of a second one."""
    found: dict[str, list[float]] = {"first_s": [], "second_s": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, __file__, "--first", run], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            first_seconds = time.perf_counter() - begin
            rest = process.stdout.readline()
        if not rest:
            raise SystemExit(f"{run}: the first translation failed")
        found["first_s"].append(first_seconds)
        found["second_s"].append(float(rest))
    return found


def told(start: dict[str, list[float]]) -> str:
    """The line for people."""
    first, second = (statistics.median(start[name]) for name in ("first_s", "second_s"))
    return (
        f"A fresh process has its first translation of one sentence after {first:.1f} s, and takes "
        f"{1e3 * second:.0f} ms for a second."
    )


def first(name: str) -> None:
    """The other side of `started`: a line after the first translation, and the second's seconds."""
    import mhe_jax

    run = mhe_jax.load(name)
    run.translate([SENTENCE])
    print("first", flush=True)
    begin = time.perf_counter()
    run.translate([SENTENCE])
    print(time.perf_counter() - begin, flush=True)


class Worker:
    """A process that translates all texts each time it is asked."""

    def __init__(self, case: str, args, exported: Path, texts: list[str], longest: int):
        self.case, self.seconds, self.found, self.memory = case, [], [], 0
        settings = {name: getattr(args, name) for name in ("beam", "batch_size", "threads")}
        given = {"case": case, "run": str(args.run), "exported": str(exported)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # OpenMP of CTranslate2 would wait actively beside the others' turns.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "passive"},
        )
        self._say({**given, **settings, "texts": texts, "longest": longest})
        self._answer()  # it is warm

    def translate(self) -> None:
        self._say({})
        answer = self._answer()
        self.seconds.append(answer["seconds"])
        self.found, self.memory = answer["found"], answer["memory"]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.case} has ended")
        return json.loads(line)


def work() -> None:
    """The other side of `Worker`: a line of JSON for each that comes in."""
    given = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["threads"]])
    texts = given["texts"]
    translate = ours(given) if given["case"] == OURS else served(given)
    while True:
        begin = time.perf_counter()
        found = translate(texts)
        seconds = time.perf_counter() - begin
        # Of this program alone: `ru_maxrss` of a child begins with what its parent had.
        status = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
        memory = 1024 * int(status.split()[0])
        print(json.dumps({"seconds": seconds, "found": found, "memory": memory}), flush=True)
        if not sys.stdin.readline():
            return


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

    place = given["exported"]
    pieces: Any = sentencepiece.SentencePieceProcessor(model_file=f"{place}/tokenizer.model")
    translator = ctranslate2.Translator(
        place,
        device="cpu",
        compute_type=given["case"].split()[1],
        intra_threads=given["threads"],
    )
    longest = given["longest"]

    def translate(texts: list[str]) -> list[str]:
        found = translator.translate_batch(
            pieces.encode(texts, out_type=str),
            beam_size=given["beam"],
            max_batch_size=given["batch_size"],
            length_penalty=0,
            max_input_length=longest,
            max_decoding_length=longest,
            disable_unk=True,
            suppress_sequences=[["<pad>"], ["<s>"], ["<mask>"]],
        )
        return pieces.decode([translation.hypotheses[0] for translation in found])

    return translate


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        sys.exit(work())
    sys.exit(first(sys.argv[2]) if sys.argv[1:2] == ["--first"] else main())
