"""The table of rules: for each operator its VJP and its batching, declared side by side by the operator's
family; and the facts behind `psgrad ops`.

A VJP is given argument by argument, as a function that sees the result and the arguments and returns the
closure from the result's cotangent to the argument's: `lambda out, x, y: lambda g: g * y`. The closure keeps
alive what it mentions and nothing else, so what a rule saves can be read off it. An argument without an entry
has no derivative (its cotangent is zero). For a list argument the closure takes the place in the list first.
Cotangents have the argument's shape and dtype.

A batching rule is `rule(batch, op, *args, **kwargs)`. `batch` (see batch_values.Batch) knows which arguments
carry the sample axis and gives their physical values, sample axis in front; the rule returns physical results
with that axis in front.
"""

from __future__ import annotations

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
from psgrad.engine.transforms.read_only import memory_of
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import map_tracers, tensors_in
from psgrad.errors import UnsupportedOperatorError

Maker = Callable[..., Callable[..., Any]]
Push = Callable[..., Callable[..., Any] | None]  # None: not for these arguments, the VJP is transposed


@dataclass(frozen=True)
class JointVJP:
    """A VJP that computes several cotangents at once: `make(out, *args)` -> `(cotangent(s), positions) ->
    {position: cotangent}`. In the place of a cotangent may be a function without arguments that returns it: a
    contraction that can stay un-run.
    """

    make: Maker


@dataclass(frozen=True)
class DerivativeRule:
    vjp: Mapping[int, Maker] | JointVJP
    # May handle the operator, given tracers: returns its result, or None to use the VJP.
    instead: Callable[..., Any] | None = None
    # Shortcuts for forward mode, which otherwise transposes the VJP (see forward.py). By position, a maker of
    # the closure from the argument's tangent to the result's; and the arguments in which the operator is
    # linear while the others stay.
    jvp: Mapping[int, Push] = field(default_factory=dict)
    linear: tuple[int, ...] = ()

    def closure(self, position: Any, out: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """From the result's cotangent to that of one argument (or of an item of a list); None where the
        derivative is zero.
        """
        assert not isinstance(self.vjp, JointVJP)
        make = self.vjp.get(position if isinstance(position, int) else position[0])
        if make is None:
            return None
        closure = make(out, *args, **kwargs)
        return closure if isinstance(position, int) else closure(position[1])


class _Table(dict[Op, Any]):
    """Rules, by operator. Any change clears the cache of `OperatorRules`."""

    def __setitem__(self, op: Op, rule: Any) -> None:
        super().__setitem__(op, rule)
        _rules_cache.clear()

    def __delitem__(self, op: Op) -> None:
        super().__delitem__(op)
        _rules_cache.clear()

    def pop(self, op: Op, *default: Any) -> Any:
        _rules_cache.clear()
        return super().pop(op, *default)


_derivatives: dict[Op, DerivativeRule] = _Table()
_batchings: dict[Op, Callable[..., Any]] = _Table()
_shared_draws: dict[Op, Callable[..., Any]] = {}
_constants: set[Op] = set()
_decompositions: dict[Op, Callable[..., Any]] = {}
_refused: set[Op] = set()
_unwrapped: set[Op] = set()


class OperatorRules(NamedTuple):
    """All rules of an operator and the facts of its schema, cached: a level reads them for each operator."""

    op: Op
    facts: OpFacts
    writes: bool
    derivative: DerivativeRule | None
    batching: Callable[..., Any] | None
    constant: bool
    is_decomposed: bool
    tables: tuple[Any, Any, Any]  # from which this was read


_rules_cache: dict[int, OperatorRules] = {}  # by id, as are the facts


def rules_of(op: Op) -> OperatorRules:
    cached = _rules_cache.get(id(op))
    if cached is not None:
        derivatives, batchings, constants = cached.tables
        if derivatives is _derivatives and batchings is _batchings and constants is _constants:
            return cached
    schema = facts(op)
    writes = bool(schema.mutated or schema.mutated_kwargs)
    tables = _derivatives, _batchings, _constants
    cached = OperatorRules(
        op, schema, writes, derivative_rule(op), batching_rule(op), is_constant(op), is_decomposed(op), tables
    )
    _rules_cache[id(op)] = cached
    return cached


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

    linear: the arguments in which the operator is linear while the others stay as they are; a list of tensors
    counts as one. jvp: by argument, `lambda out, x, y: lambda t: ...` from the argument's tangent to what it
    adds to the result's. Without either, the
        JVP is the transpose of the VJP.
    same: for a random operator on a mapped value, what to run where all samples share one draw
    (randomness='same'): a function of `draw` (`draw(op, *args)` is what all samples share), the operator and
    its arguments, on which it may call operators as they are.
    """
    _rules_cache.clear()
    for op in ops:
        if same is not None:
            assert op not in _shared_draws, op
            _shared_draws[op] = same
        if vjp is not None or instead is not None:
            assert op not in _derivatives, op
            _derivatives[op] = DerivativeRule(vjp if vjp is not None else {}, instead, jvp or {}, linear)
        if batch is not None:
            assert op not in _batchings, op
            _batchings[op] = _on_contiguous_memory(batch, op) if facts(op).contiguous else batch


def _on_contiguous_memory(rule: Callable[..., Any], op: Op) -> Callable[..., Any]:
    """A batching rule whose kernel gets contiguous memory where it reads memory as contiguous."""
    kernel = on_contiguous_memory(op, facts(op).contiguous)
    return lambda batch, _, *args, **kwargs: rule(batch, kernel, *args, **kwargs)


def constant(
    *ops: Op, batch: Callable[..., Any] | None = None, same: Callable[..., Any] | None = None
) -> None:
    """Declare operators whose result has zero derivative everywhere (comparisons, indices, fresh tensors)."""
    _constants.update(ops)
    define(*ops, batch=batch, same=same)


def replace(op: Op, *, unwrapped: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how an operator is written with others, where PyTorch's own way does not serve.

    unwrapped: what the program returns is neither cloned, nor laid out as the kernel's result, nor traced.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        _decompositions[op] = function
        if unwrapped:
            _unwrapped.add(op)
        return function

    return declare


def refuse(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the error for an operator that can't be right sample by sample, with what to do instead."""
    _refused.add(op)
    return replace(op)


def is_refused(op: Op) -> bool:
    return op in _refused


def operators() -> set[Op]:
    """All operators with a declaration."""
    return {*_derivatives, *_batchings, *_constants, *_decompositions}


def derivative_rule(op: Op) -> DerivativeRule | None:
    return _derivatives.get(op)


def forget_derivative(op: Op) -> None:
    _rules_cache.clear()
    _derivatives.pop(op, None)
    _constants.discard(op)


def forget_batching(op: Op) -> None:
    _rules_cache.clear()
    _batchings.pop(op, None)


def batching_rule(op: Op) -> Callable[..., Any] | None:
    return _batchings.get(op)


def shared_draw(op: Op) -> Callable[..., Any] | None:
    return _shared_draws.get(op)


def is_constant(op: Op) -> bool:
    return op in _constants


def is_decomposed(op: Op) -> bool:
    """Whether `op` is a composite operator without a derivative of its own, or is replaced by a program that
    returns what no level may wrap.

    Its pieces are handled one by one also where no derivative is followed: they show which are views and
    which write in place.
    """
    return op in _unwrapped or (is_composite(op) and derivative_rule(op) is None and not is_constant(op))


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    """How `op` is written with other operators: ours, else PyTorch's composite definition, else PyTorch's
    tables.
    """
    if (ours := _decompositions.get(op)) is not None:
        return ours
    if is_composite(op):
        return op.decompose
    return decomposition_table.get(op)


def decompose(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` as a program of other operators, on tracers; an error that names it if there is none."""
    function = decomposition_of(op)
    if function is None:
        raise _without_rule(op, "psgrad never falls back to a slow loop in silence, nor guesses a derivative")
    try:
        result = function(*args, **kwargs)
    except UnsupportedOperatorError as error:
        if function is not decomposition_table.get(op):
            raise
        raise _without_rule(op, f"PyTorch writes it with other operators, and {error.arrived}") from error
    if result is NotImplemented:
        raise _without_rule(op, "PyTorch writes it with other operators, but not for these arguments")
    if (
        facts(op).mutated
        or facts(op).is_view
        or state.in_backward_pass
        or op in _unwrapped
        or (is_composite(op) and op not in _decompositions)
    ):
        return result
    if not is_composite(op):
        result = _in_memory_of_its_own(result, args, kwargs)
    return laid_out_by_kernel(result, op, args, kwargs)


def _in_memory_of_its_own(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in new memory, as a kernel's is; a program of other operators may end with a view of an
    argument.
    """
    taken = {memory_of(x) for x in tensors_in(args, kwargs)}
    return map_tracers(lambda x: x.clone() if memory_of(x) in taken else x, result)


def _without_rule(op: Op, cause: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator {op.name()} has no rule{diagnostics.where()}",
        expected="an operator with a rule of its own, or one that PyTorch can express with such operators",
        cause=cause,
        next_step=(
            "write the computation with other operators, or add a rule: docs/guides/adding-an-operator.md"
            " shows how"
        ),
    )


OWN = "own rule"
FROM_VJP = "from the VJP"  # its transpose
CONSTANT = "constant"  # zero derivative everywhere
DECOMPOSED = "decomposed"  # a program of other operators, and refused by name where one of those is
REFUSED = "refused"


class Coverage(NamedTuple):
    """How each transform handles one operator."""

    operator: str
    vjp: str
    jvp: str
    batching: str


def coverage() -> list[Coverage]:
    """All operators that return new tensors or views; an in-place one is handled by its namesake without the
    underscore.
    """
    return sorted(_covered(op) for op in _operators())


def _operators() -> Iterator[Op]:
    """PyTorch's own operators, and those of other libraries that have rules."""
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
    rule = derivative_rule(op)
    otherwise = DECOMPOSED if decomposition_of(op) is not None and not is_refused(op) else REFUSED
    if is_constant(op):
        vjp = jvp = CONSTANT
    elif rule is None:
        vjp = jvp = otherwise
    else:
        vjp = OWN
        jvp = OWN if rule.jvp or rule.linear else FROM_VJP
    return Coverage(op.name(), vjp, jvp, OWN if batching_rule(op) is not None else otherwise)
