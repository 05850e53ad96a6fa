"""Random programs of views, in-place writes, broadcasts and reductions, under random nests of transforms.

The oracle shares nothing with what it checks: memory is a vector that every write replaces, a view is a
tensor of places in it, and the nests are loops around torch.autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.transforms import derivatives, grad, jacrev, jvp, vjp, vmap
from psgrad.engine.transforms.rules import registry
from psgrad.errors import TransformError

Function = Callable[[Tensor, Tensor], Tensor]

# -- programs ------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[...]": lambda x: x[...],
    "x.select(0, -1)": lambda x: x.select(0, -1),
    "x.select(-1, 0)": lambda x: x.select(-1, 0),
    "x[1:]": lambda x: x[1:],
    "x[..., ::2]": lambda x: x[..., ::2],
    "x.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "x.unsqueeze(1)": lambda x: x.unsqueeze(1),
    "x.squeeze()": lambda x: x.squeeze(),
    "x.diagonal()": lambda x: x.diagonal(),
    "x.unbind(0)[0]": lambda x: x.unbind(0)[0],
    "x.expand(2, ...)": lambda x: x.expand(2, *x.shape),
}
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "x.sin()": torch.sin,
    "x.tanh()": torch.tanh,
    "x.square()": torch.square,
    "0.5 * x": lambda x: 0.5 * x,
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "x.sum(0)": lambda x: x.sum(0),
    "x.mean(-1)": lambda x: x.mean(-1),
    "x.logsumexp(0)": lambda x: x.logsumexp(0),
    "x.cumsum(-1)": lambda x: x.cumsum(-1),
    "torch.zeros(x.shape)": lambda x: torch.zeros(x.shape, dtype=torch.float64),
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": torch.add,
    "x * y": torch.mul,
    "x - y": torch.sub,
}
# In place, and what that writes.
WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "x.sin_()": (lambda x: x.sin_(), torch.sin),
    "x.mul_(0.5)": (lambda x: x.mul_(0.5), lambda x: 0.5 * x),
    "x.zero_()": (lambda x: x.zero_(), torch.zeros_like),
}
WRITES_OF_ANOTHER: dict[
    str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
] = {
    "x.copy_(y)": (lambda x, y: x.copy_(y), lambda x, y: y.expand(x.shape)),
    "x.add_(y)": (lambda x, y: x.add_(y), torch.add),
    "x.mul_(y)": (lambda x, y: x.mul_(y), torch.mul),
}


class Step(NamedTuple):
    """One line of a program: an operation by name, on tensors by their number."""

    name: str
    x: int
    y: int | None = None


def run(steps: list[Step], x: Tensor, y: Tensor) -> Tensor:
    """The program as a user writes it."""
    tensors = [x.clone(), y.clone()]
    for name, first, second in steps:
        given = tensors[first] if second is None else (tensors[first], tensors[second])
        if name in WRITES:
            WRITES[name][0](given)
        elif name in WRITES_OF_ANOTHER:
            WRITES_OF_ANOTHER[name][0](*given)
        elif name in JOINS:
            tensors.append(JOINS[name](*given))
        else:
            tensors.append((VIEWS | POINTWISE | REDUCTIONS)[name](given))
    return outcome(tensors)


def outcome(tensors: list[Tensor]) -> Tensor:
    """Two numbers in which each element of each tensor counts differently."""
    weighted = [(t * ramp(t)).sum() for t in tensors]
    return torch.stack([sum(weighted[1:], weighted[0]), sum((w.sin() for w in weighted[::2]), weighted[-1])])


def ramp(like: Tensor) -> Tensor:
    """Fixed numbers, all different."""
    return torch.linspace(0.5, 1.5, like.numel(), dtype=torch.float64).reshape(like.shape)


@dataclass
class Memory:
    """The oracle's tensors: each a vector of cells, and the places in it that the tensor shows."""

    vectors: list[Tensor] = field(default_factory=list)
    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)  # which of them are taken from an expanded one

    def add(self, value: Tensor) -> None:
        self.vectors.append(value.reshape(-1))
        self.tensors.append((len(self.vectors) - 1, torch.arange(value.numel()).reshape(value.shape)))

    def read(self, number: int) -> Tensor:
        vector, places = self.tensors[number]
        return self.vectors[vector][places]

    def write(self, number: int, value: Tensor) -> None:
        vector, places = self.tensors[number]
        self.vectors[vector] = self.vectors[vector].index_put((places.reshape(-1),), value.reshape(-1))

    def do(self, step: Step) -> None:
        name, x, y = step
        if name in VIEWS:
            vector, places = self.tensors[x]
            self.tensors.append((vector, VIEWS[name](places)))
            if name == "x.expand(2, ...)" or x in self.expanded:
                self.expanded.add(len(self.tensors) - 1)
        elif name in WRITES:
            self.write(x, WRITES[name][1](self.read(x)))
        elif y is None:
            self.add((POINTWISE | REDUCTIONS)[name](self.read(x)))
        elif name in WRITES_OF_ANOTHER:
            self.write(x, WRITES_OF_ANOTHER[name][1](self.read(x), self.read(y)))
        else:
            self.add(JOINS[name](self.read(x), self.read(y)))

    def allows(self, step: Step) -> bool:
        """Whether PyTorch would take the step; and tensors stay small. Writes through expanded tensors are
        refused by name.
        """
        name, x, y = step
        if name in WRITES or name in WRITES_OF_ANOTHER:
            vector, places = self.tensors[x]
            if x in self.expanded:
                return False
            if y is None or x == y:
                return x != y
            others = self.tensors[y][1]
            apart = (
                vector != self.tensors[y][0]
                or not torch.isin(places.flatten(), others.flatten()).any()
                or torch.equal(places, others)
            )
            return apart and _broadcast(places, others) == places.shape
        if y is not None:
            shape = _broadcast(self.tensors[x][1], self.tensors[y][1])
            return shape is not None and shape.numel() <= 32
        try:
            result = (VIEWS | POINTWISE | REDUCTIONS)[name](self.read(x))
        except (RuntimeError, IndexError):
            return False
        return 0 < result.numel() <= 32


def _broadcast(x: Tensor, y: Tensor) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return None


def run_in_memory(steps: list[Step], x: Tensor, y: Tensor) -> Tensor:
    """The same program by the oracle."""
    memory = Memory()
    memory.add(x)
    memory.add(y)
    for step in steps:
        memory.do(step)
    return outcome([memory.read(number) for number in range(len(memory.tensors))])


X, Y = (
    torch.linspace(-0.9, 1.1, 6, dtype=torch.float64).reshape(2, 3),
    torch.tensor([0.3, -0.7, 0.5], dtype=torch.float64),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Up to ten steps that PyTorch allows, from a tensor [2, 3] and one [3]; each write is one into a view
    where there is any.
    """
    memory, steps = Memory(), []
    memory.add(X)
    memory.add(Y)
    views: list[int] = []
    for kind in draw(
        st.lists(
            st.sampled_from([VIEWS, WRITES_OF_ANOTHER, WRITES, JOINS, POINTWISE, REDUCTIONS]),
            min_size=1,
            max_size=10,
        )
    ):
        numbers: Any = range(len(memory.tensors))
        others = numbers if kind in (JOINS, WRITES_OF_ANOTHER) else [None]
        if kind in (WRITES, WRITES_OF_ANOTHER):
            numbers = views or numbers
        possible = [
            step
            for step in itertools.starmap(Step, itertools.product(kind, numbers, others))
            if memory.allows(step)
        ]
        if possible:
            steps.append(draw(st.sampled_from(possible)))
            memory.do(steps[-1])
            if kind is VIEWS:
                views.append(len(memory.tensors) - 1)
    return steps


# -- nests ---------------------------------------------------------------------------------------------------


def two_samples(x: Tensor) -> Tensor:
    return torch.stack([x, 0.5 - x])


# Each makes a function of (x, y) another one.
OURS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: lambda x, y: grad(lambda x, y: (f(x, y) * ramp(f(x, y))).sum())(x, y),
    "vjp": lambda f: lambda x, y: _pulled(*vjp(f, x, y)),
    "jvp": lambda f: lambda x, y: jvp(f, (x, y), (ramp(x), torch.zeros_like(y)))[1],
    "jacrev": lambda f: lambda x, y: jacrev(f, argnums=(0, 1))(x, y)[0],
    "vmap": lambda f: lambda x, y: vmap(f, in_dims=(0, None))(two_samples(x), y),
    "vmap of both": lambda f: lambda x, y: vmap(f)(two_samples(x), two_samples(y)),
}


def _pulled(out: Tensor, pull: Callable[[Tensor], tuple[Tensor]]) -> Tensor:
    return pull(ramp(out))[0]


def followed(x: Tensor) -> Tensor:
    """A variable of its own, which outer derivatives see through."""
    return x.view_as(x) if x.requires_grad else x.clone().requires_grad_()


def gradient(out: Tensor, x: Tensor, seed: Tensor) -> Tensor:
    if not out.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(out, x, seed, create_graph=True, materialize_grads=True)[0]


def pulled_by_autograd(f: Function) -> Function:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x = followed(x)
        out = f(x, y)
        return gradient(out, x, ramp(out))

    return function


def pushed_by_autograd(f: Function) -> Function:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x = followed(x)
        out = f(x, y)
        seed = torch.zeros_like(out, requires_grad=True)
        return gradient(gradient(out, x, seed), seed, ramp(x))

    return function


def rows_by_autograd(f: Function) -> Function:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x = followed(x)
        out = f(x, y)
        units = torch.eye(out.numel(), dtype=torch.float64).reshape(-1, *out.shape)
        return torch.stack([gradient(out, x, unit) for unit in units]).reshape(*out.shape, *x.shape)

    return function


BY_AUTOGRAD: dict[str, Callable[[Function], Function]] = {
    "grad": pulled_by_autograd,
    "vjp": pulled_by_autograd,
    "jvp": pushed_by_autograd,
    "jacrev": rows_by_autograd,
    "vmap": lambda f: lambda x, y: torch.stack([f(sample, y) for sample in two_samples(x)]),
    "vmap of both": lambda f: (
        lambda x, y: torch.stack([f(*pair) for pair in zip(two_samples(x), two_samples(y), strict=True)])
    ),
}

nests = st.lists(st.sampled_from(list(OURS)), min_size=2, max_size=3).filter(
    lambda nest: nest.count("jacrev") < 3
)


def nested(transforms: dict[str, Callable[[Function], Function]], nest: list[str], f: Function) -> Tensor:
    for name in nest:
        f = transforms[name](f)
    return f(X.clone(), Y.clone()).detach()


def right(steps: list[Step], nest: list[str]) -> bool:
    try:
        ours = nested(OURS, nest, lambda x, y: run(steps, x, y))
    except TransformError as error:
        # As in torch.func: what is made from a value of an outer transform has no sample axis, and can't
        # receive one.
        if "without a sample axis" in str(error):
            reject()
        raise
    expected = nested(BY_AUTOGRAD, nest, lambda x, y: run_in_memory(steps, x, y))
    return ours.shape == expected.shape and torch.allclose(ours, expected, 1e-9, 1e-9)


@settings(max_examples=200)
@given(steps=programs(), nest=nests)
def test_random_programs_equal_the_loop(steps: list[Step], nest: list[str]) -> None:
    assert right(steps, nest)


@given(steps=programs())
def test_random_programs_oracle_equals_pytorch(steps: list[Step]) -> None:
    torch.testing.assert_close(run(steps, X, Y), run_in_memory(steps, X, Y), rtol=1e-12, atol=1e-12)


# -- the checker itself --------------------------------------------------------------------------------------

WRITES_THROUGH_A_VIEW = [Step("x.select(0, -1)", 0), Step("x.copy_(y)", 2, 1)]


@pytest.mark.parametrize("nest", [["grad", "vmap"], ["vjp", "jvp"], ["jacrev", "vmap of both"]])
def test_random_programs_notice_lost_write(monkeypatch: pytest.MonkeyPatch, nest: list[str]) -> None:
    assert right(WRITES_THROUGH_A_VIEW, nest)
    monkeypatch.setattr(derivatives, "write_through", lambda op, base, new, *rest: base)
    assert not right(WRITES_THROUGH_A_VIEW, nest)


@pytest.mark.parametrize("nest", [["vmap", "grad"], ["grad", "vmap of both"]])
def test_random_programs_notice_wrong_gradient(monkeypatch: pytest.MonkeyPatch, nest: list[str]) -> None:
    off = registry.DerivativeRule({0: lambda out, x: lambda g: g * torch.cos(x) * (1 + 1e-7)})
    monkeypatch.setitem(registry._derivatives, torch.ops.aten.sin.default, off)
    assert not right([Step("x.sin()", 0)], nest)
