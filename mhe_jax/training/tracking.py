"""The log of a run: metrics.jsonl, progress bar or plain lines, and other writers.

Only process 0 writes. A line of metrics.jsonl is a JSON object with `step`, `split` (`train` or
`validation`) and metrics; training metrics are means since the previous line.
"""

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mhe_jax.config import InputError
from mhe_jax.config.files import METRICS, write_whole
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.training.metric_writers import MetricWriter

# What the bar calls the best validation of this process: its loss, or the score where that decides.
BEST = "best validation"


class Tracker:
    """Takes metrics by step. Close it, or use it in a `with`.

    Args:
      workdir: where files go.
      num_steps: of the whole run.
      start_step: the step that training goes on from; what an earlier process logged after it is
        dropped, since those steps run again.
      writers: take all metrics too; closed with it.
      writes: False on all processes but the first.
    """

    def __init__(
        self,
        workdir: str | Path,
        num_steps: int,
        start_step: int = 0,
        *,
        writers: Sequence[MetricWriter] = (),
        writes: bool = True,
    ):
        self.workdir, self.writes = path_of(workdir), writes
        # Without emoji, `train:` stays a word and does not become a tram.
        self._console = Console(stderr=True, emoji=False)
        self._shown: dict[str, float] = {}  # beside the bar
        self._writers = writers
        self._num_steps = num_steps
        self._file = self._progress = None
        self._closing = contextlib.ExitStack()  # closes all, whatever one of them raises
        try:
            self._open(start_step)
        except BaseException as error:
            self.__exit__(type(error), error)
            raise

    def _open(self, start_step: int) -> None:
        for writer in reversed(self._writers):
            self._closing.callback(writer.close)
        if not self.writes:
            return
        truncate(self.workdir / METRICS, start_step)
        self._file = _open_log(self.workdir / METRICS)
        self._closing.callback(self._file.close)
        if self._console.is_terminal:
            total = self._num_steps
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(table_column=Column(min_width=2 * len(str(total)) + 1)),
                # On a narrow terminal the bar gives way first, then the last of the metrics.
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(min_width=7)),
                TextColumn("left"),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "",
                total=total,
                completed=start_step,
                metrics="compiling" if start_step < total else "",
            )
            self._closing.callback(self._progress.stop)
            self._progress.start()

    def advance(self, step: int) -> None:
        """Shows that `step` updates are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, metrics=self._fitting())

    def doing(self, what: str) -> None:
        """Shows `what`, such as compiling, until the next step is done."""
        if self._progress is not None:
            self._progress.update(self._task, metrics=what)

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes metrics down and shows them."""
        if not self.writes:
            return
        assert self._file is not None
        line = {"step": step, "split": split, **{k: _rounded(v) for k, v in metrics.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.log(step, split, metrics)
        text = _readable(metrics)
        if self._progress is None:
            self.note(f"step {step}/{self._num_steps} {split}: {text}")
            return
        if split == "train":
            shown = {k: metrics[k] for k in ("loss", "tokens_per_second") if k in metrics}
            self._shown = shown | {k: v for k, v in self._shown.items() if k in (BEST, "bleu")}
        else:
            self.note(f"step {step} {split}: {text}")
            better, name = (max, "score") if "score" in metrics else (min, "loss")
            if math.isfinite(value := metrics.get(name, math.nan)):
                self._shown[BEST] = better(value, self._shown.get(BEST, value))
            if "bleu" in metrics:
                self._shown["bleu"] = metrics["bleu"]
        self._progress.update(self._task, metrics=self._fitting())

    def _fitting(self) -> str:
        """The metrics beside the bar, as many as there is room for."""
        others = len(f"step {self._num_steps}/{self._num_steps}   0:00:00 left")
        names = list(self._shown)
        while names and len(_readable(self._shown, names)) > self._console.width - others:
            names.pop()
        return _readable(self._shown, names)

    def upload(self) -> None:
        """Uploads the log before a checkpoint: that needs the log of all steps up to it.

        Raises:
          InputError: it cannot be written.
        """
        if self._file is not None and isinstance(self.workdir, Bucket):
            write_whole(self.workdir / METRICS, self._file.getvalue())

    def note(self, line: str) -> None:
        """Shows one line for people."""
        if self.writes:
            if self._progress is not None:
                self._progress.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was, and the log whole."""
        with contextlib.suppress(InputError):  # why the run ended comes first
            self.upload()
        self._closing.close()
        self._progress = None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: Any) -> None:
        with second_to(error):
            self.close()


@contextlib.contextmanager
def second_to(error: BaseException | None) -> Iterator[None]:
    """Only notes what the block raises if `error` is on its way, which comes first."""
    try:
        yield
    except Exception as other:
        if error is None:
            raise
        with contextlib.suppress(OSError):
            words = " ".join(str(other).split())
            print(f"note: {type(other).__name__}: {words}", file=sys.stderr, flush=True)


def spinner(text: str) -> contextlib.AbstractContextManager:
    """Shows on a terminal that something is going on, until the block ends."""
    console = Console(stderr=True, emoji=False)
    return console.status(escape(text)) if console.is_terminal else contextlib.nullcontext()


def _open_log(path: Path) -> Any:
    """The log to append to; for a bucket, which takes only whole files, in memory. See `upload`."""
    if not isinstance(path, Bucket):
        return path.open("a", encoding="utf-8")
    log = io.StringIO(path.read_text() if path.exists() else "")
    log.seek(0, io.SEEK_END)
    return log


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; an invalid one, such as a half-written last one, is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            # A number of thousands of digits gives a ValueError of another kind.
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and "split" in line and type(line.get("step")) is int:
                    yield line


def truncate(path: Path, step: int) -> None:
    """Drops the lines after `step`; whole or not at all."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read(path) if line["step"] <= step]
    write_whole(path, "".join(kept))


def _rounded(value: float) -> float:
    if isinstance(value, float) and math.isfinite(value) and value:
        return float(f"{value:.7g}")
    return value


def _readable(metrics: Mapping[str, float], names: Iterable[str] | None = None) -> str:
    units = {"tokens_per_second": "tokens/s"}
    shown = []
    for name in metrics if names is None else names:
        value = metrics[name]
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        shown.append(f"{units.get(name, name)} {number}")
    return ", ".join(shown)
