"""Gradient dot product: what one plain gradient step on the training example would do to the query's loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock, labelled


@dataclass(frozen=True)
class GradientDot(Method):
    """score = <g_q, g_i>.

    Charpiat, Girard, Felardos and Tarabalka, "Input Similarity from the Neural Network Perspective" (2019); TracInCP with one
    checkpoint and learning rate one.
    """

    name = "gradient_dot"
    unit = "{change}, if one gradient step on the training example were undone, per unit of learning rate"
    predicts_removal = False

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        return Products(training)


class Products(Fitted):
    """Inner products of gradients, times one factor."""

    def __init__(self, training: Examples, factor: float = 1.0) -> None:
        self.training, self.factor = training, factor
        self.facts = {}

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        prepared = queries.stream.gradients(0, len(queries))
        for rows, found in self.training.each(lambda gradients: labelled(gradients.inner(prepared, per=per))):
            yield ScoreBlock(rows.start, rows.stop, {label: products * self.factor for label, products in found.items()})

    def self_influence(self) -> Iterator[SelfBlock]:
        for rows, found in self.training.norms():
            squares = found["square_norm"] * self.factor
            yield SelfBlock(rows.start, rows.stop, squares, found["square_norm"].sqrt() * self.factor)
