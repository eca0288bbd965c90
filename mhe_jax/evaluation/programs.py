"""A trained run on the mesh: its model with parameters, tokenizer, and one program a shape."""

import bisect
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mhe_jax import tasks
from mhe_jax.config import Config, EvaluationConfig, InputError
from mhe_jax.config.files import TOKENIZER
from mhe_jax.data import AnyTokenizer, EvaluationBatches, load_tokenizer
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.sharding import use_mesh
from mhe_jax.training.state import abstract_params
from mhe_jax.training.step import make_eval_step

# The least length of rows.
SHORTEST = 16


def padded_length(longest: int, least: int, most: int) -> int:
    """The power of two that holds `longest`, from `least` to `most`, so few shapes are compiled.

    >>> padded_length(3, 8, 20), padded_length(9, 8, 20), padded_length(17, 8, 20)
    (8, 16, 20)
    """
    return min(max(least, 1 << (longest - 1).bit_length()), most)


@dataclass(frozen=True, eq=False)
class CompiledRun:
    """A trained run, loaded once; a copy with other parameters compiles nothing again."""

    workdir: Path
    config: Config = field(repr=False)
    mesh: Mesh = field(repr=False)
    tokenizer: AnyTokenizer = field(repr=False)
    model: nn.Module = field(repr=False)
    params: Any = field(repr=False)  # laid over the mesh
    steps: list[int]  # the checkpoints that params are the mean of
    compiled: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, workdir: Path, config: Config, devices: Sequence[Any] | None = None) -> Self:
        """Restores the parameters that `config.evaluation` names, on `devices` (None: all)."""
        evaluation = config.evaluation
        tokenizer = load_tokenizer(config, workdir / TOKENIZER)
        mesh = sharding.mesh_at_hand(config, "evaluating", devices)
        model = tasks.of(config).model(config.model)
        abstract = abstract_params(config, mesh)
        params, steps = checkpoint.restore_params(
            workdir, evaluation.checkpoint, abstract, evaluation.average_checkpoints, tokenizer
        )
        return cls(workdir, config, mesh, tokenizer, model, params, steps)

    @property
    def evaluation(self) -> EvaluationConfig:
        """Checkpoint, split and search."""
        return self.config.evaluation

    def rows(self, count: int, most: int) -> int:
        """Rows of a batch: the power of two that holds `count`, at most `most`, for the mesh."""
        rows = min(most, 1 << max(0, count - 1).bit_length())
        return sharding.round_up_rows(rows, self.mesh)

    def plan(
        self, lengths: Sequence[int] | np.ndarray, batch_size: int, longest: int
    ) -> tuple[int, list[tuple[int, np.ndarray]]]:
        """The rows of each batch; and of each its length and the numbers of its texts.

        Short texts come first.
        """
        rows = self.rows(len(lengths), batch_size)
        order = np.argsort(np.asarray(lengths), kind="stable")
        parts = [order[start : start + rows] for start in range(0, len(order), rows)]
        return rows, [
            (padded_length(int(lengths[part[-1]]), SHORTEST, longest), part) for part in parts
        ]

    def program(
        self, name: Hashable, function: Callable[..., Any], *arrays: Any
    ) -> Callable[[], Any]:
        """A call of `function(params, *arrays)`, compiled once for each name and shape.

        Arrays (or dictionaries of them) have a row for each text, [rows, length] or [rows, ...],
        and are the same in every process, which gets the whole result. A name holds all settings
        that its function reads beside its arguments.
        """
        leaves, structure = jax.tree.flatten(arrays)
        key = name, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        split = NamedSharding(self.mesh, sharding.BATCH)
        if key not in self.compiled:
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), arrays
            )
            with use_mesh(self.mesh):
                jitted = jax.jit(function, out_shardings=sharding.replicated(self.mesh))
                self.compiled[key] = jitted.lower(self.params, *shapes).compile()

        def put(rows: np.ndarray) -> jax.Array:
            """Every process has all rows; each device takes its own."""
            return jax.make_array_from_callback(rows.shape, split, lambda index: rows[index])

        return lambda: self.compiled[key](self.params, *jax.tree.map(put, arrays))

    def outputs(self) -> tuple[list[dict[str, Any]], EvaluationBatches, float]:
        """The sums of each batch of the split, the batches, and the seconds without compiling."""
        task = tasks.of(self.config)
        process = sharding.share_of_rows(self.mesh)
        rows = sharding.round_up_rows(self.evaluation.batch_size, self.mesh)
        split = self.evaluation.split
        batches = task.evaluation_batches(self.config, self.tokenizer, split, rows, *process)
        for number in _first_of_each_length(batches, task.inputs[0]):
            jax.block_until_ready(self._sums(batches.batch(number)))  # compiled before it counts
        begin = time.perf_counter()
        found = self.sums_of(batches)
        return found, batches, time.perf_counter() - begin

    def sums_of(self, batches: EvaluationBatches) -> list[dict[str, Any]]:
        """The sums of each batch, and whatever else the task measures a model by."""
        with batches.iterate() as iterator:
            return jax.device_get([self._sums(rows) for rows in iterator])

    def _sums(self, rows: dict[str, Any]) -> dict[str, Any]:
        task = tasks.of(self.config)
        if "sums" not in self.compiled:
            sums, places = task.sums(self.model, outputs=True), sharding.shardings_of(self.params)
            self.compiled["sums"] = make_eval_step(sums, self.mesh, places)
        batch = sharding.global_batch(task.read(rows), self.mesh)
        return self.compiled["sums"](self.params, batch)

    def check_finite(self, finite: bool) -> None:
        """Raises InputError if the model's output is not finite."""
        if not finite:
            raise InputError(
                f"{self.workdir}: the model's output is NaN or infinite: a broken checkpoint"
            )


def _first_of_each_length(batches: EvaluationBatches, text: str) -> Iterator[int]:
    """Found from few batches: all are in order of length of `text`, or of one length."""

    def length(number: int) -> int:
        return batches.batch(number)[text].shape[-1]

    number = 0
    while number < len(batches):
        yield number
        number = bisect.bisect(range(len(batches)), length(number), lo=number + 1, key=length)
