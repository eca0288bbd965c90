"""The score of a run on a split, for each task.

Every result says what it was measured on and how: task, split, the steps of the checkpoints,
seconds, and which form and engine each attention kind ran as.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax.config import Config, EvaluationConfig, InputError, MeshConfig
from mhe_jax.data import Tokenizer, evaluation_batches, open_split
from mhe_jax.data.cache import publish
from mhe_jax.evaluation.metrics import perplexity, translation_scores
from mhe_jax.evaluation.translator import Translator
from mhe_jax.evaluation.windows import Windows
from mhe_jax.model import make_model
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.loop import TOKENIZER
from mhe_jax.training.objective import batch_names, make_initializer, make_sums, ratios
from mhe_jax.training.step import make_eval_step
from mhe_jax.training.summary import described

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A trained run, ready to evaluate."""

    workdir: Path
    config: Config
    evaluation: EvaluationConfig
    mesh: Mesh
    tokenizer: Tokenizer
    model: nn.Module
    params: Any  # laid over the mesh
    steps: list[int]  # the checkpoints that params are the mean of

    @classmethod
    def load(
        cls,
        workdir: Path,
        config: Config,
        evaluation: EvaluationConfig,
        devices: Sequence[Any] | None = None,
    ) -> "Run":
        """Restores the parameters that `evaluation` names, on `devices` (None: all there are).

        Raises:
          InputError: no tokenizer or no such checkpoint, or they do not fit the config.
        """
        tokenizer = Tokenizer.load(workdir / TOKENIZER)
        tokenizer.check_vocabulary(config.model.vocabulary_size)
        mesh = evaluation_mesh(config, devices)
        model = make_model(config.task, config.model)
        initialize = make_initializer(config.task, model, config.data.sequence_length)
        with sharding.use_mesh(mesh):
            boxed = jax.eval_shape(initialize, jax.eval_shape(lambda: jax.random.key(0)))
        abstract = jax.tree.map(
            lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of),
            nn.unbox(boxed),
            sharding.parameter_shardings(boxed, mesh),
        )
        params, steps = checkpoint.restore_params(
            workdir, evaluation.checkpoint, abstract, evaluation.average_checkpoints
        )
        return cls(workdir, config, evaluation, mesh, tokenizer, model, params, steps)


def evaluation_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The run's mesh where its devices are there, else all there are along `data`, with a note.

    What training asks of its batches does not matter here: ours are rounded up.
    """
    count = jax.device_count() if devices is None else len(devices)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=count, row_multiple=count),
        optimizer=dataclasses.replace(config.optimizer, accumulate_steps=1),
    )
    try:
        return sharding.make_mesh(config, devices)
    except InputError as error:
        print(f"note: {error}; evaluating with mesh.data={count}", file=sys.stderr)
        return sharding.make_mesh(dataclasses.replace(config, mesh=MeshConfig()), devices)


def evaluate_mlm(run: Run) -> Result:
    """Loss (nats), accuracy and perplexity of the masked tokens; masks are the same every time."""
    sums, _, seconds = _sums(run)
    found = ratios(sums)
    return {
        **_described(run),
        **found,
        "predicted_tokens": int(sums["count"]),
        "seconds": seconds,
        "tokens_per_second": sums["tokens"] / seconds,
    }


def evaluate_lm(run: Run) -> Result:
    """Perplexity per token, and per word so that other tokenizers compare.

    Per word is exp(nats of all tokens / words); words are what stands between white space in the
    raw text, and one end for each line. Every token is predicted once, from its block, or with
    `evaluation.stride` from at least sequence_length - stride tokens before it.
    """
    sums, words, seconds = _sums(run)
    found = ratios(sums)
    return {
        **_described(run),
        "loss": found["loss"],
        "accuracy": found["accuracy"],
        "perplexity_per_token": perplexity(sums["nats"], sums["count"]),
        "perplexity_per_word": perplexity(sums["nats"], words),
        "stride": run.evaluation.stride,
        "nats": sums["nats"],
        "tokens": int(sums["count"]),
        "words": words,
        "seconds": seconds,
        "tokens_per_second": sums["tokens"] / seconds,
    }


def evaluate_translation(run: Run) -> Result:
    """BLEU, chrF and exact matches of a split; what was scored is in SPLIT.hypotheses.txt."""
    evaluation = run.evaluation
    source = open_split(run.config, evaluation.split)
    pairs = list(_pairs(source))
    translator = Translator(run.config, evaluation, run.params, run.mesh, run.tokenizer)
    translations = translator.translate([text for text, _ in pairs])
    hypotheses = [translation.text for translation in translations]
    if jax.process_index() == 0:
        with publish(run.workdir / f"{evaluation.split}.hypotheses.txt") as file:
            text = "".join(f"{hypothesis}\n" for hypothesis in hypotheses)
            file.write_bytes(text.encode())
    cost = translator.cost
    seconds = max(cost.decode_seconds, 1e-9)
    return {
        **_described(run),
        **translation_scores(hypotheses, [reference for _, reference in pairs]),
        "beam_size": evaluation.beam_size,
        "length_penalty": evaluation.length_penalty,
        "sentences": len(pairs),
        "truncated_sources": sum(translation.truncated for translation in translations),
        "output_tokens": cost.tokens,
        "seconds": cost.decode_seconds,
        "compile_seconds": cost.compile_seconds,
        "sentences_per_second": cost.sentences / seconds,
        "output_tokens_per_second": cost.tokens / seconds,
    }


EVALUATIONS = {"mlm": evaluate_mlm, "lm": evaluate_lm, "translation": evaluate_translation}


def _described(run: Run) -> Result:
    return {
        **described(run.config, run.mesh, run.params),
        "split": run.evaluation.split,
        "checkpoint": run.evaluation.checkpoint,
        "average_checkpoints": run.evaluation.average_checkpoints,
        "steps": run.steps,
    }


def _pairs(source) -> Iterator[tuple[str, str]]:
    for number in range(len(source)):
        pair = source[number]
        assert isinstance(pair, tuple)
        yield pair


def _sums(run: Run) -> tuple[dict[str, float], int, float]:
    """Sums over the split, its words, and the seconds without tokenizing and compiling."""
    split, stride = run.evaluation.split, run.evaluation.stride
    rows = sharding.round_up_rows(run.evaluation.batch_size, run.mesh)
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    if stride is None:
        batches = evaluation_batches(run.config, run.tokenizer, split, batch_size=rows, **process)
    else:
        batches = Windows(run.config, run.tokenizer, split, rows, stride, **process)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.params)
    step = make_eval_step(make_sums(run.config.task, run.model), run.mesh, shardings)

    def sums_of(rows):
        rows = {name: rows[name] for name in batch_names(run.config.task)}
        return step(run.params, sharding.global_batch(rows, run.mesh))

    jax.block_until_ready(sums_of(batches.batch(0)))
    begin = time.perf_counter()
    with batches.iterate() as iterator:
        found = jax.device_get([sums_of(rows) for rows in iterator])
    seconds = time.perf_counter() - begin
    # Added on the host in float64: a long split loses no digits.
    sums = {name: sum(float(batch[name]) for batch in found) for name in found[0]}
    if not sums["nats"] < float("inf"):
        raise InputError(f"{run.workdir}: the loss is not a number: a broken checkpoint")
    return sums, batches.num_words, seconds
