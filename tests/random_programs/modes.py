"""The nests of transforms that a program is put under, each written once for both sets of transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.random_programs.backends import by_autograd, ramp

if TYPE_CHECKING:
    from tests.random_programs.programs import Program


@dataclass(frozen=True)
class Case:
    """A program's function and arguments.

    f: returns a tuple of tensors. args: the sample axis at `dims[i]`. wanted: places of the arguments that
    are differentiated.
    """

    f: Callable[..., Any]
    args: Sequence[Tensor]
    dims: Sequence[int | None]
    wanted: Sequence[int]

    @classmethod
    def of(cls, program: Program, f: Callable[..., Any], values: Sequence[Tensor]) -> Case:
        dims = [a.dim if a.batched else None for a in program.arguments]
        args = [x if not d else x.movedim(0, d) for x, d in zip(values, dims, strict=True)]
        return cls(f, args, dims, program.places(lambda a: a.differentiated))

    def apart(self, samples: int) -> Case:
        """The same case, each sample with a copy of its own of what is differentiated, and so with a gradient
        of its own.
        """
        shared = [d is None and i in self.wanted for i, d in enumerate(self.dims)]
        args = [
            x.expand(samples, *x.shape).clone() if own else x
            for x, own in zip(self.args, shared, strict=True)
        ]
        dims = [0 if own else d for d, own in zip(self.dims, shared, strict=True)]
        return Case(self.f, args, dims, self.wanted)

    def loss(self, *args: Tensor) -> Tensor:
        """The outputs' entries, each times a number of its own, added up."""
        return total(self.f(*args))

    def floats(self, *args: Tensor) -> tuple[Tensor, ...]:
        """The outputs that a derivative can be taken of, flat, at most 6 entries each."""
        return tuple(x.reshape(-1)[:6] for x in self.f(*args) if x.is_floating_point())

    @property
    def one(self) -> list[Tensor]:
        """The arguments of the first sample."""
        return [x if d is None else x.select(d, 0) for x, d in zip(self.args, self.dims, strict=True)]

    def requiring(self) -> Case:
        """The same case, whose arguments the caller's autograd follows."""
        args = [x.detach().clone().requires_grad_(i in self.wanted) for i, x in enumerate(self.args)]
        return Case(self.f, args, self.dims, self.wanted)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.args[i] for i in self.wanted]


def total(outs: Any) -> Tensor:
    terms = [(x * ramp(x)).sum() for x in tree_flatten(outs)[0] if x.is_floating_point()]
    return sum(terms[1:], terms[0])


def _tangents(xs: Sequence[Tensor]) -> list[Tensor]:
    return [ramp(x).flip(0) if x.dim() else ramp(x) for x in xs]


def _vjp(t: Any, c: Case) -> Callable[..., Any]:
    return lambda *args: t.vjp(c.floats, c.wanted, args, ramp)


def _jvp(t: Any, c: Case) -> Callable[..., Any]:
    return lambda *args: t.jvp(c.floats, c.wanted, args, _tangents([args[i] for i in c.wanted]))


def _of_batch(t: Any, c: Case) -> Callable[..., Tensor]:
    """The loss of all samples."""
    return lambda *args: total(t.vmap(c.f, c.dims)(*args))


def _twice(t: Any, c: Case) -> Any:
    """One vmap in another: the outer over a second axis of those arguments that are differentiated."""
    outer = [0 if i in c.wanted else None for i in range(len(c.args))]
    args = [torch.stack([x, x * 0.5]) if d == 0 else x for x, d in zip(c.args, outer, strict=True)]
    return t.vmap(t.vmap(c.f, c.dims), outer)(*args)


def _second(t: Any, c: Case) -> Callable[..., Any]:
    """A gradient of a gradient."""
    return t.grad(lambda *args: total(t.grad(c.loss, c.wanted)(*args)), c.wanted)


def _weighted_vmap(t: Any, c: Case) -> Any:
    """vmap over the batched arguments, of a gradient with respect to all that is differentiated."""
    return t.vmap(t.grad(c.loss, c.wanted), c.dims)(*c.args)


def _outside(make: Callable[[Any, Case], Any]) -> Callable[[Any, Case], Any]:
    """`make`, and the caller's autograd around it."""

    def mode(t: Any, c: Case) -> Any:
        attached = c.requiring()
        with torch.enable_grad():
            return by_autograd(make(t, attached), attached.leaves)

    return mode


MODES: dict[str, Callable[[Any, Case], Any]] = {
    "vmap": lambda t, c: t.vmap(c.f, c.dims)(*c.args),
    "grad": lambda t, c: t.grad(c.loss, c.wanted)(*c.one),
    "vmap(grad)": _weighted_vmap,
    "grad(vmap)": lambda t, c: t.grad(_of_batch(t, c), c.wanted)(*c.args),
    "vmap(vjp)": lambda t, c: t.vmap(_vjp(t, c), c.dims)(*c.args),
    "vmap(jvp)": lambda t, c: t.vmap(_jvp(t, c), c.dims)(*c.args),
    "jvp(vmap)": lambda t, c: t.jvp(t.vmap(c.f, c.dims), c.wanted, c.args, _tangents(c.leaves)),
    "vmap(jacrev)": lambda t, c: t.vmap(t.jacrev(c.floats, c.wanted), c.dims)(*c.args),
    "jacrev(vmap)": lambda t, c: t.jacrev(lambda *args: t.vmap(c.floats, c.dims)(*args), c.wanted)(*c.args),
    "vmap(jacfwd)": lambda t, c: t.vmap(t.jacfwd(c.floats, c.wanted), c.dims)(*c.args),
    "vmap(vmap)": _twice,
    "vmap(grad(grad))": lambda t, c: t.vmap(_second(t, c), c.dims)(*c.args),
    "vmap(grad(jvp))": lambda t, c: t.vmap(t.grad(lambda *args: total(_jvp(t, c)(*args)), c.wanted), c.dims)(
        *c.args
    ),
    "autograd of vmap": _outside(lambda t, c: t.vmap(c.f, c.dims)(*c.args)),
    "autograd of vmap(vmap)": _outside(_twice),
    "autograd of vmap(grad)": _outside(_weighted_vmap),
    "autograd of vmap(jvp)": _outside(lambda t, c: t.vmap(_jvp(t, c), c.dims)(*c.args)),
    "autograd of grad": _outside(lambda t, c: t.grad(c.loss, c.wanted)(*c.one)),
    "per sample": _weighted_vmap,
}
"""`per sample`: the loop's side of it; psgrad's is per_sample_gradients with its queries (queries.py)."""

WEIGHTS = {"per sample": 6, "autograd of vmap": 3, "vmap(grad)": 2}
"""Modes that are taken more often than the others."""
