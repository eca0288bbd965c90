"""Regression: a number for a text, or for a pair of texts."""

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data.examples import Row
from mhe_jax.model import Regressor
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.task import LabelledTask
from mhe_jax.tasks.sums import squared_error_sums
from mhe_jax.tasks.task import Batch, Sums


class NumberRows(LabelledRows):
    """Rows whose label is a number."""

    label_type = np.float32


class Regression(LabelledTask):
    """Task `regression`."""

    loss_unit = "squared error"
    row_type = NumberRows

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, T]) -> numbers [B]."""
        return Regressor(config, right_padded=True)

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        """Squared errors."""
        return squared_error_sums(logits, batch["labels"], batch["weights"])

    def empty_row(self, config: Config) -> Row:
        """A row with a label that is a number."""
        return super().empty_row(config) | {"labels": np.zeros((), np.float32)}
