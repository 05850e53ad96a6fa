"""Raises an operator's own error for shapes that are wrong for one sample. The operator is run once for each
signature, on tensors without values.

A batched kernel may accept shapes that the operator refuses for one sample: with a sample axis in front, a
vector is a matrix. So each operator of the user's function first runs on the shapes that the function reads,
on PyTorch's meta device. For a signature that was checked before, this takes microseconds. If the meta device
refuses, the operator runs on zeros, because some meta kernels refuse correct shapes.

Some meta kernels import PyTorch's compiler, which takes longer than the whole run of a small network. In
their place a formula recognises the right shapes of a layer, and other operators run on zeros at once, if
these are few.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.transforms.operators import RANDOM_COMPOSITES, Op, facts
from psgrad.engine.transforms.private_torch import tree_leaves, tree_map, without_modes

aten = torch.ops.aten

# For these operators the kernel always runs on zeros: the meta device accepts shapes that it refuses.
_LENIENT: frozenset[Op] = frozenset(
    {
        aten.index_put.default,
        aten.index_put_.default,
        aten.index_add.default,
        aten.index_select.default,
        aten.index_reduce.default,
        aten._unsafe_masked_index_put_accumulate.default,
        aten.put.default,
        aten.put_.default,
        aten.bucketize.Tensor,
        aten.conv3d.default,
        aten.conv3d.padding,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
        aten.soft_margin_loss.default,
        aten.geqrf.default,
        aten.linalg_lstsq.default,
        aten.histogram.bin_ct,
        aten.histogram.bins_tensor,
    }
)
# For these the kernel runs if there are few elements: their meta kernels import the compiler.
_IMPORTING: frozenset[Op] = frozenset(
    {
        *[each.default for each in (aten.all, aten.any, aten.mean, aten.cat, aten.stack, aten.cumsum)],
        *[each.default for each in (aten.batch_norm, aten.group_norm, aten.instance_norm, aten.layer_norm)],
        *[each.default for each in (aten.rms_norm, aten.native_group_norm, aten.native_layer_norm)],
        *[each.default for each in (aten.cross_entropy_loss, aten.mse_loss, aten.l1_loss, aten.huber_loss)],
        *[each.default for each in (aten.smooth_l1_loss, aten.nll_loss_nd, aten.binary_cross_entropy)],
        *[each.default for each in (aten.binary_cross_entropy_with_logits, aten.kl_div, aten.prelu)],
        *[each.default for each in (aten.glu, aten.hardswish, aten.log_sigmoid, aten.logsumexp)],
        *[each.default for each in (aten.linalg_vector_norm, aten.cosine_similarity, aten.roll)],
        *[each.default for each in (aten.adaptive_avg_pool2d, aten.tril, aten.triu)],
        *[each.dim for each in (aten.all, aten.any, aten.mean)],
        *[each.Tensor for each in (aten.__and__, aten.__or__, aten.subtract, aten.divide, aten.rsub)],
        aten.log_softmax.int,
        aten.where.ScalarOther,
    }
)
_FEW = 1 << 22  # elements of arguments that may be written as zeros in place of that import
# For these the kernel runs on zeros if the rank of an argument (by position) is not one of those given here.
_USUAL_RANKS: dict[Op, dict[int, Container[int]]] = {
    aten.addmv.default: {0: (0, 1)},
    aten.softmax.int: {0: range(1, 9)},
    aten.native_group_norm.default: {0: range(2, 9), 1: (1,), 2: (1,)},
    aten.batch_norm.default: {0: range(2, 9), **dict.fromkeys(range(1, 5), (1,))},
    aten.ctc_loss.IntList: {1: (1, 2)},
    aten.ctc_loss.Tensor: {1: (1, 2)},
    aten.conv1d.default: {2: (1,)},
    aten.conv2d.default: {2: (1,)},
    aten.conv_transpose1d.default: {2: (1,)},
    aten.conv_transpose2d.input: {2: (1,)},
    aten.conv_transpose3d.input: {2: (1,)},
}


def _layer_fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, summed: int) -> bool:
    """Whether the product over the last axis of `x` and the axis `summed` of the matrix `weight`, plus the
    vector `bias`, is right: False also for what is right and rare.
    """
    others = [weight] if bias is None else [weight, bias]
    return (
        weight.dim() == 2
        and x.shape[-1:] == weight.shape[summed : summed + 1]
        and (bias is None or bias.shape == weight.shape[1 - summed : 2 - summed])
        and x.is_floating_point()
        and all(other.dtype == x.dtype for other in others)
    )


_FORMULAS: dict[Op, Callable[..., bool]] = {
    aten.linear.default: lambda x, weight, bias=None: _layer_fits(x, weight, bias, 1),
    aten.addmm.default: lambda bias, x, weight, **scales: x.dim() == 2 and _layer_fits(x, weight, bias, 0),
}

# The kernels of these operators read and write beyond their arguments for some wrong shapes. `batch_norm`,
# which checks shapes, runs instead.
_BATCH_NORM: dict[Op, Callable[..., tuple[Any, ...]]] = {
    aten.native_batch_norm.default: lambda *args: args,
    aten._native_batch_norm_legit.default: lambda *args: args,
    aten._native_batch_norm_legit.no_stats: lambda *args: (*args[:3], None, None, *args[3:]),
    aten._batch_norm_with_update.default: lambda *args: (*args[:5], True, *args[5:]),
    aten._batch_norm_no_update.default: lambda *args: (*args[:5], False, *args[5:]),
}

# Operators with index arguments; a mask selects as many elements as it has true values.
_MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)

# Operators whose own rules check shapes. The lengths of a packed sequence are values; zeros are not valid
# lengths.
_RECURRENT = (aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu)
_REFUSED_BY_RULES: frozenset[Op] = frozenset(
    {
        aten._grouped_mm.default,  # its kernel takes no float64, the rule does
        *[getattr(packet, overload) for packet in _RECURRENT for overload in ("input", "data")],
    }
)

_MAX_SIGNATURES = 1 << 16
_accepted: set[Any] = set()
_unchecked: dict[int, Op] = {}  # by id, because hashing is slow; the value keeps the id from being reused


def refuse_shapes(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the operator's own error if it does not take arguments of these shapes."""
    number = id(op)
    if number in _unchecked:
        return
    signature = (
        number,
        *[
            (a.shape, a.dtype) if isinstance(a, torch.Tensor) else _shape(a) if type(a) is list else a
            for a in args
        ],
    )
    if kwargs:
        signature += tuple([(name, _shape(a)) for name, a in kwargs.items()])
    try:
        if signature in _accepted:
            return
    except TypeError:  # an argument that can't be hashed
        return
    if not _is_checked(op):
        _unchecked[number] = op
        return
    with without_modes():
        if op in _MASKED and any(_is_mask(index) for index in args[1]):
            _check_masked(op, *args)
        else:
            _check_shapes(op, args, kwargs)
    if len(_accepted) >= _MAX_SIGNATURES:
        _accepted.clear()
    _accepted.add(signature)


def _shape(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    return tuple([_shape(item) for item in argument]) if isinstance(argument, (list, tuple)) else argument


def _is_checked(op: Op) -> bool:
    """Whether the operator's shapes are checked. They are not for operators of other libraries, random
    operators, elementwise operators that broadcast, and operators whose rules check shapes.
    """
    if op.namespace != "aten" or torch.Tag.pointwise in op.tags or facts(op).is_random:
        return False
    return op not in RANDOM_COMPOSITES and op not in _REFUSED_BY_RULES


def _check_shapes(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op in _BATCH_NORM:
        op, args = aten.batch_norm.default, (*_BATCH_NORM[op](*args), False)
    if _is_right(op, args, kwargs):
        return
    with random_state.torch_restored([torch.default_generator]):
        op(*_with(args, None), **_with(kwargs, None))


def _elements(args: tuple[Any, ...]) -> int:
    return sum(x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor))


def _is_right(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these shapes need no run on zeros."""
    if op in _FORMULAS:
        return _FORMULAS[op](*args, **kwargs)
    if op in _LENIENT or (op in _IMPORTING and _elements(args) <= _FEW):
        return False
    try:
        op(*_with(args, "meta"), **_with(kwargs, "meta"))
    except NotImplementedError:  # no meta kernel
        return True
    except Exception as error:
        return "meta" in str(error)  # the operator needs values
    return _is_usual(op, args)


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _check_masked(op: Op, x: torch.Tensor, indices: list[torch.Tensor | None], *rest: Any) -> None:
    """Check that masks fit `x`, and that for some number of true elements the other arguments fit.

    The numbers to try are 0, 1, and the lengths of the axes of a write's values, because values broadcast.
    """
    masks = [
        torch.zeros(i.shape, dtype=torch.bool, device=i.device) if i is not None and _is_mask(i) else None
        for i in indices
    ]
    of_axes = [mask for mask in masks if mask is None or mask.dim()]
    if any(mask is not None for mask in of_axes):
        aten.index.Tensor(_with(x, None), of_axes)
    if len(of_axes) < len(masks):
        return  # a mask without axes selects all of x or nothing
    refusals: list[Exception] = []
    for count in sorted({0, 1, *(rest[0].shape if rest else ())}, reverse=True):
        try:
            _check_shapes(op, (x, list(_with_places(indices, masks, count)), *rest), {})
        except Exception as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def _with_places(indices: Sequence[Any], masks: Sequence[torch.Tensor | None], count: int) -> Iterator[Any]:
    """The indices; each mask is replaced by one index of `count` elements for each of its axes."""
    for index, mask in zip(indices, masks, strict=True):
        if mask is None:
            yield index
        else:
            yield from [torch.zeros(count, dtype=torch.int64, device=mask.device)] * mask.dim()


def _is_usual(op: Op, args: tuple[Any, ...]) -> bool:
    return all(
        position >= len(args) or args[position] is None or args[position].dim() in ranks
        for position, ranks in _USUAL_RANKS.get(op, {}).items()
    )


def _with(tree: Any, device: str | None) -> Any:
    """The arguments with new tensors of the same shapes and dtypes, on `device`; None keeps each one's
    device.
    """
    return tree_map(
        lambda x: (
            torch.zeros(x.shape, dtype=x.dtype, device=device or x.device)
            if isinstance(x, torch.Tensor)
            else x
        ),
        tree,
    )
