"""Whether a working directory that has a run in it can go on under a new config."""

import math
import re
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.data import TOKENIZER
from mhe_jax.fields import leaves
from mhe_jax.loading import load_json, to_dict

FILE = "config.json"

# What may differ: how long and how often, how the same numbers are computed and where things lie,
# and the numbers of the optimizer. All else changes what is learned, or the shape of the state.
MAY_CHANGE = re.compile(
    r"workdir|mesh\..*|evaluation\..*"
    r"|train\.(?!seed|init_from).*"
    r"|data\.(directory|cache_directory|test)"
    r"|model\.remat|model\.kronecker\.apply|model\.attention(_by_role\.\w+)?\.(form|engine)"
    r"|optimizer\.(?!name|ema_decay).*"
)


def holds_run(config: Config) -> bool:
    """Whether the run in `config.workdir` goes on: what another run gave it, it has."""
    return (Path(config.workdir) / FILE).exists()


def changed_fields(config: Config) -> list[str]:
    """What differs from the run in `config.workdir`, each as `name: old -> new`; [] without a run.

    Raises:
      InputError: a difference under which the run cannot go on; nothing has been touched.
    """
    if not holds_run(config):
        return []
    old, new = leaves(to_dict(load_json(Path(config.workdir) / FILE))), leaves(to_dict(config))
    changed = []
    for name, value in new.items():
        if old[name] == value:
            continue
        # An average can change its decay, but not begin or end.
        ema = name == "optimizer.ema_decay" and None not in (old[name], value)
        if not ema and not MAY_CHANGE.fullmatch(name):
            raise InputError(
                f"{config.workdir} holds a run with {name}={old[name]!r}, not {value!r}: "
                "go on with the old value, or give another --workdir"
            )
        changed.append(f"{name}: {old[name]!r} -> {value!r}")
    return changed


def check_files(config: Config) -> None:
    """Raises InputError where a run has lost its tokenizer: another would not mean the same."""
    tokenizer = Path(config.workdir) / TOKENIZER
    if holds_run(config) and not tokenizer.exists() and config.model.has_pieces:
        raise InputError(f"{tokenizer}: no such file")


def drop_tokenizer_without_run(config: Config) -> None:
    """A start that ended before it was a run may have wanted another tokenizer than this one."""
    workdir = Path(config.workdir)
    if not holds_run(config) and not any(workdir.glob("checkpoints/[0-9]*")):
        (workdir / TOKENIZER).unlink(missing_ok=True)


def check_text(config: Config, meta: dict[str, Any], steps_per_epoch: float) -> None:
    """Raises InputError where a checkpoint is of another text; older ones do not say."""
    old = meta.get("steps_per_epoch", steps_per_epoch)
    if not math.isclose(old, steps_per_epoch, rel_tol=1e-6):
        raise InputError(
            f"data.train has changed: an epoch is {steps_per_epoch:,.2f} steps, and was "
            f"{old:,.2f} for the run in {config.workdir}: go on with the old text, or give "
            "another --workdir"
        )


def check_length(config: Config, done: int) -> None:
    """A run can be made longer; `done` steps cannot be taken back."""
    if done > config.train.num_steps:
        raise InputError(
            f"train.num_steps is {config.train.num_steps}: {config.workdir} has done {done} already"
        )
