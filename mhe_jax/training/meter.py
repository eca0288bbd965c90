"""Metrics of the steps, read without making the device wait, their speed, and the result."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax.attention import choices
from mhe_jax.config import Config
from mhe_jax.model import count_parameters
from mhe_jax.tasks.sums import ratios
from mhe_jax.training.checkpoint import Meta
from mhe_jax.training.tracking import Tracker

# FLOP/s of a device in bfloat16 without sparsity, as its maker states.
PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_of(mesh: Mesh) -> float | None:
    """FLOP/s of all devices together, if known."""
    device = mesh.devices.flat[0].device_kind
    return PEAK[device] * mesh.size if device in PEAK else None


class NotFinite(ArithmeticError):
    """A number of a step that must be finite is not."""

    def __init__(self, step: int, what: str, skipped: int = 0):
        before = f", and {skipped} before it were left out" if skipped else ""
        super().__init__(f"step {step}: the {what} is not finite{before}")


class Meter:
    """Reads the metrics of step n - 1 while step n runs, and adds them up between log lines.

    A line comes after every `log_every` steps, and after the `last` one of the run. At most `skip`
    updates that are not finite are left out; `flops` are of a step with a batch of these shapes,
    `peak` of all devices a second. `totals` outlives the process with the checkpoints: `tokens`
    that were trained on (not padding), `seconds` in all, `stepping_seconds` without compilation,
    validation and checkpoints, and `window`, the sums since the last log line.
    """

    def __init__(
        self,
        tracker: Tracker,
        log_every: int,
        last: int,
        totals: dict[str, Any],
        *,
        skip: int = 0,
        flops: Callable[[dict[str, tuple[int, ...]]], float] = lambda shapes: 0.0,
        peak: float | None = None,
    ):
        self.tracker, self.totals, self.skip = tracker, totals, skip
        self._log_every, self._last, self._flops, self._peak = log_every, last, flops, peak
        new = dict.fromkeys(("tokens", "seconds", "stepping_seconds"), 0.0)
        totals.update({**new, "skipped": 0, "started": time.time(), "window": {}, **totals})
        self._pending: tuple[int, Any, float] | None = None
        self._seen: dict[Any, float] = {}  # FLOPs of the shapes that are compiled
        # Since the last line of this process, whose `totals["window"]` may be older.
        self._of_window = dict.fromkeys(("seconds", "tokens", "flops"), 0.0)
        self._step_times: list[float] = []
        self._step_seconds, self._only_stepping = 0.0, False
        self._mark = time.monotonic()

    def run(self, train_step, state, batch, step: int):
        """Begins `step` and returns the state after it; reads the metrics of the step before it."""
        shapes = {name: array.shape for name, array in batch.items()}
        key = tuple(sorted(shapes.items()))
        if compiles := key not in self._seen:
            self._seen[key] = self._flops(shapes)
            self._lap(stepping=True)
        state, metrics = train_step(state, batch)
        if compiles:
            self.idle()
        self.flush()
        self._pending = step, metrics, self._seen[key]
        return state

    def idle(self) -> None:
        """Counts the time since the last reading as spent on something other than steps."""
        self._lap(stepping=False)

    def _lap(self, *, stepping: bool) -> None:
        now = time.monotonic()
        elapsed, self._mark = now - self._mark, now
        self.totals["seconds"] += elapsed
        if stepping:
            self.totals["stepping_seconds"] += elapsed
            self._of_window["seconds"] += elapsed
            self._step_seconds += elapsed
        else:
            self._only_stepping = False

    def flush(self) -> None:
        """Waits for the last step that has begun, and reads its metrics."""
        if self._pending is None:
            return
        (step, found, flops), self._pending = self._pending, None
        metrics = {k: v.item() for k, v in jax.device_get(found).items()}
        self._lap(stepping=True)
        # A time counts from one reading to the next, if nothing but steps came in between.
        if self._only_stepping:
            self._step_times.append(self._step_seconds)
        self._step_seconds, self._only_stepping = 0.0, True
        of_step = {name: metrics.pop(name) for name in ("gradient_norm", "learning_rate")}
        if metrics.pop("finite"):
            window = self.totals["window"]
            for name, value in metrics.items():
                window[name] = window.get(name, 0.0) + value
            self.totals["tokens"] += metrics["tokens"]
            self._of_window["tokens"] += metrics["tokens"]
        else:
            self._skip(step, metrics["loss"], of_step["gradient_norm"])
        self._of_window["flops"] += flops
        if step % self._log_every == 0 or step == self._last:
            self._log(step, of_step)

    def _skip(self, step: int, loss: float, gradient_norm: float) -> None:
        what = "update" if math.isfinite(gradient_norm) else "gradient"
        what = what if math.isfinite(loss) else "loss"
        if self.totals["skipped"] >= self.skip:
            raise NotFinite(step, what, self.totals["skipped"])
        self.totals["skipped"] += 1
        left_out = f"left out, {self.totals['skipped']} of at most {self.skip}"
        self.tracker.note(f"step {step}: the {what} is not finite; {left_out}")

    def _log(self, step: int, of_step: dict[str, float]) -> None:
        window, seconds = self.totals["window"], max(self._of_window["seconds"], 1e-9)
        metrics = ratios(window) if window else {}
        # Of an update that was left out the norm may be no number, which JSON does not have.
        metrics |= {name: value for name, value in of_step.items() if math.isfinite(value)}
        metrics["tokens_per_second"] = self._of_window["tokens"] / seconds
        if self._step_times:
            metrics["step_seconds_p50"] = statistics.median(self._step_times)
        if self._peak:
            metrics["mfu"] = self._of_window["flops"] / seconds / self._peak
        elapsed = max(time.time() - self.totals["started"], 1e-9)
        metrics["goodput"] = min(self.totals["stepping_seconds"] / elapsed, 1.0)
        if self.skip:
            metrics["skipped"] = self.totals["skipped"]
        self.tracker.log(step, "train", metrics)
        window.clear()
        self._of_window = dict.fromkeys(self._of_window, 0.0)
        self._step_times.clear()


def first_lines(config: Config, mesh: Mesh, params: Any) -> list[str]:
    """What trains, for how long and on what, for people."""
    counts, m = count_parameters(params, config.model), config.model
    each = {
        f"{m.attention_for(r).kind}, {m.attention_for(r).num_heads} heads": r for r in config.kinds
    }
    attention = " and ".join(
        f"{role} {how}" if len(each) > 1 else how for how, role in each.items()
    )
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    size = f"{counts['total']:,} parameters, {counts['attention']:,} of them in attention"
    warmup = config.optimizer.warmup_steps
    rising = f"note: optimizer.warmup_steps is {warmup:,}: the learning rate only rises"
    return [
        f"{config.task} model with {attention}: {size}",
        f"{config.train.num_steps:,} steps on {mesh.size} × {mesh.devices.flat[0].device_kind}"
        f"{axes and f' ({axes})'}, kept in {config.workdir}",
        *[rising] * (warmup >= config.train.num_steps),
    ]


def in_words(attention: dict[str, str]) -> str:
    """What `choices` gives, for people.

    >>> in_words({"mhe_mul": "folded on xla", "mha": "xla"})
    'mhe_mul by engine xla in form folded; mha by engine xla'
    """

    def said(choice: str) -> str:
        form, _, engine = choice.rpartition(" on ")
        return f"engine {engine}{form and f' in form {form}'}"

    each = {kind: " and ".join(map(said, made.split(", "))) for kind, made in attention.items()}
    return "; ".join(f"{kind} by {how}" for kind, how in each.items())


def described(config: Config, mesh: Mesh, params: Any) -> dict[str, Any]:
    """The part that all results share: the model, its size, and the devices."""
    kinds = config.kinds
    return {
        "task": config.task,
        "kind": kinds if len(set(kinds.values())) > 1 else next(iter(kinds.values())),
        "attention": choices(),
        "parameters": count_parameters(params, config.model),
        "device": mesh.devices.flat[0].device_kind,
        "num_devices": mesh.size,
        "jax": jax.__version__,
    }


def result(
    config: Config, mesh: Mesh, params: Any, meta: Meta, best: Meta | None
) -> dict[str, Any]:
    """The JSON object that ends a run; `meta` and `best` are of its last and best checkpoint."""
    last, best = meta.get("validation") or {}, best or {}
    metrics = best.get("validation") or {}
    if "score" in metrics:  # it decides what is best
        of_best = {"best_validation_score": metrics["score"], "loss_at_best_step": metrics["loss"]}
    else:
        of_best = {f"best_validation_{n}": metrics.get(n) for n in ("loss", "perplexity")}
    return {
        **described(config, mesh, params),
        "attention": meta.get("attention", {}),
        "steps": config.train.num_steps,
        "validation_loss": last.get("loss"),
        "validation_perplexity": last.get("perplexity"),
        "best_step": best.get("validated_step"),
        **of_best,
        # Official metrics of labelled examples; how well moved words are found; BLEU of a sample.
        **({"best_validation": metrics} if {"score", "auc", "bleu"} & {*metrics} else {}),
        "training_seconds": round(meta["seconds"], 1),
        # Source and target without padding; without compilation, validation and checkpoints.
        "tokens_per_second": round(meta["tokens"] / max(meta["stepping_seconds"], 1e-9), 1),
        "changed": meta.get("changed", []),  # at a resume: then no one config describes the run
        "workdir": config.workdir,
    }
