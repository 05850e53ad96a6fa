"""Errors planted in rules, and the programs that notice them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms.rules import registry
from tests.random_programs import noticed
from tests.random_programs.checking import check
from tests.random_programs.programs import Program
from tests.random_programs.writer import write

FACTOR = 1 + 1e-3
Seen = Callable[[Any], Any]


def exactly(seed: int) -> Program:
    """The program of a seed, in float64: halves would take an error of 0.1 % for rounding."""
    return replace(write(seed), dtype=torch.float64)


@contextmanager
def planted(op: registry.Op, factor: float = FACTOR) -> Iterator[None]:
    """While it lasts, all derivatives of an operator are off by a factor."""
    with _watched({op: lambda x: x * factor}):
        yield


def noticing(seeds: int) -> dict[str, int]:
    """By operator, the first seed below `seeds` whose program comes out right, and fails where the operator's
    derivatives are off; few seeds rather than many.
    """
    used = {seed: ops for seed in range(seeds) if (ops := _used(seed))}
    found: dict[str, int] = {}
    for op in dict.fromkeys(itertools.chain(*used.values())):
        candidates = [seed for seed, ops in used.items() if op in ops]
        for seed in sorted(candidates, key=lambda seed: (seed not in found.values(), seed)):
            with planted(op):
                if check(exactly(seed)).failed:
                    found[str(op)] = seed
                    break
    return dict(sorted(found.items()))


def written(seeds: int) -> str:
    """`noticed.py`, with the programs of so many seeds to choose from."""
    head = Path(noticed.__file__).read_text().partition("{\n")[0]
    return head + "{\n" + "".join(f'    "{op}": {seed},\n' for op, seed in noticing(seeds).items()) + "}\n"


def operator(name: str) -> registry.Op:
    """The operator of an entry: `aten.tanh.default`."""
    library, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, library), packet), overload)


def _used(seed: int) -> set[registry.Op]:
    """The operators whose derivatives a program takes; none where it is refused, or fails."""
    used: set[registry.Op] = set()

    def seen(op: registry.Op) -> Seen:
        return lambda x: (used.add(op), x)[1]

    with _watched({op: seen(op) for op in registry.operators()}):
        return used if check(exactly(seed)).kind == "equal" else set()


@contextmanager
def _watched(seen: dict[registry.Op, Seen]) -> Iterator[None]:
    """While it lasts, what the closures of these operators' derivatives return goes through a function."""
    kept = {op: rule for op in seen if (rule := registry.rules_of(op).derivative) is not None}
    try:
        for op, rule in kept.items():
            if not isinstance(rule.vjp, registry.JointVJP):
                vjp, jvp = (
                    {position: _through(make, seen[op]) for position, make in makers.items()}
                    for makers in (rule.vjp, rule.jvp)
                )
                registry.change(op, derivative=replace(rule, vjp=vjp, jvp=jvp))
        yield
    finally:
        for op, rule in kept.items():
            registry.change(op, derivative=rule)


def _through(make: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def of(found: Any) -> Any:
        if callable(found):  # of an argument that is a list: the place in it comes first
            return lambda *given: of(found(*given))
        return seen(found) if isinstance(found, Tensor) else found

    return lambda *args, **kwargs: of(make(*args, **kwargs))
