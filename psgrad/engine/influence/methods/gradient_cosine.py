"""The cosine of the angle between gradients: the dot product without the examples' norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock, labelled, with_total
from psgrad.errors import InfluenceError


@dataclass(frozen=True)
class GradientCosine(Method):
    """score = <g_q, g_i> / (|g_q| |g_i|), of a layer the cosine within it, beside that of all of them; NaN where either gradient is zero.

    Hanawa, Yokoi, Hara and Inui, "Evaluation of Similarity-based Explanations" (2021). It forgets how strongly an example pulls, so
    that outliers do not lead every list; it predicts nothing, and the cosine of an example with itself is 1.
    """

    name = "gradient_cosine"
    unit = "cosine of the angle between the two gradients, from -1 to 1"
    predicts_removal = False

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        return Cosines(training)


class Cosines(Fitted):
    """Cosines of the angles between gradients."""

    has_self_influence = False

    def __init__(self, training: Examples) -> None:
        self.training = training
        self.facts = {}

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        prepared = queries.stream.gradients(0, len(queries))
        query_norms = _norms(prepared, per)

        def cosines(gradients: Any) -> dict[str, torch.Tensor]:
            products, norms = with_total(labelled(gradients.inner(prepared, per=per))), _norms(gradients, per)
            return {label: _ratio(value, norms[label].unsqueeze(1) * query_norms[label]) for label, value in products.items()}

        for rows, found in self.training.each(cosines):
            yield ScoreBlock(rows.start, rows.stop, found)

    def self_influence(self) -> Iterator[SelfBlock]:
        raise InfluenceError(
            "gradient_cosine has no self-influence: the cosine of every gradient with itself is 1",
            next_step="set influence.self_influence: never, or choose gradient_dot, whose self-influence is the squared gradient norm",
        )


def _norms(gradients: Any, per: Per) -> Mapping[str, torch.Tensor]:
    return {label: squares.sqrt() for label, squares in with_total(labelled(gradients.square_norms(per=per))).items()}


def _ratio(product: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return torch.where(norms > 0, product / norms, torch.nan)
