"""Influence functions with the mean of inverses in place of the inverse of a mean (DataInf)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.influence.amounts import is_affine
from psgrad.engine.influence.damping import Damping, default_damping
from psgrad.engine.influence.method import (
    RELATIVE,
    Checkpoint,
    Fitted,
    Method,
    Preconditioned,
    SelfBlock,
    flat_rows,
    not_finite_gradients,
)
from psgrad.errors import InfluenceError, one_line


@dataclass(frozen=True)
class DataInf(Method):
    """score = g_q^T A g_i / n, A = (1 / n) sum_j (g_j g_j^T + lam I)^-1, parameter by parameter.

    Kwon, Wu, Wu and Zou, "DataInf: Efficiently Estimating Data Influence in LoRA-tuned LLMs and Diffusion
    Models" (2024), equation 5, of which this is minus the influence, divided by n once more for the removal
    of one example. A is not the inverse of the empirical Fisher plus lam I, but the mean over examples of the
    inverses: closed forms, far from it where many examples matter.

    Attributes:
        damping: lam, the same for all parameters; None for `relative_damping` times the mean square of the
            parameter's gradients' elements, parameter by parameter. Where neither is given: none with a
            weight decay and a model that is affine in its parameters, and a tenth of the mean square else.
        weight_decay: of training, on the mean loss; it is part of the curvature.
    """

    name = "datainf"
    unit = RELATIVE
    predicts_removal = False

    damping: float | None = None
    relative_damping: float | None = None
    weight_decay: float = 0.0

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        total = training.fold(
            lambda gradients: {name: x.sum() for name, x in gradients.square_norms(per="parameter").items()}
        )
        for name, squares in total.items():
            if not math.isfinite(float(squares)):
                raise not_finite_gradients(f"the training gradients of {name} are not finite")
        numbers = {name: max(parameter.numel(), 1) for name, parameter in training.params.items()}
        means = {name: float(squares) / len(training) / numbers[name] for name, squares in total.items()}
        convex = self.weight_decay > 0 and is_affine(training)
        damping = default_damping(
            self.damping, self.relative_damping, 0.1, convex=convex, weight_decay=self.weight_decay
        )
        return MeanOfInverses(training, means, self.weight_decay, damping)


class MeanOfInverses(Preconditioned):
    """A of `DataInf`, from the mean over examples and elements of the squared training gradients in each
    parameter.

    By Sherman and Morrison A v = (v - (1 / n) sum_j g_j (g_j^T v) / (lam + |g_j|^2)) / lam: one pass over the
    training examples for any number of vectors, and no matrix of inner products among the examples.

    facts: `damping` and `mean_eigenvalue` by parameter.
    Raises InfluenceError where a parameter has neither damping nor weight decay.
    """

    makes_passes = True

    def __init__(
        self, training: Examples, mean_squares: dict[str, float], weight_decay: float, damping: Damping
    ) -> None:
        super().__init__(training)
        self.mean_squares, self.weight_decay = mean_squares, weight_decay
        self.damping = {name: damping.resolve(mean) for name, mean in mean_squares.items()}
        self.added = {name: value + weight_decay for name, value in self.damping.items()}
        for name, value in self.added.items():
            _assert_invertible(name, value, mean_squares[name])
        self.facts = {"damping": self.damping, "mean_eigenvalue": mean_squares}

    def precondition(self, vectors: Vectors) -> Vectors:
        prepared = as_gradients(vectors)

        def corrections(gradients: PerSampleGradients) -> Vectors:
            """name -> [k, numel] float64: the sums over a chunk's samples of g (g^T v) / (lam + |g|^2)."""
            squares = gradients.square_norms(per="parameter")
            products = gradients.inner(prepared, per="parameter")
            weights = {
                name: products[name] / (squares[name] + self.added[name]).unsqueeze(1) for name in vectors
            }

            def add(total: Vectors, name: str, samples: slice, block: torch.Tensor) -> Vectors:
                rows = accumulating(block.reshape(len(block), -1))
                total[name] += weights[name][samples].t().to(rows.dtype) @ rows
                return total

            zeros = {name: flat_rows(torch.zeros_like(value)) for name, value in vectors.items()}
            return gradients.reduce(add, zeros)

        result: Vectors = {}
        for name, correction in self.training.fold(corrections).items():
            value = (flat_rows(vectors[name]) - correction / len(self.training)) / (
                self.added[name] * len(self.training)
            )
            result[name] = value.reshape(vectors[name].shape).to(vectors[name].dtype)
        return result

    def self_influence(self) -> Iterator[SelfBlock]:
        """A pass over the training examples for each block of them."""
        start = 0
        while start < len(self.training):
            chunk = self.training.each(lambda gradients: gradients.materialise(), start)
            rows, vectors = next(chunk)
            del chunk  # before the next pass
            size = sum(value[:1].numel() for value in vectors.values())
            step = max(1, _BLOCK_NUMBERS // max(size, 1))
            for first in range(0, rows.stop - rows.start, step):
                some = {
                    name: value[first : first + step].to(self.training.device)
                    for name, value in vectors.items()
                }
                yield _block(rows.start + first, some, self.precondition(some))
            start = rows.stop


# Numbers of the gradients whose self-influence one pass gives.
_BLOCK_NUMBERS = 1 << 25


def _block(start: int, vectors: Vectors, prepared: Vectors) -> SelfBlock:
    products = torch.stack(
        [(flat_rows(prepared[name]) * flat_rows(value)).sum(1) for name, value in vectors.items()]
    ).sum(0)
    norms = torch.stack([flat_rows(value).square().sum(1) for value in prepared.values()]).sum(0).sqrt()
    return SelfBlock(start, start + len(products), products.cpu(), norms.cpu())


def _assert_invertible(name: str, added: float, mean: float) -> None:
    if added > 0:
        return
    raise InfluenceError(
        f"DataInf has no inverse for {name}: its damping and the weight decay are zero; expected a damping"
        " above zero: one example's gradient alone has no inverse",
        hint=(
            one_line(
                None if mean else "no training example has a gradient in this parameter",
                f"set influence.method.damping: {0.1 * mean:.3g}, a tenth of the mean eigenvalue"
                if mean
                else "leave it out of `parameters`",
            )
        ),
    )
