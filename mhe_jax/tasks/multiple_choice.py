"""Multiple choice: which of C texts goes with a given one; each is scored by itself."""

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data.examples import Row
from mhe_jax.model import ChoiceScorer
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.task import LabelledTask


class ChoiceRows(LabelledRows):
    """Rows of `bos A eos C_c eos` for each choice c: tokens, token_types, marks [C, T]."""

    def arrays(self, number: int, length: int) -> tuple[np.ndarray, ...]:
        """The first text of an example with each of the others."""
        rows = [self.pair(number, choice, length) for choice in range(1, self.num_texts)]
        return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


class MultipleChoice(LabelledTask):
    """Task `multiple_choice`."""

    row_type = ChoiceRows

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, C, T]) -> scores [B, C]."""
        return ChoiceScorer(config, right_padded=True)

    def empty_row(self, config: Config) -> Row:
        """A row of an example, with a row of tokens for each choice."""
        shape = (len(row_of(config).texts) - 1, config.data.sequence_length)
        texts = {name: np.zeros(shape, np.int32) for name in self.inputs}
        return super().empty_row(config) | texts
