"""Small texts, a small tokenizer and a small experiment for the tests of this room."""

import dataclasses
from pathlib import Path

import numpy as np

from mhe_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from mhe_jax.data import Text, Tokenizer, train_tokenizer

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
WORDS = [
    *("der", "die", "das", "haus", "hund", "katze", "baum", "auto", "groß", "klein", "läuft"),
    *("sieht", "isst", "und", "oder", "nicht", "sehr", "the", "house", "dog", "cat", "tree"),
    *("car", "big", "small", "runs", "sees", "eats", "and", "or", "not", "very"),
]


def sentences(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    """`count` different lines of words."""
    generator = np.random.default_rng(seed)
    lines = []
    for i in range(count):
        words = [WORDS[j] for j in generator.integers(len(WORDS), size=generator.integers(longest))]
        lines.append(" ".join([*words, str(i)]))
    return lines


def small_tokenizer(vocabulary_size: int = 300) -> Tokenizer:
    """A tokenizer of the words above."""
    words = Text.of("words", [(line,) for line in sentences(300)])
    return train_tokenizer([(words, 1.0)], vocabulary_size)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def experiment(directory: Path, task: str, **data) -> Config:
    """A config that reads below `directory` and keeps its cache there."""
    options = {"sequence_length": 24, "batch_size": 8, "tokens_per_batch": 384} | data
    return Config(
        task=task,  # type: ignore[arg-type]
        model=ModelConfig(vocabulary_size=300, max_length=40),
        data=DataConfig(
            directory=str(directory), cache_directory=str(directory / "cache"), **options
        ),
        train=TrainConfig(seed=3),
    )


def with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def equal(one, other) -> None:
    """Asserts that two batches are the same."""
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
        assert one[name].dtype == other[name].dtype


def joined(parts):
    """The global batch of what each process holds."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
