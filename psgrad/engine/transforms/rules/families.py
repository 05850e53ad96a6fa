"""Families: functions that make the rules of most operators from one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import cast as cast
from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.operators import aten as aten
from psgrad.engine.transforms.private_torch import schema_of
from psgrad.engine.transforms.rules.registry import Maker, Op, Push, define
from psgrad.engine.transforms.tracer import map_tracers


def sum_to(g: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """The transpose of broadcasting and of type promotion: `g` summed to `shape`, in `dtype`. None, a zero,
    stays None.
    """
    if g is None:
        return None
    if g.shape != shape:
        extra = g.dim() - len(shape)
        # a sum over an axis of one would only copy
        axes = [i for i in range(extra) if g.shape[i] != 1] + [
            i + extra for i, size in enumerate(shape) if size == 1 and g.shape[i + extra] != 1
        ]
        if axes:
            g = run(aten.sum.dim_IntList, g, axes, extra != len(axes))
        if g.shape != shape:
            g = run(aten.reshape.default, g, shape)
    return g if g.dtype == dtype else cast(g, dtype)


def broadcasting(make: Maker, position: int) -> Maker:
    """The VJP of an elementwise operator with broadcasting: the cotangent is summed over the axes along which
    the argument was repeated.
    """

    def maker(out: torch.Tensor, *args: Any, **kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        argument = args[position]
        shape, dtype = argument.shape, argument.dtype
        closure = make(out, *args, **kwargs)
        if shape == out.shape and dtype == out.dtype:
            return closure
        return lambda g: sum_to(closure(g), shape, dtype)

    return maker


def diagonal_jvp(make: Maker, position: int) -> Push:
    """The JVP of an elementwise operator. Its Jacobian is diagonal, so the closure of its VJP also maps a
    real tangent of the argument to that of the result.

    None for complex values: there the closure is the conjugate of the JVP, if the operator is holomorphic.
    """

    def maker(out: torch.Tensor, *args: Any, **kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if out.dtype.is_complex or args[position].dtype.is_complex:
            return None
        shape, dtype, closure = out.shape, out.dtype, make(out, *args, **kwargs)
        return lambda t: closure(cast(t if t.shape == shape else t.expand(shape), dtype))

    return maker


def elementwise_batch(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """The batching rule of elementwise operators: the operator itself; operands of lower rank get axes of
    length one after the sample axis.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if len(tensors) == 1:
        return op(*[batch.raw(a) for a in args], **kwargs)
    rank, dtype, mixed = -1, tensors[0].dtype, False
    for t in tensors:
        rank = max(rank, t.dim())
        mixed = mixed or t.dtype != dtype
    if mixed:
        args = tuple(_promoted(batch, args, tensors, rank))
    return op(*[batch.aligned(a, rank) for a in args], **kwargs)


def _promoted(batch: Any, args: Any, tensors: list[torch.Tensor], rank: int) -> list[Any]:
    """The arguments, cast so that the result has the dtype that PyTorch gives one sample's result. Scalars of
    a sample have an axis here, and PyTorch would promote them as tensors.
    """
    scalars = [t for t in tensors if t.dim() == 0]
    if not any(batch.is_mapped(t) for t in scalars):
        return list(args)
    dtype = _joint(scalars)
    if rank:
        others = _joint([t for t in tensors if t.dim()])
        dtype = torch.result_type(torch.empty((1,), dtype=others), torch.empty((), dtype=dtype))
    return [
        (
            batch.level.lift(batch.physical(a).to(dtype))
            if isinstance(a, torch.Tensor)
            and a.dim() == 0
            and batch.is_mapped(a)
            and a.dtype != dtype
            and a.dtype != torch.bool
            else a
        )
        for a in args
    ]


def _joint(tensors: list[torch.Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def elementwise(*ops: Op, **derivatives: Maker) -> None:
    """Declare elementwise operators. Keywords `x0, x1, ...` give the VJP in the tensor argument of that
    position.

    The Jacobian is diagonal, so the closure of the VJP is also that of the JVP.
    """
    diagonal = {int(name[1:]): make for name, make in derivatives.items()}
    vjp = {position: broadcasting(make, position) for position, make in diagonal.items()}
    jvp = {position: diagonal_jvp(make, position) for position, make in diagonal.items()}
    define(*ops, vjp=vjp or None, jvp=jvp, batch=elementwise_batch)


def linear(*ops: Op, back: Maker, batch: Callable[..., Any] | None = None) -> None:
    """Declare operators that are linear in their first argument. back: the VJP, which is their adjoint."""
    define(*ops, vjp={0: back}, linear=(0,), batch=batch)


def first_result(make: Maker) -> Maker:
    """The VJP of an operator with several results, from that of its first result. The others have no
    derivative.
    """

    def maker(out: Any, *args: Any, **kwargs: Any) -> Callable[[Sequence[Any]], Any]:
        closure = make(out, *args, **kwargs)
        return lambda gs: closure(gs[0]) if gs[0] is not None else None

    return maker


def unchanged(out: torch.Tensor, *args: Any, **kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The VJP of an operator that adds its argument, or only moves it: the cotangent itself."""
    return lambda g: g


def wrap_dim(dim: int, rank: int) -> int:
    """The axis as a non-negative number. A scalar has the axes of a vector, as in PyTorch."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})"
        )
    return dim % rank


def shifted(*positions: int) -> Callable[..., Any]:
    """Batching for operators that take one tensor and axes: each axis argument is increased by one.

    positions: of the axis arguments.
    """
    last = max(positions)

    def rule(batch: Any, op: Op, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        full = list(args)
        if len(full) < last:
            for argument in schema_of(op).arguments[len(full) + 1 : last + 1]:
                full.append(kwargs.pop(argument.name, argument.default_value))
        for position in positions:
            value = full[position - 1]
            if isinstance(value, int):
                full[position - 1] = wrap_dim(value, x.dim()) + 1
            elif isinstance(value, (list, tuple)):
                full[position - 1] = [wrap_dim(d, x.dim()) + 1 for d in value]
        if x.dim() == 0:  # an axis of a scalar: computed as a vector of length one
            return without_unit_axis(op(batch.physical(x).unsqueeze(1), *full, **kwargs))
        return op(batch.physical(x), *full, **kwargs)

    return rule


def without_unit_axis(result: Any) -> Any:
    """Results [n] of an operator that ran on scalars as vectors of length one, without the axis of length
    one.
    """
    if isinstance(result, (tuple, list)):
        return tuple(without_unit_axis(item) for item in result)
    return result.squeeze(1) if result.dim() == 2 else result


def folded(*positions: int) -> Callable[..., Any]:
    """Batching for kernels with a batch axis: the sample axis is folded into it, in the arguments at
    `positions`.
    """

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        full = [
            batch.fold(a) if i in positions and isinstance(a, torch.Tensor) else a for i, a in enumerate(args)
        ]
        if any(batch.is_mapped(a) for a in full):
            raise NotImplementedError(
                f"{op}: an argument that is shared by the kernel's batch carries a sample axis"
            )
        return batch.unfold(op(*full, **kwargs), args[positions[0]].shape[0])

    return rule


def pooled(axes: int) -> Callable[..., Any]:
    """Batching for a kernel on tensors with `axes` spatial axes, a channel axis and perhaps a batch axis."""

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        if args[0].dim() == axes + 2:
            return folded(*range(len(args)))(batch, op, *args, **kwargs)
        return on_physical(batch, op, *args, **kwargs)

    return rule


def of_one_if_empty(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The batching rule for a kernel that fails on an empty batch: it runs on one sample of zeros instead,
    which is then left out.
    """

    def of_all(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        if batch.size:
            return rule(batch, op, *args, **kwargs)
        level = type(batch.level)(1, batch.level.randomness)

        def zeros(a: Any) -> Any:
            return level.lift(batch.raw(a).new_zeros(1, *a.shape)) if batch.is_mapped(a) else a

        named = {name: zeros(a) for name, a in kwargs.items()}
        return map_tracers(lambda x: x[:0], rule(level.batch, op, *map(zeros, args), **named))

    return of_all


@of_one_if_empty
def one_by_one(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Batching for rare operators, whose kernels take one sample: they run for each sample alone."""

    def of_sample(number: int) -> Any:
        one = [batch.raw(a)[number] if batch.is_mapped(a) else a for a in args]
        named = {k: batch.raw(a)[number] if batch.is_mapped(a) else a for k, a in kwargs.items()}
        return op(*one, **named)

    results = [of_sample(number) for number in range(batch.size)]
    if isinstance(results[0], tuple):
        return tuple(map(torch.stack, zip(*results, strict=True)))
    return torch.stack(results)


def leading(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Batching for operators that use trailing axes only: the sample axis is one more leading axis."""
    return op(*[batch.raw(a) for a in args], **kwargs)


def on_physical(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Batching for kernels whose operands must all have the same leading axes, so also the sample axis."""
    return op(*[batch.physical(a) if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
