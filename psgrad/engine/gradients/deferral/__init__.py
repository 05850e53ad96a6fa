"""The deferral policy: the rules by which operators on cotangents of shared values stay un-run.

A level calls this policy in the backward pass, for the cotangent of a value that all samples share (a weight,
or a value computed from weights only). A contraction over positions makes a deferred value (`entry.py`).
Linear operators on a deferred value are applied to its factors (`propagation.py`, `shared_products.py`). Any
other operator materialises the value first.
"""

from __future__ import annotations

from typing import Any

from psgrad.engine.gradients.deferral.entry import ENTRY_RULES
from psgrad.engine.gradients.deferral.images import image
from psgrad.engine.gradients.deferral.propagation import SHAPES, SUMS
from psgrad.engine.gradients.deferral.shared_products import PARTS, PRODUCTS
from psgrad.engine.gradients.deferred import DeferredGradient as DeferredGradient
from psgrad.engine.gradients.deferred import Placed as Placed
from psgrad.engine.gradients.deferred import deferred_in as deferred_in
from psgrad.engine.gradients.deferred import oriented as oriented
from psgrad.engine.gradients.terms import Dense
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import schema_of
from psgrad.engine.transforms.rules.registry import rules_of
from psgrad.engine.transforms.tracer import tensors_in

# Each gets the level's Batch, the operator, for each argument its deferred value or None, the positional and
# the keyword arguments. It returns a DeferredGradient, or NotImplemented if the values have to be
# materialised first.
PROPAGATION_RULES: dict[Op, Any] = {**SHAPES, **PARTS, **SUMS, **PRODUCTS}


class WeightDeferral:
    """The policy. It has no state."""

    def starts(self, op: Op) -> bool:
        return op in ENTRY_RULES

    def apply(self, batch: Batch, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        joined = bool(args) and isinstance(args[0], (list, tuple))
        deferred = [deferred_in(batch, a) for a in (args[0] if joined else args)]
        if any(w is not None for w in deferred):
            handler = PROPAGATION_RULES.get(op)
            result = NotImplemented if handler is None else handler(batch, op, deferred, args, kwargs)
            if result is NotImplemented and not joined:
                result = image(batch, op, deferred, args, kwargs)
            return _materialised(batch, op, args, kwargs) if result is NotImplemented else result
        return ENTRY_RULES[op](batch, op, *args, **kwargs) if op in ENTRY_RULES else NotImplemented


def _materialised(batch: Batch, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the operator on the materialised values. It stores the name of the operator."""
    if rules_of(op).batching is None:  # its decomposition into other operators may keep the factors
        return NotImplemented
    tracers: list[Any] = [a for a in tensors_in(args, kwargs) if deferred_in(batch, a) is not None]
    lost = next(
        (tracer.value.lost_at for tracer in tracers if tracer.value.lost_at), op.name().removeprefix("aten::")
    )
    for tracer in tracers:
        tracer.below()
    returns = schema_of(op).returns
    if schema_of(op).is_mutable or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return NotImplemented
    result = batch.level.process(op, args, kwargs)
    if (
        not batch.is_mapped(result)
        or deferred_in(batch, result) is not None
        or not (result.is_floating_point() or result.is_complex())
    ):
        return result
    return DeferredGradient.of(Dense(batch.physical(result), materialised=True, lost_at=lost), result.shape)
