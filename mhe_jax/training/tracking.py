"""The log of a run: metrics.jsonl, lines for people, TensorBoard, Weights & Biases.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError, TrainConfig, not_installed
from mhe_jax.config.files import METRICS, write_whole
from mhe_jax.config.places import Bucket, path_of


class Tracker:
    """Takes metrics by step, in a `with`, and drops those that were logged after `start_step`.

    `writers` take all metrics too, and are closed at the end. Without `writes`, as in all processes
    but the first, nothing is written or shown.
    """

    def __init__(
        self,
        workdir: str | Path,
        num_steps: int,
        start_step: int = 0,
        *,
        writers: "Sequence[Writer]" = (),
        writes: bool = True,
    ):
        self.workdir, self.writes, self._num_steps = path_of(workdir), writes, num_steps
        self._file, self._writers = None, writers
        self._closing = contextlib.ExitStack()  # closes all, whatever one of them raises
        for _, close in reversed(writers):
            self._closing.callback(close)
        if not writes:
            return
        path = self.workdir / METRICS
        if path.exists():
            kept = [json.dumps(line) for line in read(path) if line["step"] <= start_step]
            write_whole(path, "".join(f"{line}\n" for line in kept))
        self._file = _open_log(path)
        self._closing.callback(self._file.close)

    def log(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes metrics down and shows them."""
        if self._file is None:
            return
        rounded = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, "split": split, **rounded}) + "\n")
        self._file.flush()
        for log, _ in self._writers:
            log(step, split, metrics)
        shown = ", ".join(
            f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"
            for name, value in metrics.items()
        )
        self.note(f"step {step}/{self._num_steps} {split}: {shown}")

    def upload(self) -> None:
        """Uploads the log before a checkpoint: that needs the log of all steps up to it."""
        if self._file is not None and isinstance(self.workdir, Bucket):
            write_whole(self.workdir / METRICS, self._file.getvalue())

    def note(self, line: str) -> None:
        """Shows one line for people; training goes on where nobody can read it any more."""
        if self.writes:
            with contextlib.suppress(OSError):
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


# Field of `train`: the library it needs, and the extra that has it.
NEEDS = {"tensorboard": ("tensorboardX", "report"), "wandb": ("wandb", "wandb")}


def check_writers(train: TrainConfig, workdir: Path) -> None:
    """Raises InputError if a writer that is asked for has no library or no local files."""
    for field, (library, extra) in NEEDS.items():
        asked = getattr(train, field)
        if asked and importlib.util.find_spec(library) is None:
            raise not_installed(f"train.{field}=True needs {library}", extra)
        if asked and isinstance(workdir, Bucket):
            raise InputError(f"train.{field}=True: takes a local --workdir, not {workdir}")


# Takes step, split and metrics; and what to call at the end.
Writer = tuple[Callable[[int, str, Mapping[str, float]], None], Callable[[], Any]]


def tensorboard(workdir: Path, start_step: int) -> Writer:
    """Event files in WORKDIR/tensorboard; steps after `start_step` are written again."""
    from tensorboardX import SummaryWriter

    events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def log(step: int, split: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            events.add_scalar(f"{split}/{name}", value, step)

    return log, events.close


def weights_and_biases(workdir: Path, config: dict[str, Any]) -> Writer:
    """A run of Weights & Biases, and the same at a resume: its id lies in WORKDIR/wandb/run_id."""
    import wandb

    file = workdir / "wandb" / "run_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:10])
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "mhe_jax",
        name=workdir.name,
        id=file.read_text(),
        dir=str(workdir),
        config=config,
        resume="allow",
        allow_val_change=True,  # the number of steps, for example
    )
    # The library's own step count never goes back, but a run's does after a crash.
    run.define_metric("*", step_metric="step")

    def log(step: int, split: str, metrics: Mapping[str, float]) -> None:
        run.log({"step": step, **{f"{split}/{name}": x for name, x in metrics.items()}})

    return log, run.finish


def make_writers(
    train: TrainConfig, workdir: Path, start_step: int, config: dict[str, Any]
) -> list[Writer]:
    """The writers that `train` asks for, of a run with this config that goes on after a step."""
    wandb = [weights_and_biases(workdir, config)] if train.wandb else []
    return wandb + ([tensorboard(workdir, start_step)] if train.tensorboard else [])
