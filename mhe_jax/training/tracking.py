"""The log of a run: metrics.jsonl, a progress bar or plain lines, TensorBoard, Weights & Biases.

Only process 0 writes. A line of metrics.jsonl is a JSON object with `step`, `split` (`train` or
`validation`) and metrics; training metrics are means since the previous line.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mhe_jax.config import InputError, TrainConfig, not_installed
from mhe_jax.config.files import METRICS, write_whole
from mhe_jax.config.places import Bucket, path_of


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
        writers: "Sequence[MetricWriter]" = (),
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
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
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


# Field of `train`: the library it needs, and the extra that has it.
NEEDS = {"tensorboard": ("tensorboardX", "report"), "wandb": ("wandb", "wandb")}


def check_writers(train: TrainConfig, workdir: Path) -> None:
    """Raises InputError if a writer that is asked for has no library or no local files."""
    for field, (library, extra) in NEEDS.items():
        if not getattr(train, field):
            continue
        if importlib.util.find_spec(library) is None:
            raise not_installed(f"train.{field}=True needs {library}", extra)
        if isinstance(workdir, Bucket):
            raise InputError(f"train.{field}=True: takes a local --workdir, not {workdir}")


def make_writers(
    train: TrainConfig, workdir: Path, start_step: int, config: dict[str, Any]
) -> "list[MetricWriter]":
    """The writers that `train` asks for, of a run with this config that goes on after a step."""
    # Weights & Biases first: it may refuse.
    writers: list[MetricWriter] = [WeightsAndBiases(workdir, config)] if train.wandb else []
    if train.tensorboard:
        writers.append(TensorBoard(workdir, start_step))
    return writers


class TensorBoard:
    """Event files in WORKDIR/tensorboard; steps after `start_step` are written again."""

    def __init__(self, workdir: Path, start_step: int):
        from tensorboardX import SummaryWriter

        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)
        self.close = self._events.close

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(f"{split}/{name}", value, step)


class WeightsAndBiases:
    """A run of Weights & Biases, the same one whenever training resumes.

    Its id lies in WORKDIR/wandb/run_id, with its local files. The variables of the library say
    where it goes; WANDB_PROJECT is `mhe_jax` if it is not set.
    """

    def __init__(self, workdir: Path, config: dict[str, Any]):
        import wandb

        file = workdir / "wandb" / "run_id"
        if not file.exists():
            write_whole(file, uuid.uuid4().hex[:10])
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "mhe_jax",
                name=workdir.name,
                id=file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(workdir),
                config=config,
                allow_val_change=True,  # the number of steps, for example
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise InputError(f"train.wandb=True: {' '.join(str(error).split())}") from error
        # The library's own step count never goes back, but a run's does after a crash.
        self._run.define_metric("*", step_metric="step")
        self.close = self._run.finish

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"{split}/{name}": x for name, x in metrics.items()}})


MetricWriter = TensorBoard | WeightsAndBiases
