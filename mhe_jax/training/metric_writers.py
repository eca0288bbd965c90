"""Where metrics optionally go besides metrics.jsonl: TensorBoard, and Weights & Biases."""

import importlib.util
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from mhe_jax.config import Config, InputError, not_installed
from mhe_jax.config.fields import to_dict
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import scheme_of

# Field of `train`: the library it needs, and the extra that has it.
NEEDS = {"tensorboard": ("tensorboardX", "report"), "wandb": ("wandb", "wandb")}


def check_writers(config: Config) -> None:
    """Raises InputError if a writer that is asked for has no library or no local files."""
    for field, (library, extra) in NEEDS.items():
        if not getattr(config.train, field):
            continue
        if importlib.util.find_spec(library) is None:
            raise not_installed(f"train.{field}=True needs {library}", extra)
        if scheme_of(config.workdir) is not None:
            raise InputError(f"train.{field}=True: takes a local --workdir, not {config.workdir}")


def make_writers(config: Config, start_step: int) -> "list[MetricWriter]":
    """The writers that `config.train` asks for; training resumes from `start_step`."""
    # Weights & Biases first: it may refuse.
    writers: list[MetricWriter] = [WeightsAndBiases(config)] if config.train.wandb else []
    if config.train.tensorboard:
        writers.append(TensorBoard(Path(config.workdir), start_step))
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

    def __init__(self, config: Config):
        import wandb

        workdir = Path(config.workdir)
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
                config=to_dict(config),
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
