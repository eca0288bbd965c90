"""A trained run on the mesh: its model with parameters, tokenizer, and one program a shape."""

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
from mhe_jax.data import PAD, EvaluationBatches, load_tokenizer
from mhe_jax.evaluation.quantization import quantized
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.sharding import RULES_BY_LENGTH, use_mesh
from mhe_jax.training.state import abstract_params


@dataclass(frozen=True, eq=False)
class CompiledRun:
    """A trained run, loaded once; a copy with other parameters compiles nothing again."""

    workdir: Path
    config: Config = field(repr=False)
    mesh: Mesh = field(repr=False)
    tokenizer: Any = field(repr=False)  # of the task
    model: nn.Module = field(repr=False)
    params: Any = field(repr=False)  # laid over the mesh
    steps: list[int]  # the checkpoints that params are the mean of
    compiled: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    compile_seconds: list[float] = field(default_factory=list, repr=False)  # of each program

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
        if evaluation.quantize:
            model, params = quantized(config, model, params)
        return cls(workdir, config, mesh, tokenizer, model, params, steps)

    @property
    def evaluation(self) -> EvaluationConfig:
        return self.config.evaluation

    def each(
        self,
        name: Hashable,
        function: Callable[..., Any],
        lengths: Sequence[int] | np.ndarray,
        longest: int,
        batch_size: int,
        arrays: Callable[[list[int], int, int], Sequence[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """The number of each text, short ones first, with its row of `function(params, *arrays)`.

        Texts of similar length share a batch of R rows and length T, both powers of two (T from 16
        to `longest`), so that few programs are compiled. `arrays(numbers, R, T)` are the inputs of
        these texts, arrays or dictionaries of them, padded to R rows, the same in every process.
        `name` holds all settings that `function` reads beside its arguments.
        """
        rows = min(batch_size, 1 << max(0, len(lengths) - 1).bit_length())
        rows = sharding.round_up_rows(rows, self.mesh)
        split = NamedSharding(self.mesh, sharding.BATCH)

        def put(array: np.ndarray) -> jax.Array:  # every process has all rows
            return jax.make_array_from_callback(array.shape, split, lambda index: array[index])

        order = np.argsort(np.asarray(lengths), kind="stable").tolist()
        for start in range(0, len(order), rows):
            numbers = order[start : start + rows]
            length = max(16, 1 << (int(lengths[numbers[-1]]) - 1).bit_length())
            inputs = jax.tree.map(put, tuple(arrays(numbers, rows, min(length, longest))))
            found, structure = jax.tree.flatten(self._call(name, function, *inputs))
            for row, number in enumerate(numbers):
                yield number, structure.unflatten([leaf[row] for leaf in found])

    def _call(self, name: Hashable, function: Callable[..., Any], *arrays: Any) -> Any:
        """`function(params, *arrays)`, compiled once for each name and shape."""
        leaves, structure = jax.tree.flatten(arrays)
        key = name, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self.compiled:
            begin = time.perf_counter()
            with use_mesh(self.mesh, RULES_BY_LENGTH[self.config.mesh.length]):
                jitted = jax.jit(function, out_shardings=sharding.replicated(self.mesh))
                self.compiled[key] = jitted.lower(self.params, *arrays).compile()
            self.compile_seconds.append(time.perf_counter() - begin)
        return jax.device_get(self.compiled[key](self.params, *arrays))

    def outputs(self) -> tuple[list[dict[str, Any]], EvaluationBatches, float]:
        """What the task measures of each batch of the split, the batches, and the running time."""
        task, evaluation = tasks.of(self.config), self.evaluation
        rows = sharding.round_up_rows(evaluation.batch_size, self.mesh)
        given = self.config, self.tokenizer, evaluation.split, rows
        batches = task.evaluation_batches(*given, *sharding.share_of_rows(self.mesh))
        sums, found = task.sums(self.model, outputs=True), []
        before, begin = len(self.compile_seconds), time.perf_counter()
        with batches.iterate() as iterator:
            for read in map(task.read, iterator):
                batch = sharding.global_batch(read, self.mesh)
                found.append(self._call("sums", lambda params, x: sums(params, x, None), batch))
        compiling = sum(self.compile_seconds[before:])
        return found, batches, time.perf_counter() - begin - compiling

    def check_finite(self, finite: bool) -> None:
        if not finite:
            reason = "the model's output is NaN or infinite: a broken checkpoint"
            raise InputError(f"{self.workdir}: {reason}")


def filled(ids: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """Tokens [rows, length], int32: ids, and padding."""
    tokens = np.full((rows, length), PAD, np.int32)
    for row, of_text in zip(tokens, ids, strict=False):
        row[: len(of_text)] = of_text
    return tokens
