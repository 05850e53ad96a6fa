"""Rows of the Gauss-Newton matrix of softmax losses from labels that the model draws itself, for outputs that
are too large for their second derivatives, such as those of a vocabulary at each position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import OutputRows, rows_like
from psgrad.engine.gradients.projections.projection import key_of, streams, words_at
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.transforms import grad, vmap
from psgrad.errors import InfluenceError

# How far the gradient in the output may be from that of a softmax loss, as a share of its largest number.
_CLOSE = 1e-3


@dataclass(frozen=True)
class SampledLabelRows(OutputRows):
    """Rows sqrt(s) (p - e_y)' J / sqrt(R), with labels y drawn from p, the model's own probabilities.

    At each position the second derivatives of a softmax loss in its logits are s (diag(p) - p p'), which is
    the mean of s (p - e_y)(p - e_y)'. Labels of positions are drawn independently, so that products of two
    positions are zero on average. The sum of j_r j_r' has the Gauss-Newton matrix of the sum of the losses as
    its mean. A sample's labels follow from the seed and its number.
    """

    seed: int = 0

    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        if target is None or target.is_floating_point() or target.shape != outputs.shape[:-1]:
            raise _no_labels(outputs)
        logits = accumulating(outputs)
        slopes = vmap(grad(self.objective.criterion))
        counted = slopes(logits, target).abs().amax(-1) > 0
        probabilities = logits.softmax(-1)
        cumulative = probabilities.cumsum(-1)
        positions = target[0].numel()
        stream = streams(key_of(self.seed, "labels"), self.numbers_of(rows).to(outputs.device)).unsqueeze(1)
        words = words_at(stream, torch.arange(self.per_sample * positions, device=outputs.device))
        uniform = ((words >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
        drawn = uniform.reshape(len(outputs), self.per_sample, *target.shape[1:]).to(logits.dtype)
        found = []
        for each in drawn.unbind(1):
            chosen = torch.searchsorted(cumulative, (each * cumulative[..., -1]).unsqueeze(-1)).squeeze(-1)
            labels = torch.where(counted, chosen.clamp(max=outputs.shape[-1] - 1), target)
            expected = probabilities.clone()
            expected.scatter_add_(
                -1,
                labels.clamp(min=0).unsqueeze(-1),
                -torch.ones_like(labels, dtype=logits.dtype).unsqueeze(-1),
            )
            expected = torch.where(counted.unsqueeze(-1), expected, 0.0)
            found.append(self._scaled(slopes(logits, labels), expected, outputs))
        cotangents = torch.stack([each.flatten(1) for each in found], 1) / math.sqrt(self.per_sample)
        if weights is not None:
            cotangents = cotangents * weights.to(cotangents).sqrt().reshape(-1, 1, 1)
        return cotangents

    @staticmethod
    def _scaled(slope: torch.Tensor, expected: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """sqrt(s) (p - e_y), of the loss's gradient in the output, s (p - e_y), and of p - e_y."""
        sizes = expected.abs().flatten(1).sum(1)
        scale = slope.abs().flatten(1).sum(1) / torch.where(sizes > 0, sizes, 1.0)
        scale = scale.reshape(-1, *[1] * (slope.dim() - 1))
        off, largest = (slope - scale * expected).abs().amax(), slope.abs().amax()
        if not bool(off <= _CLOSE * largest):
            raise _no_labels(outputs)
        return scale.sqrt() * expected


def _no_labels(outputs: torch.Tensor) -> InfluenceError:
    return InfluenceError(
        f"the model's output has {outputs[0].numel()} numbers for one example, and its loss is not that of a"
        " softmax with one label a position, so that no labels can be drawn",
        expected="cross_entropy or token_cross_entropy for outputs of this size",
        next_step="set fisher: empirical, which takes the gradients of the training loss",
    )


def sampled_label_rows(training: Examples, draws: int, seed: int) -> SampledLabelRows:
    """`draws` rows for each example."""
    return rows_like(SampledLabelRows, training, per_sample=draws, seed=seed)
