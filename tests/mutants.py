"""Bugs that people make, put in one at a time: does the nearest test see each?

    python tests/mutants.py                   all of them, two at once
    python tests/mutants.py -j 1 schedule ema those with one of these words in their names
    python tests/mutants.py --list            only say where each applies

Prints a line for each, and those that no test saw; the exit status is 1 where there are any. All of
it happens in copies of the tree in a temporary directory, after the tests passed there unchanged.

Not mutmut or cosmic-ray: they make thousands of bugs by rule, for a suite of milliseconds, and name
them by file and line; here a test takes seconds, and files move.
"""

import argparse
import ast
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from mutations.attention_mutants import ATTENTION
from mutations.cloud_mutants import CLOUD
from mutations.data_mutants import DATA
from mutations.evaluation_mutants import EVALUATION
from mutations.export_mutants import EXPORT
from mutations.interchange_mutants import INTERCHANGE
from mutations.model_mutants import MODEL
from mutations.more_data_mutants import MORE_DATA
from mutations.more_evaluation_mutants import MORE_EVALUATION
from mutations.mutant import Mutant
from mutations.python_mutants import PYTHON
from mutations.run_mutants import RUN
from mutations.training_mutants import TRAINING
from mutations.watching_mutants import WATCHING

MUTANTS = (
    *ATTENTION,
    *MODEL,
    *DATA,
    *MORE_DATA,
    *TRAINING,
    *RUN,
    *EVALUATION,
    *MORE_EVALUATION,
    *PYTHON,
    *INTERCHANGE,
    *EXPORT,
    *WATCHING,
    *CLOUD,
)
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mhe_jax"


class Place(NamedTuple):
    """A file of the package, and its text before and after a mutant."""

    path: Path
    before: str
    after: str


class Definition(NamedTuple):
    """A function, class or constant: its qualified name, and where it stands in its file."""

    name: str
    path: Path
    node: ast.stmt
    start: int
    stop: int


class Package:
    """The source of the package below `root`, with all that is defined there."""

    def __init__(self, root: Path):
        self.texts = {
            path.relative_to(root): path.read_text(encoding="utf-8")
            for path in sorted((root / PACKAGE).rglob("*.py"))
        }
        self.definitions = [
            definition for path, text in self.texts.items() for definition in defined(path, text)
        ]

    def place(self, mutant: Mutant) -> Place:
        """Where a mutant applies.

        Raises:
          ValueError: nowhere, at several places, or to something that is no other program.
        """
        found = [
            d
            for d in self.definitions
            if d.name == mutant.where and mutant.old in self.texts[d.path][d.start : d.stop]
        ]
        if len(found) != 1:
            files = ", ".join(str(d.path) for d in found) or "none"
            raise ValueError(f"{mutant.where} with {mutant.old!r} must be in one file, not {files}")
        _, path, node, start, stop = found[0]
        text = self.texts[path]
        times = text[start:stop].count(mutant.old)
        if times != 1:
            raise ValueError(f"{mutant.where} in {path} has {mutant.old!r} {times} times")
        after = text[:start] + text[start:stop].replace(mutant.old, mutant.new) + text[stop:]
        became = [
            d.node for d in defined(path, after) if (d.name, d.start) == (mutant.where, start)
        ]
        if [ast.dump(n) for n in became] == [ast.dump(node)]:
            raise ValueError(f"{path}: {mutant.new!r} is the same program as {mutant.old!r}")
        return Place(path, text, after)


def defined(path: Path, text: str) -> Iterator[Definition]:
    """Functions and classes at any depth, and constants of the module.

    >>> text = "A = 1\\nclass B:\\n    def c(self):\\n        pass\\n"
    >>> [d.name for d in defined(Path("x.py"), text)]
    ['A', 'B', 'B.c']
    """
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            name = None
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                name = child.name
            elif isinstance(node, ast.Module) and isinstance(child, ast.Assign | ast.AnnAssign):
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                name = target.id if isinstance(target, ast.Name) else None
            if name is not None and isinstance(child, ast.stmt):
                first = min([child, *getattr(child, "decorator_list", [])], key=lambda n: n.lineno)
                start, stop = starts[first.lineno - 1], starts[child.end_lineno or -1]
                yield Definition(prefix + name, path, child, start, stop)
            if not isinstance(child, ast.expr):
                yield from walk(child, prefix + f"{name}." if name is not None else prefix)

    return walk(ast.parse(text), "")


def pytest_paths(tests: str, root: Path) -> list[str]:
    """`test_a.py::test_b test_c.py` as arguments of pytest, below `root`.

    Raises:
      ValueError: there is not one file of that name, or no such test in it.
    """
    paths = []
    for test in tests.split():
        name, *nodes = test.split("::")
        found = sorted((root / "tests").rglob(name))
        if len(found) != 1:
            raise ValueError(f"{name} must be one file below tests, not {len(found)}")
        text = found[0].read_text(encoding="utf-8")
        for node in nodes:
            function = node.partition("[")[0]
            if not re.search(rf"^\s*(def|class) {function}\b", text, re.MULTILINE):
                raise ValueError(f"{name} has no {function}")
        paths.append("::".join([str(found[0].relative_to(root)), *nodes]))
    return paths


class Runs:
    """Runs of pytest in `jobs` copies of the tree, one in each at a time."""

    def __init__(self, directory: Path, jobs: int, timeout: float):
        self.timeout = timeout
        self.trees: queue.Queue[Path] = queue.Queue()
        self.running: set[subprocess.Popen] = set()
        self.lock, self.over = threading.Lock(), False
        for job in range(jobs):
            tree = directory / str(job)
            copy_tree(tree)
            self.trees.put(tree)

    @contextlib.contextmanager
    def tree(self) -> Iterator[Path]:
        """A copy that nobody else uses meanwhile."""
        tree = self.trees.get()
        try:
            yield tree
        finally:
            self.trees.put(tree)

    def test(self, tests: str, tree: Path) -> tuple[int | None, str]:
        """Exit status of pytest, None when its time is over, and what it printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE"]
        command += ["-m", "not slow"]
        command += ["-p", "no:cacheprovider", *pytest_paths(tests, tree)]
        environment = dict(
            os.environ,
            PYTHONPATH=str(tree),
            # A file that changes twice a second would meet its old bytecode.
            PYTHONDONTWRITEBYTECODE="1",
            # What a mutant leaves as it is need not be compiled again.
            JAX_COMPILATION_CACHE_DIR=str(tree.with_name(f"{tree.name}.programs")),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        with self.lock:
            if self.over:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                cwd=tree,
                env=environment,
                text=True,
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self.running.add(process)
        with process:
            try:
                printed, _ = process.communicate(timeout=self.timeout)
                return process.returncode, printed
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                stop(process)
                with self.lock:
                    self.running.discard(process)

    def end(self) -> None:
        """Stop what runs, and start nothing more."""
        with self.lock:
            self.over = True
            for process in self.running:
                stop(process)


def stop(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_tree(target: Path) -> None:
    """All files of the tree that git would keep."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Verdict(NamedTuple):
    """Who saw a mutant, or None; or the `fault` that kept it from being judged."""

    mutant: Mutant
    seconds: float
    seen_by: str | None
    fault: str | None = None


def judge(mutant: Mutant, place: Place, runs: Runs) -> Verdict:
    """Run the tests of a mutant in a copy that has it."""
    began = time.monotonic()
    with runs.tree() as tree:
        file = tree / place.path
        try:
            file.write_text(place.after, encoding="utf-8")
            status, printed = runs.test(mutant.tests, tree)
        finally:
            file.write_text(place.before, encoding="utf-8")
    seconds = time.monotonic() - began
    if status == 0:
        return Verdict(mutant, seconds, None)
    if status is None:
        return Verdict(mutant, seconds, "the clock")
    if status == 1:
        failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", printed, re.MULTILINE)
        return Verdict(mutant, seconds, failed[1] if failed else "pytest")
    if status < 0:
        return Verdict(mutant, seconds, f"signal {-status}")
    return Verdict(mutant, seconds, None, f"pytest ended with {status}:\n{printed[-2000:]}")


def check_unchanged(mutants: Sequence[Mutant], runs: Runs, pool: ThreadPoolExecutor) -> None:
    """Raises SystemExit unless all their tests pass without a mutant."""

    def check(tests: str) -> str | None:
        with runs.tree() as tree:
            status, printed = runs.test(tests, tree)
        say(f"unchanged  {tests}: {'passes' if status == 0 else 'fails'}")
        return None if status == 0 else f"{tests} fails without a mutant:\n{printed[-4000:]}"

    files = sorted({test for m in mutants for test in m.tests.split()})
    failed = [message for message in pool.map(check, files) if message is not None]
    if failed:
        raise SystemExit("\n".join(failed))


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their names")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each (120)")
    parser.add_argument("--list", action="store_true", help="only say where each applies")
    options = parser.parse_args(arguments)
    package = Package(ROOT)
    mutants = [
        m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)
    ]
    if not mutants:
        parser.error(f"no mutant has {' or '.join(options.words)} in its name")
    places = {m.name: package.place(m) for m in mutants}
    for m in mutants:
        pytest_paths(m.tests, ROOT)
    if options.list:
        for m in mutants:
            say(f"{m.name}: {places[m.name].path}, {m.where}; {m.tests}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    verdicts = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        runs = Runs(Path(directory), options.jobs, options.timeout)
        try:
            check_unchanged(mutants, runs, pool)
            judged = [pool.submit(judge, m, places[m.name], runs) for m in mutants]
            for number, future in enumerate(as_completed(judged), 1):
                v = future.result()
                verdicts.append(v)
                outcome = "not judged" if v.fault else f"killed by {v.seen_by}"
                if v.seen_by is None and not v.fault:
                    outcome = "SURVIVED"
                say(f"{number}/{len(mutants)}  {v.seconds:4.0f} s  {v.mutant.name}: {outcome}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            runs.end()
    for v in verdicts:
        if v.fault:
            say(f"\n{v.mutant.name} was not judged: {v.fault}")
    survivors = [v.mutant for v in verdicts if v.seen_by is None and not v.fault]
    for m in survivors:
        say(f"\n{m.name} survived {m.tests}\n  {m.where}\n  - {m.old}\n  + {m.new}")
    by_clock = sum(v.seen_by == "the clock" for v in verdicts)
    say(f"\n{len(mutants)} mutants, {len(survivors)} survived, {by_clock} killed by the clock")
    return int(any(v.seen_by is None for v in verdicts))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
