"""Measures of the Hessian of each sample's loss: the ends of its spectrum, by Lanczos, and its trace, by
random probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.examples import Examples
from psgrad.engine.measures.measure import Arrays, Measure, OwnPass, Setting
from psgrad.engine.measures.passes import (
    Inputs,
    plain_objective,
    random_normals,
    random_signs,
    refusing,
    row_pass,
)
from psgrad.engine.transforms import grad, vjp, vmap


@dataclass
class HessianTopEigenvalue(Measure):
    """The largest eigenvalue with its sign, as in work on sharpness. The same iterations give the lowest
    one; the largest magnitude is the larger of both.

    An eigenvalue lies within the residual of the value, which never exceeds the largest one. If the
    residual is large, more iterations are needed.

    Options:
        iterations: Lanczos steps for each sample, at least 2: products with its Hessian, and vectors that are
            kept.
    """

    iterations: int = 20

    name: ClassVar[str] = "hessian_top_eigenvalue"
    title: ClassVar[str] = "Largest eigenvalue of the Hessian"
    formula: ClassVar[str] = (
        "max_v v' (d2 l / d theta2) v over unit vectors v, by Lanczos with full reorthogonalisation"
    )
    unit: ClassVar[str] = "{loss} per squared unit of parameter"
    source: ClassVar[str] = (
        "Lanczos iteration: Parlett, The Symmetric Eigenvalue Problem (1998), chapter 13, residual bound"
        " theorem 4.5.1; as sharpness: Cohen et al.: Gradient Descent on Neural Networks Typically Occurs at"
        " the Edge of Stability (2021), section 2"
    )
    cost: ClassVar[str] = (
        "a pass of its own; for each iteration about three times the pass for gradients; iterations x p"
        " numbers are kept for each sample"
    )
    meanings: ClassVar[dict[str, str]] = {
        "hessian_top_eigenvalue": (
            "largest curvature of the sample's loss in any direction ({loss} per squared unit of parameter)"
        ),
        "hessian_top_residual": (
            "within this distance of hessian_top_eigenvalue lies an eigenvalue of the Hessian (the same unit)"
        ),
        "hessian_lowest_eigenvalue": "lowest curvature in any direction, mostly negative (the same unit)",
        "hessian_lowest_residual": (
            "within this distance of hessian_lowest_eigenvalue lies an eigenvalue of the Hessian (the same"
            " unit)"
        ),
    }

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(
                f"got {self.iterations} iterations, expected at least 2: one tells nothing of the ends of a"
                " spectrum"
            )

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-top-eigenvalue", self._run)]

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, vectors=1, kept=self.iterations + 4)
        return refusing(self, row_pass(self._examples, self._ends, size, rows), "second derivatives")

    def _ends(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        starts = random_normals(self._seed, self.name, rows, self._hessians.size)[:, 0].to(
            self._hessians.dtype
        )
        ends = extreme_eigenvalues(partial(self._hessians.products, inputs, target), starts, self.iterations)
        columns = zip(("eigenvalue", "residual"), ends, strict=True)
        return {
            f"hessian_{end}_{what}": values[:, place]
            for what, values in columns
            for place, end in enumerate(("lowest", "top"))
        }


# Probes that share a pass: more only take more memory.
_AT_ONCE = 8


@dataclass
class HessianTrace(Measure):
    """The mean of z'Hz over vectors z of random signs, drawn for each sample from the number of its row.

    If a model has no more parameters than there are probes, the trace is exact. A negative one: the
    loss curves downwards in more directions, or more strongly, than upwards.

    Options:
        probes: random vectors for each sample, at least 2. The standard error is divided by the square root
            of their number.
    """

    probes: int = 32

    name: ClassVar[str] = "hessian_trace"
    title: ClassVar[str] = "Trace of the Hessian"
    formula: ClassVar[str] = "tr(d2 l / d theta2), estimated as mean_j z_j' H z_j with z_j of random signs"
    unit: ClassVar[str] = "{loss} per squared unit of parameter, summed over the parameters"
    source: ClassVar[str] = (
        "Hutchinson: A stochastic estimator of the trace of the influence matrix for Laplacian smoothing"
        " splines (1990), section 2; for networks: Yao et al.: PyHessian (2020), section 3.2"
    )
    cost: ClassVar[str] = "a pass of its own; for each probe about three times the pass for gradients"
    meanings: ClassVar[dict[str, str]] = {
        "hessian_trace": (
            "sum of the curvatures of the sample's loss along all parameters ({loss} per squared unit of"
            " parameter)"
        ),
        "hessian_trace_error": (
            "standard error of hessian_trace over the probes, 0 if it is exact (the same unit)"
        ),
    }

    def __post_init__(self) -> None:
        if self.probes < 2:
            raise ValueError(
                f"got {self.probes} probes, expected at least 2: one alone has no standard error"
            )

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)
        self._exact = self._hessians.size <= self.probes

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-trace", self._run)]

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, min(_AT_ONCE, self.probes))
        return refusing(self, row_pass(self._examples, self._traces, size, rows), "second derivatives")

    def _traces(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        estimates = torch.cat(
            [self._along(inputs, target, rows, first) for first in range(0, self._count, _AT_ONCE)], dim=1
        )
        if self._exact:
            return {"hessian_trace": estimates.sum(1), "hessian_trace_error": 0 * estimates.sum(1)}
        return {
            "hessian_trace": estimates.mean(1),
            "hessian_trace_error": estimates.std(1) / math.sqrt(self.probes),
        }

    @property
    def _count(self) -> int:
        return self._hessians.size if self._exact else self.probes

    def _along(
        self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor, first: int
    ) -> torch.Tensor:
        """[k, m] float64: z'Hz for the probes number first, first + 1, ..."""
        size, count = self._hessians.size, min(_AT_ONCE, self._count - first)
        if self._exact:
            unit = torch.eye(size, device=rows.device)[first : first + count]
            probes = unit.expand(len(rows), count, size)
        else:
            probes = random_signs(self._seed, self.name, rows, size, first, count)
        return (self._hessians.products(inputs, target, probes).double() * probes).sum(2)


# The memory for the products of one chunk: fixed, so that a resumed run cuts the same chunks.
_CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
# Vectors of the parameters' length that exist at a time for each vector of a sample's products.
_COPIES = 4


class SampleHessians:
    """Products with the Hessians of samples, one a sample, in the trainable parameters.

    Args:
        examples: the model and the loss. A model that draws at random has no Hessian: its draws are refused.
    """

    def __init__(self, examples: Examples) -> None:
        self.flat, self.params = examples.flat, examples.params
        self.objective = plain_objective(examples)
        self.dtype = next(iter(self.params.values())).dtype
        self.device = examples.device

    @property
    def size(self) -> int:
        """p, the number of trainable parameters."""
        return self.flat.size

    def chunk_size(self, most: int, vectors: int, kept: int = 0) -> int:
        """How many samples to take at a time, where each is multiplied with `vectors` vectors at once and
        keeps `kept` further vectors.

        most: how many the pass for gradients took at a time.
        """
        each = self.size * self.dtype.itemsize * (_COPIES * vectors + kept)
        return max(1, min(most // (2 * vectors), _CHUNK_BYTES.get(self.device.type, 1 << 30) // max(each, 1)))

    def products(self, inputs: Inputs, target: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        """[k, m, p]: of each of k samples its Hessian times m vectors of its own [k, m, p], in the
        parameters' type.
        """
        k, m, p = vectors.shape
        split = {
            name: part.view(k, m, *part.shape[1:])
            for name, part in self.flat.split(vectors.reshape(k * m, p).to(self.dtype)).items()
        }

        def of_one(vectors: dict[str, torch.Tensor], *sample: torch.Tensor) -> dict[str, torch.Tensor]:
            gradient = grad(lambda params: self.objective.loss(params, sample[:-1], sample[-1])[0])
            _, along = vjp(gradient, self.params)  # no tangent, which the padding row of an embedding has
            return vmap(lambda vector: along(vector)[0])(vectors)  # type: ignore[no-any-return]

        result = vmap(of_one, (0, *[0] * len(inputs), None if target is None else 0))(split, *inputs, target)
        return self.flat.join(
            {name: part.reshape(k * m, *part.shape[2:]) for name, part in result.items()}
        ).view(k, m, p)


# A new direction that is shorter than this number of roundings of the matrix is a rounding error: the Krylov
# space has ended.
_ROUNDINGS = 16


def extreme_eigenvalues(
    products: Callable[[torch.Tensor], torch.Tensor], starts: torch.Tensor, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of the spectra of k symmetric matrices [p, p]: (the lowest and the highest Ritz value [k, 2]
    float64, the norm of their residuals |A v - value v|, within which the matrix has an eigenvalue).

    Every new vector is made orthogonal to all before it, twice. Vectors are kept in the type of `starts`;
    their inner products, the small matrices and their eigenvalues are in float64. Values and residuals are of
    products with the found vectors, and so hold what rounding did, too. Those of a matrix with entries that
    are not finite are NaN.

    Args:
        products: [k, m, p] to [k, m, p]: each matrix times m vectors of its own.
        starts: [k, p]: the first vectors; what a matrix does to all that is orthogonal to its own stays
            unseen.
        iterations: at most, and at most p.

    Parlett, "The Symmetric Eigenvalue Problem" (1998), chapter 13; the bound: theorem 4.5.1.
    """
    k, p = starts.shape
    steps = min(iterations, p)
    ended = _ROUNDINGS * torch.finfo(starts.dtype).eps
    basis = starts.new_zeros(k, steps, p)
    inner = starts.new_zeros(k, steps, steps, dtype=torch.float64)  # the matrices in the basis: tridiagonal
    vector = _unit(starts)
    scale = starts.new_zeros(k, dtype=torch.float64)
    alive = torch.ones(k, dtype=torch.bool, device=starts.device)
    for step in range(steps):
        basis[:, step] = vector
        product = products(vector.unsqueeze(1)).squeeze(1)
        # A space that has ended is continued with zeros, whose value is its first entry: that lies between
        # the ends, and moves neither.
        inner[:, step, step] = torch.where(alive, (vector.double() * product.double()).sum(1), inner[:, 0, 0])
        earlier = basis[:, : step + 1]
        for _ in range(2):
            row = product.unsqueeze(
                1
            )  # as a row from the left: four times as fast on CPUs as a column from the right
            product = torch.baddbmm(row, row @ earlier.transpose(1, 2), earlier, alpha=-1).squeeze(1)
        length = torch.linalg.vector_norm(product, dim=1, dtype=torch.float64)
        scale = torch.maximum(scale, torch.maximum(inner[:, step, step].abs(), length))
        alive = alive & ~(length <= ended * scale)
        if step + 1 < steps:
            inner[:, step, step + 1] = inner[:, step + 1, step] = torch.where(alive, length, 0.0)
            vector = torch.where(alive.unsqueeze(1), product / length.unsqueeze(1), 0.0).to(starts.dtype)
    finite = torch.isfinite(inner).flatten(1).all(1)
    _, within = torch.linalg.eigh(torch.where(finite.view(-1, 1, 1), inner, 0.0))
    vectors = within[:, :, [0, -1]].transpose(1, 2).to(starts.dtype) @ basis
    # In a space of one direction the only value is repeated, and a vector may be zero.
    vectors = _unit(torch.where(vectors.any(2, keepdim=True), vectors, basis[:, :1]))
    turned = products(vectors).double()
    values = (vectors.double() * turned).sum(2)
    residuals = torch.linalg.vector_norm(turned - values.unsqueeze(2) * vectors, dim=2)
    values, residuals = (torch.where(finite.unsqueeze(1), x, torch.nan) for x in (values, residuals))
    return values, residuals


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
