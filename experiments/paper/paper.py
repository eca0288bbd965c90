"""The experiments of this page: every run of each, with the scores it is told by.

    python experiments/paper/paper.py translation
    python experiments/paper/paper.py encoders
    python experiments/paper/paper.py hashes
    python experiments/paper/paper.py matrices     # starts from runs of translation

Data lies in data/multi30k, data/wikitext-2, data/glue/SST-2 and data/glue/CoLA, or below another
`--data.directory`. Each run is a `train.py` or `eval.py` with the flags below, on one core unless
`--jobs 1`; `experiments/runs.py` says what is repeated, and what a failure ends.
"""

import lzma
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import runs
from experiments.runs import Runs, flags_of, loss, note
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.data import open_train, train_tokenizer
from mhe_jax.tasks import of

SEEDS = ("0", "1", "2")
RATES = ("1e-3", "2e-3", "4e-3")
MULTI30K = ("multi30k.py:small", "multi30k")
MLM = ("wikitext2_mlm.py", "wikitext-2")
# Fields of `model.attention`; those of mva take half the width of the model for its scores.
TRANSLATION = {
    "mha": {"kind": "mha"},
    "mhe_mul": {"kind": "mhe_mul"},
    "mhe_add": {"kind": "mhe_add"},
    "mva": {"kind": "mva", "score_features": "128"},
    "sha": {"kind": "sha"},
    "mqa": {"kind": "mqa"},
    "gqa": {"kind": "gqa", "num_kv_heads": "2"},
    "skv": {"kind": "skv"},
    "el": {"kind": "el"},
    "mhe_add-2-groups": {"kind": "mhe_add", "num_groups": "2"},
    "mhe_add-2-score-groups": {"kind": "mhe_add", "score_groups": "2"},
}
SEVERAL_SEEDS = ("mha", "mhe_mul", "mhe_add", "mhe_add-2-groups", "mva", "sha")
ENCODERS = {name: TRANSLATION[name] for name in ("mha", "mhe_mul", "mhe_add", "sha", "mqa")}
ENCODERS["mva"] = {"kind": "mva", "score_features": "64"}
# Neighbours, which tell most, are found much sooner than by learned positions.
POSITIONS = ("--model.positions", "sinusoidal")
# Each task's config, its data, and its files as they are distributed.
TASKS = {
    "sst2": ("finetune.py:sst2", "glue/SST-2", ["train.tsv.xz"], ["dev.tsv.xz"]),
    "cola": (
        "finetune.py:cola",
        "glue/CoLA",
        ["in_domain_train.tsv.xz"],
        ["in_domain_dev.tsv.xz", "out_of_domain_dev.tsv.xz"],
    ),
}
TASK_STEPS = {"sst2": "2000", "cola": "1600"}
# Of the encoders; in those of WikiText-2 alone words of reviews fall to pieces.
VOCABULARY_SIZE = 8000
HASHES = ("md_emb", "md_pool", "md_add", "md_proj", "lsh_emb", "lsh_pool", "lsh_add", "lsh_proj")
NOISE = ("0.1", "0.2")
# Terms in attention, MLP and embedding.
RANKS = ("2-4-32", "8-16-128", "16-32-256")
WARM_RANKS = ("16", "32", "64", "128", "1000")


def attention(fields: dict[str, str]) -> list[str]:
    return flags_of(fields, "model.attention.")


def translation(at: Runs, name: str, seeds: tuple[str, ...] = SEEDS[:1]) -> tuple[Path, str]:
    """One attention: the learning rate by validation loss of the first seed, then the others.

    Returns the run of the first seed at that rate, and the rate.
    """

    def run(rate: str, seed: str) -> Path:
        flags = ["--optimizer.learning_rate", rate, "--train.seed", seed]
        where = f"translation/{name},{rate},seed={seed}"
        return at.train(where, *MULTI30K, *attention(TRANSLATION[name]), *flags)

    found = {rate: run(rate, SEEDS[0]) for rate in RATES}
    rate = min(found, key=lambda rate: loss(found[rate]))
    for seed in seeds:
        at.evaluate(run(rate, seed), "test")
    return found[rate], rate


def of_task(at: Runs, task: str) -> list[str]:
    """Config, data and files."""
    config, data, training, validation = TASKS[task]
    if task == "cola":
        training, validation = (
            [named(at, data, file) for file in of] for of in (training, validation)
        )
    files = ["--data.train", *training, "--data.validation", *validation, "--data.test"]
    return [config, data, *files]


def named(at: Runs, data: str, file: str) -> str:
    """A file of CoLA with the names of its columns, which it comes without."""
    path = (at.directory / file).resolve().with_suffix("")
    with at.locks[path]:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = lzma.decompress((at.data / data / file).read_bytes()).decode()
            path.write_text("source\tlabel\tmark\tsentence\n" + lines, encoding="utf-8")
    return str(path)


def misspelt(rate: str) -> str:
    """How eval.py calls the validation split with this share of its words misspelt, by seed 0."""
    return f"validation_misspelt_{rate}_0"


def tune(at: Runs, name: str, task: str, *flags: str, noise: tuple[str, ...] = ()) -> None:
    """A task's run and its scores, also where words are misspelt."""
    run = at.train(name, *of_task(at, task), "--train.num_steps", TASK_STEPS[task], *flags)
    for rate in noise:
        at.evaluate(run, misspelt(rate), "--spelling_noise", rate)
    at.evaluate(run, "validation")


def pieces(at: Runs) -> Path:
    """A tokenizer of the training texts of WikiText-2 and of the tasks."""
    path = at.directory / "mlm" / "tokenizer.model"
    with at.locks[path]:
        if not path.exists():
            note(f"{path}: train_tokenizer")
            wikitext, *configs = [
                parse_train_arguments([*at.arguments(*one[:2]), *one[2:]])
                for one in (MLM, *(of_task(at, task) for task in TASKS))
            ]
            sources = open_train(wikitext)
            for config in configs:
                sources += of(config).texts(config)
            train_tokenizer(sources, VOCABULARY_SIZE).save(path)
    return path


def encoder(at: Runs, name: str) -> None:
    """One attention: MLM, then each task from it with all seeds, and from nothing with one."""
    tokenizer = pieces(at).resolve()
    shape = (*attention(ENCODERS[name]), *POSITIONS)
    shape += ("--model.vocabulary_size", str(VOCABULARY_SIZE))

    def shape_from(data: str) -> tuple[str, ...]:
        # From the data to the run, so that a record holds wherever both lie together.
        there = os.path.relpath(tokenizer, (at.data / data).resolve())
        return (*shape, "--data.tokenizer", there)

    start = at.train(f"mlm/{name}", *MLM, *shape_from(MLM[1]))
    at.evaluate(start, "test")
    for task in TASKS:
        for seed in SEEDS:
            flags = ("--train.init_from", str(start), "--train.seed", seed)
            tune(at, f"{task}/{name},seed={seed}", task, *flags)
        tune(at, f"{task}/{name},nothing,seed=0", task, *shape_from(TASKS[task][1]))


def hashed(at: Runs, name: str) -> None:
    """One embedding: pre-training with context and without, tasks, and tasks misspelt."""
    embedding = ["--model.hashing", name]
    if name == "pieces":
        embedding = ["--model.hashing", "None", "--model.vocabulary_size", "4000"]
    # A table learns nothing of rare words by large steps.
    rate = "5e-4" if name.endswith("_emb") else "2e-3"
    flags = [*embedding, "--optimizer.learning_rate", rate]
    start = at.train(f"hashes/{name}", "hashformer.py", "wikitext-2", *flags)
    flags += ["--model.context", "token"]
    alone = at.train(f"hashes/{name},alone", "hashformer.py", "wikitext-2", *flags)
    for run in (start, alone):
        at.evaluate(run, "test")
    for task in TASKS:
        tune(at, f"{task}-hashes/{name}", task, "--train.init_from", str(start), noise=NOISE)


def matrices(at: Runs, name: str) -> None:
    """Multi30k with factors, at the learning rate of the dense `mha` or `mhe_mul`."""
    kind = "mhe_mul" if name.endswith("mhe_mul") else "mha"
    _, rate = translation(at, kind)
    terms = zip(("attention", "mlp", "embedding"), name.partition(",")[0].split("-"), strict=True)
    flags = [part for role, rank in terms for part in (f"--model.kronecker.{role}", rank)]
    flags += ["--optimizer.learning_rate", rate, *attention(TRANSLATION[kind])]
    at.evaluate(at.train(f"matrices/{name}", *MULTI30K, *flags), "test")


def warm(at: Runs, rank: str) -> None:
    """The dense `mha` factorized at one rank, its embeddings left alone; then trained a little."""
    dense, _ = translation(at, "mha")
    run, terms = at.directory / f"warm/{rank}", ("--attention", rank, "--mlp", rank)
    if not (run / "config.json").exists():
        at.call(run, "-m", "mhe_jax", "factorize", str(dense), str(run), *terms)
    at.evaluate(run, "test", "--checkpoint", "last", name="before.json")
    flags = ["--train.num_steps", "300", "--optimizer.warmup_steps", "30"]
    flags += ["--optimizer.learning_rate", "5e-4", *attention(TRANSLATION["mha"])]
    flags += [part for role in terms[::2] for part in (f"--model.kronecker.{role[2:]}", rank)]
    at.evaluate(at.train(f"warm/{rank}", *MULTI30K, *flags), "test")


# By experiment: what runs side by side.
CASES: dict[str, list[Callable[[Runs], object]]] = {
    "translation": [
        *(partial(translation, name=name, seeds=SEEDS) for name in SEVERAL_SEEDS),
        *(partial(translation, name=name) for name in TRANSLATION if name not in SEVERAL_SEEDS),
    ],
    "encoders": [partial(encoder, name=name) for name in ENCODERS],
    "hashes": [partial(hashed, name=name) for name in ("pieces", *HASHES)],
    "matrices": [
        *(partial(matrices, name=name) for name in (*RANKS, "8-16-128,mhe_mul")),
        *(partial(warm, rank=rank) for rank in WARM_RANKS),
    ],
}


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("experiment", choices=CASES)
    args = parser.parse_args()
    at = Runs(args)
    return int(not at.each(lambda case: case(at), CASES[args.experiment]))


if __name__ == "__main__":
    sys.exit(main())
