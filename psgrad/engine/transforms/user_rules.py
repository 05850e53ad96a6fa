"""Calls whose derivative is given by the user (autograd_function.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.calls import (
    Call,
    Cotangents,
    Flat,
    Mapped,
    TapedCall,
    dispatch_call,
    entered_again,
    kind_of,
    own_values,
    without_adoption,
)
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.forward import ForwardLevel, transpose
from psgrad.engine.transforms.levels import users_program
from psgrad.engine.transforms.private_torch import DelayedError
from psgrad.engine.transforms.refused_writes import read_only
from psgrad.engine.transforms.reverse import GradLevel
from psgrad.engine.transforms.rules.families import cast
from psgrad.engine.transforms.tracer import is_differentiable
from psgrad.errors import TransformError

Pull = Callable[[Cotangents], Cotangents]
Derived = tuple[Pull, frozenset[int]]


def wrong_cotangent(name: str, g: Any, position: int, shape: torch.Size) -> TransformError:
    what = f"shape {tuple(g.shape)}" if isinstance(g, torch.Tensor) else f"type {kind_of(g)}"
    return TransformError(
        f"the reverse rule of {name} gave a cotangent of {what} for argument {position}, of shape"
        f" {tuple(shape)}; expected the argument's shape, or None for zero",
        hint="if the argument was broadcast, sum its cotangent over the repeated axes",
    )


class UserRuleCall(Call):
    """A call whose derivative is given by the user. Without a rule for forward mode, this is the transpose of
    the reverse one.

    function: arguments -> results.
    derive: (arguments, results, which arguments need cotangents) -> (the function from the cotangents of the
        results to those of the arguments, constant results).
    forward: (arguments, results, tangents) -> tangents of the results.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Flat], Flat],
        derive: Callable[[Flat, Flat, list[int]], Derived] | None = None,
        forward: Callable[[Flat, Flat, Flat], Flat] | None = None,
    ) -> None:
        super().__init__(name, function)
        self.derive, self.forward = derive, forward

    def run(self, args: Flat) -> Flat:
        followed = (
            any(isinstance(x, torch.Tensor) and x.requires_grad for x in args) and torch.is_grad_enabled()
        )
        with read_only(args):
            if not followed:
                return self.function(args)
            with torch.no_grad():
                return self._without_autograd(self.function(args))

    def _without_autograd(self, outs: Flat) -> Flat:
        """Results whose backward pass in PyTorch's autograd raises an error. Autograd would differentiate the
        operators of the function and ignore the user's rule.
        """
        message = (
            f"{self.name} has a derivative of its own, which PyTorch's autograd does not use: differentiate"
            " with psgrad's grad or vjp"
        )
        places = [i for i, x in enumerate(outs) if is_differentiable(x)]
        refusal = DelayedError(message.encode(), len(places))
        refused = refusal(*[outs[i].detach().requires_grad_() for i in places])
        for i, x in zip(places, refused if isinstance(refused, tuple) else (refused,), strict=True):
            outs[i] = x
        return outs

    def for_all_samples(self, mapped: Mapped) -> UserRuleCall:
        def derive(args: Flat, outs: Flat, needed: list[int]) -> Derived:
            assert self.derive is not None
            with entered_again(mapped.level):
                own = mapped.up(args, mapped.args), mapped.up(outs, mapped.outs)
                pull, constant = self.derive(*own, needed)

            def pull_all(cotangents: Cotangents) -> Cotangents:
                with entered_again(mapped.level):
                    result = pull(mapped.up(cotangents, mapped.outs))
                return mapped.cotangents_down(result)

            return pull_all, constant

        def forward(args: Flat, outs: Flat, tangents: Flat) -> Flat:
            assert self.forward is not None
            with entered_again(mapped.level):
                given = mapped.up(outs, mapped.outs)
                pushed = self.forward(mapped.up(args, mapped.args), given, mapped.up(tangents, mapped.args))
            return mapped.tangents_down(pushed)

        return UserRuleCall(
            self.name, self.function_of_all(mapped), self.derive and derive, self.forward and forward
        )

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> TapedCall:
        with without_adoption(level), read_only(values):
            outs, pull, constant = self._derived(level, values, needed)
        return TapedCall(outs, lambda cotangents: self._pulled(pull, cotangents, values), constant=constant)

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        with without_adoption(level), read_only(values):
            if self.forward is not None:
                outs = self._results(level, values)
                return outs, own_values(level, self.forward(values, outs, tangents), self.name)
            needed = [i for i, t in enumerate(tangents) if t is not None]
            outs, pull, constant = self._derived(level, values, needed)

            def backwards(leaves: Flat) -> Flat:
                pulled = self._pulled(pull, leaves, values)
                return [pulled[i] for i in needed]

            varying = [None if i in constant else x for i, x in enumerate(outs)]
            return outs, self._transposed_backward(backwards, varying, [tangents[i] for i in needed], level)

    def _transposed_backward(
        self, backwards: Callable[[Flat], Flat], outs: Flat, tangents: Flat, level: ForwardLevel
    ) -> Flat:
        """The tangents of the results, by the transpose of the backward rule. A rule that is not linear (for
        example one that clips) has no transpose; this is checked at two points.
        """
        pushed = transpose(backwards, outs, tangents, above=level)
        for elsewhere in (1e3, -1e3):
            for here, there in zip(
                pushed, transpose(backwards, outs, tangents, above=level, at=elsewhere), strict=True
            ):
                same = here is there or (
                    here is not None
                    and there is not None
                    and torch.allclose(here, there, 1e-3, 1e-6, equal_nan=True)
                )
                if not same:
                    raise TransformError(
                        f"forward mode of {self.name}{diagnostics.where()}, whose backward is not linear",
                        hint="give the function a jvp as well, or differentiate it in reverse mode only",
                    )
        return pushed

    def _results(self, level: DerivativeLevel, values: Flat) -> Flat:
        return own_values(level, dispatch_call(self, values, below=level), self.name)

    def _derived(
        self, level: DerivativeLevel, values: Flat, needed: list[int]
    ) -> tuple[Flat, Pull, frozenset[int]]:
        """The results, the function of their cotangents, and the constant results."""
        if self.derive is None:
            raise TransformError(
                f"{self.name} has no rule for its derivative{diagnostics.where()}",
                hint="give it a backward",
            )
        outs = self._results(level, values)
        return outs, *self.derive(values, outs, needed)

    def _pulled(self, pull: Pull, cotangents: Cotangents, values: Flat) -> Cotangents:
        """The cotangents from the user's rule, in the arguments' dtypes. Raises TransformError for a wrong
        shape.
        """
        with users_program(), read_only(cotangents):
            given = pull(cotangents)
        checked: Cotangents = []
        for position, (g, x) in enumerate(zip(given, values, strict=True)):
            if g is None or not is_differentiable(x):
                checked.append(None)
                continue
            if not isinstance(g, torch.Tensor) or g.shape != x.shape:
                raise wrong_cotangent(self.name, g, position, x.shape)
            checked.append(cast(g, x.dtype))
        return checked
