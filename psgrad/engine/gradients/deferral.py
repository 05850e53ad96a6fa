"""The deferral policy: which operators on cotangents of shared values stay un-run, and what happens to them on their way.

A level asks this policy while the pass back computes the cotangent of a value that all samples share (a weight, or anything
made from weights alone). A contraction over positions begins a deferred value; transposes and reshapes relabel it; sums collect
terms; products with shared matrices move into a factor (LoRA). Anything else makes the value real first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms import Convolution, Dense, Product, Rows, Term
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.convolution import Geometry
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten


@dataclass(frozen=True)
class Placed:
    """A term, and how its axes lie in the parameter's."""

    term: Term
    layout: Layout

    @classmethod
    def plain(cls, term: Term) -> Placed:
        return cls(term, Layout.identity(term.shape))


@dataclass(frozen=True)
class DeferredGradient:
    """A per-sample value that is a sum of terms, [n] x `shape`."""

    terms: tuple[Placed, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, term: Term, shape: tuple[int, ...] | torch.Size) -> DeferredGradient:
        layout = Layout.identity(term.shape).reshape(shape) if tuple(shape) != term.shape else Layout.identity(term.shape)
        assert layout is not None
        return cls((Placed(term, layout),), torch.Size(shape), term.dtype, term.device)

    def with_terms(self, terms: list[Placed], shape: Any = None) -> DeferredGradient:
        return DeferredGradient(tuple(terms), torch.Size(self.shape if shape is None else shape), self.dtype, self.device)

    def at(self, samples: slice) -> DeferredGradient:
        """The same for some of the samples."""
        return self.with_terms([Placed(placed.term.at(samples), placed.layout) for placed in self.terms])

    def describe(self) -> str:
        """How its norms are computed."""
        return " + ".join(placed.term.describe() for placed in self.terms) or "zero"

    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""
        # Factors in halves of a gradient in float32 are multiplied and summed in float32.
        wide = torch.promote_types(self.dtype, self.terms[0].term.dtype)
        parts = [placed.layout.apply(placed.term.at(slice(None), wide).materialise(), lead=1) for placed in self.terms]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(self.dtype)


class WeightDeferral:
    """The policy. It has no state."""

    def starts(self, op: Op) -> bool:
        return op in _STARTS

    def apply(self, batch: Batch, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = [deferred_in(batch, a) for a in args]
        if any(w is not None for w in waiting):
            handler = _ON_THE_WAY.get(op)
            return NotImplemented if handler is None else handler(batch, waiting, args, kwargs)
        return _STARTS[op](batch, *args, **kwargs) if op in _STARTS else NotImplemented


def deferred_in(batch: Batch, argument: Any) -> DeferredGradient | None:
    """The deferred value of a tracer of this level, None for anything else."""
    if batch.is_mapped(argument) and isinstance(argument.value, DeferredGradient):
        return argument.value
    return None


# -- where deferred values begin -----------------------------------------------------------------------------------------------------


def _mm(batch: Batch, a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right = batch.physical(a).transpose(1, 2), batch.physical(b)  # [n, t, rows], [n, t, columns]
    if left.dtype != right.dtype or left.dtype.is_complex:
        return NotImplemented
    return DeferredGradient.of(Product(left.unsqueeze(1), right.unsqueeze(1)), (left.shape[2], right.shape[2]))


def _bmm(batch: Batch, a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right = batch.physical(a).transpose(2, 3), batch.physical(b)
    if left.dtype != right.dtype or left.dtype.is_complex:
        return NotImplemented
    term = Product(left, right)
    return DeferredGradient.of(term, term.shape)


def _convolution_backward(batch: Batch, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any) -> Any:
    if list(args[-1]) != [False, True, False] or g.dtype != x.dtype or g.dtype.is_complex:
        return NotImplemented
    geometry = Geometry.of(args[:-1], weight.dim() - 2)
    term = Convolution(batch.physical(g), batch.physical(x), torch.Size(weight.shape), geometry)
    return None, DeferredGradient.of(term, term.shape), None


def _embedding_backward(batch: Batch, g: torch.Tensor, index: torch.Tensor, count: int, padding_idx: int, scale: bool) -> Any:
    rows, places = batch.physical(g), batch.physical(index)
    n, width = rows.shape[0], rows.shape[-1]
    rows, places = rows.reshape(n, index.numel(), width), places.reshape(n, index.numel())
    if padding_idx >= 0:
        rows = rows.masked_fill((places == padding_idx).unsqueeze(-1), 0)
    term = Rows(places, rows, count)
    return DeferredGradient.of(term, term.shape)


_STARTS: dict[Op, Any] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.convolution_backward.default: _convolution_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}

# -- what may happen to them on the way ------------------------------------------------------------------------------------------------


def _same(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    return value if value is not None and kwargs.get("dtype") in (None, value.dtype) else NotImplemented


def _cast(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    """A weight that is cast to another precision on its way into a product (autocast): the factors stay in theirs.

    So what is asked of the gradient sums products of halves in float32, and nothing is rounded to halves in between.
    """
    value, dtype = waiting[0], kwargs.get("dtype")
    if value is None or kwargs.get("device") not in (None, value.device):
        return NotImplemented
    if dtype in (None, value.dtype):
        return value
    return replace(value, dtype=dtype) if dtype.is_floating_point else NotImplemented


def _relabelled(value: DeferredGradient, layouts: list[Layout | None]) -> Any:
    if any(layout is None for layout in layouts):
        return NotImplemented
    terms = [Placed(placed.term, layout) for placed, layout in zip(value.terms, layouts, strict=True) if layout is not None]
    return value.with_terms(terms, terms[0].layout.shape)


def _reshaped(value: DeferredGradient, shape: Any) -> Any:
    if -1 in shape:
        known = -1
        for size in shape:
            known *= size
        shape = [value.shape.numel() // known if size == -1 and known else size for size in shape]
    return _relabelled(value, [placed.layout.reshape(shape) for placed in value.terms])


def _reshape(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    return _reshaped(waiting[0], args[1])


def _squeeze(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    dims = range(len(value.shape)) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {wrap_dim(d, len(value.shape)) for d in dims}
    return _reshaped(value, [s for i, s in enumerate(value.shape) if not (i in gone and s == 1)])


def _unsqueeze(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    shape = list(waiting[0].shape)
    shape.insert(wrap_dim(args[1], len(shape) + 1), 1)
    return _reshaped(waiting[0], shape)


def _permuted(value: DeferredGradient, dims: list[int]) -> Any:
    return _relabelled(value, [placed.layout.permute(dims) for placed in value.terms])


def _permute(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    rank = len(waiting[0].shape)
    return _permuted(waiting[0], [wrap_dim(d, rank) for d in args[1]])


def _transpose(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    rank = len(waiting[0].shape)
    dims = list(range(rank))
    if len(args) == 3:
        first, second = wrap_dim(args[1], rank), wrap_dim(args[2], rank)
    elif rank == 2:
        first, second = 0, 1
    else:
        return waiting[0]
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(waiting[0], dims)


def _expand(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    return waiting[0] if tuple(args[1]) == tuple(waiting[0].shape) else NotImplemented


def _add(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("alpha", 1) != 1 or not all(isinstance(a, torch.Tensor) for a in args) or args[0].shape != args[1].shape:
        return NotImplemented
    if args[0].dtype != args[1].dtype:
        return NotImplemented
    known = next(w for w in waiting if w is not None)
    terms: list[Placed] = []
    for argument, value in zip(args, waiting, strict=True):
        terms += value.terms if value is not None else [Placed.plain(Dense(batch.physical(argument)))]
    return known.with_terms(terms)


def _scale_by(exponent: int) -> Any:
    def scale(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
        numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        if waiting[0] is None or len(args) != 2 or len(numbers) != 1 or kwargs:
            return NotImplemented
        factor = float(numbers[0]) ** exponent
        return waiting[0].with_terms([Placed(p.term.scaled(factor), p.layout) for p in waiting[0].terms])

    return scale


def _negate(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    return waiting[0].with_terms([Placed(p.term.scaled(-1.0), p.layout) for p in waiting[0].terms])


def _times_shared_matrix(batch: Batch, waiting: Any, args: Any, kwargs: Any) -> Any:
    """(sum_t left ⊗ right) @ M = sum_t left ⊗ (right @ M): the matrix goes into a factor."""
    left, right = waiting
    matrix = args[1] if left is not None else args[0]
    value = left if left is not None else right
    if (left is not None and right is not None) or batch.is_mapped(matrix) or len(value.shape) != 2 or matrix.dim() != 2:
        return NotImplemented
    shape = (value.shape[0], matrix.shape[1]) if left is not None else (matrix.shape[0], value.shape[1])
    terms = []
    for placed in value.terms:
        moved = _into_factor(placed, value.shape, matrix, on_the_right=left is not None)
        layout = Layout.identity(moved.shape).reshape(shape) if moved is not None else None
        if moved is None or layout is None:
            return NotImplemented
        terms.append(Placed(moved, layout))
    return value.with_terms(terms, shape)


def _into_factor(placed: Placed, shape: torch.Size, matrix: torch.Tensor, *, on_the_right: bool) -> Term | None:
    term = oriented(placed)
    if term is None or term.shape[-2:] != tuple(shape):
        return None
    if isinstance(term, Product):
        if on_the_right:
            return Product(term.left, torch.matmul(term.right, matrix))
        return Product(torch.matmul(term.left, matrix.t()), term.right)
    if isinstance(term, Rows) and on_the_right:
        return Rows(term.index, torch.matmul(term.rows, matrix), term.count)
    return None


def oriented(placed: Placed) -> Term | None:
    """The term with its elements in the parameter's order, transposed if need be; None where they lie in yet another order."""
    term, layout = placed.term, placed.layout
    order = [i for i in layout.order if layout.atoms[i] != 1]
    if order == sorted(order):
        return term
    if isinstance(term, Product) and term.shape[0] == 1:
        rows = [i for i in sorted(order) if math.prod(layout.atoms[: i + 1]) <= term.shape[1]]
        columns = [i for i in sorted(order) if i not in rows]
        if order == columns + rows and math.prod(layout.atoms[i] for i in rows) == term.shape[1]:
            return term.transposed()
    return None


_ON_THE_WAY: dict[Op, Any] = {
    aten.add.Tensor: _add,
    aten.neg.default: _negate,
    aten.mul.Tensor: _scale_by(1),
    aten.mul.Scalar: _scale_by(1),
    aten.div.Tensor: _scale_by(-1),
    aten.div.Scalar: _scale_by(-1),
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten._to_copy.default: _cast,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.expand.default: _expand,
    aten.mm.default: _times_shared_matrix,
    aten.matmul.default: _times_shared_matrix,
}
