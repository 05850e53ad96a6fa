"""The deferral policy: which operators on cotangents of shared values stay un-run, and what happens to them on their way.

A level asks this policy while the pass back computes the cotangent of a value that all samples share (a weight, or anything
made from weights alone). A contraction over positions begins a deferred value (starts.py); linear operators on it are carried out on
its factors (on_the_way.py). Anything else makes the value real first.
"""

from __future__ import annotations

from typing import Any

from psgrad.engine.gradients.on_the_way import ON_THE_WAY
from psgrad.engine.gradients.placed import DeferredGradient as DeferredGradient
from psgrad.engine.gradients.placed import Placed as Placed
from psgrad.engine.gradients.placed import deferred_in as deferred_in
from psgrad.engine.gradients.placed import oriented as oriented
from psgrad.engine.gradients.starts import STARTS
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op


class WeightDeferral:
    """The policy. It has no state."""

    def starts(self, op: Op) -> bool:
        return op in STARTS

    def apply(self, batch: Batch, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        joined = bool(args) and isinstance(args[0], (list, tuple))
        waiting = [deferred_in(batch, a) for a in (args[0] if joined else args)]
        if any(w is not None for w in waiting):
            handler = ON_THE_WAY.get(op)
            return NotImplemented if handler is None else handler(batch, op, waiting, args, kwargs)
        return STARTS[op](batch, op, *args, **kwargs) if op in STARTS else NotImplemented
