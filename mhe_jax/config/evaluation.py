"""How runs are scored and compared."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt, Le

from mhe_jax.config.values import Count, Finite, Natural, NotNegative, Part, Seed

# The names of sacreBLEU.
BleuTokenizer = Literal[
    "13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab", "flores200", "spBLEU-1K"
]


@dataclass(frozen=True)
class EvaluationConfig:
    """How eval.py scores, translates or continues with a run."""

    # Which split.
    split: Literal["validation", "test"] = "test"
    # Sources to read instead of the split's, also relative to data.directory.
    sources: tuple[str, ...] = ()
    # `best` on the validation split (by the official score of labelled examples, else by loss),
    # `last`, or a step number.
    checkpoint: str = "best"
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); 1 for one.
    average_checkpoints: Count = 1
    # Rows decoded or scored at once.
    batch_size: Count = 64
    # Beams; 1 is greedy.
    beam_size: Count = 5
    # alpha of ((5 + length) / 6)^alpha, which divides a hypothesis' log-probability; 0 for none.
    length_penalty: NotNegative = 0.6
    # Fewest tokens of an output before its end, as far as its longest length allows; 0 allows an
    # empty one.
    min_length: Natural = 1
    # Longest output is the length of the source or prompt plus this, at most model.max_length (or
    # data.sequence_length, for a language model, prompt included).
    extra_length: Natural = 50
    # How BLEU cuts texts into words: a tokenizer of sacreBLEU. To 13a a text without spaces is one
    # word: Chinese takes zh, Japanese char or ja-mecab.
    bleu_tokenizer: BleuTokenizer = "13a"
    # For a language model: windows of data.sequence_length tokens begin this far apart; each token
    # is predicted once, after at least sequence_length - stride others or, near the beginning of
    # the split, after all there are; None: sequence_length.
    stride: Count | None = None
    # Generation: divides the logits before a token is drawn; 0 takes the most probable token.
    temperature: NotNegative = 0.0
    # Generation: draw only from this many most probable tokens.
    top_k: Count | None = None
    # Generation: draw from the fewest most probable tokens that together have this probability.
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    # Seed of generation and misspelling.
    seed: Seed = 0
    # Share of the words to misspell in the texts of labelled examples (not for task span, nor
    # where spans are marked).
    spelling_noise: Part = 0.0
    # Longest answer, in tokens (task span).
    answer_length: Count = 30
    # By how much giving no answer must outscore the best answer (squad_v2).
    no_answer_threshold: Finite = 0.0


def result_name(evaluation: EvaluationConfig) -> str:
    """The name of result files: the split, or the first source that replaces it.

    A source that is called like a split does not take the name of the split's own results.
    """
    name = evaluation.split
    if evaluation.sources:
        name = re.sub(r"\W+", "_", Path(evaluation.sources[0]).name)
        name = f"sources_{name}" if name in ("validation", "test") else name
    if evaluation.spelling_noise:
        name += f"_misspelt_{evaluation.spelling_noise}_{evaluation.seed}"
    return name


@dataclass(frozen=True)
class Comparison:
    """Tables and plots of finished runs, by attention and whatever else differs."""

    # Where report.html and runs.csv go.
    out: str = "report"
    # The split whose scores are compared, as eval.py left them in the run.
    split: Literal["validation", "test"] = "test"
    # The score: a number in eval_SPLIT.json; None takes that of the task.
    metric: str | None = None
    # Fields whose value is chosen for each attention by the best validation loss, such as
    # optimizer.learning_rate.
    choose: tuple[str, ...] = ()
    # Lengths T at which the memory of a layer is compiled; none leaves it out.
    lengths: tuple[Count, ...] = (128, 512, 2048)
