"""Influence functions with eigenvalue-corrected Kronecker-factored curvature (EK-FAC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.gradients.parts import Part
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.influence.amounts import is_affine
from psgrad.engine.influence.curvature.kronecker_blocks import KroneckerBlock, Multiplied
from psgrad.engine.influence.curvature.kronecker_fitting import EXACT_BLOCK, fisher_rows, fit_blocks
from psgrad.engine.influence.curvature.separable import Separable
from psgrad.engine.influence.damping import Damping, default_damping
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.method import (
    RELATIVE,
    Checkpoint,
    Fitted,
    Method,
    Preconditioned,
    ScoreBlock,
    SelfBlock,
)
from psgrad.errors import ConfigError, InfluenceError


@dataclass(frozen=True)
class EKFAC(Method):
    """score = g_q^T (n (C + lam I))^-1 g_i, C the mean curvature in blocks, one for each weight with its
    bias, that are diagonal in the product of the eigenvectors of their factors' second moments: C = U Lambda
    U^T.

    George, Laurent, Bouthillier, Ballas and Vincent, "Fast Approximate Natural Gradient Descent in a
    Kronecker-factored Eigenbasis" (2018), equation 8; Grosse et al., "Studying Large Language Model
    Generalization with Influence Functions" (2023), section 3.1.

    Attributes:
        fisher: what the curvature's rows are. 'sampled': `draws` random rows of the Gauss-Newton matrix for
            each training example, which are what gradients for labels that the model draws itself are;
            'exact': all of its rows; 'empirical': the gradients of the training loss.
        draws, seed: of 'sampled'.
        exact_blocks: a weight that has at most this many numbers with its bias has its whole block, which
            then is not approximated by factors; 0 for none.
        damping: lam, the same for all blocks; None for `relative_damping` times the mean eigenvalue, block by
            block. Where neither is given: none with a weight decay and a model that is affine in its
            parameters, and a tenth of the mean eigenvalue else.
        weight_decay: of training, on the mean loss; it is part of the curvature.
    """

    name = "ekfac"
    # Each block has its own damping, and nothing between blocks is counted: scores only rank, and were beyond
    # any possible change.
    unit = RELATIVE
    predicts_removal = False

    fisher: Literal["sampled", "exact", "empirical"] = "sampled"
    draws: int = 1
    seed: int = 0
    exact_blocks: int = EXACT_BLOCK
    damping: float | None = None
    relative_damping: float | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ConfigError(f"ekfac: draws is {self.draws}; expected at least 1")
        if self.exact_blocks < 0:
            raise ConfigError(f"ekfac: exact_blocks is {self.exact_blocks}; expected 0 for none, or more")

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        blocks = fit_blocks(self._rows(training), len(training), self.exact_blocks)
        return KroneckerFactored(training, blocks, self.weight_decay, self._damping(training), self.fisher)

    def _damping(self, training: Examples) -> Damping:
        convex = self.weight_decay > 0 and is_affine(training)
        return default_damping(
            self.damping, self.relative_damping, 0.1, convex=convex, weight_decay=self.weight_decay
        )

    def _rows(self, training: Examples) -> Examples:
        if self.fisher == "empirical":
            return training
        return fisher_rows(training, self.draws if self.fisher == "sampled" else None, self.seed)


class BlockProducts:
    """Inner products of training gradients with queries through the inverse of one block. Where all of them
    are outer products, and the inverse is nearly a sum of few, that is less work than to multiply the
    queries.

    Args:
        inverse: [g, a, b] float64.
        pairs: how many pairs of a training example and a query there are.

    Attributes:
        queries: the results of `of`, one for each chunk.
    """

    def __init__(self, block: KroneckerBlock, inverse: torch.Tensor, pairs: int) -> None:
        self.block, self.inverse, self.pairs = block, inverse, pairs
        self.label, self.queries = block.label, list[torch.Tensor]()

    @cached_property
    def separable(self) -> Separable | None:
        return Separable.of(self.inverse[0], self.pairs) if len(self.inverse) == 1 else None

    def of(self, queries: PerSampleGradients) -> torch.Tensor:
        """[k, a + b]: both factors of each gradient in the block's bases, if `inner` needs no more; else
        [k, g, a, b], multiplied.
        """
        basis, part = self.block.basis, queries.parts[0]
        kind = part.gradients[basis.name].dtype
        are_outer = all(basis.is_outer(part) for part in queries.parts)
        if kind != torch.float32 or not are_outer or self.separable is None:
            return self.block.multiplied(queries, self.inverse)
        factors: torch.Tensor = queries.by_part(
            lambda part: torch.cat(basis.outer(part, torch.float64) or [], 2)
        )
        return factors.squeeze(1).to(kind)

    def inner(self, part: Part) -> torch.Tensor:
        """[n, m] float64: of the gradients of one part."""
        if self._factors is None or (factors := self.block.basis.outer(part)) is None:
            return self._multiplied.inner(part)
        assert self.separable is not None
        left, right = (factor.squeeze(1) for factor in factors)
        return self.separable.inner((left, right), self._factors)

    @cached_property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """[m, a] and [m, b]; None if a chunk of queries has none."""
        if any(each.dim() > 2 for each in self.queries):
            return None
        sizes = list(self.inverse.shape[1:])
        left, right = torch.cat(self.queries).split(sizes, 1)
        return left, right

    @cached_property
    def _multiplied(self) -> Multiplied:
        values = []
        for each in self.queries:
            if each.dim() == 2:
                left, right = each.double().split(list(self.inverse.shape[1:]), 1)
                each = (left.unsqueeze(2) * self.inverse * right.unsqueeze(1)).to(each).unsqueeze(1)
            values.append(each)
        found = torch.cat(values)
        return Multiplied(self.block, found, self.pairs // max(1, len(found)))


class KroneckerFactored(Preconditioned):
    """Blocks with a damping.

    fisher: where the factors' gradients come from. Raises InfluenceError where a block has no inverse.
    """

    def __init__(
        self,
        training: Examples,
        blocks: list[KroneckerBlock],
        weight_decay: float,
        damping: Damping,
        fisher: str,
    ) -> None:
        super().__init__(training)
        self.fisher = fisher
        self.blocks, self.weight_decay = blocks, weight_decay
        self.means = {block.label: float(block.values.mean()) for block in blocks}
        self.damping = {label: damping.resolve(mean) for label, mean in self.means.items()}
        self._inverses = [self._inverse(block) for block in blocks]

    @property
    def facts(self) -> FitFacts:
        return FitFacts(
            damping=self.damping,
            mean_eigenvalue=self.means,
            blocks={block.label: block.basis.describe() for block in self.blocks},
            fisher=self.fisher,
        )

    def _inverse(self, block: KroneckerBlock) -> torch.Tensor:
        """[g, a, b]: the eigenvalues of the inverse of n (C + lam I)."""
        values = block.values + (self.weight_decay + self.damping[block.label])
        smallest, largest = (float(values.min()), float(values.max())) if values.numel() else (1.0, 1.0)
        precision = torch.finfo(self.training.stream.dtype).eps
        if not smallest > precision * largest:
            mean = self.means[block.label]
            raise InfluenceError(
                f"the curvature of {block.label} has no inverse: with a damping of"
                f" {self.damping[block.label]:.3g} its eigenvalues go from {smallest:.3g} to {largest:.3g}",
                hint=(
                    f"set influence.method.damping: {0.1 * mean:.3g}, a tenth of the mean eigenvalue"
                    if mean
                    else "no example has a gradient in this layer; leave it out of `parameters`"
                ),
            )
        return 1 / (values * len(self.training))

    def precondition(self, vectors: Vectors) -> Vectors:
        gradients, total = as_gradients(vectors), Vectors()
        for block, inverse in zip(self.blocks, self._inverses, strict=True):
            for name, value in block.precondition(gradients, inverse).items():
                total[name] = total[name] + value if name in total else value
        return {name: total[name] for name in vectors}

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        pairs = len(self.training) * len(queries)
        asked = [BlockProducts(*each, pairs) for each in zip(self.blocks, self._inverses, strict=True)]
        parts = [
            found for _, found in queries.each(lambda some: {each.label: each.of(some) for each in asked})
        ]
        for each in asked:
            each.queries = [part[each.label].to(self.training.device) for part in parts]

        def products(part: Part) -> torch.Tensor:
            return torch.stack([each.inner(part) for each in asked]).sum(0)

        for rows, found in self.training.each(lambda gradients: {"scores": gradients.by_part(products)}):
            yield ScoreBlock(rows.start, rows.stop, found["scores"])

    def self_influence(self) -> Iterator[SelfBlock]:
        def both(gradients: Any) -> dict[str, torch.Tensor]:
            part = [
                block.weighted_squares(gradients, [inverse, inverse.square()])
                for block, inverse in zip(self.blocks, self._inverses, strict=True)
            ]
            products, squares = (torch.stack(parts).sum(0) for parts in zip(*part, strict=True))
            return {"self_influence": products, "norm": squares.sqrt()}

        for rows, part in self.training.each(both):
            yield SelfBlock(rows.start, rows.stop, part["self_influence"], part["norm"])
