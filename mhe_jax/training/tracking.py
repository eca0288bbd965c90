"""The log of a run: metrics.jsonl, progress bar or plain lines, and other writers.

Only process 0 writes. A line of metrics.jsonl is a JSON object with `step`, `split` (`train` or
`validation`) and metrics; training metrics are means since the previous line.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mhe_jax.config.files import METRICS, write_whole
from mhe_jax.config.places import Bucket, path_of
from mhe_jax.training.metric_writers import MetricWriter


class Tracker:
    """Takes metrics by step, in a `with`.

    What an earlier process logged after `start_step` is dropped, since those steps run again.
    `writers` take all metrics too, and are closed at the end. Without `writes`, as in all processes
    but the first, nothing is written or shown.
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
        self.workdir, self.writes, self._num_steps = path_of(workdir), writes, num_steps
        self._file = self._progress = None
        self._shown = ""  # beside the bar
        self._writers = writers
        self._closing = contextlib.ExitStack()  # closes all, whatever one of them raises
        for writer in reversed(writers):
            self._closing.callback(writer.close)
        if not writes:
            return
        truncate(self.workdir / METRICS, start_step)
        self._file = _open_log(self.workdir / METRICS)
        self._closing.callback(self._file.close)
        # Without emoji, `train:` stays a word and does not become a tram.
        console = Console(stderr=True, emoji=False)
        if console.is_terminal:
            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task(
                "", total=num_steps, completed=start_step, metrics=""
            )
            self._closing.enter_context(self._progress)

    def advance(self, step: int) -> None:
        """Shows that `step` updates are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, metrics=self._shown)

    def doing(self, what: str) -> None:
        """Shows `what`, such as compiling, until the next step is done."""
        if self._progress is not None:
            self._progress.update(self._task, metrics=what)

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes metrics down and shows them."""
        if self._file is None:
            return
        rounded = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, "split": split, **rounded}) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.log(step, split, metrics)
        if self._progress is not None and split == "train":
            shown = ("loss", "tokens_per_second")
            self._shown = _readable({k: metrics[k] for k in shown if k in metrics})
            self._progress.update(self._task, metrics=self._shown)
        else:
            self.note(f"step {step}/{self._num_steps} {split}: {_readable(metrics)}")

    def upload(self) -> None:
        """Uploads the log before a checkpoint: that needs the log of all steps up to it."""
        if self._file is not None and isinstance(self.workdir, Bucket):
            write_whole(self.workdir / METRICS, self._file.getvalue())

    def note(self, line: str) -> None:
        """Shows one line for people; training goes on where nobody can read it any more."""
        if not self.writes:
            return
        with contextlib.suppress(OSError):
            if self._progress is not None:
                self._progress.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: Any) -> None:
        # Why a run ends comes first.
        with contextlib.suppress(Exception) if error else contextlib.nullcontext(), self._closing:
            self.upload()


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
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and "split" in line and type(line.get("step")) is int:
                    yield line


def truncate(path: Path, step: int) -> None:
    """Drops the lines after `step`; whole or not at all."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in read(path) if line["step"] <= step]
        write_whole(path, "".join(kept))


def _readable(metrics: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )
