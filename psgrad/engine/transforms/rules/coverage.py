"""What the table of rules says of each operator: the facts behind `psgrad ops`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from psgrad.engine.transforms.operators import Op, facts
from psgrad.engine.transforms.rules import registry

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
    """All operators that return new tensors or views; an in-place one is carried out by its namesake without the underscore."""
    return sorted(_covered(op) for op in _operators())


def _operators() -> Iterator[Op]:
    """PyTorch's own operators, and those of other libraries that have rules."""
    known = [_named(name) for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    for op in {*known, *registry.operators()}:
        schema, operator = op._schema, facts(op)
        takes_tensors = any("Tensor" in str(item.type) for item in (*schema.arguments, *schema.returns))
        if takes_tensors and not operator.mutated and not operator.mutated_kwargs:
            yield op


def _named(name: str) -> Op:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _covered(op: Op) -> Coverage:
    rule = registry.derivative_rule(op)
    otherwise = DECOMPOSED if registry.decomposition_of(op) is not None and not registry.is_refused(op) else REFUSED
    if registry.is_constant(op):
        vjp = jvp = CONSTANT
    elif rule is None:
        vjp = jvp = otherwise
    else:
        vjp = OWN
        jvp = OWN if rule.jvp or rule.linear else FROM_VJP
    return Coverage(op.name(), vjp, jvp, OWN if registry.batching_rule(op) is not None else otherwise)
