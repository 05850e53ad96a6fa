"""The table of rules: the VJP and the batching rule of each operator, which its family declares together; and
the facts for `psgrad ops`.

There is one VJP for each argument: a function of the result and the arguments that returns the closure from
the result's cotangent to the argument's, `lambda out, x, y: lambda g: g * y`. The closure holds only the
values that it uses; these are the values that the rule saves. An argument without an entry has no derivative
(its cotangent is zero). For a list argument the maker returns a function of the index in the list, which
returns the closure. Cotangents have the argument's shape and dtype.

A batching rule is `rule(batch, op, *args, **kwargs)`. `batch` (see batch_values.Batch) tests whether an
argument has the sample axis and returns its physical value, sample axis in front. The rule returns physical
results with that axis in front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.aliasing import laid_out_by_kernel
from psgrad.engine.transforms.operators import Op as Op
from psgrad.engine.transforms.operators import OpFacts, facts, on_contiguous_memory
from psgrad.engine.transforms.operators import is_composite as is_composite
from psgrad.engine.transforms.private_torch import decomposition_table, operator_names, schema_of
from psgrad.engine.transforms.refused_writes import memory_of
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import map_tracers, tensors_in
from psgrad.errors import UnsupportedOperatorError

Maker = Callable[..., Callable[..., Any]]
Push = Callable[..., Callable[..., Any] | None]  # None: for these arguments the VJP is transposed


@dataclass(frozen=True)
class JointVJP:
    """A VJP that computes several cotangents together: `make(out, *args)` -> `(cotangent(s), positions) ->
    {position: cotangent}`, for these positions or more. A cotangent may be replaced by a function without
    arguments that returns it: a contraction that can stay un-run.
    """

    make: Maker


@dataclass(frozen=True)
class DerivativeRule:
    """The derivative of an operator.

    Attributes:
        vjp: by position of the argument.
        instead: a program of other operators, which may replace the operator where it has a derivative:
            returns its result, or None to use the VJP.
        jvp: shortcuts for forward mode, which otherwise transposes the VJP (see forward.py): by position, a
            maker of the closure from the argument's tangent to the result's.
        linear: the arguments in which the operator is linear if the others are fixed.
    """

    vjp: Mapping[int, Maker] | JointVJP
    instead: Callable[..., Any] | None = None
    jvp: Mapping[int, Push] = field(default_factory=dict)
    linear: tuple[int, ...] = ()

    def closure(self, position: Any, out: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """The function from the result's cotangent to that of one argument (or of an item of a list); None if
        the derivative is zero.
        """
        assert not isinstance(self.vjp, JointVJP)
        make = self.vjp.get(position if isinstance(position, int) else position[0])
        if make is None:
            return None
        closure = make(out, *args, **kwargs)
        return closure if isinstance(position, int) else closure(position[1])


@dataclass(frozen=True)
class OperatorRules:
    """All rules of an operator.

    Attributes:
        batching: see above.
        same: of a random operator on a mapped value, the program for one draw for all samples.
        constant: whether the result has zero derivative everywhere.
        program: of other operators, in place of PyTorch's definition.
        unwrapped: whether its result is not cloned, not copied to the kernel's memory layout, and not traced.
        refused: whether the program raises the error for an operator without a correct result.
        writes: whether the operator writes into an argument.
        is_decomposed: whether it is a composite operator without a derivative rule, or is replaced by an
            unwrapped program. The operators of its definition are handled one by one, also without a
            derivative, because some may be views or write in place.
    """

    op: Op
    facts: OpFacts
    derivative: DerivativeRule | None = None
    batching: Callable[..., Any] | None = None
    same: Callable[..., Any] | None = None
    constant: bool = False
    program: Callable[..., Any] | None = None
    unwrapped: bool = False
    refused: bool = False
    writes: bool = field(init=False)
    is_decomposed: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "writes", bool(self.facts.mutated or self.facts.mutated_kwargs))
        composite = is_composite(self.op) and self.derivative is None and not self.constant
        object.__setattr__(self, "is_decomposed", self.unwrapped or composite)


table: dict[int, OperatorRules] = {}  # by the operator's id, as are the facts; all that were asked for


def rules_of(op: Op) -> OperatorRules:
    found = table.get(id(op))
    if found is None:
        found = table[id(op)] = OperatorRules(op, facts(op))
    return found


def change(op: Op, **rules: Any) -> None:
    """Set rules of an operator, by the names of `OperatorRules`."""
    table[id(op)] = dataclasses.replace(rules_of(op), **rules)


def define(
    *ops: Op,
    vjp: Mapping[int, Maker] | JointVJP | None = None,
    batch: Callable[..., Any] | None = None,
    instead: Callable[..., Any] | None = None,
    jvp: Mapping[int, Push] | None = None,
    linear: tuple[int, ...] = (),
    same: Callable[..., Any] | None = None,
) -> None:
    """Declare the rules of operators. A second declaration of the same rule is a mistake.

    linear: the arguments in which the operator is linear if the others are fixed; a list of tensors counts as
        one.
    jvp: by argument, `lambda out, x, y: lambda t: ...` from the argument's tangent to its contribution to the
        result's tangent. Without `linear` and `jvp`, the JVP is the transpose of the VJP.
    same: for a random operator on a mapped value, the program for one draw for all samples
        (randomness='same'): a function of `draw` (`draw(op, *args)` is the shared draw), the operator and its
        arguments.
    """
    for op in ops:
        before = rules_of(op)
        if same is not None:
            assert before.same is None, op
            change(op, same=same)
        if vjp is not None or instead is not None:
            assert before.derivative is None, op
            change(op, derivative=DerivativeRule(vjp or {}, instead, jvp or {}, linear))
        if batch is not None:
            assert before.batching is None, op
            change(op, batching=_on_contiguous_memory(batch, op) if before.facts.contiguous else batch)


def _on_contiguous_memory(rule: Callable[..., Any], op: Op) -> Callable[..., Any]:
    """The batching rule, with contiguous memory for the arguments that the kernel reads as contiguous."""
    kernel = on_contiguous_memory(op, facts(op).contiguous)
    return lambda batch, _, *args, **kwargs: rule(batch, kernel, *args, **kwargs)


def constant(
    *ops: Op, batch: Callable[..., Any] | None = None, same: Callable[..., Any] | None = None
) -> None:
    """Declare operators whose result has zero derivative everywhere (comparisons, indices, fresh tensors)."""
    for op in ops:
        change(op, constant=True)
    define(*ops, batch=batch, same=same)


def replace(op: Op, *, unwrapped: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a program of other operators for an operator, in place of PyTorch's definition.

    unwrapped: the program's result is not cloned, not copied to the kernel's memory layout, and not traced.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        change(op, program=function, unwrapped=unwrapped)
        return function

    return declare


def refuse(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function that raises the error for an operator without a correct result for each sample."""
    change(op, refused=True)
    return replace(op)


def operators() -> set[Op]:
    """All operators with a declaration."""
    return {x.op for x in table.values() if x.derivative or x.batching or x.constant or x.program}


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    """The program of other operators for `op`: psgrad's, else PyTorch's composite definition, else that of
    PyTorch's tables; None if there is none.
    """
    if (ours := rules_of(op).program) is not None:
        return ours
    if is_composite(op):
        return op.decompose
    return decomposition_table.get(op)


def decompose(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `op`, on tracers, by a program of other operators. Raises UnsupportedOperatorError if
    there is none.
    """
    function = decomposition_of(op)
    if function is None:
        raise _without_rule(op, "psgrad does not use a slow loop silently, and does not guess a derivative")
    try:
        result = function(*args, **kwargs)
    except UnsupportedOperatorError as error:
        if function is not decomposition_table.get(op):
            raise
        raise _without_rule(op, f"PyTorch defines it by other operators, and {error.message}") from error
    if result is NotImplemented:
        raise _without_rule(op, "PyTorch defines it by other operators, but not for these arguments")
    rules = rules_of(op)
    if (
        rules.facts.mutated
        or rules.facts.is_view
        or not state.interpreting
        or rules.unwrapped
        or (is_composite(op) and rules.program is None)
    ):
        return result
    if not is_composite(op):
        result = _in_new_memory(result, args, kwargs)
    return laid_out_by_kernel(result, op, args, kwargs)


def _in_new_memory(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in new memory, like that of a kernel. A program of other operators may return a view of an
    argument.
    """
    taken = {memory_of(x) for x in tensors_in(args, kwargs)}
    return map_tracers(lambda x: x.clone() if memory_of(x) in taken else x, result)


def _without_rule(op: Op, cause: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator {op.name()} has no rule{diagnostics.where()}: {cause}",
        hint="use other operators, or add a rule: docs/guides/adding-an-operator.md shows how",
    )


OWN = "own rule"
FROM_VJP = "from the VJP"  # its transpose
CONSTANT = "constant"  # zero derivative everywhere
DECOMPOSED = "decomposed"  # a program of other operators; refused if one of these is refused
REFUSED = "refused"


class Coverage(NamedTuple):
    """How each transform handles one operator."""

    operator: str
    vjp: str
    jvp: str
    batching: str


def coverage() -> list[Coverage]:
    """The coverage of all operators that return new tensors or views. An in-place operator has that of the
    operator without the underscore.
    """
    return sorted(_covered(op) for op in _operators())


def _operators() -> Iterator[Op]:
    """PyTorch's own operators, and operators of other libraries that have rules."""
    own = [_named(name) for name in operator_names() if name.startswith("aten::")]
    for op in {*own, *operators()}:
        schema, operator = schema_of(op), facts(op)
        takes_tensors = any("Tensor" in str(item.type) for item in (*schema.arguments, *schema.returns))
        if takes_tensors and not operator.mutated and not operator.mutated_kwargs:
            yield op


def _named(name: str) -> Op:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _covered(op: Op) -> Coverage:
    rules = rules_of(op)
    otherwise = DECOMPOSED if decomposition_of(op) is not None and not rules.refused else REFUSED
    if rules.constant:
        vjp = jvp = CONSTANT
    elif rules.derivative is None:
        vjp = jvp = otherwise
    else:
        vjp, jvp = OWN, OWN if rules.derivative.jvp or rules.derivative.linear else FROM_VJP
    return Coverage(op.name(), vjp, jvp, OWN if rules.batching is not None else otherwise)
