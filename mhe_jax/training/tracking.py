"""The log of a run: metrics.jsonl, progress bar or plain lines, TensorBoard, a picture.

Only process 0 writes. A line of metrics.jsonl is a JSON object with `step`, `split` (`train` or
`validation`) and metrics; training metrics are means since the line before.
"""

import contextlib
import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.files import METRICS, publish, write_whole
from mhe_jax.config.places import Bucket, path_of

PICTURE = "learning_curve.png"
# What the bar calls the lowest validation loss of this process.
BEST = "best validation"


class Tracker:
    """Takes metrics by step. Close it, or use it in a `with`.

    Args:
      workdir: where files go.
      num_steps: of the whole run.
      loss_unit: for the picture.
      start_step: the step that training goes on from; what an earlier process logged after it is
        dropped, since it comes again.
      tensorboard: also write event files.
      writes: False on all processes but the first.
    """

    def __init__(
        self,
        workdir: str | Path,
        num_steps: int,
        start_step: int = 0,
        *,
        loss_unit: str,
        tensorboard: bool = False,
        writes: bool = True,
    ):
        self.workdir, self.loss_unit, self.writes = path_of(workdir), loss_unit, writes
        # Without emoji `train:` stays a word, and is no tram.
        self._console = Console(stderr=True, emoji=False)
        self._shown: dict[str, float] = {}  # beside the bar
        self._events = self._file = self._progress = None
        if not writes:
            return
        if tensorboard:
            self._events = _event_writer(self.workdir / "tensorboard", start_step)
        truncate(self.workdir / METRICS, start_step)
        self._file = _open_log(self.workdir / METRICS)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(table_column=Column(min_width=2 * len(str(num_steps)) + 1)),
                # Of a narrow terminal the bar gives way first, then the metrics.
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(min_width=7)),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "", total=num_steps, completed=start_step, metrics="compiling"
            )
            self._progress.start()
        self._num_steps = num_steps

    def advance(self, step: int) -> None:
        """`step` updates are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, metrics=_readable(self._shown))

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Write metrics down and show them."""
        if not self.writes:
            return
        assert self._file is not None
        line = {"step": step, "split": split, **{k: _rounded(v) for k, v in metrics.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(f"{split}/{name}", value, step)
        text = _readable(metrics)
        if self._progress is None:
            self.note(f"step {step}/{self._num_steps} {split}: {text}")
            return
        if split == "train":
            shown = {k: metrics[k] for k in ("loss", "tokens_per_second") if k in metrics}
            self._shown = shown | {k: v for k, v in self._shown.items() if k == BEST}
        else:
            self.note(f"step {step} {split}: {text}")
            loss = metrics.get("loss", math.nan)
            if loss < self._shown.get(BEST, math.inf):
                self._shown[BEST] = loss
        self._progress.update(self._task, metrics=_readable(self._shown))

    def upload(self) -> None:
        """Before a checkpoint: the log of all steps until it must be there when it is.

        Raises:
          InputError: it cannot be written.
        """
        if self._file is not None and isinstance(self.workdir, Bucket):
            write_whole(self.workdir / METRICS, self._file.getvalue())

    def note(self, line: str) -> None:
        """One line for people."""
        if self.writes:
            if self._progress is not None:
                self._progress.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def draw(self) -> None:
        """The learning curve of the whole run, from metrics.jsonl."""
        self.upload()
        if self.writes:
            self.note(learning_curve(self.workdir, self.loss_unit))

    def close(self) -> None:
        """Leave the terminal as it was, and the log whole."""
        with contextlib.suppress(InputError):  # why the run ended comes first
            self.upload()
        for part in (self._progress and self._progress.stop, self._file and self._file.close):
            if part:
                part()
        if self._events is not None:
            self._events.close()
        self._progress = None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _open_log(path: Path) -> Any:
    """To append to; of a bucket, which takes only whole files, in memory. See `upload`."""
    if not isinstance(path, Bucket):
        return path.open("a", encoding="utf-8")
    log = io.StringIO(path.read_text() if path.exists() else "")
    log.seek(0, io.SEEK_END)
    return log


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; what is none, such as a half-written last one, is left out."""
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
    """Drop what is after `step`; whole or not at all."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read(path) if line["step"] <= step]
    write_whole(path, "".join(kept))


def learning_curve(workdir: Path, loss_unit: str) -> str:
    """Draw training and validation loss by step; returns the line to tell people."""
    try:
        figure = new_figure(figsize=(7, 4.5))
    except InputError as error:
        return f"no {PICTURE}: {error}"
    axes = figure.subplots()
    lines = list(read(workdir / METRICS))
    for split, style in (("train", "-"), ("validation", "o-")):
        of_split = [line for line in lines if line["split"] == split and "loss" in line]
        points = [(line["step"], line["loss"]) for line in of_split]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=split, markersize=4)
            axes.legend()
    axes.set(xlabel="step", ylabel=f"loss ({loss_unit})", title=workdir.name)
    axes.grid(alpha=0.3)
    try:
        with publish(workdir / PICTURE) as draft:
            figure.savefig(draft, format="png", dpi=120)
    except InputError as error:  # the run is whole without it
        return f"no {PICTURE}: {error}"
    return f"learning curve: {workdir / PICTURE}"


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure, laid out so that nothing overlaps.

    Raises:
      InputError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("it needs matplotlib", "report") from None
    return Figure(layout="constrained", **options)


def check_tensorboard() -> None:
    """Raises InputError where what writes event files is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise not_installed("train.tensorboard=True needs tensorboardX", "report")


def _event_writer(directory: Path, start_step: int) -> Any:
    check_tensorboard()
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(directory), purge_step=start_step + 1)


def _rounded(value: float) -> float:
    if isinstance(value, float) and math.isfinite(value) and value:
        return float(f"{value:.7g}")
    return value


def _readable(metrics: Mapping[str, float]) -> str:
    names = {"tokens_per_second": "tokens/s"}
    shown = []
    for name, value in metrics.items():
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        shown.append(f"{names.get(name, name)} {number}")
    return ", ".join(shown)
