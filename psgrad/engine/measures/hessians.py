"""The Hessian of each sample's own loss in the parameters, times vectors: the derivative along them of the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.measures.row_passes import Inputs, plain_objective
from psgrad.engine.transforms import grad, jvp, vmap

Product = Callable[[torch.Tensor], torch.Tensor]

# What the products of one chunk may take: fixed, so that a run that goes on cuts its chunks where it did before.
_CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
# Vectors as long as the parameters that are there at a time for each one that a sample is multiplied with.
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
        """How many samples to take at a time, where each is multiplied with so many vectors at once and keeps so many vectors besides.

        most: how many the pass for gradients took at a time.
        """
        each = self.size * self.dtype.itemsize * (_COPIES * vectors + kept)
        return max(1, min(most // (2 * vectors), _CHUNK_BYTES.get(self.device.type, 1 << 30) // max(each, 1)))

    def products(self, inputs: Inputs, target: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        """[k, m, p]: of each of k samples its Hessian times m vectors of its own [k, m, p], in the parameters' type."""
        k, m, p = vectors.shape
        split = {name: part.view(k, m, *part.shape[1:]) for name, part in self.flat.split(vectors.reshape(k * m, p).to(self.dtype)).items()}

        def of_one(vectors: dict[str, torch.Tensor], *sample: torch.Tensor) -> dict[str, torch.Tensor]:
            gradient = grad(lambda params: self.objective.loss(params, sample[:-1], sample[-1])[0])
            return vmap(lambda vector: jvp(gradient, (self.params,), (vector,))[1])(vectors)  # type: ignore[no-any-return]

        found = vmap(of_one, (0, *[0] * len(inputs), None if target is None else 0))(split, *inputs, target)
        return self.flat.join({name: part.reshape(k * m, *part.shape[2:]) for name, part in found.items()}).view(k, m, p)
