"""A tiny parallel text, and configs of each task on it."""

import functools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from free_ports import free_port

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from mhe_jax.config.fields import set_field, to_dict
from mhe_jax.tasks import TASKS
from mhe_jax.training import loop, sharding
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of

# The flag that quickens compiling, where this jaxlib has it: see tests/conftest.py.
OLDER = [flag for flag in os.environ["XLA_FLAGS"].split() if "fusion_emitters" in flag]

ROOT = Path(__file__).parents[2]
WORDS = {
    "en": "one small dog runs over the green meadow and a man with red hat watches him",
    "de": "ein kleiner hund läuft über die grüne wiese und einer mit rotem hut sieht ihm",
}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A directory with train and validation, in English and German; also the cache of indices."""
    directory = tmp_path_factory.mktemp("text")
    draw = random.Random(3)
    for split, lines in (("train", 300), ("validation", 24)):
        picks = [[draw.randrange(15) for _ in range(draw.randint(2, 6))] for _ in range(lines)]
        for language, words in WORDS.items():
            words = words.split()
            text = "".join(" ".join(words[i] for i in pick) + "\n" for pick in picks)
            (directory / f"{split}.{language}").write_text(text, encoding="utf-8")
    return directory


def config_of(text, task, changes):
    pair = task == "translation"
    languages = ("en", "de") if pair else ("en",)
    config = Config(
        task=task,
        model=ModelConfig(
            vocabulary_size=300,
            features=16,
            mlp_features=24,
            num_layers=1,
            max_length=16,
            attention=AttentionConfig(kind="mhe_mul", num_heads=2),
        ),
        data=DataConfig(
            directory=str(text),
            train=tuple(f"train.{language}" for language in languages),
            validation=tuple(f"validation.{language}" for language in languages),
            cache_directory=str(text / "cache"),
            sequence_length=16,
            batch_size=8,
            tokens_per_batch=256,
            length_buckets=(8, 16) if pair else (),
        ),
        optimizer=OptimizerConfig(warmup_steps=3),
        train=TrainConfig(
            num_steps=6, eval_every=3, checkpoint_every=2, keep_checkpoints=2, log_every=2
        ),
        evaluation=EvaluationConfig(batch_size=8),
    )
    for name, value in changes.items():
        config = set_field(config, name, value)
    return config


@pytest.fixture
def tiny(text, tmp_path):
    """`tiny(task, **{"dotted.field": value})`: an experiment of a second or two."""

    def make(task="mlm", /, **changes):
        return config_of(text, task, {"workdir": str(tmp_path / "run"), **changes})

    return make


FINISHED = {"optimizer.ema_decay": 0.9, "optimizer.label_smoothing": 0.1, "train.num_steps": 6}


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """`finished(task)`: config and result of one whole run with FINISHED; not to be changed."""

    @functools.cache
    def make(task):
        workdir = tmp_path_factory.mktemp("finished") / "run"
        config = config_of(text, task, {"workdir": str(workdir), **FINISHED})
        return config, loop.train(config, jax.devices()[:1])

    return make


@pytest.fixture
def copied(finished, tmp_path):
    """`copied(task)`: the config of a copy of that run."""

    def make(task, workdir=tmp_path / "run"):
        config, _ = finished(task)
        shutil.copytree(config.workdir, workdir)
        return set_field(config, "workdir", str(workdir))

    return make


@pytest.fixture(scope="session")
def saved():
    """`saved(config, workdir)`: the newest state of a run, as NumPy arrays."""

    def restore(config, workdir=None):
        mesh = sharding.make_mesh(config, jax.devices()[:1])
        model = TASKS[config.task].model(config.model)
        _, abstract = initializer_of(config, model, make_optimizer(config), mesh)
        checkpoints = Checkpoints(workdir or config.workdir)
        state, _ = checkpoints.restore(abstract)
        checkpoints.close()
        return jax.device_get(state)

    return restore


@pytest.fixture(autouse=True, scope="module")
def fast_compilation():
    """Nothing here depends on how well a program is optimized, and much on how soon it is there."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# A script of ours with some code before it.
DRIVER = """
import os, runpy, sys
exec(os.environ["BEFORE"])
script = sys.argv[0] = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def launch(tmp_path, tmp_path_factory):
    """`launch(config, workdir, before, *flags)`: starts train.py after the code of `before`.

    `script="eval.py"` evaluates the run in `workdir`.
    """

    def start(config, workdir, before="", *flags, script="train.py", devices=1):
        file = tmp_path / f"{config.task}.py"
        file.write_text(
            "from mhe_jax.config import Config\nfrom mhe_jax.config.fields import checked\n"
            f"def get_config():\n    return checked(Config, {to_dict(config)!r})\n"
        )
        environment = dict(
            os.environ,
            JAX_PLATFORMS="cpu",
            XLA_FLAGS=" ".join([f"--xla_force_host_platform_device_count={devices}", *OLDER]),
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
            JAX_DISABLE_MOST_OPTIMIZATIONS="1",
            JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.getbasetemp() / "programs"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            BEFORE=before,
        )
        if script == "train.py":
            arguments = [str(file), "--workdir", str(workdir), *flags]
        else:
            arguments = [str(workdir), *flags]
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, script, *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture(scope="session")
def finish():
    """`finish(process)`: its exit status and what it wrote."""

    def wait(process):
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    return wait


@pytest.fixture
def job(launch, finish):
    """`job(config, workdir, count)`: so many processes as one job; what `finish` gives of each.

    `before={1: code}` goes before process 1, `flags={1: [...]}` are for it alone. One that
    is not heard of for `timeout` seconds is lost.
    """

    def run(config, workdir, count, before=None, flags=None, timeout=120, **options):
        before, flags = before or {}, flags or {}
        coordinator = f"localhost:{free_port()}"
        together = ["--coordinator", coordinator, "--num_processes", str(count)]
        together += ["--process_timeout", str(timeout)]
        processes = [
            launch(
                config,
                workdir,
                before.get(p, ""),
                *together,
                *("--process_id", str(p), *flags.get(p, ())),
                **options,
            )
            for p in range(count)
        ]
        return [finish(process) for process in processes]

    return run
