"""Methods of inner products of gradients: the dot product, the cosine, and TracInCP, the dot products at
several checkpoints weighted by the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.method import (
    Checkpoint,
    Fitted,
    Method,
    Preconditioned,
    ScoreBlock,
    SelfBlock,
)
from psgrad.errors import ConfigError, InfluenceError


@dataclass(frozen=True)
class GradientDot(Method):
    """score = <g_q, g_i>.

    Charpiat, Girard, Felardos and Tarabalka, "Input Similarity from the Neural Network Perspective" (2019);
    TracInCP with one checkpoint and learning rate one.
    """

    name = "gradient_dot"
    unit = "{change}, if one gradient step on the training example were undone, per unit of learning rate"
    predicts_removal = False

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        return GradientProducts(training)


class GradientProducts(Fitted):
    """Inner products of gradients, times one factor."""

    def __init__(self, training: Examples, factor: float = 1.0) -> None:
        self.training, self.factor = training, factor

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        prepared = queries.gradients(range(len(queries)))
        for rows, part in self.training.each(lambda gradients: {"scores": gradients.inner(prepared)}):
            yield ScoreBlock(rows.start, rows.stop, part["scores"] * self.factor)

    def self_influence(self) -> Iterator[SelfBlock]:
        for rows, part in self.training.norms():
            squares = part["square_norm"] * self.factor
            yield SelfBlock(rows.start, rows.stop, squares, part["square_norm"].sqrt() * self.factor)


@dataclass(frozen=True)
class GradientCosine(Method):
    """score = <g_q, g_i> / (|g_q| |g_i|), NaN
    where either gradient is zero.

    Hanawa, Yokoi, Hara and Inui, "Evaluation of Similarity-based Explanations" (2021). It leaves out how
    strongly an example pulls, so that outliers do not lead every list; it predicts nothing, and the cosine of
    an example with itself is 1.
    """

    name = "gradient_cosine"
    unit = "cosine of the angle between the two gradients, from -1 to 1"
    predicts_removal = False

    @property
    def joins_by_own_rule(self) -> bool:
        return True  # cosines are on one scale already

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        return GradientCosines(training)


class GradientCosines(Fitted):
    """Cosines of the angles between gradients."""

    has_self_influence = False

    def __init__(self, training: Examples) -> None:
        self.training = training

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        prepared = queries.gradients(range(len(queries)))
        query_norms = prepared.square_norms().sqrt()

        def cosines(gradients: Any) -> dict[str, torch.Tensor]:
            norms = gradients.square_norms().sqrt().unsqueeze(1) * query_norms
            return {"scores": torch.where(norms > 0, gradients.inner(prepared) / norms, torch.nan)}

        for rows, part in self.training.each(cosines):
            yield ScoreBlock(rows.start, rows.stop, part["scores"])

    def self_influence(self) -> Iterator[SelfBlock]:
        raise InfluenceError(
            "gradient_cosine has no self-influence: the cosine of every gradient with itself is 1",
            hint="set influence.self_influence: never, or choose gradient_dot",
        )


@dataclass(frozen=True)
class TracIn(Method):
    """score = sum over checkpoints t of learning_rate_t <D_t g_q, g_i>, all gradients taken at checkpoint t.

    Pruthi, Liu, Kale and Sundararajan, "Estimating Training Data Influence by Tracing Gradient Descent"
    (2020), section 3.2. The checkpoints must be of one run; independently trained models are other people's
    runs, and their sum has no meaning.

    Attributes:
        optimizer: whose steps are undone: of 'sgd' D_t is one, of 'adam' diagonal, 1 / (sqrt(v) + 1e-8), v
            the mean of squared batch gradients. It is read from the optimiser's state beside the checkpoint,
            or estimated from the training examples.
        batch_size: of training; v is estimated for batches of this size where no state is there.
    """

    name = "tracin"
    unit = (
        "{change}, if one plain gradient step on the training example were undone at each checkpoint, to"
        " first order"
    )
    predicts_removal = False

    optimizer: Literal["sgd", "adam"] = "sgd"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam") or (self.batch_size is not None and self.batch_size < 1):
            raise ConfigError(
                f"tracin: optimizer {self.optimizer!r}, batch_size {self.batch_size}; expected sgd or adam,"
                " and at least 1"
            )
        if self.batch_size is not None and self.optimizer == "sgd":
            raise ConfigError(
                "tracin: batch_size is given, and optimizer is sgd; expected batch_size with adam alone"
            )
        if self.optimizer == "adam":
            object.__setattr__(self, "unit", self.unit.replace("plain gradient step", "step of Adam"))

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        if checkpoint.learning_rate is None:
            raise InfluenceError(
                f"tracin weighs each checkpoint by its learning rate, and checkpoint {checkpoint.number}"
                " has none",
                hint="name it in influence.checkpoints: [{path: ..., learning_rate: ...}]",
            )
        if self.optimizer == "adam":
            return AdamProducts.fit(training, checkpoint, self.batch_size)
        return GradientProducts(training, checkpoint.learning_rate)

    def across(self, blocks: Sequence[ScoreBlock]) -> torch.Tensor:
        return torch.stack([block.scores for block in blocks]).sum(0)


class AdamProducts(Preconditioned):
    """Inner products of gradients through Adam's diagonal, times the learning rate."""

    def __init__(self, training: Examples, scales: Vectors, source: str) -> None:
        super().__init__(training)
        self.scales, self.source = scales, source

    @property
    def facts(self) -> FitFacts:
        return FitFacts(second_moments=self.source)

    @classmethod
    def fit(cls, training: Examples, checkpoint: Checkpoint, batch_size: int | None) -> AdamProducts:
        """Raises InfluenceError without a state or a batch size, and for a state that lacks a parameter."""
        squares, source = checkpoint.second_moments(), "the optimiser's state beside the checkpoint"
        if squares is None and batch_size is None:
            raise InfluenceError(
                "tracin with optimizer: adam needs Adam's mean of squared gradients, and checkpoint"
                f" {checkpoint.number} has no state of the optimiser beside it",
                hint="set influence.method.batch_size to that of training: they are then estimated",
            )
        if squares is None:
            assert batch_size is not None
            squares, source = _batch_squares(training, batch_size), f"estimated, for batches of {batch_size}"
        missing = next((name for name in training.params if name not in squares), None)
        if missing is not None:
            raise InfluenceError(
                f"the optimiser's state of checkpoint {checkpoint.number} has nothing of {missing}",
                hint="leave parameters that were not trained out of influence.parameters",
            )
        assert checkpoint.learning_rate is not None
        device, rate = training.device, checkpoint.learning_rate
        scales = {
            name: rate / (squares[name].to(device).double().sqrt() + _EPSILON) for name in training.params
        }
        return cls(training, scales, source)

    def precondition(self, vectors: Vectors) -> Vectors:
        return {name: value * self.scales[name] for name, value in vectors.items()}


_EPSILON = 1e-8


def _batch_squares(training: Examples, batch_size: int) -> Vectors:
    """name -> the mean of the squared gradient of a random batch's mean loss: the square of the gradients'
    mean, and a batch's share of their variance.
    """

    def sums(gradients: PerSampleGradients) -> dict[str, Vectors]:
        ones, count = torch.ones_like(gradients.losses), len(gradients)
        return {
            "first": {name: value.double() for name, value in gradients.weighted_sum(ones).items()},
            "second": {name: count * value for name, value in gradients.second_moment().items()},
        }

    total, n = training.fold(sums), len(training)
    found = {}
    for name, first in total["first"].items():
        mean = (first / n).square()
        found[name] = mean + (total["second"][name] / n - mean).clamp_min(0) / batch_size
    return found
