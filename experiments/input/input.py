"""How fast and how lean the input is: text of 1 GB to batches, alone on the CPU.

    python experiments/input/input.py --text data/wikitext-2/train.txt.xz
    python experiments/input/input.py --text data/wikitext-2/train.txt.xz --gigabytes 0.2 --cases lm

The text is repeated to the size, with a running number before each line so that no two are equal.
Pairs are stretches of twenty of its words, a tenth of the size. The tokenizer is given. Each
measurement is a process of its own, timed from its start, imports included:

    cold        to the first batch where nothing is cached: the text is checked and tokenized
    CPU         the same in seconds that all threads together were computing
    warm        to the first batch where its tokens are there
    memory      peak up to then, or what is held after the batches that follow, less what the
                imports hold; without the pages of the token files, which the system may drop
    tokens/s    of the batches that follow the first, read ahead as in training; without padding
    per core    tokens of those batches by the seconds that all threads together were computing
    full        share of the batches that is not padding
"""

import argparse
import itertools
import json
import lzma
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mhe_jax import tasks

CASES = ("mlm", "lm", "translation")
VOCABULARY_SIZE = 8000
COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": "{case}".format_map,
    "GB": "{gigabytes:.2f}".format_map,
    "cold s": "{cold_seconds:.1f}".format_map,
    "cold CPU s": "{cold_processor_seconds:.0f}".format_map,
    "warm s": "{warm_seconds:.1f}".format_map,
    "memory MB": "{memory_megabytes:.0f}".format_map,
    "tokens/s": "{tokens_per_second:,}".format_map,
    "tokens/s per core": "{tokens_per_core_second:,}".format_map,
    "full": "{full:.1%}".format_map,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="lines to repeat, packed by xz")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the made file")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--steps", type=int, default=2000, help="batches after the first")
    parser.add_argument("--out", type=Path, help="a JSON file of all numbers")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what a process of its own does
    args = parser.parse_args(arguments)
    if args.measure:
        print(json.dumps(measure(**json.loads(args.measure))))
        return 0
    if args.text is None:
        parser.error("--text FILE.xz is missing")
    from experiments import reports, timing  # what is measured does not import them

    with tempfile.TemporaryDirectory() as name:
        make_files(Path(name), args.text, int(args.gigabytes * 1e9))
        rows = [row(Path(name), case, args.steps) for case in args.cases]
    about = reports.header(__file__, "float32", arguments)
    return reports.finish(args.out, about, COLUMNS, rows, timing.LeftOut())


def make_files(directory: Path, text: Path, size: int) -> None:
    """text.txt and pairs.tsv, and a tokenizer that has seen the text without the numbers."""
    from mhe_jax.data import Text, train_tokenizer

    with lzma.open(text, "rt") as file:
        lines = [line.strip() for line in file if line.strip()]
    sample = Text.of(str(text), [(line,) for line in lines])
    train_tokenizer([(sample, 1.0)], VOCABULARY_SIZE).save(directory / "tokenizer.model")
    words = " ".join(lines).split()
    sides = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
    pairs = ["\t".join(pair) for pair in itertools.pairwise(sides)]
    for name, repeated, most in (("text.txt", lines, size), ("pairs.tsv", pairs, size // 10)):
        with (directory / name).open("w") as file:
            file.write("source\ttarget\n" if name == "pairs.tsv" else "")
            for number, line in enumerate(itertools.cycle(repeated)):
                file.write(f"{number} {line}\n")
                if number % 1000 == 0 and file.tell() > most:
                    break


def row(directory: Path, case: str, steps: int) -> dict:
    """A case, cold and then warm."""
    print(f"{case} ...", file=sys.stderr)
    asked = {"directory": str(directory), "case": case, "steps": steps, "size": VOCABULARY_SIZE}
    found = []
    for _ in range(2):
        given = json.dumps(asked | {"started": time.time()})
        command = [sys.executable, __file__, "--measure", given]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    return {
        "case": case,
        "cold_seconds": cold.pop("seconds"),
        "cold_processor_seconds": cold["processor_seconds"],
        "warm_seconds": warm.pop("seconds"),
        **warm,
        "memory_megabytes": max(cold["memory_megabytes"], warm["memory_megabytes"]),
    }


def measure(directory: str, case: str, steps: int, size: int, started: float) -> dict:
    """Seconds to the first batch, peak memory beyond the imports, and speed."""
    import numpy as np

    from mhe_jax.config import Config, DataConfig, ModelConfig

    file = "pairs.tsv" if case == "translation" else "text.txt"
    config = Config(
        task=case,  # type: ignore[arg-type]
        model=ModelConfig(vocabulary_size=size),
        data=DataConfig(
            directory=directory,
            train=(file,),
            tokenizer="tokenizer.model",
            cache_directory=f"{directory}/{case}",
        ),
    )
    before, held = megabytes("VmHWM:"), megabytes("RssAnon:")
    tasks.check_sources(config)
    made = tasks.make_tokenizer(config, Path(directory, case, "tokenizer.model"))
    batches = tasks.train_batches(config, made)
    print(batches.describe(), file=sys.stderr)
    with batches.iterate() as iterator:
        next(iterator)
        seconds, processor_seconds = time.time() - started, time.process_time()
        peak = megabytes("VmHWM:") - before
        begin, tokens, places = time.perf_counter(), 0, 0
        for batch in itertools.islice(iterator, steps):
            read = [batch[name] for name in ("tokens", "source", "target") if name in batch]
            tokens += sum(np.count_nonzero(array) for array in read)
            places += sum(array.size for array in read)
        elapsed, computed = time.perf_counter() - begin, time.process_time() - processor_seconds
    return {
        "gigabytes": Path(directory, file).stat().st_size / 1e9,
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor_seconds, 2),
        "memory_megabytes": round(max(peak, megabytes("RssAnon:") - held)),
        "tokens_per_second": round(tokens / elapsed),
        "tokens_per_core_second": round(tokens / computed),
        "full": round(tokens / places, 4),
    }


def megabytes(field: str) -> float:
    """What Linux says of this process; `ru_maxrss` of a child begins with what its parent had."""
    return int(Path("/proc/self/status").read_text().partition(field)[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
