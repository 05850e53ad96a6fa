"""register_rule: rules for operators of `torch.library`, or for operators of PyTorch without a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.operators import Op, facts
from psgrad.engine.transforms.private_torch import OpOverloadPacket, schema_of
from psgrad.engine.transforms.rules import registry
from psgrad.engine.transforms.rules.registry import JointVJP, Maker
from psgrad.errors import TransformError, UnsupportedOperatorError

Makers = Mapping[int | str, Maker | None]


def register_rule(
    op: Any,
    *,
    vjp: Makers | JointVJP | None = None,
    jvp: Makers | None = None,
    batch: Callable[..., Any] | None = None,
    constant: bool = False,
    replace: bool = False,
) -> None:
    """Set the rules of an operator of `torch.library`, or of an operator of PyTorch for which psgrad has no
    rule.

    Args:
        op: `torch.ops.mine.f` (or one of its overloads), its name "mine::f", or what
            `torch.library.custom_op` returned.
        vjp: by argument (name or position), `lambda out, *args: lambda g: ...` from the result's cotangent to
            the argument's, linear in `g`. None means that the derivative is zero. An argument that is left
            out has no rule: a derivative in it is an error.
        jvp: by argument, `lambda out, *args: lambda t: ...` from the argument's tangent to its contribution
            to the result's tangent. If it is left out, forward mode transposes `vjp`.
        batch: `rule(batch, op, *args, **kwargs)`, the operator for all samples at once
            (docs/guides/adding-an-operator.md).
        constant: the result has zero derivative in all arguments.
        replace: whether existing rules are replaced.
    """
    overload = _overload(op)
    name = overload.name()
    writes = bool(facts(overload).mutated or facts(overload).mutated_kwargs)
    derivative = vjp is not None or jvp is not None
    for wrong, what in (
        (writes, "the operator writes into an argument; expected one that returns new tensors"),
        (constant and derivative, "constant=True together with a derivative; expected one of the two"),
        (jvp is not None and vjp is None, "a jvp without a vjp; expected a vjp, whose shortcut it is"),
        (vjp is None and batch is None and not constant, "without any rule; expected vjp, batch or constant"),
    ):
        if wrong:
            raise TransformError(f"register_rule({name}): {what}")
    makers = vjp if vjp is None or isinstance(vjp, JointVJP) else _by_position(overload, vjp, complete=True)
    pushes = _by_position(overload, jvp or {}, complete=False)
    before = registry.rules_of(overload)
    for given, has, what in (
        (vjp is not None or constant, before.derivative is not None or before.constant, "a derivative"),
        (batch is not None, before.batching is not None, "a batching rule"),
    ):
        if given and has and not replace:
            raise TransformError(
                f"register_rule({name}): the operator has {what} already",
                hint="pass replace=True to use the new rule",
            )
    if vjp is not None or constant:
        registry.change(overload, derivative=None, constant=constant)
    if batch is not None:
        registry.change(overload, batching=None)
    registry.define(overload, vjp=makers, jvp=pushes, batch=batch)


def _overload(op: Any) -> Op:
    """The one overload of an operator."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, str):
        namespace, _, rest = op.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None) if rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise TransformError(
                f"register_rule({op!r}): PyTorch has no operator of this name; expected a name such as"
                ' "mine::f" or "mine::f.overload"',
            )
        op = getattr(packet, overload) if overload else packet
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        if len(names) != 1:
            raise TransformError(
                f"register_rule({op}): the operator has the overloads {names}",
                hint=f"name one: {op}.{names[0]}",
            )
        op = getattr(op, names[0])
    if not isinstance(op, Op):
        raise TransformError(
            f"register_rule was given a {type(op).__name__}; expected an operator, such as torch.ops.mine.f",
            hint="for a Python function write a torch.autograd.Function",
        )
    return op


def _by_position(op: Op, makers: Makers, *, complete: bool) -> dict[int, Maker]:
    """The rules by position. complete: tensor arguments without a rule get one that raises an error, because
    zero would be a guess.
    """
    arguments = schema_of(op).arguments
    positions = {argument.name: position for position, argument in enumerate(arguments)}
    rules: dict[int, Maker | None] = {}
    for key, maker in makers.items():
        position = positions.get(key, -1) if isinstance(key, str) else key
        if not 0 <= position < len(arguments) or "Tensor" not in str(arguments[position].type):
            raise TransformError(
                f"register_rule({op.name()}): a rule for argument {key!r}; expected tensor arguments among"
                f" {[argument.name for argument in arguments]}, by name or position",
            )
        rules[position] = maker
    if complete:
        for position, argument in enumerate(arguments):
            if "Tensor" in str(argument.type):
                rules.setdefault(position, _refusal(op, argument.name))
    return {position: maker for position, maker in rules.items() if maker is not None}


def _refusal(op: Op, argument: str) -> Maker:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOperatorError(
            f"operator {op.name()} has no rule for its derivative in {argument!r}{diagnostics.where()}",
            hint=f"add it to register_rule's vjp; {argument!r}: None means that the derivative is zero",
        )

    return refuse
