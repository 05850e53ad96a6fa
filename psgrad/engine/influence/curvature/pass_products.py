"""Products with a curvature matrix by passes over the data: the derivative along each vector, forward, and back again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Vectors
from psgrad.engine.gradients.memory import chunk_budget
from psgrad.engine.influence.curvature.products import Curvature, CurvatureProducts
from psgrad.engine.influence.curvature.rows import gauss_newton_rows
from psgrad.engine.influence.curvature.spectrum import hutchinson_trace
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.errors import InfluenceError

# So many vectors share a pass forward: more only take more memory.
_VECTORS = 32
# Random vectors behind an estimated trace.
_PROBES = 64


class PassProducts(CurvatureProducts):
    """Products of a training set's curvature, each a pass over the data for every `_VECTORS` vectors.

    Passes run in the parameters' type; only sums over chunks are in float64. seed: of the random signs behind the trace of a
    Hessian, or of a Gauss-Newton matrix of large outputs.
    """

    how = "passes over the data"

    def __init__(self, training: Examples, curvature: Curvature, weight_decay: float = 0.0, seed: int = 0) -> None:
        super().__init__(training.flat, len(training), weight_decay)
        self.training, self.curvature, self.seed = training, curvature, seed
        memory = chunk_budget(training.device, training.options.get("memory")) // _VECTORS
        self._examples = replace(training, options={**training.options, "memory": memory})

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        block = block.to(self.training.device)
        return torch.cat([self._apply(part) for part in block.split(_VECTORS)])

    def mean_eigenvalue(self) -> tuple[float, float]:
        p = self.flat.size
        source = self.training if self.curvature == "fisher" else self._rows() if self.curvature == "gauss_newton" else None
        if source is not None:
            return sum(float(found["square_norm"].sum()) for _, found in source.norms()) / self.count / p, 0.0
        without_decay = PassProducts(self.training, self.curvature, seed=self.seed)
        trace, error = hutchinson_trace(without_decay.apply, p, probes=_PROBES, seed=self.seed, device=self.training.device)
        return trace / p, error / p

    def _rows(self) -> Examples | None:
        """Rows of the Gauss-Newton matrix, whose square norms add up to its trace; None where there are too many of them."""
        try:
            return gauss_newton_rows(self.training)
        except InfluenceError:
            return None

    def _apply(self, vectors: torch.Tensor) -> torch.Tensor:
        kind = next(iter(self.training.params.values())).dtype
        summing = _Summing(self.flat.join)
        way = partial(self._products, self.flat.split(vectors.to(kind)))
        for _ in self._examples.stream.run(self.count, [summing], way):
            pass
        return summing.total / self.count + self.weight_decay * vectors.double()

    def _products(
        self, vectors: Vectors, loss: Callable[..., Any], params: Vectors, inputs: Any, target: Any, *, randomness: str, **_: Any
    ) -> Vectors:
        """name -> [k, *shape]: the sum over a chunk's samples of their curvature times each of k vectors."""
        objective, over = self.training.objective, (0, None if target is None else 0)

        def losses(params: Vectors) -> torch.Tensor:
            return vmap(lambda *sample: loss(params, *sample)[0], over, randomness=randomness)(inputs, target)

        def outputs(params: Vectors) -> Any:
            return vmap(lambda *sample: objective.predict(params, sample), randomness=randomness)(*inputs)

        def slopes(output: Any) -> Any:
            return vmap(grad(objective.criterion), over)(output, target)

        if self.curvature == "hessian":
            total = grad(lambda params: losses(params).sum())
            return vmap(lambda vector: jvp(total, (params,), (vector,))[1])(vectors)  # type: ignore[no-any-return]
        function = outputs if self.curvature == "gauss_newton" else losses
        value, pull = vjp(function, params)

        def product(vector: Vectors) -> Vectors:
            along = jvp(function, (params,), (vector,))[1]
            curved = jvp(slopes, (value,), (along,))[1] if self.curvature == "gauss_newton" else along
            return pull(curved)[0]  # type: ignore[no-any-return]

        return vmap(product)(vectors)  # type: ignore[no-any-return]


class _Summing:
    """A measure that adds up, in float64, the products of chunks."""

    needs_factors = True

    def __init__(self, join: Callable[[Vectors], torch.Tensor]) -> None:
        self.join = join
        self.total: Any = 0.0
        self._chunk: Any = 0.0

    def columns(self, products: Vectors) -> dict[str, torch.Tensor]:
        self._chunk = self.join(products).double()
        return {}

    def keep(self) -> None:
        self.total = self.total + self._chunk
        self._chunk = 0.0
