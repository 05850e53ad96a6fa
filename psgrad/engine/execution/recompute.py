"""The modules of a model that repeat, each run again in the backward pass: a pass holds what goes in and out
of each, and the values in between of one of them alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from psgrad.engine.transforms.checkpoint import checkpoint
from psgrad.engine.transforms.private_torch import make_fx_runs, tree_leaves
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import innermost
from psgrad.errors import ModelError


class Recompute:
    """Whether the modules that repeat in a run's models run again in the backward pass of a transform."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.modules: list[str] = []

    def add(self, model: nn.Module) -> nn.Module:
        """The model itself, its blocks under this switch. Without a transform they run as ever."""
        found = dict(repeated_modules(model))
        for name, module in found.items():
            module.forward = RecomputedForward(self, name, module.forward)  # type: ignore[method-assign]
        self.modules = list(found)
        return model

    def switch_on(self) -> bool:
        """Run blocks again from now on, as memory has run out. Whether this makes a difference: it was off,
        and there are repeated modules.
        """
        before, self.on = self.on, True
        return bool(self.modules) and not before


def repeated_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each layer of a stack: the children of one class of a list of modules, where there
    are at least two that have modules of their own. Of stacks in stacks the outer ones.
    """
    for name, module in model.named_children():
        children = dict(module.named_children())
        kinds = Counter(type(child) for child in children.values() if any(True for _ in child.children()))
        kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and count > 1:
            yield from (
                (f"{prefix}{name}.{key}", child) for key, child in children.items() if type(child) is kind
            )
        else:
            yield from repeated_modules(module, f"{prefix}{name}.")


class RecomputedForward:
    """A module's forward that saves its arguments alone for the backward pass of a transform."""

    def __init__(self, recompute: Recompute, name: str, forward: Callable[..., Any]) -> None:
        self.recompute, self.name, self.forward = recompute, name, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.recompute.on and state.stack):
            return self.forward(*args, **kwargs)
        first: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            results = self.forward(*args, **kwargs)
            found = [innermost(x) for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
            if not first:
                first[:] = found
            elif not make_fx_runs():
                self._require_same(first, found)
            return results

        through = lambda args, kwargs: run(*args, **kwargs)  # with names that checkpoint has, too
        return checkpoint(through, args, kwargs)

    def _require_same(self, first: list[Any], second: list[Any]) -> None:
        """Raises ModelError if the second run found something else, from which a gradient would be wrong."""
        for one, other in zip(first, second, strict=True):
            if type(one) is torch.Tensor and type(other) is torch.Tensor and not _agree(one, other):
                raise ModelError(
                    f"the block {self.name} computes something else when it runs again; expected the same"
                    " numbers, as engine.recompute runs it again in the backward pass",
                    hint=(
                        "a cache, a counter, or another state that a run changes; set engine.recompute: none"
                    ),
                )


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same, but for the order of sums on a GPU."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.dtype.is_floating_point:
        return False
    rounding = 16 * torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=rounding, atol=rounding * float(one.abs().max()), equal_nan=True)
