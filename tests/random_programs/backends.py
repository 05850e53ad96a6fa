"""Two sets of transforms with one signature: ours, and loops around torch.autograd.

grad and vjp: with respect to the arguments `places`, as a tuple. Functions return tensors, or tuples of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psgrad.engine import transforms

Function = Callable[..., Any]


def within(f: Function, places: Sequence[int], args: Sequence[Tensor]) -> Function:
    """f as a function of the arguments `places` alone."""

    def some(*given: Tensor) -> Any:
        full = list(args)
        for place, x in zip(places, given, strict=True):
            full[place] = x
        return f(*full)

    return some


class Ours:
    """psgrad's transforms."""

    def vmap(self, f: Function, dims: Sequence[int | None]) -> Function:
        return transforms.vmap(f, in_dims=tuple(dims))

    def grad(self, f: Function, places: Sequence[int]) -> Function:
        return transforms.grad(f, tuple(places))

    def vjp(
        self, f: Function, places: Sequence[int], args: Sequence[Tensor], cotangents: Function
    ) -> tuple[Tensor, ...]:
        out, pull = transforms.vjp(within(f, places, args), *[args[i] for i in places])
        return pull(tree_map(cotangents, out))

    def jvp(
        self, f: Function, places: Sequence[int], args: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Any:
        return transforms.jvp(within(f, places, args), tuple(args[i] for i in places), tuple(tangents))[1]

    def jacrev(self, f: Function, places: Sequence[int]) -> Function:
        return transforms.jacrev(f, tuple(places))

    def jacfwd(self, f: Function, places: Sequence[int]) -> Function:
        return transforms.jacfwd(f, tuple(places))

    def attached(self) -> AbstractContextManager[None]:
        return torch.enable_grad()


class Loops:
    """torch.autograd, sample by sample. As the oracle is to know what a write leaves behind, autograd keeps
    copies of what it needs.
    """

    def vmap(self, f: Function, dims: Sequence[int | None]) -> Function:
        def mapped(*args: Tensor) -> Any:
            count = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
            rows = [
                f(*[x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)])
                for i in range(count)
            ]
            leaves = [tree_flatten(row)[0] for row in rows]
            return tree_unflatten(
                [torch.stack(column) for column in zip(*leaves, strict=True)], tree_flatten(rows[0])[1]
            )

        return mapped

    def grad(self, f: Function, places: Sequence[int]) -> Function:
        def gradients(*args: Tensor) -> tuple[Tensor, ...]:
            given = [followed(args[i]) for i in places]
            out = within(f, places, args)(*given)
            return pulled([out], given, [torch.ones_like(out)])

        return gradients

    def vjp(
        self, f: Function, places: Sequence[int], args: Sequence[Tensor], cotangents: Function
    ) -> tuple[Tensor, ...]:
        given = [followed(args[i]) for i in places]
        outs = tree_flatten(within(f, places, args)(*given))[0]
        return pulled(outs, given, [cotangents(out) for out in outs])

    def jvp(
        self, f: Function, places: Sequence[int], args: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Any:
        given = [followed(args[i]) for i in places]
        outs, structure = tree_flatten(within(f, places, args)(*given))
        pushed = []
        for out in outs:
            seed = torch.zeros_like(out, requires_grad=out.is_floating_point())
            back = pulled([out], given, [seed]) if out.is_floating_point() else None
            pushed.append(torch.zeros_like(out) if back is None else pulled(back, [seed], tangents)[0])
        return tree_unflatten(pushed, structure)

    def jacrev(self, f: Function, places: Sequence[int]) -> Function:
        return self._jacobian(f, places, self._rows)

    def jacfwd(self, f: Function, places: Sequence[int]) -> Function:
        return self._jacobian(f, places, self._tangents)

    def _jacobian(self, f: Function, places: Sequence[int], parts: Function) -> Function:
        def jacobian(*args: Tensor) -> Any:
            given = [followed(args[i]) for i in places]
            outs, structure = tree_flatten(within(f, places, args)(*given))
            return tree_unflatten([parts(outs, place, given) for place in range(len(outs))], structure)

        return jacobian

    def _tangents(self, outs: Sequence[Tensor], place: int, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same numbers as `_rows`. A tangent has the dtype of the result, a cotangent that of the
        argument.
        """
        return tuple(x.to(outs[place].dtype) for x in self._rows(outs, place, given))

    def _rows(self, outs: Sequence[Tensor], place: int, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Cotangents of zero go into the other outputs, and may meet infinities, as they do in
        torch.func.jacrev.
        """
        out, seeds = outs[place], [torch.zeros_like(x) for x in outs]
        if not out.numel():
            return tuple(x.new_zeros(*out.shape, *x.shape) for x in given)
        units = torch.eye(out.numel(), dtype=out.dtype).reshape(-1, *out.shape)
        rows = [pulled(outs, given, [*seeds[:place], unit, *seeds[place + 1 :]]) for unit in units]
        return tuple(
            torch.stack(column).reshape(*out.shape, *x.shape)
            for column, x in zip(zip(*rows, strict=True), given, strict=True)
        )

    def attached(self) -> AbstractContextManager[None]:
        return torch.enable_grad()


class LoopsByOutput(Loops):
    """The same, but with each output of a Jacobian pulled back alone: no cotangent of zero meets another's
    infinities.

    It is for Jacobians by tangents, which know no cotangents.
    """

    def _tangents(self, outs: Sequence[Tensor], place: int, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return super()._tangents([outs[place]], 0, given)


class TangentLoops(Loops):
    """The same, but with a JVP for each column of a Jacobian, where the loop else takes its rows."""

    def jacfwd(self, f: Function, places: Sequence[int]) -> Function:
        """Tangents of zero go into the other arguments, and may meet infinities, as they do in
        torch.func.jacfwd.
        """

        def jacobian(*args: Tensor) -> Any:
            columns, zeros = [], [torch.zeros_like(args[place]) for place in places]
            for number, place in enumerate(places):
                units = torch.eye(args[place].numel(), dtype=args[place].dtype).reshape(
                    -1, *args[place].shape
                )
                pushed = [
                    self.jvp(f, places, args, [*zeros[:number], unit, *zeros[number + 1 :]]) for unit in units
                ]
                columns.append(
                    [
                        torch.stack(some, -1).reshape(*some[0].shape, *args[place].shape)
                        for some in zip(*pushed, strict=True)
                    ]
                )
            return tuple(zip(*columns, strict=True))

        return jacobian


class ForwardLoops(TangentLoops):
    """The same, with PyTorch's forward mode for JVPs, which the loop else takes from two passes back."""

    def jvp(
        self, f: Function, places: Sequence[int], args: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Any:
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(args[i].clone(), t.clone())
                for i, t in zip(places, tangents, strict=True)
            ]
            out = within(f, places, args)(*duals)
            return tree_map(lambda x: _tangent(forward_ad.unpack_dual(x).tangent, x), out)


def _tangent(tangent: Tensor | None, value: Tensor) -> Tensor:
    return torch.zeros_like(value) if tangent is None else tangent


def followed(x: Tensor) -> Tensor:
    """A variable of its own, which outer derivatives see through."""
    return x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()


def pulled(outs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The cotangents of `inputs`; zeros where nothing depends on them."""
    pairs = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in inputs)
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        list(inputs),
        [seed for _, seed in pairs],
        create_graph=True,
        materialize_grads=True,
    )
    return tuple(found)


def by_autograd(out: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the caller's autograd says of the results of a transform, weighted by a ramp."""
    outs = [x for x in tree_flatten(out)[0] if x.requires_grad]
    if not outs:
        return tuple(torch.zeros_like(x) for x in inputs)
    found = torch.autograd.grad(outs, list(inputs), [ramp(x) for x in outs], materialize_grads=True)
    return tuple(found)


def ramp(like: Tensor) -> Tensor:
    """Fixed numbers, all different, in the shape and dtype of `like`."""
    return torch.linspace(0.5, 1.5, like.numel(), dtype=torch.float64).reshape(like.shape).to(like.dtype)
