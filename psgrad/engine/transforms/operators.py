"""Facts about operators: the facts of an operator's schema, the operators whose arguments are cast here for
autocast, and the kernels that read memory as if it were contiguous.

Autocast acts before operators reach psgrad, so most are cast already. For some operators it casts only the
products inside them (on a CPU the recurrent layers, their cells and einsum; on a GPU the recurrent layers).
psgrad's rules run these products below autocast, so the arguments of these operators are cast here.

Batching passes expanded tensors (stride 0) to kernels: a value that all samples share, the cotangent of a
sum. Most kernels use the strides. The kernels in `READ_AS_CONTIGUOUS` read all memory after the address of
the first element: with expanded or sliced memory they return wrong numbers, or read outside the tensor.
`tests/engine/transforms/kernel_layouts.py` searches for them among all kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.private_torch import (
    DisableTorchDispatch,
    can_decompose,
    overload_name,
    schema_of,
    tree_flatten,
    tree_map,
)
from psgrad.engine.transforms.private_torch import Op as Op
from psgrad.errors import TransformError

aten = torch.ops.aten

# By kernel, the positions of the arguments that it reads as contiguous memory.
READ_AS_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm_backward.default: (3, 4),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_group_norm_backward.default: (0, 1, 2, 3, 4),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten.fractional_max_pool2d_backward.default: (4,),
    aten.fractional_max_pool3d_backward.default: (4,),
    aten._ctc_loss.default: (1,),
    aten._ctc_loss.Tensor: (1, 2, 3),
    aten._ctc_loss_backward.default: (2, 5, 6),
    aten._ctc_loss_backward.Tensor: (2, 3, 4, 5, 6),
    aten._cdist_backward.default: (0, 1, 2, 4),
    aten._linalg_check_errors.default: (0,),
    aten.linalg_matrix_exp.default: (0,),
    aten.median.dim: (0,),
    aten.nanmedian.dim: (0,),
}


def contiguous(positions: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments with contiguous memory at `positions`. Tracers are unchanged: their level calls
    this again.
    """
    return tuple(
        [a.contiguous() if i in positions and type(a) is torch.Tensor else a for i, a in enumerate(args)]
    )


def on_contiguous_memory(op: Any, positions: tuple[int, ...]) -> Callable[..., Any]:
    """`op`, with contiguous memory at `positions`, for a batching rule."""
    return partial(_call, op, positions)


def _call(op: Any, positions: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    return op(*contiguous(positions, args), **kwargs)


class OpFacts(NamedTuple):
    """The facts of an operator's schema."""

    op: Op
    mutated: tuple[int, ...]  # positions of the arguments that it writes to
    mutated_kwargs: tuple[str, ...]  # the same for `out=`-like arguments
    returns_target: bool  # whether it returns only the tensors that it has written to
    is_view: bool
    is_random: bool
    draws_position: int | None  # of the argument that says whether an operator draws at all
    contiguous: tuple[int, ...]  # positions of the arguments that its kernel reads as contiguous memory


# By the operator's id, as hashing an operator is slow; the facts hold the operator, so that its id stays its
# own.
_facts: dict[int, OpFacts] = {}


def facts(op: Op) -> OpFacts:
    cached = _facts.get(id(op))
    if cached is None:
        cached = _facts[id(op)] = _read(op)
    return cached


def _read(op: Op) -> OpFacts:
    schema = schema_of(op)
    mutated, mutated_kwargs = [], []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only:
                mutated_kwargs.append(argument.name)
            else:
                mutated.append(position)
    returns_target = bool(mutated) and all(r.alias_info is not None for r in schema.returns)
    is_view = not mutated and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    draws = next(
        (i for i, argument in enumerate(schema.arguments) if argument.name in ("dropout_p", "training")), None
    )
    # In a composite operator (a recurrent layer) an inner operator draws. Attention is an exception: it may
    # choose a kernel that draws.
    random = torch.Tag.nondeterministic_seeded in op.tags and (draws is not None or not is_composite(op))
    return OpFacts(
        op,
        tuple(mutated),
        tuple(mutated_kwargs),
        returns_target,
        is_view,
        random,
        draws,
        READ_AS_CONTIGUOUS.get(op, ()),
    )


@functools.cache
def is_composite(op: Op) -> bool:
    """Whether PyTorch itself defines `op` as a program of other operators, for autograd too."""
    try:
        return can_decompose(op)
    except RuntimeError:  # for some legacy overloads this raises an error
        return False


def written_by(op: Op, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `op` writes to."""
    operator = facts(op)
    return [
        *(args[position] for position in operator.mutated),
        *(kwargs[name] for name in operator.mutated_kwargs if name in kwargs),
    ]


def is_random(op: Op, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call draws. Attention kernels draw only with dropout, a randomised relu only in
    training.
    """
    operator = facts(op)
    if not operator.is_random or op in RANDOM_COMPOSITES:
        return False
    if operator.draws_position is None:
        return True
    position = operator.draws_position
    return bool(
        args[position] if position < len(args) else kwargs.get(schema_of(op).arguments[position].name, False)
    )


# Composite operators that draw: the operators inside them are handled.
RANDOM_COMPOSITES: frozenset[Op] = frozenset(
    {
        aten.dropout.default,
        aten.dropout_.default,
        aten.feature_dropout.default,
        aten.feature_dropout_.default,
        aten.alpha_dropout.default,
        aten.alpha_dropout_.default,
        aten.feature_alpha_dropout.default,
        aten.feature_alpha_dropout_.default,
    }
)


@functools.cache
def functional_variant(op: Op) -> Op | None:
    """The operator that returns what the in-place operator `op` would write: `add_.Tensor` ->
    `add.Tensor`.
    """
    name = schema_of(op).name.removeprefix("aten::")
    if not schema_of(op).name.startswith("aten::"):
        return None
    special = {
        "bernoulli_.float": aten.bernoulli.p,
        "zero_": aten.fill.Scalar,
        "pow_.Scalar": aten.pow.Tensor_Scalar,
        "pow_.Tensor": aten.pow.Tensor_Tensor,
        "normal_": aten.normal_functional.default,
        "transpose_": aten.transpose.int,
        "float_power_.Scalar": aten.float_power.Tensor_Scalar,
        "float_power_.Tensor": aten.float_power.Tensor_Tensor,
        "floor_divide_.Tensor": aten.floor_divide.default,
    }
    key = name + ("." + overload_name(op) if overload_name(op) != "default" else "")
    if key in special:
        return special[key]
    base = "__" + name[3:] if name.startswith("__i") else name.rstrip("_")  # __iand__ -> __and__
    packet = getattr(aten, base, None)
    return getattr(packet, overload_name(op), None) if packet is not None else None


def operator_defaults(op: Op, given: int, kwargs: dict[str, Any]) -> list[Any]:
    """Values for arguments that `op` requires and its in-place variant does not have (the 0.5 of
    `bernoulli_()`, the 0 of `zero_()`).
    """
    if op is aten.bernoulli.p and given < 2 and "p" not in kwargs:
        return [0.5]
    if op is aten.fill.Scalar and given < 2 and "value" not in kwargs:
        return [0]
    return []


def out_of_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value that the in-place operator `op` would write, as a new tensor of the target's shape."""
    functional, target = functional_variant(op), args[0]
    if functional is None:
        refuse_mutation(op, "a traced tensor, and has no counterpart that returns a new tensor")
    if functional is aten.polygamma.default:  # polygamma_(x, n), but polygamma(n, x)
        args = (args[1], args[0])
    new = functional(*args, *operator_defaults(functional, len(args), kwargs), **kwargs)
    if new.shape != target.shape:
        raise TransformError(
            f"{op} can't turn a tensor of shape {tuple(target.shape)} into one of shape {tuple(new.shape)} in"
            f" place{diagnostics.where()}",
            hint="use the operator without the underscore, which returns a new tensor",
        )
    return new


@functools.cache
def reshapes_in_place(op: Op) -> bool:
    """Whether `op` (`t_`, `squeeze_`) changes the shape or strides of its target, but not its memory."""
    if torch.Tag.inplace_view not in op.tags or op is aten.detach_.default:
        return False
    functional = functional_variant(op)
    return functional is not None and facts(functional).is_view


def reshape_tracer(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Change the shape and strides of a tracer by `op`. A tracer has no memory."""
    guard = DisableTorchDispatch()
    try:
        op(*args, **kwargs)
    finally:
        del guard


def refuse_mutation(
    op: Op,
    what: str,
    hint: str = (
        "use the operator that returns a new tensor (x = x + y for x += y, torch.where or index_put for"
        " x[i] = y), or make the target from an input, for example x.new_zeros(...) in place of"
        " torch.zeros(...)"
    ),
) -> NoReturn:
    """Raise an error for an in-place operator that psgrad can't run correctly."""
    raise TransformError(
        f"{op.name().removeprefix('aten::')} writes in place into {what}{diagnostics.where()}",
        hint=hint,
    )


WHOLE: frozenset[Op] = frozenset(
    overload
    for packet in (
        aten.lstm,
        aten.gru,
        aten.rnn_tanh,
        aten.rnn_relu,
        aten.lstm_cell,
        aten.gru_cell,
        aten.rnn_tanh_cell,
        aten.rnn_relu_cell,
        aten.einsum,
        aten.chain_matmul,
        aten.linalg_multi_dot,
    )
    for name in packet.overloads()
    if name != "out"
    for overload in (getattr(packet, name),)
)
"""Operators whose inner products autocast would cast, and which have one rule here."""

_HALVES = (torch.bfloat16, torch.float16)


def cast(args: Any, kwargs: Any) -> Any:
    """(args, kwargs) of an operator in `WHOLE` under autocast: float32 tensors are cast to the half-precision
    type of the others.

    If all tensors are float32, nothing is cast, which is slower than autocast and more exact. PyTorch
    switches autocast off before it calls psgrad, so psgrad can't find out whether it is on for this call,
    only whether it is used at all.
    """
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    halves = {x.dtype for x in tensors if x.dtype in _HALVES}
    if len(halves) != 1 or all(x.dtype != torch.float32 for x in tensors) or not _inside_autocast():
        return args, kwargs
    kind = halves.pop()
    return tree_map(
        lambda x: x.to(kind) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x,
        (args, kwargs),
    )


def _inside_autocast() -> bool:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
