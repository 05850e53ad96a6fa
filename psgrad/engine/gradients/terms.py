"""Terms: per-sample gradients that are sums over positions of products, kept as their factors until a query contracts them.

Axes: sample n, position t (s), row a, column b, group g; a term's canonical value has the shape `shape`, per sample.
Every query of a term is exact; which order of contraction is cheaper is decided from the sizes, and big intermediates are made
for a few samples at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from psgrad.engine.gradients.doubts import samples_where
from psgrad.engine.transforms.rules.convolution import Geometry, as_matrices, grouped_kernel_is_fast, weight_gradients

# Bytes of the intermediates of one block of samples: small enough for a processor's cache, large enough for a GPU's kernels.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}

aten = torch.ops.aten


def blocks(n: int, bytes_per_sample: int, device: torch.device) -> Iterator[slice]:
    """The samples, as slices whose intermediates fit the block size."""
    budget = BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"])
    step = max(1, min(n, budget // max(bytes_per_sample, 1)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def accumulating_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: sums of products of halves are not taken in halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def accumulating(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision in which it may be summed."""
    return x.to(accumulating_dtype(x.dtype))


def sum_of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[n]: the sum over all other axes of x * y.

    Written as a product and a sum, because PyTorch sums pairwise there: a dot product of millions of float32 (bmm, einsum,
    vector_norm) adds them up in a row, and its error reaches 1e-4.
    """
    axes = list(range(1, x.dim()))
    if not axes:
        return x * y
    each = math.prod(x.shape[1:]) * x.element_size()
    parts = [(x[block] * y[block]).sum(axes) for block in blocks(x.shape[0], each, x.device)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_zeros(0)


def joined(parts: list[torch.Tensor], term: Term, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """[n, *shape] from the blocks of a term's samples; a single block is not copied, and there may be none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros(0, *shape, dtype=term.dtype, device=term.device)


class Term(ABC):
    """One summand of a per-sample gradient."""

    shape: tuple[int, ...]  # canonical, per sample

    @property
    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it keeps, sample axis first."""

    @property
    def samples(self) -> int:
        return self.factors[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.factors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.factors[0].dtype

    @abstractmethod
    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Term:
        """The same for some of the samples, in another precision if asked."""

    def among(self, places: torch.Tensor, count: int) -> Self:
        """The same among `count` samples: this term's stand at `places` [n], the others have zero."""
        rows = torch.full((count,), self.samples, device=self.device).index_copy(0, places, torch.arange(self.samples, device=self.device))
        padded = {
            field.name: torch.cat([factor, factor.new_zeros(1, *factor.shape[1:])])
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(factor := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **padded).at(rows)  # type: ignore[type-var, return-value]

    @abstractmethod
    def square_norms(self) -> torch.Tensor:
        """[n]"""

    @abstractmethod
    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""

    @abstractmethod
    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape]: the sum over samples, each times its weight [n]."""

    @abstractmethod
    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        """[n]: the inner product of each sample's value with one vector [*shape]."""

    @abstractmethod
    def scaled(self, factor: float) -> Term:
        """The term times a number."""

    @abstractmethod
    def kin(self) -> tuple[Any, ...]:
        """What terms have in common that add up to one term."""

    @abstractmethod
    def plus(self, others: Sequence[Any]) -> Term:
        """The sum of this and others of its kin, as one term: of products, one with the positions of all."""

    def materialised_square_norms(self) -> torch.Tensor:
        """[n]: the norm of the written-out value, a block of samples at a time. Free of cancellation between positions."""
        kind = accumulating_dtype(self.dtype)
        size = math.prod(self.shape) * kind.itemsize
        parts = [_square_norm(self.at(block, kind).materialise()) for block in blocks(self.samples, size, self.device)]
        return joined(parts, self)

    def describe(self) -> str:
        """How the norm is computed, in a word or two."""
        return "materialise"


def _square_norm(value: torch.Tensor) -> torch.Tensor:
    value = accumulating(value)
    return sum_of_products(value, value)


def _zero_where_lost(norms: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n] norms that are products of squares, of which the largest in each factor are given, [n].

    Squares near the smallest number of a type have lost their digits, and a large second factor would hide it. Zero says so: whoever
    asked takes it again in a wider type.
    """
    kind = torch.finfo(norms.dtype)
    return norms.masked_fill(torch.minimum(left, right) < kind.tiny / kind.eps, 0)


@dataclass(frozen=True)
class Dense(Term):
    """A value that is there: biases, affine parameters, whatever can't be factored."""

    value: torch.Tensor  # [n, *shape]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.value.shape[1:])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.value,)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Dense:
        return Dense(self.value[samples].to(dtype or self.dtype))

    def square_norms(self) -> torch.Tensor:
        return _square_norm(self.value)

    def materialise(self) -> torch.Tensor:
        return self.value

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return torch.tensordot(weights.to(value.dtype), value, 1)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return value.reshape(value.shape[0], vector.numel()) @ vector.reshape(-1).to(value.dtype)

    def scaled(self, factor: float) -> Dense:
        return Dense(self.value * factor)

    def kin(self) -> tuple[Any, ...]:
        return Dense, self.shape

    def plus(self, others: Sequence[Dense]) -> Dense:
        return Dense(sum((other.value for other in others), self.value))

    def describe(self) -> str:
        return "direct"


@dataclass(frozen=True)
class Product(Term):
    """Sums over positions of outer products: `ngta,ngtb->ngab`. The weight gradient of every matrix product."""

    left: torch.Tensor  # [n, g, t, a]
    right: torch.Tensor  # [n, g, t, b]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.left.shape[1], self.left.shape[3], self.right.shape[3])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.left, self.right)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Product:
        return Product(self.left[samples].to(dtype or self.dtype), self.right[samples].to(dtype or self.dtype))

    @property
    def _gram_is_cheaper(self) -> bool:
        """The Gram path costs t*t*(a+b) a group, writing the value out t*a*b."""
        positions, rows, columns = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return positions * (rows + columns) <= rows * columns

    def square_norms(self) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        n, groups, positions = left.shape[:3]
        if positions == 1:
            if groups == 1:
                squares = _square_norm(left), _square_norm(right)
                return _zero_where_lost(squares[0] * squares[1], *squares)
            squares = (left * left).sum((2, 3)), (right * right).sum((2, 3))
            return _zero_where_lost((squares[0] * squares[1]).sum(1), squares[0].amax(1), squares[1].amax(1))
        if not self._gram_is_cheaper:
            return Product(left, right).materialised_square_norms()
        out = torch.empty(n, dtype=left.dtype, device=left.device)
        for block in blocks(n, 2 * groups * positions * positions * left.element_size(), left.device):
            x, y = left[block].flatten(0, 1), right[block].flatten(0, 1)
            gram_x, gram_y = torch.bmm(x, x.transpose(1, 2)), torch.bmm(y, y.transpose(1, 2))
            out[block] = self._gram_sums(block, gram_x, gram_y)
        return out

    def _gram_sums(self, block: slice, gram_left: torch.Tensor, gram_right: torch.Tensor) -> torch.Tensor:
        """[n] from Gram matrices [n * g, t, t] (the first is overwritten).

        Where the positions' contributions cancel, rounding would show: those samples are written out instead. The diagonal, each
        position by itself, says how large the numbers were that met in the sum.
        """
        groups = self.left.shape[1]
        largest = [gram.diagonal(dim1=1, dim2=2).reshape(-1, groups * gram.shape[1]).amax(1) for gram in (gram_left, gram_right)]
        products = gram_left.mul_(gram_right)
        alone = products.diagonal(dim1=1, dim2=2).sum(1).reshape(-1, groups).sum(1)
        total = products.flatten(1).sum(1).reshape(-1, groups).sum(1)
        cancelled = samples_where(total < CANCELLATION * alone)
        if len(cancelled):
            total[cancelled] = self.at(cancelled + block.start, total.dtype).materialised_square_norms()
        return _zero_where_lost(total, *largest)

    def materialise(self) -> torch.Tensor:
        return torch.matmul(self.left.transpose(2, 3), self.right)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        scale = weights.reshape(-1, 1, 1, 1).to(left.dtype)
        if left.shape[3] <= right.shape[3]:
            left = left * scale
        else:
            right = right * scale
        if left.shape[1] == 1:
            return (left.flatten(0, 2).t() @ right.flatten(0, 2)).unsqueeze(0)
        return torch.bmm(left.transpose(0, 1).flatten(1, 2).transpose(1, 2), right.transpose(0, 1).flatten(1, 2))

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        return sum_of_products(torch.matmul(left, vector.to(left.dtype)), right)

    def scaled(self, factor: float) -> Product:
        return Product(self.left * factor, self.right)

    def kin(self) -> tuple[Any, ...]:
        return Product, self.shape

    def plus(self, others: Sequence[Product]) -> Product:
        every = (self, *others)
        return Product(torch.cat([term.left for term in every], 2), torch.cat([term.right for term in every], 2))

    def transposed(self) -> Product:
        return Product(self.right, self.left)

    def describe(self) -> str:
        if self.left.shape[2] == 1:
            return "outer product"
        return "gram" if self._gram_is_cheaper else "materialise"


# A Gram sum under this share of its diagonal has lost about two digits: it is taken again without cancellation.
CANCELLATION = 0.05


@dataclass(frozen=True)
class Rows(Term):
    """Rows added where an index says: the gradient of a table that was looked up. The one-hot factor is never built."""

    index: torch.Tensor  # [n, t]
    rows: torch.Tensor  # [n, t, b]
    count: int  # rows of the table

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, self.rows.shape[2])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.rows, self.index)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Rows:
        return Rows(self.index[samples], self.rows[samples].to(dtype or self.dtype), self.count)

    def _keys(self) -> torch.Tensor:
        """[n * t]: one number for each pair of sample and table row."""
        return (self.index + torch.arange(self.samples, device=self.device).unsqueeze(1) * self.count).reshape(-1)

    def square_norms(self) -> torch.Tensor:
        rows = accumulating(self.rows)
        n, positions, columns = rows.shape
        if positions == 1:
            return _square_norm(rows)
        # rows of one sample with the same index are added first: linear in the positions, and nothing cancels afterwards
        index, order = self.index.sort(1)
        ranks = torch.cat([torch.zeros_like(index[:, :1]), (index[:, 1:] != index[:, :-1]).cumsum(1)], 1)  # among the sample's indices
        places = torch.empty_like(ranks).scatter_(1, order, ranks) + torch.arange(n, device=self.device).unsqueeze(1) * positions
        merged = torch.zeros(n * positions, columns, dtype=rows.dtype, device=self.device)
        return _square_norm(merged.index_add_(0, places.reshape(-1), rows.reshape(-1, columns)).reshape(rows.shape))

    def materialise(self) -> torch.Tensor:
        n, _, columns = self.rows.shape
        value = torch.zeros(n * self.count, columns, dtype=self.dtype, device=self.device)
        return value.index_add_(0, self._keys(), self.rows.reshape(-1, columns)).reshape(n, self.count, columns)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        scaled = rows * weights.reshape(-1, 1, 1).to(rows.dtype)
        out = torch.zeros(self.count, rows.shape[2], dtype=rows.dtype, device=self.device)
        return out.index_add_(0, self.index.reshape(-1), scaled.reshape(-1, rows.shape[2]))

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        return sum_of_products(rows, vector.to(rows.dtype)[self.index])

    def scaled(self, factor: float) -> Rows:
        return Rows(self.index, self.rows * factor, self.count)

    def kin(self) -> tuple[Any, ...]:
        return Rows, self.shape

    def plus(self, others: Sequence[Rows]) -> Rows:
        every = (self, *others)
        return Rows(torch.cat([term.index for term in every], 1), torch.cat([term.rows for term in every], 1), self.count)

    def describe(self) -> str:
        return "index"


@dataclass(frozen=True)
class Convolution(Term):
    """A convolution's weight gradient: a product over output positions of cotangents with patches that are not written out."""

    cotangents: torch.Tensor  # [n, b, o, *out]
    inputs: torch.Tensor  # [n, b, i, *in]
    weight_shape: torch.Size
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.weight_shape)

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.cotangents, self.inputs)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Convolution:
        kind = dtype or self.dtype
        return Convolution(self.cotangents[samples].to(kind), self.inputs[samples].to(kind), self.weight_shape, self.geometry)

    def as_product(self) -> Product:
        """The same gradient with its patches written out, [n, g, t, columns]."""
        patches, cotangents = as_matrices(self.cotangents, self.inputs, self.weight_shape, self.geometry)
        return Product(cotangents, patches)

    def _positions(self) -> int:
        narrow = self.inputs if self.geometry.transposed else self.cotangents
        return narrow.shape[1] * math.prod(narrow.shape[3:])

    def _gram_is_cheaper(self) -> bool:
        groups = self.geometry.groups
        rows = self.weight_shape[0] // groups
        columns = math.prod(self.weight_shape[1:])
        return self._positions() * (rows + columns) <= rows * columns

    def _blocks(self) -> Iterator[slice]:
        """Samples whose weight gradients, and patches where they have to be written out, fit a block."""
        elements = math.prod(self.weight_shape)
        if self._gram_is_cheaper() or not grouped_kernel_is_fast(self.cotangents, self.weight_shape):
            elements = max(elements, self._positions() * math.prod(self.weight_shape[1:]) * self.geometry.groups)
        return blocks(self.samples, elements * max(self.dtype.itemsize, 4), self.device)

    def square_norms(self) -> torch.Tensor:
        if not self._gram_is_cheaper():
            return self.materialised_square_norms()
        parts = [self.at(block).as_product().square_norms() for block in self._blocks()]
        return joined(parts, self)

    def materialise(self) -> torch.Tensor:
        parts = [weight_gradients(self.cotangents[block], self.inputs[block], self.weight_shape, self.geometry) for block in self._blocks()]
        return joined(parts, self, self.weight_shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        g = g * weights.reshape(-1, *(1,) * (g.dim() - 1)).to(g.dtype)
        shape_only = torch.empty((), dtype=g.dtype, device=g.device).expand(self.weight_shape)
        return aten.convolution_backward.default(g.flatten(0, 1), x.flatten(0, 1), shape_only, [0], *self.geometry, [False, True, False])[1]

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        moved = aten.convolution.default(x.flatten(0, 1), vector.to(x.dtype), None, *self.geometry)
        return sum_of_products(moved.reshape(g.shape), g)

    def scaled(self, factor: float) -> Convolution:
        return Convolution(self.cotangents * factor, self.inputs, self.weight_shape, self.geometry)

    def kin(self) -> tuple[Any, ...]:
        geometry = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in self.geometry)
        return Convolution, self.shape, geometry, self.inputs.shape[2:], self.cotangents.shape[2:]

    def plus(self, others: Sequence[Convolution]) -> Convolution:
        every = (self, *others)
        cotangents, inputs = torch.cat([term.cotangents for term in every], 1), torch.cat([term.inputs for term in every], 1)
        return Convolution(cotangents, inputs, self.weight_shape, self.geometry)

    def describe(self) -> str:
        return "gram" if self._gram_is_cheaper() else "materialise"
