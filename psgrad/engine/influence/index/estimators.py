"""Scores from rows of (projected) gradients: inner products, cosines, and products with the inverse of the
rows' own second moment.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import Arrays, in_turn
from psgrad.engine.gradients.flat import Flat
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.index.index_rows import Differentiated, RowBlock, RowSource
from psgrad.engine.influence.index.stored_index import StoredRows
from psgrad.engine.influence.method import Fitted, ScoreBlock, SelfBlock
from psgrad.errors import InfluenceError


class FittedRows(Fitted):
    """The common part of methods on rows: queries become rows by the same projector, and the training rows
    stream past.
    """

    def __init__(self, source: RowSource) -> None:
        self.source = source

    @property
    def facts(self) -> FitFacts:
        projector = self.source.projector
        return FitFacts(
            projection=None if projector.projection is None else projector.projection.describe(),
            columns=projector.width,
            projection_noise=projector.noise,
        )

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        projector, processes = self.source.projector, queries.processes
        require_parameters(projector.flat, queries)
        rows = queries.each(lambda gradients: {"rows": projector(gradients)})
        prepared = self.prepared(torch.cat([part["rows"].double() for _, part in rows]))

        def own() -> Iterator[Arrays]:
            for block in self.source.blocks(processes.rank, processes.size):
                scores = self.contracted(block, prepared)
                scores[~block.finite] = torch.nan
                weights = self.weights(block)
                result = {"scores": scores, "rows": torch.tensor([block.start, block.stop])}
                yield result if weights is None else {**result, "weights": weights}

        for found in in_turn(processes, "scores", own()):
            start, stop = found["rows"].tolist()
            yield ScoreBlock(start, stop, found["scores"], found.get("weights"))

    def prepared(self, queries: torch.Tensor) -> torch.Tensor:
        """The factor of the rows, [m, k], for projected queries [m, k]."""
        return queries

    @abstractmethod
    def contracted(self, block: RowBlock, queries: torch.Tensor) -> torch.Tensor:
        """[b, m]: the scores for prepared queries [m, k]."""

    def weights(self, block: RowBlock) -> torch.Tensor | None:
        return None


class ProjectedProducts(FittedRows):
    """<P g_q, P g_i> times a factor: an unbiased estimate of <g_q, g_i>. Self-influences are of the whole
    gradients, without noise.
    """

    def __init__(self, source: RowSource, factor: float = 1.0) -> None:
        super().__init__(source)
        self.factor = factor

    def contracted(self, block: RowBlock, queries: torch.Tensor) -> torch.Tensor:
        return (block.rows.double() @ queries.t()) * (self.factor * block.to_loss).unsqueeze(1)

    def self_influence(self) -> Iterator[SelfBlock]:
        squares = self.source.losses_and_square_norms()[1]
        yield SelfBlock(0, len(squares), squares * self.factor, squares.sqrt() * self.factor)


class ProjectedCosines(FittedRows):
    """The cosine of the angle between projected gradients; NaN where either is zero."""

    has_self_influence = False

    def contracted(self, block: RowBlock, queries: torch.Tensor) -> torch.Tensor:
        rows = block.rows.double()
        norms = (rows.norm(dim=1) * block.to_loss.abs()).unsqueeze(1) * queries.norm(dim=1)
        products = (rows @ queries.t()) * block.to_loss.unsqueeze(1)
        return torch.where(norms > 0, products / norms, torch.nan)

    def self_influence(self) -> Iterator[SelfBlock]:
        raise InfluenceError(
            "gradient_cosine has no self-influence: the cosine of every gradient with itself is 1",
            hint="choose gradient_dot, whose self-influence is the squared gradient norm",
        )


class ProjectedInverse(FittedRows):
    """P g_q (M / n + lam I)^-1 P g_i / n, M the sum over the rows of P g g' P', in float64.

    Args:
        of: whether g is the gradient of the loss (M is then the projected empirical Fisher), or that of the
            margin: TRAK, whose scores are those of -df, and go with weights -dl/df.
        damping: lam; None for `relative_damping` times the mean eigenvalue of M / n.

    Raises InfluenceError where M / n + lam I has no inverse, or lam is negative.
    """

    def __init__(
        self, source: RowSource, of: Differentiated, damping: float | None, relative_damping: float
    ) -> None:
        super().__init__(source)
        self.of = of
        # For the rows of an index it takes longer than all else.
        self.has_self_influence = not isinstance(source, StoredRows)
        moment = source.moment(of)
        k, n = len(moment), source.finite
        mean = float(moment.diagonal().sum()) / (n * k)
        lam = Damping(damping, relative_damping).resolve(mean)
        self.lam, self.mean_eigenvalue = lam, mean
        self._root = factor_of(moment + torch.eye(k, dtype=torch.float64) * (lam * n), lam, mean, n)

    @property
    def facts(self) -> FitFacts:
        return replace(super().facts, damping=self.lam, mean_eigenvalue=self.mean_eigenvalue)

    def prepared(self, queries: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_solve(queries.t(), self._root).t()

    def contracted(self, block: RowBlock, queries: torch.Tensor) -> torch.Tensor:
        products = block.rows.double() @ queries.t()
        return -products if self.of == "margin" else products * block.to_loss.unsqueeze(1)

    def weights(self, block: RowBlock) -> torch.Tensor | None:
        return block.weight if self.of == "margin" else None

    def self_influence(self) -> Iterator[SelfBlock]:
        for block in self.source.blocks():
            rows = block.rows.double() * block.to_loss.unsqueeze(1)
            solved = self.prepared(rows)
            result = (rows * solved).sum(1), solved.norm(dim=1)
            yield SelfBlock(
                block.start, block.stop, *(values.where(block.finite, torch.nan) for values in result)
            )


def factor_of(matrix: torch.Tensor, damping: float, mean_eigenvalue: float, count: int) -> torch.Tensor:
    """The lower Cholesky factor of a symmetric matrix [k, k] float64, the sum over `count` rows plus its
    damping.

    Raises InfluenceError, with a damping that would do, where it has no inverse to float64's digits.
    """
    root, info = torch.linalg.cholesky_ex(matrix)
    pivots = root.diagonal().square()
    # The ratio of the pivots is at most the condition number.
    if not int(info) and bool(pivots.min() > len(matrix) * torch.finfo(matrix.dtype).eps * pivots.max()):
        return root
    enough = 1e-6 * mean_eigenvalue
    raise InfluenceError(
        f"the second moment of the projected gradients is singular: damping {damping:g}, {len(matrix)}"
        f" columns, {count} training examples",
        hint=(
            f"set influence.method.damping: {enough:.3g}, or more"
            if enough > 0
            else "look at the data: every gradient is zero"
        ),
    )


def require_parameters(flat: Flat, queries: Examples) -> None:
    """Raises InfluenceError unless the queries are of the parameters that the rows are of."""
    rows, asked = flat.shapes, queries.flat.shapes
    first = next((name for name in {**rows, **asked} if rows.get(name) != asked.get(name)), None)
    if first is None:
        return
    arrived, expected = (
        list(shapes[first]) if first in shapes else "not among them" for shapes in (asked, rows)
    )
    raise InfluenceError(
        f"the queries' gradients are of other parameters than the training examples': {first} is {arrived};"
        f" expected {first} {expected}",
        hint="choose the same model and parameters, or build the index again",
    )
