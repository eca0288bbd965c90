"""The score of a run on a split, for each task.

Every result says what it was measured on and how: task, split, the steps of the checkpoints,
seconds, and which form and engine each attention kind ran as.
"""

import bisect
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from mhe_jax.config import LABELLED, Config, EvaluationConfig, InputError, MeshConfig
from mhe_jax.config.files import publish
from mhe_jax.data import (
    TOKENIZER,
    AnyTokenizer,
    EvaluationBatches,
    Tokenizer,
    evaluation_batches,
    load_tokenizer,
    open_split,
)
from mhe_jax.data.tasks.batches import EvaluationExamples
from mhe_jax.data.tasks.submission import submission
from mhe_jax.evaluation.metrics import perplexity, translation_scores
from mhe_jax.evaluation.translator import Translator
from mhe_jax.evaluation.windows import Windows
from mhe_jax.model import make_model
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.objective import make_sums, ratios, what_is_read
from mhe_jax.training.run.warm_start import abstract_params
from mhe_jax.training.scored import summarize, total
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
    tokenizer: AnyTokenizer
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
        tokenizer = load_tokenizer(config, workdir / TOKENIZER)
        mesh = evaluation_mesh(config, devices)
        model = make_model(config.task, config.model)
        abstract = abstract_params(config, mesh)
        params, steps = checkpoint.restore_params(
            workdir, evaluation.checkpoint, abstract, evaluation.average_checkpoints, tokenizer
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


def evaluate_shuffle_random(run: Run) -> Result:
    """Loss (nats), accuracy, and the area under the ROC curve of moved against original tokens.

    What is moved and replaced is the same every time.
    """
    found, batches, seconds = _run(run)
    sums = _finite(run, total(found))
    return {
        **_described(run),
        **summarize(found, batches),
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
    assert isinstance(run.tokenizer, Tokenizer)
    translator = Translator(run.config, evaluation, run.params, run.mesh, run.tokenizer)
    translations = translator.translate([text for text, _ in pairs])
    hypotheses = [translation.text for translation in translations]
    if jax.process_index() == 0:
        with publish(run.workdir / f"{name_of(evaluation)}.hypotheses.txt") as file:
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


def evaluate_labelled(run: Run) -> Result:
    """Official numbers of a split whose labels are known; predictions go to SPLIT.predictions.*.

    The file has the form in which the suite of the data set takes submissions.
    """
    found, batches, seconds = _run(run)
    assert isinstance(batches, EvaluationExamples)
    outputs = [(batch["index"], batch["outputs"]) for batch in found]
    if not all(np.isfinite(output).all() for _, output in outputs):
        raise InputError(f"{run.workdir}: the output is not a number: a broken checkpoint")
    if jax.process_index() == 0:
        for suffix, text in submission(run.config, batches, outputs).items():
            with publish(run.workdir / f"{name_of(run.evaluation)}.{suffix}") as file:
                file.write_text(text, encoding="utf-8")
    numbers = summarize(found, batches) if batches.labelled else {}
    return {
        **_described(run),
        "dataset": run.config.data.dataset,
        "spelling_noise": run.evaluation.spelling_noise,
        **numbers,
        "examples": batches.num_examples,
        "seconds": seconds,
        "examples_per_second": batches.num_examples / seconds,
    }


EVALUATIONS = {
    "mlm": evaluate_mlm,
    "shuffle_random": evaluate_shuffle_random,
    "lm": evaluate_lm,
    "translation": evaluate_translation,
    **dict.fromkeys(LABELLED, evaluate_labelled),
}


def _described(run: Run) -> Result:
    return {
        **described(run.config, run.mesh, run.params),
        "split": run.evaluation.split,
        "sources": list(getattr(run.config.data, run.evaluation.split)),
        "checkpoint": run.evaluation.checkpoint,
        "average_checkpoints": run.evaluation.average_checkpoints,
        "steps": run.steps,
    }


def name_of(evaluation: EvaluationConfig) -> str:
    """What files of results are called: by the split, or by the first source in its place."""
    name = evaluation.split
    if evaluation.sources:
        name = re.sub(r"\W+", "_", Path(evaluation.sources[0]).name)
    if evaluation.spelling_noise:
        name += f"_misspelt_{evaluation.spelling_noise}_{evaluation.seed}"
    return name


def _pairs(source) -> Iterator[tuple[str, str]]:
    for number in range(len(source)):
        pair = source[number]
        assert isinstance(pair, tuple)
        yield pair


def _sums(run: Run) -> tuple[dict[str, float], int, float]:
    """Sums over the split, its words, and the seconds without tokenizing and compiling."""
    found, batches, seconds = _run(run)
    return _finite(run, total(found)), batches.num_words, seconds


def _finite(run: Run, sums: dict[str, float]) -> dict[str, float]:
    if not sums["nats"] < float("inf"):
        raise InputError(f"{run.workdir}: the loss is not a number: a broken checkpoint")
    return sums


def _first_of_each_length(batches: EvaluationBatches) -> Iterator[int]:
    """Found in few batches, which are in order of length (or all of one)."""

    def length(number: int) -> int:
        return batches.batch(number)["tokens"].shape[-1]

    number = 0
    while number < len(batches):
        yield number
        number = bisect.bisect(range(len(batches)), length(number), lo=number + 1, key=length)


def _run(run: Run) -> tuple[list[dict[str, Any]], EvaluationBatches, float]:
    """What the model gives for each batch of the split, and the seconds it took."""
    share, shares = sharding.share_of_rows(run.mesh)
    split, stride = run.evaluation.split, run.evaluation.stride
    rows = sharding.round_up_rows(run.evaluation.batch_size, run.mesh)
    process = {"process_index": share, "process_count": shares}
    if stride is None:
        batches = evaluation_batches(run.config, run.tokenizer, split, batch_size=rows, **process)
    else:
        batches = Windows(run.config, run.tokenizer, split, rows, stride, **process)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.params)
    step = make_eval_step(make_sums(run.config.task, run.model, outputs=True), run.mesh, shardings)

    def sums_of(rows):
        rows = what_is_read(run.config.task, rows)
        return step(run.params, sharding.global_batch(rows, run.mesh))

    for number in _first_of_each_length(batches):  # compiled here, not in the time below
        jax.block_until_ready(sums_of(batches.batch(number)))
    begin = time.perf_counter()
    with batches.iterate() as iterator:
        found = jax.device_get([sums_of(rows) for rows in iterator])
    return found, batches, time.perf_counter() - begin
