"""Cases that are run once: a file has a line for each that has begun, and for each that is done."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

# A run of a case gives what its line says; one that is wrong says so under "wrong".
Cases = dict[str, Callable[[], dict]]


class Log:
    """The lines: a header, then each case as it begins and as it is done."""

    def __init__(self, path: Path, about: dict):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A process that was killed may leave a part of a line.
        whole, _, rest = text.rpartition("\n")
        if rest:
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        self.rows = [json.loads(line) for line in whole.splitlines()]
        if not self.rows:
            self.append({"header": about})
        self.header = self.rows[0]["header"]

    def append(self, row: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def differs(self, about: dict) -> bool:
        same = "device", "versions", "smoke"
        return any(self.header.get(name) != about[name] for name in same)

    def done(self) -> list[dict]:
        return [row for row in self.rows if "seconds" in row]

    def failed(self) -> list[str]:
        return [f"{row['case']}: {why}" for row in self.done() for why in row.get("wrong", [])]


def go_on(cases: Cases, log: Log) -> None:
    """Runs the cases that are not done; one in which the process ended twice is left."""
    done = {row["case"] for row in log.done()}
    begun = Counter(row["begun"] for row in log.rows if "begun" in row)
    for name in (name for name in cases if name not in done):
        if begun[name] > 1:
            log.append({"case": name, "seconds": 0.0, "wrong": ["the process ended in it twice"]})
            continue
        begin = time.monotonic()
        log.append({"begun": name})
        try:
            found = cases[name]()
        except Exception as error:  # any library may fail in its own way
            if device_is_lost():
                raise
            found = {"wrong": [reason_of(error)]}
        seconds = time.monotonic() - begin
        log.append({"case": name, "seconds": seconds, **found})
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)


def device_is_lost() -> bool:
    """Whether nothing runs any more, as after an access to memory that is not there."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return True
    return False


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
