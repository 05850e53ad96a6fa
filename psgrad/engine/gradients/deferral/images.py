"""Operators that are linear in a deferred value and whose other arguments all samples share: masks,
nonlinearities, norms and penalties of weights. The value stays deferred, as the image of its terms.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients.deferral.propagation import DeferredArguments
from psgrad.engine.gradients.deferred import DeferredGradient, Placed, merged
from psgrad.engine.gradients.terms import Dense, Image, Term
from psgrad.engine.gradients.terms.placed import are_finite
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.operators import Op

aten = torch.ops.aten


# Operators that multiply each element of their first argument, repeated or not, with a number that does not
# depend on it.
_SCALING: tuple[Op, ...] = (
    aten.expand.default,
    aten.tril.default,
    aten.triu.default,
    aten.div.Tensor,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
)
# Others that are linear in their first argument.
_MIXING: tuple[Op, ...] = (
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.flip.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.index_select_backward.default,
    aten.mv.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
)
# Those of more arguments: the places in which they are linear, each with the place of another argument that
# has to be zero then.
_ELEMENTWISE: dict[Op, dict[int, int | None]] = {
    **{op: {0: None} for op in _SCALING},
    aten.mul.Tensor: {0: None, 1: None},
    aten.masked_fill.Scalar: {0: 2},
    aten.where.self: {1: 2, 2: 1},
    aten.where.ScalarOther: {1: 2},
    aten.where.ScalarSelf: {2: 1},
}
LINEAR: dict[Op, dict[int, int | None]] = {
    **_ELEMENTWISE,
    **{op: {0: None} for op in _MIXING},
    **{op: {0: None, 1: None} for op in (aten.mm.default, aten.bmm.default, aten.matmul.default)},
    aten.constant_pad_nd.default: {0: 2},
}


def image(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    """The image of a deferred value under an operator, stored where that takes no more memory than what it is
    made of; NotImplemented if the operator is not linear in it, or depends on the sample otherwise.
    """
    places = [place for place, value in enumerate(deferred) if value is not None]
    if op not in LINEAR or len(places) != 1 or places[0] not in LINEAR[op]:
        return NotImplemented
    (place,) = places
    if (zero := LINEAR[op][place]) is not None and not _is_zero(args, zero):
        return NotImplemented
    value, shared = deferred[place], [a for a in args if isinstance(a, torch.Tensor) and a is not args[place]]
    assert value is not None
    types = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
    other = [each for each in types if each != value.dtype]
    if other or any(batch.is_mapped(a) for a in (*shared, *kwargs.values())):
        return NotImplemented
    linear = partial(applied, op, place, _without_tensors(args), kwargs)
    one = linear(torch.zeros(1, *value.shape, dtype=value.dtype, device=value.device), *shared)
    if one.dtype != value.dtype:
        return NotImplemented
    shape = one.shape[1:]
    stored = all(isinstance(each.term, Dense) and each.layout.window is None for each in value.terms)
    if stored and shape.numel() <= value.shape.numel():
        term = Dense(linear(value.materialise(), *shared), lost_at=value.lost_at)
        return value.with_terms([Placed.plain(term)], shape)
    floating = [a for a in shared if a.is_floating_point()]
    if op is aten.div.Tensor:
        floating = [a.reciprocal() for a in floating]
    if floating and not are_finite(*floating):  # zeros times infinity are NaN, which a sum would hide
        return NotImplemented
    terms = tuple(merged(value.terms)) if len(value.terms) > 1 else value.terms
    found = Image(terms, tuple(shared), linear, tuple(shape), op in _ELEMENTWISE)
    if shape.numel() == 1:
        ones = torch.ones(shape, dtype=value.dtype, device=value.device)
        small: Term = Dense(found.dot(ones).reshape(-1, *shape))
    elif shape.numel() <= sum(factor[:1].numel() for factor in found.factors):
        small = Dense(found.in_blocks())
    else:
        small = found
    return value.with_terms([Placed.plain(small)], shape)


def _is_zero(args: Any, place: int) -> bool:
    """Whether an argument, if it is given, is known to be zero without waiting for a device."""
    other = args[place] if len(args) > place else 0
    if isinstance(other, (int, float)):
        return other == 0
    return (
        type(other) is torch.Tensor and other.device.type == "cpu" and other.dim() == 0 and not other.item()
    )


def _without_tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator with `torch.Tensor` in the place of tensors."""
    return tuple(torch.Tensor if isinstance(argument, torch.Tensor) else argument for argument in args)


def image_of_product(
    op: Op, args: tuple[Any, ...], place: int, coefficients: torch.Tensor, shape: torch.Size
) -> DeferredGradient:
    """An elementwise product (or quotient) of coefficients [n, *], the argument at a place, that are constant
    along some axes, with a tensor that all samples share.
    """
    linear = partial(applied, op, place, _without_tensors(args), {})
    inner = Placed.plain(Dense(coefficients))
    return DeferredGradient.of(Image((inner,), (args[1 - place],), linear, tuple(shape), True), shape)


def applied(op: Op, place: int, args: Any, kwargs: Any, value: torch.Tensor, *shared: torch.Tensor) -> Any:
    """The operator on each of the values [m, *shape], the argument at a place, in their precision. args: with
    `torch.Tensor` in the place of tensors.
    """
    others, level = iter(shared), BatchLevel(len(value))
    given: list[Any] = []
    for number, argument in enumerate(args):
        if number == place:
            given.append(level.lift(value))
        elif argument is torch.Tensor:
            given.append(next(others))
        else:
            given.append(value.dtype if isinstance(argument, torch.dtype) else argument)
    named = {
        name: value.dtype if isinstance(argument, torch.dtype) else argument
        for name, argument in kwargs.items()
    }
    with level.body(attach=False):
        return level.batch.physical(op(*given, **named))
