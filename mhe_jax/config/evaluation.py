"""How runs are scored and compared."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EvaluationConfig:
    """How eval.py scores, translates or continues with a run."""

    # Which split.
    split: Literal["validation", "test"] = "test"
    # Sources to read in place of the split's, named as those are: relative to data.directory.
    sources: tuple[str, ...] = ()
    # `best` on the validation split (by the official score of labelled examples, else by loss),
    # `last`, or a step number.
    checkpoint: str = "best"
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); 1 for one.
    average_checkpoints: int = 1
    # Rows decoded or scored at once.
    batch_size: int = 64
    # Beams; 1 is greedy.
    beam_size: int = 5
    # alpha of ((5 + length) / 6)^alpha that divides a hypothesis' log-probability; 0 for none.
    length_penalty: float = 0.6
    # Longest output is the length of the source or prompt plus this, at most model.max_length (or,
    # of a language model with its prompt, data.sequence_length).
    extra_length: int = 50
    # Of a language model: windows of data.sequence_length tokens that begin this far apart; each
    # token is predicted once, after at least sequence_length - stride others or, near the beginning
    # of the split, all that there are; None: sequence_length.
    stride: int | None = None
    # Generation: what divides the logits before a token is drawn; 0 takes the most probable.
    temperature: float = 0.0
    # Generation: draw from this many most probable tokens only.
    top_k: int | None = None
    # Generation: draw from the fewest most probable tokens that together have this probability.
    top_p: float | None = None
    # Generation and misspelling: of what is drawn.
    seed: int = 0
    # Share of the words that are misspelt in the texts of labelled examples (not of task span, nor
    # where spans are marked).
    spelling_noise: float = 0.0
    # Tokens of the longest answer (task span).
    answer_length: int = 30
    # How much more no answer must score than the best one to be given (squad_v2).
    no_answer_threshold: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Tables and plots of finished runs, by attention and whatever else differs."""

    # Where report.html, report.md and the tables as .csv go.
    out: str = "report"
    # Which split's scores; eval.py has left them in the run.
    split: Literal["validation", "test"] = "test"
    # The score: a number of eval_SPLIT.json; None is that of the task.
    metric: str | None = None
    # Fields of which each attention has the value with the best validation loss, such as
    # optimizer.learning_rate.
    choose: tuple[str, ...] = ()
    # Lengths T at which the memory of a layer is compiled; none leaves it out.
    lengths: tuple[int, ...] = (128, 512, 2048)
