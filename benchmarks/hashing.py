"""How fast words are hashed, on the CPU: words a minute, and tokens a minute of known words.

    python benchmarks/hashing.py                              # data/wikitext-2/train.txt.xz
    python benchmarks/hashing.py --file my.txt --rounds 5

New words are made of the text's own: the first half of one and the second half of another, no two
alike. LSH takes its features from a sentencepiece model of 8,000 pieces that is trained on the
text first. Each number is the median of the rounds, each round with hashes that have seen nothing.

    signatures   128 bits a word        buckets   one of 50,260
    known words  the whole text, split into words that have all been met before, with splitting
    a core       by the seconds that all threads together were computing: what one core that does
                 nothing else gives, however busy the machine is

The last line is one JSON object; the exit status is 1 if a bar is missed: a minute has 20,000,000
MD hashes, 200,000 LSH signatures, 20,000 LSH buckets and 20,000,000 tokens of known words.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from mhe_jax.config import InputError, ModelConfig
from mhe_jax.data import HashedWords, Pieces, open_source, train_tokenizer
from mhe_jax.hashformers.hashes import LSH, MD, split

BUCKETS = 50_260
PIECES = 8000
BARS = {
    "MD signatures": 20e6,
    "MD buckets": 20e6,
    "LSH signatures": 200e3,
    "LSH buckets": 20e3,
    "known words, MD signatures": 20e6,
    "known words, MD buckets": 20e6,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", default="data/wikitext-2/train.txt.xz", help="a text file")
    parser.add_argument("--md_words", type=int, default=1_000_000, help="new words for MD")
    parser.add_argument("--lsh_words", type=int, default=20_000, help="new words for LSH")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        source = open_source((args.file,), "text", option="--file")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [str(source[i]) for i in range(len(source))]
    pieces = Pieces(train_tokenizer(source, PIECES).model)
    words = new_words(lines, max(args.md_words, args.lsh_words))
    for_md, for_lsh = words[: args.md_words], words[: args.lsh_words]
    few = for_lsh[: max(1, len(for_lsh) // 10)]  # buckets take ten times as long

    def known(hashing: str) -> tuple[Callable[[], object], int]:
        hashed = HashedWords(ModelConfig(hashing=hashing, vocabulary_size=BUCKETS + 5))  # type: ignore[arg-type]
        count = sum(map(len, hashed.encode_batch(lines)))
        return lambda: hashed.encode_batch(lines), count

    cases = {
        "MD signatures": (lambda: MD().signatures(for_md), len(for_md)),
        "MD buckets": (lambda: MD().buckets(for_md, BUCKETS), len(for_md)),
        "LSH signatures": (lambda: LSH(pieces).signatures(for_lsh), len(for_lsh)),
        "LSH buckets": (lambda: LSH(pieces).buckets(few, BUCKETS), len(few)),
        "known words, MD signatures": known("md_proj"),
        "known words, MD buckets": known("md_emb"),
    }
    print(f"{'':<28}{'a minute':>14}{'a core':>14}{'bar':>14}{'of':>12}")
    found = {}
    for name, (run, count) in cases.items():
        times = zip(*(times_of(run) for _ in range(args.rounds)), strict=True)
        wall, core = (round(60 * count / statistics.median(seconds)) for seconds in times)
        found[name] = {"a_minute": wall, "a_minute_of_a_core": core}
        print(f"{name:<28}{wall:>14,}{core:>14,}{BARS[name]:>14,.0f}{count:>12,}", flush=True)
    missed = [name for name, bar in BARS.items() if found[name]["a_minute"] < bar]
    about = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "file": args.file}
    print(json.dumps(about | found | {"missed": missed, "passed": not missed}))
    return bool(missed)


def times_of(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call, and those that all threads were computing."""
    begin, computed = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - computed


def new_words(lines: list[str], count: int) -> list[str]:
    """`count` different words that are made of halves of those of the text, and not in it."""
    own = list(dict.fromkeys(word for line in lines for word in split(line) if word.isalnum()))
    generator = np.random.default_rng(0)
    met, found = set(own), {}
    while len(found) < count:
        for i, j in generator.integers(len(own), size=(count, 2)).tolist():
            word = own[i][: -(-len(own[i]) // 2)] + own[j][len(own[j]) // 2 :]
            if word not in met:
                found[word] = None
    return list(found)[:count]


if __name__ == "__main__":
    sys.exit(main())
