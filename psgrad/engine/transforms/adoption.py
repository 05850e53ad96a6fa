"""Levels that make tracers of tensors which the user's function makes from untraced values.

The function may later write traced values into such a tensor. So the level *adopts* each new tensor: it makes
a tracer of it, and in-place operators can be handled. A view of memory from outside is not adopted.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.interpreter import interpret, run_definition
from psgrad.engine.transforms.levels import Level
from psgrad.engine.transforms.operators import Op, aten, facts
from psgrad.engine.transforms.rules.registry import decomposition_of, is_decomposed
from psgrad.engine.transforms.shape_checks import refuse_shapes
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import map_tracers, top_level


class AdoptingLevel(Level):
    """A level that adopts the tensors made inside its function. Subclasses define the tracer."""

    adopts = True

    def adopt(self, value: torch.Tensor) -> torch.Tensor:
        """A tracer of this level that stands for a value from below."""
        raise NotImplementedError

    def write_outside(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an in-place operator on a tensor that this level does not follow."""
        raise NotImplementedError

    def lower(self, op: Op, values: Any, kwargs: Any) -> Any:
        """The result of `op` one level below, on values below this level's tracers."""
        return interpret(op, values, kwargs, below=self)

    def process_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = facts(op)
        if operator.mutated or operator.mutated_kwargs:
            return self.write_outside(op, args, kwargs)
        if is_decomposed(op):
            refuse_shapes(op, args, kwargs)  # the operators of its definition may accept wrong shapes
            return run_definition(decomposition_of(op), args, kwargs)  # type: ignore[arg-type]
        result = self.lower_untraced(op, args, kwargs)
        # a view has memory from outside; torch.tensor(..) ends with lift_fresh, whose result is new
        fresh = not operator.is_view or op is aten.lift_fresh.default
        return map_tracers(self.adopt, result) if fresh else result

    def lower_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result one level below. Every level adopts a fresh tensor, so that it can be written to at all
        of them.
        """
        top = top_level(args, kwargs)
        first = top.index if top is not None else 0
        adopter = next(
            (level for level in reversed(state.stack) if level.adopts and first < level.index < self.index),
            None,
        )
        return self.lower(op, args, kwargs) if adopter is None else adopter.process_untraced(op, args, kwargs)
