"""How fast and how lean the input is: text of 1 GB, as lines and as Parquet, on the CPU.

    python experiments/input/input.py                      # makes the file, measures, deletes it
    python experiments/input/input.py --gigabytes 0.1 --out input.json

Each measurement is a process of its own, timed from its start, imports included:

    cold        nothing is cached: the file is checked and indexed; the tokenizer is given
    warm        the index is there
    memory      peak over the batches that follow, less what the process held after its imports
    tokens/s    of the batches that follow the first, read ahead as in training; without padding
    per core    tokens of those batches by the seconds that all threads together were computing
    full        share of the batches that is not padding

The exit status is 1 if a bar is missed: 90 s cold, 10 s warm, 300 MB. Translation (pairs in a .tsv
file of a tenth of the size) and packed rows (of text, a tenth of the size too) have no bar: they
tokenize everything once, which the cold number shows. Parquet has the same lines as one column.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mhe_jax import tasks

BARS = {"cold_seconds": 90.0, "warm_seconds": 10.0, "memory_megabytes": 300.0}
BARRED = ("mlm", "lm", "lm, Parquet")
VOCABULARY_SIZE = 8000
BLOCK_BYTES = 16 << 20
COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda r: r["case"],
    "GB": lambda r: f"{r['bytes'] / 1e9:.2f}",
    "cold s": lambda r: f"{r['cold_seconds']:.1f}",
    "warm s": lambda r: f"{r['warm_seconds']:.1f}",
    "memory MB": lambda r: f"{r['memory_megabytes']:.0f}",
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "tokens/s per core": lambda r: f"{r['tokens_per_core_second']:,.0f}",
    "full": lambda r: f"{r['full']:.1%}",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the made file")
    parser.add_argument("--steps", type=int, default=2000, help="batches after the first")
    parser.add_argument("--out", type=Path, help="a JSON file of all numbers")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what a process of its own does
    args = parser.parse_args(arguments)
    if args.measure:
        print(json.dumps(measure(**json.loads(args.measure))))
        return 0
    from experiments import reports  # what is measured does not import it

    with tempfile.TemporaryDirectory() as name:
        rows = [row(Path(name), *each, args.steps) for each in cases(Path(name), args.gigabytes)]
    missed = [
        f"{found['case']}: {name} {found[name]:.1f} and not {bar:g}"
        for found in rows
        if found["case"] in BARRED
        for name, bar in BARS.items()
        if found[name] > bar
    ]
    about = reports.header(__file__, "float32", arguments)
    reports.save(args.out, {"header": about, "results": rows, "bars": BARS, "missed": missed})
    print(*reports.header_lines(about), "", reports.table(COLUMNS, rows), "", *missed, sep="\n")
    return bool(missed)


def cases(directory: Path, gigabytes: float) -> list[tuple[str, bool, Path]]:
    """(task, packed, file), and the tokenizer beside them."""
    size = int(gigabytes * 1e9)
    text = make_text(directory / "text.txt", size)
    less = make_text(directory / "less.txt", size // 10)
    pairs = make_text(directory / "pairs.tsv", size // 10, columns=2)
    column = make_column(text, directory / "text.parquet")
    make_tokenizer(text, directory / "tokenizer.model")
    of_text = [("mlm", False, text), ("mlm", True, less), ("lm", False, text), ("lm", True, less)]
    of_pairs = [("translation", packed, pairs) for packed in (False, True)]
    return [*of_text, ("lm", False, column), *of_pairs]


def make_text(path: Path, size: int, columns: int = 1) -> Path:
    """`size` bytes of lines of made-up words with a natural spread; the same every time."""
    import numpy as np

    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = [
        "".join(letters[np.minimum(generator.geometric(0.12, n) - 1, 25)])
        for n in generator.integers(2, 11, 20_000)
    ]
    lines, length = [], 0
    while length < min(size, BLOCK_BYTES):
        drawn = generator.zipf(1.3, int(generator.integers(5, 30)) * columns) % len(words)
        part = len(drawn) // columns
        texts = [" ".join(words[i] for i in drawn[c * part :][:part]) for c in range(columns)]
        lines.append("\t".join(texts) + "\n")
        length += len(lines[-1])
    block = "".join(lines).encode()
    with path.open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
    return path


def make_column(text: Path, path: Path) -> Path:
    """The lines of a text as a column, in row groups of a common size."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema({"text": pyarrow.string()})
    with text.open() as lines, parquet.ParquetWriter(path, schema) as out:
        while group := [line.rstrip("\n") for line in itertools.islice(lines, 100_000)]:
            out.write_table(pyarrow.table({"text": group}))
    return path


def make_tokenizer(text: Path, path: Path) -> None:
    """Trained on the beginning of the text: here it is given, and its training not measured."""
    from mhe_jax.data import Text, train_tokenizer

    with text.open("rb") as file:
        lines = file.read(4 << 20).decode(errors="ignore").splitlines()
    items = [(line,) for line in lines]
    train_tokenizer([(Text.of(str(text), items), 1.0)], VOCABULARY_SIZE).save(path)


def row(directory: Path, task: str, packed: bool, text: Path, steps: int) -> dict:
    """A case, cold and then warm."""
    case = task + ", packed" * packed + ", Parquet" * (text.suffix == ".parquet")
    print(f"{case} ...", file=sys.stderr)
    asked = {"task": task, "packing": packed, "text": str(text), "steps": steps}
    asked |= {"tokenizer": str(directory / "tokenizer.model"), "cache": str(directory / case)}
    found = []
    for _ in range(2):
        given = json.dumps(asked | {"started": time.time()})
        command = [sys.executable, __file__, "--measure", given]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    return {
        "case": case,
        "bytes": text.stat().st_size,
        "cold_seconds": cold["seconds"],
        "warm_seconds": warm["seconds"],
        "memory_megabytes": max(cold["megabytes"], warm["megabytes"]),
        **{name: warm[name] for name in ("tokens_per_second", "tokens_per_core_second", "full")},
    }


def measure(task, packing, text, steps, tokenizer, cache, started) -> dict:
    """Seconds to the first batch, peak memory beyond the imports, and speed."""
    import numpy as np

    from mhe_jax.config import Config, DataConfig, ModelConfig

    config = Config(
        task=task,
        model=ModelConfig(vocabulary_size=VOCABULARY_SIZE),
        data=DataConfig(train=(text,), tokenizer=tokenizer, cache_directory=cache, packing=packing),
    )
    before = peak_megabytes()
    tasks.check_sources(config)
    made = tasks.make_tokenizer(config, Path(cache) / "run" / "tokenizer.model")
    batches = tasks.train_batches(config, made)
    print(batches.describe(), file=sys.stderr)
    with batches.iterate() as iterator:
        next(iterator)
        seconds = time.time() - started
        begin, computed, tokens, places = time.perf_counter(), time.process_time(), 0, 0
        for _ in range(steps):
            batch = next(iterator)
            read = [batch[name] for name in ("tokens", "source", "target") if name in batch]
            tokens += sum(np.count_nonzero(array) for array in read)
            places += sum(array.size for array in read)
        elapsed, computed = time.perf_counter() - begin, time.process_time() - computed
    return {
        "seconds": round(seconds, 2),
        "megabytes": round(peak_megabytes() - before),
        "tokens_per_second": round(tokens / elapsed),
        "tokens_per_core_second": round(tokens / computed),
        "full": round(tokens / places, 4),
    }


def peak_megabytes() -> float:
    """The most memory that this process has held so far, on Linux.

    `ru_maxrss` of a child begins with what its parent had.
    """
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
