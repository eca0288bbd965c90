"""A trained run, loaded once: its model with parameters, tokenizer and mesh.

Every result says what it was measured on and how: task, split, the steps of the checkpoints,
seconds, and which form and engine each attention kind ran as.
"""

import bisect
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config, EvaluationConfig
from mhe_jax.config.files import TOKENIZER, write_whole
from mhe_jax.data import AnyTokenizer, EvaluationBatches, load_tokenizer
from mhe_jax.evaluation.translator import Cost, Translation, Translator
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.state import abstract_params
from mhe_jax.training.step import make_eval_step
from mhe_jax.training.summary import described


@dataclass(frozen=True)
class Run:
    """A trained run, ready to evaluate; `config.evaluation` says how."""

    workdir: Path
    config: Config
    mesh: Mesh
    tokenizer: AnyTokenizer
    model: nn.Module
    params: Any  # laid over the mesh
    steps: list[int]  # the checkpoints that params are the mean of

    @classmethod
    def load(
        cls,
        workdir: Path,
        config: Config,
        devices: Sequence[Any] | None = None,
    ) -> "Run":
        """Restores the parameters that `config.evaluation` names, on `devices` (None: all).

        Raises:
          InputError: no tokenizer or no such checkpoint, or they do not fit the config.
        """
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

    def described(self) -> dict[str, Any]:
        """The part that all results share: the model, the split, the checkpoints."""
        evaluation = self.evaluation
        return {
            **described(self.config, self.mesh, self.params),
            "split": evaluation.split,
            "sources": list(getattr(self.config.data, evaluation.split)),
            "checkpoint": evaluation.checkpoint,
            "average_checkpoints": evaluation.average_checkpoints,
            "steps": self.steps,
        }

    def outputs(self) -> tuple[list[dict[str, Any]], EvaluationBatches, float]:
        """The sums of each batch of the split, the batches, and the seconds without compiling."""
        task, tokenizer = tasks.of(self.config), self.tokenizer
        tokenizer.check_vocabulary(self.config.model.vocabulary_size)
        process = sharding.share_of_rows(self.mesh)
        rows = sharding.round_up_rows(self.evaluation.batch_size, self.mesh)
        batches = task.scored_batches(self.config, tokenizer, self.evaluation.split, rows, *process)
        evaluated = task.sums(self.model, outputs=True)
        step = make_eval_step(evaluated, self.mesh, sharding.shardings_of(self.params))

        def sums_of(rows):
            return step(self.params, sharding.global_batch(task.read(rows), self.mesh))

        for number in _first_of_each_length(batches):  # compiled here, not in the time below
            jax.block_until_ready(sums_of(batches.batch(number)))
        begin = time.perf_counter()
        with batches.iterate() as iterator:
            found = jax.device_get([sums_of(rows) for rows in iterator])
        return found, batches, time.perf_counter() - begin

    def translate(self, texts: Sequence[str]) -> tuple[list[Translation], Cost]:
        """Translations of the texts by beam search, and what they cost."""
        translator = Translator(self)
        return translator.translate(texts), translator.cost

    def publish(self, suffix: str, text: str) -> None:
        """Writes a file of results, named by the split and `suffix`, by one process."""
        if jax.process_index() == 0:
            write_whole(self.workdir / f"{name_of(self.evaluation)}.{suffix}", text)


def name_of(evaluation: EvaluationConfig) -> str:
    """The name of files of results: the split, or the first source in its place."""
    name = evaluation.split
    if evaluation.sources:
        name = re.sub(r"\W+", "_", Path(evaluation.sources[0]).name)
    if evaluation.spelling_noise:
        name += f"_misspelt_{evaluation.spelling_noise}_{evaluation.seed}"
    return name


def _first_of_each_length(batches: EvaluationBatches) -> Iterator[int]:
    """Found in few batches, which are in order of length (or all of one)."""

    def length(number: int) -> int:
        return batches.batch(number)["tokens"].shape[-1]

    number = 0
    while number < len(batches):
        yield number
        number = bisect.bisect(range(len(batches)), length(number), lo=number + 1, key=length)
