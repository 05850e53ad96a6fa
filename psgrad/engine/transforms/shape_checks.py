"""Refuses shapes that an operator refuses for one sample, by running it on tensors without values, once for
each signature.

A batched kernel may accept what the operator refuses for one sample: with a sample axis in front, a vector is
a matrix. So each operator of the user's function is first run on the shapes that the function sees, on
PyTorch's meta device. That costs microseconds where the signature is known. If the meta device refuses, the
operator is run on zeros, because some meta kernels refuse too much.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.operators import RANDOM_COMPOSITES, Op, facts
from psgrad.engine.transforms.private_torch import tree_map, without_modes

aten = torch.ops.aten

# Operators for which the meta device accepts shapes that the kernel refuses: the kernel always runs on zeros.
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
# For these it runs on zeros if the rank of an argument, by its position, is another one.
_USUAL_RANKS: dict[Op, dict[int, Container[int]]] = {
    aten.addmm.default: {0: (1, 2)},
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

# Operators whose kernels read and write beyond their arguments for some wrong shapes: `batch_norm`, which
# checks, runs instead.
_BATCH_NORM: dict[Op, Callable[..., tuple[Any, ...]]] = {
    aten.native_batch_norm.default: lambda *args: args,
    aten._native_batch_norm_legit.default: lambda *args: args,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *rest: (
        x,
        weight,
        bias,
        None,
        None,
        *rest,
    ),
    aten._batch_norm_with_update.default: lambda x, weight, bias, mean, var, *rest: (
        x,
        weight,
        bias,
        mean,
        var,
        True,
        *rest,
    ),
    aten._batch_norm_no_update.default: lambda x, weight, bias, mean, var, *rest: (
        x,
        weight,
        bias,
        mean,
        var,
        False,
        *rest,
    ),
}

# Operators that take places; a mask takes as many places as it has true values.
_MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)

# Operators whose rules refuse wrong shapes by name. A packed sequence's lengths are values, for which zeros
# can't stand.
_RECURRENT = (aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu)
_REFUSED_BY_RULES: frozenset[Op] = frozenset(
    {
        aten.stft.default,
        aten._grouped_mm.default,  # its kernel takes no float64, the rule does
        *[getattr(packet, overload) for packet in _RECURRENT for overload in ("input", "data")],
    }
)

_MAX_SIGNATURES = 1 << 16
_accepted: set[Any] = set()
_unchecked: dict[int, Op] = {}  # by id, as hashing an operator takes long; the value keeps the id its own


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
    """Whether the operator's shapes are checked: PyTorch's own operators, without random draws, operators
    that broadcast element by element, and operators whose rules check shapes.
    """
    if op.namespace != "aten" or torch.Tag.pointwise in op.tags or facts(op).is_random:
        return False
    return op not in RANDOM_COMPOSITES and op not in _REFUSED_BY_RULES


def _check_shapes(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op in _BATCH_NORM:
        op, args = aten.batch_norm.default, (*_BATCH_NORM[op](*args), False)
    try:
        op(*_with(args, "meta"), **_with(kwargs, "meta"))
    except NotImplementedError:  # no meta kernel
        if op not in _LENIENT:
            return
    except Exception as error:
        if "meta" in str(error) and op not in _LENIENT:  # it depends on values, which the meta device lacks
            return
    else:
        if op not in _LENIENT and _is_usual(op, args):
            return
    with torch.random.fork_rng(devices=[]):
        op(*_with(args, None), **_with(kwargs, None))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _check_masked(op: Op, x: torch.Tensor, indices: list[torch.Tensor | None], *rest: Any) -> None:
    """Check that masks fit `x`, and that for some number of true places the other arguments fit.

    The numbers to try are the lengths of a write's values along an axis, beside 0 and 1, because values are
    broadcast.
    """
    masks = [
        torch.zeros(i.shape, dtype=torch.bool, device=i.device) if i is not None and _is_mask(i) else None
        for i in indices
    ]
    of_axes = [mask for mask in masks if mask is None or mask.dim()]
    if any(mask is not None for mask in of_axes):
        aten.index.Tensor(_with(x, None), of_axes)
    if len(of_axes) < len(masks):
        return  # True or False for all of x, which takes no axis
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
    """The indices, with an index of this many places for each axis of a mask."""
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
    """The arguments with new tensors of the same shapes and dtypes, on another device or on their own."""
    return tree_map(
        lambda x: (
            torch.zeros(x.shape, dtype=x.dtype, device=device or x.device)
            if isinstance(x, torch.Tensor)
            else x
        ),
        tree,
    )
