"""Scores by the query's loss at the output that a removal is predicted to lead to, not by its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import jacobian_rows
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import as_gradients
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.leverage import Corrected
from psgrad.engine.influence.method import Fitted, Preconditioned, ScoreBlock, SelfBlock
from psgrad.engine.transforms import vmap

# Numbers of outputs whose losses are computed at once.
_OUTPUTS = 1 << 22


class AtOutput(Fitted):
    """score = m_q(z_q + J_q H^-1 g_i) - m_q(z_q), m_q the measurement as a function of the output z_q, J_q
    the output's Jacobian.

    The parameters' change is that of the fit, and so is the output's to first order; of the measurement every
    order is counted. Where the model is linear, nothing but the change of the parameters is approximate.
    """

    def __init__(self, fitted: Any) -> None:
        self.fitted: Corrected | Preconditioned = fitted
        self.steps: Preconditioned = fitted.removed if isinstance(fitted, Corrected) else fitted
        self.has_self_influence = fitted.has_self_influence
        self.calibrated = fitted.calibrated

    @property
    def facts(self) -> FitFacts:
        return self.fitted.facts

    def solver(self) -> Preconditioned | None:
        return self.fitted.solver()

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        change = _Changes(queries, self.steps)
        for rows, changes in self.steps.training.each(change):
            block = ScoreBlock(rows.start, rows.stop, changes["scores"])
            yield self.fitted.marked(block) if isinstance(self.fitted, Corrected) else block

    def self_influence(self) -> Iterator[SelfBlock]:
        """By the gradient, as that of the fit."""
        return self.fitted.self_influence()


class _Changes:
    """The changes of queries by removals, as a query of the training set's gradients."""

    def __init__(self, queries: Examples, steps: Preconditioned) -> None:
        rows, device = jacobian_rows(queries), steps.training.device
        self.prepared = as_gradients(steps.precondition(queries.flat.split(rows.materialise().to(device))))
        outputs = torch.cat([outputs["output"] for _, outputs in queries.outputs()])
        shape = outputs.shape[1:]
        self.outputs = outputs.to(device).double().reshape(len(outputs), -1)
        target = queries.stream.load(range(queries.count))[1]
        self.target = target.double() if target is not None and target.is_floating_point() else target

        def loss(flat: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
            return queries.objective.criterion(flat.reshape(shape), target)

        over_queries = vmap(loss, in_dims=(0, None if target is None else 0))
        self.losses = vmap(over_queries, in_dims=(0, None))
        self.before = over_queries(self.outputs, self.target)

    def __call__(self, gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        steps = gradients.inner(self.prepared).reshape(len(gradients), *self.outputs.shape)
        parts = [
            self.losses(self.outputs + some, self.target)
            for some in steps.split(max(1, _OUTPUTS // self.outputs.numel()))
        ]
        return {"scores": torch.cat(parts).double() - self.before}
