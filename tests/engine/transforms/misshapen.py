"""Calls of operators with per-sample shapes that the operator refuses, and what the transforms make
of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms import vjp, vmap
from psgrad.errors import PsgradError
from tests.engine.transforms.operators import Program
from tests.seeds import set_seed


def misshapen(tensors: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """The tensors, one of them with an axis more, an axis less, no axis, or another length."""
    for place, x in enumerate(tensors):
        if x.layout != torch.strided:
            continue
        others = [x.unsqueeze(0), x.unsqueeze(-1)]
        if x.dim():
            others += [
                torch.cat([x, x.narrow(axis, 0, min(1, x.shape[axis]))], axis) for axis in {0, x.dim() - 1}
            ]
            if x.numel():
                others += [x.select(0, 0), x.select(-1, 0), x.flatten()[0]]
        for other in others:
            yield [*tensors[:place], other, *tensors[place + 1 :]]


def refused_by_the_operator(program: Program, tensors: list[Tensor]) -> bool:
    set_seed(0)
    try:
        program(*[x.clone() for x in tensors])
    except Exception:
        return True
    return False


def under_vmap(program: Program, tensors: list[Tensor], where: tuple[int | None, ...]) -> Any:
    set_seed(0)
    stacked = [
        torch.stack([x, x]) if axis is not None else x.clone() for x, axis in zip(tensors, where, strict=True)
    ]
    return vmap(lambda *xs: tuple(program(*xs)), where, randomness="same")(*stacked)


def under_vjp(program: Program, tensors: list[Tensor], where: Any = None) -> Any:
    set_seed(0)
    return vjp(lambda *leaves: program(*program.with_leaves(tensors, leaves)), *program.leaves(tensors))


def complaint(run: Callable[[], Any]) -> str | None:
    """What is wrong with `run`, which has to raise an error that says something; None where it does."""
    try:
        run()
    except (PsgradError, RuntimeError):
        return None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        meant = "raise" in (frame.line or "") or "psgrad/engine" not in frame.filename
        return (
            None
            if meant
            else f"{type(error).__name__}: {error} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        )
    return "accepted"


def complaints(program: Program) -> Iterator[str]:
    count = len(program.tensors)
    ways: set[tuple[int | None, ...]] = {
        (0,) * count,
        *(tuple(0 if i == only else None for i in range(count)) for only in range(count)),
    }
    for tensors in misshapen(program.tensors):
        if not refused_by_the_operator(program, tensors):
            continue
        shapes = [tuple(x.shape) for x in tensors]
        for where in sorted(ways, key=str):
            if result := complaint(lambda t=tensors, w=where: under_vmap(program, t, w)):
                yield f"vmap {where} of {program.name} {shapes}: {result}"
        if program.differentiable and (result := complaint(lambda t=tensors: under_vjp(program, t))):
            yield f"vjp of {program.name} {shapes}: {result}"
