"""The interface of an influence method: options, a fit to the training set at one checkpoint, and scores in
blocks of training examples. `row_norms` finds the rows whose loss and gradient are finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.errors import InfluenceError

# Scores with this unit add up: their sum over examples predicts the effect of removing all of them. {change}
# is the measurement's name for a change for the worse: "rise of the query's loss, in nats", or "fall of the
# query's margin, in nats".
REMOVAL = "predicted {change}, if the training example were removed"
# For scores whose size is not certain: the curvature is damped or approximate, or the model is not the
# solution of a convex problem.
UNCALIBRATED = "predicted {change} (uncalibrated), if the training example were removed"
# For scores that only rank.
RELATIVE = "relative, no unit"


@dataclass(frozen=True)
class ScoreBlock:
    """The scores [k, m] float64 of the training examples start, ..., stop - 1 for all m queries, on the CPU.

    weights: [k] float64, for methods whose scores are a product of a matrix and one number a training
    example, each of which is averaged over checkpoints by itself (TRAK); None for all others. The scores are
    without them.
    """

    start: int
    stop: int
    scores: torch.Tensor
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class SelfBlock:
    """The self-influence [k] of the training examples start, ..., stop - 1, and the norm [k] of their
    preconditioned gradients, both float64 on the CPU.
    """

    start: int
    stop: int
    self_influence: torch.Tensor
    preconditioned_norm: torch.Tensor


@dataclass(frozen=True)
class Checkpoint:
    """The point in training of the model that a method is fitted to.

    number: from 0. learning_rate: the optimiser's when the checkpoint was saved; None where the config names
    none. say: called with messages for a person while it runs. queries: how many will be scored, for methods
    that choose the cheapest computation; None where that is not known. of: how many checkpoints scores are
    averaged over. second_moments: reads Adam's mean of the squared gradients, name -> [*shape], where the
    optimiser's state is beside the checkpoint; None where it is not.
    """

    number: int = 0
    learning_rate: float | None = None
    say: Callable[[str], None] = field(default=lambda _: None)
    queries: int | None = None
    of: int = 1
    second_moments: Callable[[], Mapping[str, torch.Tensor] | None] = field(default=lambda: None)


class Method(ABC):
    """A method with its options: kinds are frozen dataclasses, one file each in `methods/`.

    name: as in a config. unit: of a score, for headers; see REMOVAL for what stands in it, which it becomes
    where fits are `calibrated`. predicts_removal: whether scores are the change on removal.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = UNCALIBRATED
    predicts_removal: ClassVar[bool] = True

    @abstractmethod
    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        """All that does not depend on the queries: curvature, its factors or its inverse.

        Raises InfluenceError where this training set, or this checkpoint, has no such scores.
        """

    def across(self, blocks: Sequence[ScoreBlock]) -> torch.Tensor:
        """Scores [k, m] from those of several checkpoints: their mean, unless a method overrides this."""
        scores = torch.stack([block.scores for block in blocks]).mean(0)
        if blocks[0].weights is None:
            return scores
        weights = torch.stack([block.weights for block in blocks if block.weights is not None]).mean(0)
        return scores * weights.unsqueeze(1)

    @property
    def joins_by_own_rule(self) -> bool:
        """Whether `across` takes the checkpoints' scores as they are, by a rule that is the method's own;
        scores of other methods are put on one scale for each query before they are averaged.
        """
        return type(self).across is not Method.across


class Fitted(ABC):
    """A method fitted to a training set at one checkpoint.

    has_self_influence: whether it costs about what scores cost; False where it takes a solve an
    example. calibrated: whether scores are amounts: the curvature is that of a convex training objective at
    its minimum, and nothing but its weight decay is added.
    """

    has_self_influence: bool = True
    calibrated: bool = False

    @property
    def facts(self) -> FitFacts:
        """What the fit says of itself, for the manifest; of its solves, too, once there are scores."""
        return FitFacts()

    @abstractmethod
    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        """The scores of all training examples for these queries, in blocks, in the order of the training
        set.
        """

    @abstractmethod
    def self_influence(self) -> Iterator[SelfBlock]:
        """Each training example's influence on itself, in blocks, in order."""

    def solver(self) -> Preconditioned | None:
        """What multiplies with the inverse of the curvature; None for methods without one."""
        return None


class Preconditioned(Fitted):
    """score = <A g_q, g_i>: the queries' gradients g_q are multiplied by a matrix A once, and the training
    gradients g_i stream past.

    makes_passes: whether `precondition` goes over the training examples.
    """

    makes_passes: ClassVar[bool] = False

    def __init__(self, training: Examples) -> None:
        self.training = training

    def solver(self) -> Preconditioned | None:
        return self

    @abstractmethod
    def precondition(self, vectors: Vectors) -> Vectors:
        """A v of k vectors, name -> [k, *shape]."""

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        flat = self.training.flat
        prepared = as_gradients(self.precondition(flat.split(queries.materialise().to(self.training.device))))
        for rows, part in self.training.each(lambda gradients: {"scores": gradients.inner(prepared)}):
            yield ScoreBlock(rows.start, rows.stop, part["scores"])

    def self_influence(self) -> Iterator[SelfBlock]:
        def both(vectors: Vectors) -> dict[str, torch.Tensor]:
            prepared = self.precondition(vectors)
            norms = row_products(prepared, prepared).sqrt()
            return {"self_influence": row_products(prepared, vectors), "norm": norms}

        blocks: Iterator[tuple[slice, dict[str, torch.Tensor]]]
        if self.makes_passes:  # which all processes make together, with the same vectors
            device = self.training.device
            blocks = (
                (rows, both({name: value.to(device) for name, value in vectors.items()}))
                for rows, vectors in self.training.each(lambda gradients: gradients.materialise())
            )
        else:
            blocks = self.training.each(lambda gradients: both(gradients.materialise()))
        for rows, part in blocks:
            yield SelfBlock(rows.start, rows.stop, part["self_influence"].cpu(), part["norm"].cpu())


def row_products(first: Vectors, second: Vectors) -> torch.Tensor:
    """[k] float64: of k vectors with k others, both name -> [k, *shape]."""

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(len(value), -1).double()

    each = [(rows(value) * rows(second[name]).to(value.device)).sum(1) for name, value in first.items()]
    return torch.stack(each).sum(0)


def not_finite_gradients(arrived: str) -> InfluenceError:
    """The error of a training set with gradients that are not finite."""
    return InfluenceError(
        arrived,
        hint="find the rows with `psgrad analyze`, and leave them out of the data",
    )


@dataclass(frozen=True)
class RowNorms:
    """The results of a pass over n rows: finite [n], losses [n], norms [n] of the gradients, and further
    columns (a prediction).
    """

    finite: torch.Tensor
    losses: np.ndarray
    norms: np.ndarray
    columns: dict[str, np.ndarray]


def row_norms(examples: Examples) -> RowNorms:
    """The losses and gradient norms of all rows, in one pass."""
    chunks = [norms for _, norms in examples.norms()]
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    losses, squares = columns.pop("loss"), columns.pop("square_norm")
    finite = torch.isfinite(losses) & torch.isfinite(squares)
    return RowNorms(
        finite,
        losses.numpy(),
        squares.sqrt().numpy(),
        {name: value.numpy() for name, value in columns.items()},
    )
