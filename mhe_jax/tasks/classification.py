"""Classification: which class a text, or a pair of texts, belongs to."""

import flax.linen as nn

from mhe_jax.config import ModelConfig
from mhe_jax.model import Classifier
from mhe_jax.tasks.labelled.task import LabelledTask


class Classification(LabelledTask):
    """Task `classification`."""

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, T]) -> logits [B, C]."""
        return Classifier(config, right_padded=True)

    def num_classes(self, labels: tuple[str, ...]) -> int | None:
        """A class for each label."""
        return len(labels)
