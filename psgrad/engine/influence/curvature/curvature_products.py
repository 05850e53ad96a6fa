"""Products of the training set's mean curvature with blocks of vectors, which is all that iterative solvers
need.

`RowProducts` keeps the rows of a Gauss-Newton matrix or an empirical Fisher, as factors or materialised
(row_blocks.py), and runs the model once: G v = sum over rows of j (j'v) / n. `PassProducts` runs over the
data for each product: the derivative along each vector, forward and then backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.execution.buckets import SumOverSamples
from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples, QueryColumns
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.output_rows import (
    OutputRows,
    gauss_newton_rows,
    gauss_newton_trace,
    outputs_alike,
)
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Flat, Vectors
from psgrad.engine.gradients.parts import Part
from psgrad.engine.gradients.terms import block_bytes
from psgrad.engine.influence.curvature.row_blocks import ParameterRows, part_of
from psgrad.engine.influence.solvers.spectrum import Apply, hutchinson_trace
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import InfluenceError

CurvatureKind = Literal["gauss_newton", "hessian", "fisher", "sampled"]


class CurvatureProducts(ABC):
    """A symmetric matrix [p, p]: the mean over n samples of a curvature of their loss, plus a weight decay on
    the diagonal.

    Attributes:
        how: where its products come from, in words for a manifest.
        flat: the order of the parameters.
        count: n.
        weight_decay: as given.
    """

    how: ClassVar[str]

    def __init__(self, flat: Flat, count: int, weight_decay: float = 0.0) -> None:
        self.flat, self.count, self.weight_decay = flat, count, weight_decay

    @abstractmethod
    def apply(self, block: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: the matrix, with its weight decay, times each of k vectors [k, p]. Sums over
        samples are in float64.
        """

    def damped(self, damping: float) -> Apply:
        """Products with the matrix plus `damping` on its diagonal."""
        return lambda block: self.apply(block) + damping * block

    @abstractmethod
    def mean_eigenvalue(self) -> tuple[float, float]:
        """The mean of the eigenvalues without the weight decay, that is the trace over p, and its standard
        error: 0 where it is exact.
        """


def curvature_products(
    training: Examples, curvature: CurvatureKind = "gauss_newton", *, weight_decay: float = 0.0
) -> CurvatureProducts:
    """Products with the mean curvature of the training set, by the method of the least work.

    curvature: 'gauss_newton' (the loss's second derivatives in the output, pulled back to the parameters),
    'fisher' (of the labels that there are: the mean of g g' over per-sample gradients g) or 'hessian'.

    Gauss-Newton and Fisher keep their rows where these fit in memory; else, and for a Hessian, each product
    runs over the data.
    """
    by_rows = RowProducts.of(training, curvature, weight_decay)
    return by_rows if by_rows is not None else PassProducts(training, curvature, weight_decay)


def _rows(training: Examples, curvature: str) -> Examples | None:
    """Rows whose outer products add up to a curvature; None where there are none, or too many of them."""
    if curvature == "fisher":
        return training
    try:
        return gauss_newton_rows(training) if curvature == "gauss_newton" else None
    except InfluenceError:  # the output is large, or no tensor
        return None


PartsByName = Mapping[str, ParameterRows]

# Intermediates of a product, as a multiple of the block size of the device: large matrices are faster.
_BLOCKS = 8
# The share of the free memory for rows.
_SHARE = 3


class RowProducts(CurvatureProducts):
    """Products with the mean over n samples of sums of j j' over each one's rows j, plus a weight decay.

    Args:
        flat: the order of the parameters.
        count: n.
        chunks: of each chunk of samples the rows in each parameter, of those that it has any in.
        weight_decay: what is added to the diagonal.
        summed: the sum over the processes of a tensor of each, where each has the rows of some samples.
    """

    how = "rows kept"

    def __init__(
        self,
        flat: Flat,
        count: int,
        chunks: list[PartsByName],
        weight_decay: float = 0.0,
        summed: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
    ) -> None:
        super().__init__(flat, count, weight_decay)
        self.chunks, self._summed = chunks, summed

    @classmethod
    def of(cls, training: Examples, curvature: str, weight_decay: float = 0.0) -> RowProducts | None:
        """The curvature of a training set; None where it has no rows, or they don't fit in memory.

        Raises InfluenceError where the loss is not convex in the output.
        """
        source, budget, rows = _rows(training, curvature), training.free_bytes() // _SHARE, 1
        if source is None:
            return None
        if isinstance(source, OutputRows):
            source, rows = replace(source, settle=False), source.per_sample
        if rows * training.flat.size * next(iter(training.params.values())).element_size() > budget:
            return None
        stored: list[list[PartsByName]] = []

        def keep(gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
            stored.append([parts_of(part) for part in gradients.parts])
            return {}

        def parts_of(part: Part) -> dict[str, ParameterRows]:
            each = part.gradients.items()
            return {name: part_of(gradient, rows) for name, gradient in each if not gradient.is_zero}

        chunks: list[PartsByName] = []

        def fit() -> bool:
            own, stored_bytes = source.own_rows(), 0
            for done, _ in source.of_own_rows(QueryColumns(keep)):
                more = stored.pop()
                stored.clear()  # of attempts that ran out of memory
                chunks.extend(more)
                stored_bytes += sum(part.bytes for each in more for part in each.values())
                if stored_bytes * len(own) > budget * (done.stop - own.start):
                    return False
            return True

        if not training.everywhere(training.processes.together("rows that are kept", fit)):
            return None
        return cls(training.flat, len(training), chunks, weight_decay, training.summed)

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        vectors = block.double().t()
        parts = {
            (name, part.form): part for rows in self.chunks for name, part in rows.items()
        }  # chunks may differ in the form
        arranged = {
            (name, form): part.arrange(vectors[self.flat.columns[name]])
            for (name, form), part in parts.items()
        }
        totals = {kind: torch.zeros_like(value) for kind, value in arranged.items()}
        for rows in self.chunks:
            for samples in _pieces(rows, vectors):
                along = torch.stack(
                    [part.inner(arranged[name, part.form], samples) for name, part in rows.items()]
                ).sum(0)
                for name, part in rows.items():
                    part.add_back(totals[name, part.form], along, samples)
        result = torch.zeros_like(vectors)
        for (name, form), total in totals.items():
            result[self.flat.columns[name]] += parts[name, form].restore(total) / self.count
        return (self.weight_decay * vectors + self._summed(result)).t()

    def mean_eigenvalue(self) -> tuple[float, float]:
        squares = sum(part.square_sum() for rows in self.chunks for part in rows.values())
        return float(
            self._summed(torch.tensor(squares, dtype=torch.float64))
        ) / self.count / self.flat.size, 0.0


def _pieces(rows: PartsByName, vectors: torch.Tensor) -> list[slice]:
    """The samples of a chunk, as slices whose products with vectors [p, k] have intermediates of a good
    size.
    """
    count = max((part.samples for part in rows.values()), default=0)
    room = vectors.element_size() * sum(part.room(vectors.shape[1]) for part in rows.values())
    step = max(1, _BLOCKS * block_bytes(vectors.device) // max(room, 1))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


# The number of vectors that share a forward pass: more take only more memory.
_VECTORS = 32
# Random vectors behind an estimated trace, and their seed.
_PROBES, _SEED = 64, 0


class PassProducts(CurvatureProducts):
    """Products of a training set's curvature, each a pass over the data for every `_VECTORS` vectors.

    Passes run in the parameters' type; only sums over chunks are in float64.
    """

    how = "passes over the data"

    def __init__(self, training: Examples, curvature: CurvatureKind, weight_decay: float = 0.0) -> None:
        super().__init__(training.flat, len(training), weight_decay)
        self.training, self.curvature = training, curvature
        memory = chunk_budget(training.device, training.options.get("memory")) // _VECTORS
        tokens = training.options.get("tokens")
        own = {"memory": memory, "tokens": None if tokens is None else max(1, tokens // _VECTORS)}
        self._examples = replace(training, options={**training.options, **own})

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        block = block.to(self.training.device)
        return torch.cat([self._apply(part) for part in block.split(_VECTORS)])

    def mean_eigenvalue(self) -> tuple[float, float]:
        p, source = self.flat.size, _rows(self.training, self.curvature)
        if source is not None:
            return sum(float(norms["square_norm"].sum()) for _, norms in source.norms()) / self.count / p, 0.0
        if self.curvature == "gauss_newton" and outputs_alike(self.training):
            trace, error = gauss_newton_trace(self.training, _SEED)
            return trace / self.count / p, error / self.count / p
        products, device = PassProducts(self.training, self.curvature).apply, self.training.device
        trace, error = hutchinson_trace(products, p, probes=_PROBES, seed=_SEED, device=device)
        return trace / p, error / p

    def _apply(self, vectors: torch.Tensor) -> torch.Tensor:
        kind = next(iter(self.training.params.values())).dtype
        of_chunk = partial(self._products, self.flat.split(vectors.to(kind)))
        total = self._examples.fold(lambda products: self.flat.join(products.value).double(), of_chunk)
        return total / self.count + self.weight_decay * vectors.double()

    @replayable("sum")
    def _products(
        self,
        vectors: Vectors,
        loss: Callable[..., Any],
        params: Vectors,
        inputs: Any,
        target: Any,
        *,
        randomness: str,
        **_: Any,
    ) -> SumOverSamples:
        """name -> [k, *shape]: the sum over a chunk's samples of their curvature times each of k vectors."""
        objective, over = self.training.objective, (0, None if target is None else 0)

        def losses(params: Vectors) -> torch.Tensor:
            return vmap(lambda *sample: loss(params, *sample)[0], over, randomness=randomness)(inputs, target)

        def outputs(params: Vectors) -> Any:
            return vmap(lambda *sample: objective.predict(params, sample), randomness=randomness)(*inputs)

        def slopes(output: Any) -> Any:
            return vmap(grad(objective.criterion), over)(output, target)

        def weighted(slopes: Any) -> Any:
            weights = objective.weights(inputs)
            if weights is None:
                return slopes
            return tree_map(lambda x: x * weights.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype), slopes)

        # Derivatives along a vector are transposed gradients. A tangent would say something else of the
        # padding row of an embedding, which PyTorch gives no gradient: training never moves it.
        if self.curvature == "hessian":
            _, along_gradient = vjp(grad(lambda params: losses(params).sum()), params)
            return SumOverSamples(vmap(lambda vector: along_gradient(vector)[0])(vectors))
        gauss_newton = self.curvature == "gauss_newton"
        value, pull = vjp(outputs if gauss_newton else losses, params)
        _, push = vjp(lambda cotangent: pull(cotangent)[0], value)

        def product(vector: Vectors) -> Vectors:
            along = push(vector)[0]
            curved = weighted(jvp(slopes, (value,), (along,))[1]) if gauss_newton else along
            return pull(curved)[0]  # type: ignore[no-any-return]

        return SumOverSamples(vmap(product)(vectors))
