"""Fits the blocks of a Kronecker-factored curvature in two passes over its rows: one for the bases, one for
the eigenvalues in them.

The rows are gradients, or a few random rows of the Gauss-Newton matrix for each sample: from labels that the
model draws itself where outputs are too large for their second derivatives, such as those of a vocabulary at
each position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_derivatives import OutputDerivatives
from psgrad.engine.execution.output_rows import (
    LARGEST_OUTPUT,
    OutputRows,
    gauss_newton_rows,
    output_size,
    rows_like,
)
from psgrad.engine.execution.ranks import Arrays, Processes, in_turn
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.gradients.per_sample import per_sample_gradients
from psgrad.engine.gradients.projections.projection import key_of, signs, streams, words_at
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.influence.curvature.kronecker_blocks import (
    Basis,
    Bias,
    KroneckerBlock,
    second_moment,
    sum_of_squares,
)
from psgrad.engine.influence.curvature.kronecker_factors import Covariances, FactorSums, Form, Use, cover
from psgrad.engine.influence.method import not_finite_gradients
from psgrad.engine.transforms import grad, vmap
from psgrad.errors import InfluenceError

# A weight that has at most this many numbers with its bias gets the exact block: 8 MiB, and less than a
# second for its eigenvectors. A parameter without factors always does.
EXACT_BLOCK = 1024


def fit_blocks(rows: Examples, count: int, exact: int = 0) -> list[KroneckerBlock]:
    """The blocks whose sum over rows, divided by `count`, approximates (1 / count) sum_r j_r j_r^T, one for
    each weight with its bias.

    Args:
        rows: examples whose gradients are the rows j_r of the curvature: training examples for the empirical
            Fisher.
        exact: a weight that has at most `exact` numbers with its bias gets a basis of its gradient, which
            makes the block exact.

    The basis of each factor is that of its second moment, summed over rows and positions; of a parameter
    without factors that of its gradient, or none where the parameter is large. The eigenvalues are those of
    George et al.: the mean squares of the gradients' elements in the bases, positions of a row summed before
    squaring.

    Raises InfluenceError where a gradient is not finite.
    """
    moments = moments_of(rows.params, gather(rows), exact)
    whole = [each.is_row and each.size[2] <= max(exact, EXACT_BLOCK) for each in moments]
    bases = diagonalised(moments, rows.processes, rows.device)

    def squares(gradients: PerSampleGradients) -> list[torch.Tensor]:
        return [
            (second_moment if is_whole else sum_of_squares)(basis, gradients)
            for basis, is_whole in zip(bases, whole, strict=True)
        ]

    totals = rows.fold(squares)
    own = [
        replace(basis, right=total)
        for basis, total, is_whole in zip(bases, totals, whole, strict=True)
        if is_whole
    ]
    turned = iter(diagonalised(own, rows.processes, rows.device))
    blocks = []
    for basis, total, is_whole in zip(bases, totals, whole, strict=True):
        if is_whole:
            basis = next(turned)
            assert basis.right is not None
            total = (basis.right * (total @ basis.right)).sum(1, keepdim=True)
        blocks.append(KroneckerBlock(basis, total / count))
    return blocks


def gather(rows: Examples) -> FactorSums:
    """The second moments of all rows' factors, of gradients that keep theirs even where they are larger than
    the gradient.
    """
    gathering = Covariances()
    if isinstance(rows, OutputRows):
        replace(rows, settle=False).gather(gathering)
    else:
        rows.gather(gathering, partial(per_sample_gradients, settle=False))
    return gathering.sums.over(rows.processes, rows.device)


def diagonalised(moments: list[Basis], processes: Processes, device: torch.device) -> list[Basis]:
    """Bases of the eigenvectors of the moments that they hold. Each process computes some of them."""
    sides = [(place, side) for place in range(len(moments)) for side in ("left", "right")]
    todo = [(place, side) for place, side in sides if getattr(moments[place], side) is not None]

    def own() -> Iterator[Arrays]:
        for place, side in todo[processes.rank :: processes.size]:
            yield {"vectors": _eigenvectors(getattr(moments[place], side), moments[place].name)}

    found = in_turn(processes, "eigenvectors", own())
    vectors = {key: each["vectors"].to(device) for key, each in zip(todo, found, strict=True)}
    return [
        replace(each, left=vectors.get((place, "left")), right=vectors.get((place, "right")))
        for place, each in enumerate(moments)
    ]


def moments_of(params: Vectors, sums: FactorSums, exact: int) -> list[Basis]:
    """For each part of the parameters, name -> [*shape], in their order, the moments that its basis is of, in
    the basis's place; biases go with their weights. Those without moments are taken as a single row: weights
    of at most `exact` numbers, and what has no factors.
    """
    shapes = {name: parameter.shape for name, parameter in params.items()}
    forms: dict[str, list[Form]] = {name: [] for name in shapes}
    for name, form in sums.moments:
        forms[name].append(form)
    biases = _biases(sums, shapes, {name for name, of_name in forms.items() if len(of_name) == 1})
    tied = {bias.name for bias in biases.values()}
    bases: list[Basis] = []
    for name, shape in shapes.items():
        if name in tied:
            continue
        bias = next((biases[name, form] for form in forms[name] if (name, form) in biases), None)
        size = shape.numel() + (0 if bias is None else bias.shape.numel())
        if forms[name] and cover(forms[name], shape) and size > exact:
            bases += [
                _of_factors((name, form), shape, sums, biases.get((name, form))) for form in forms[name]
            ]
        else:
            row = Form(None, (1, 1, shape.numel()))
            bases.append(
                Basis(name, shape, row, None if bias is None else replace(bias, appended="right"), None, None)
            )
    return bases


def _biases(sums: FactorSums, shapes: dict[str, torch.Size], candidates: set[str]) -> dict[Use, Bias]:
    """Each use's bias; a bias of several weights goes to the first one."""
    biases: dict[Use, Bias] = {}
    taken: set[str] = set()
    for tie, held in sums.ties.items():
        whole = tie.use[0] in candidates and cover([tie.use[1]], shapes[tie.use[0]])
        if held and whole and tie.use not in biases and tie.bias not in taken:
            # summed cotangents: a one stands where the other factor has the activations
            biases[tie.use] = Bias(tie.bias, shapes[tie.bias], "right" if tie.side == "left" else "left")
            taken.add(tie.bias)
    return biases


def _of_factors(use: Use, shape: torch.Size, sums: FactorSums, bias: Bias | None) -> Basis:
    name, form = use
    moments = sums.moments[use]
    sides: dict[str, torch.Tensor | None] = {}
    for side in ("left", "right"):
        moment = moments.get(side)
        if moment is not None and side == "left" and "one_hot" in moments:
            moment = moment + moments["one_hot"].diag()
        if moment is not None and bias is not None and bias.appended == side:
            along, corner = (
                moments[f"{side}_sum"].unsqueeze(2),
                moments["positions"].expand(len(moment), 1, 1),
            )
            moment = torch.cat(
                [torch.cat([moment, along], 2), torch.cat([along.transpose(1, 2), corner], 2)], 1
            )
        sides[side] = moment
    return Basis(name, shape, form, bias, sides["left"], sides["right"])


def _eigenvectors(moment: torch.Tensor, name: str) -> torch.Tensor:
    """[g, a, a] of symmetric matrices [g, a, a]."""
    if not bool(torch.isfinite(moment).all()):
        raise not_finite_gradients(
            f"the gradients of {name} are not finite, or so large that their squares are not"
        )
    return torch.linalg.eigh((moment + moment.transpose(1, 2)) / 2).eigenvectors


@dataclass(frozen=True)
class SampledRows(OutputRows):
    """Rows (S e)' J / sqrt(R), with S S' the second derivatives of a sample's loss in its output and e of
    random signs.

    The sum of j_r j_r' over all rows has the Gauss-Newton matrix of the sum of the losses as its mean, as
    that of gradients for labels drawn from the model has; with signs its variance is the least. A sample's
    signs follow from the seed and its number.
    """

    seed: int = 0

    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        derivatives = OutputDerivatives.of(self.objective.criterion, outputs, target, weights)
        roots = derivatives.root(self.numbers_of(rows))[0]
        size = self.per_sample * roots.shape[2]
        stream = streams(key_of(self.seed, "rows"), rows.to(outputs.device)).unsqueeze(1)
        words = words_at(stream, torch.arange(math.ceil(size / 64), device=outputs.device))
        drawn = signs(words)[:, :size].reshape(-1, self.per_sample, roots.shape[2]).to(roots)
        return torch.bmm(drawn, roots.transpose(1, 2)) / math.sqrt(self.per_sample)


def fisher_rows(training: Examples, draws: int | None, seed: int) -> OutputRows:
    """`draws` sampled rows for each example, or all rows where it is None. Of large outputs the rows are
    those of labels that the model draws.

    Raises InfluenceError where the output is not a tensor or too large, and, as a pass goes on, where the
    loss is not convex in it.
    """
    size = output_size(training)
    if size > LARGEST_OUTPUT and draws is not None:
        return sampled_label_rows(training, draws, seed)
    if size > LARGEST_OUTPUT:
        raise InfluenceError(
            f"the model's output has {size} numbers for one example, and rows of the Gauss-Newton matrix take"
            f" at most {LARGEST_OUTPUT}",
            hint="set fisher: sampled, which draws labels, or empirical",
        )
    if draws is None:
        return gauss_newton_rows(training)
    return rows_like(SampledRows, training, per_sample=draws, seed=seed)


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
        f"the model's output has {outputs[0].numel()} numbers for one example, and its loss is not that of"
        " a softmax with one label a position, so that no labels can be drawn",
        hint="set fisher: empirical, or the loss cross_entropy or token_cross_entropy",
    )


def sampled_label_rows(training: Examples, draws: int, seed: int) -> SampledLabelRows:
    """`draws` rows for each example."""
    return rows_like(SampledLabelRows, training, per_sample=draws, seed=seed)
