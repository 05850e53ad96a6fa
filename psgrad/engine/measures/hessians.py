"""Products with the Hessian of each sample's loss in the parameters, and the extreme eigenvalues of many
symmetric matrices at once, by Lanczos.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.measures.passes import Inputs, plain_objective
from psgrad.engine.transforms import grad, jvp, vmap

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
        """How many samples to take at a time, where each is multiplied with so many vectors at once and keeps
        so many vectors besides.

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
            return vmap(lambda vector: jvp(gradient, (self.params,), (vector,))[1])(vectors)  # type: ignore[no-any-return]

        result = vmap(of_one, (0, *[0] * len(inputs), None if target is None else 0))(split, *inputs, target)
        return self.flat.join(
            {name: part.reshape(k * m, *part.shape[2:]) for name, part in result.items()}
        ).view(k, m, p)


# A new direction shorter than so many roundings of the matrix is one itself: the Krylov space has ended.
_ROUNDINGS = 16


@dataclass(frozen=True)
class Ends:
    """The lowest and the highest Ritz value of each of k matrices, [k] float64, each with the norm of its
    residual, |A v - value v|: the matrix has an eigenvalue within this distance.
    """

    lowest: torch.Tensor
    lowest_residual: torch.Tensor
    highest: torch.Tensor
    highest_residual: torch.Tensor


def extreme_eigenvalues(
    products: Callable[[torch.Tensor], torch.Tensor], starts: torch.Tensor, iterations: int
) -> Ends:
    """The ends of the spectra of k symmetric matrices [p, p].

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
    return Ends(values[:, 0], residuals[:, 0], values[:, 1], residuals[:, 1])


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
