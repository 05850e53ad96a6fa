"""TracInCP: gradient dot products along one training run, each weighed by the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, ScoreBlock, Scores
from psgrad.engine.influence.methods.gradient_dot import Products
from psgrad.errors import InfluenceError


@dataclass(frozen=True)
class TracIn(Method):
    """score = sum over checkpoints t of learning_rate_t <g_q, g_i>, all gradients taken at checkpoint t.

    Pruthi, Liu, Kale and Sundararajan, "Estimating Training Data Influence by Tracing Gradient Descent" (2020), section 3.2. The
    checkpoints must be of one run; independently trained models are other people's runs, and their sum has no meaning.
    """

    name = "tracin"
    unit = "{change}, if one gradient step on the training example were undone at each checkpoint, to first order"
    predicts_removal = False

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        if checkpoint.learning_rate is None:
            raise InfluenceError(
                f"tracin weighs each checkpoint by its learning rate, and checkpoint {checkpoint.number} has none",
                expected="the optimiser's learning rate when the checkpoint was saved",
                next_step="name it in influence.checkpoints: [{path: ..., learning_rate: ...}]",
            )
        return Products(training, checkpoint.learning_rate)

    def across(self, blocks: Sequence[ScoreBlock]) -> Scores:
        return {label: torch.stack([block.scores[label] for block in blocks]).sum(0) for label in blocks[0].scores}
