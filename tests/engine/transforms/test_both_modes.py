"""Forward mode is the transpose of reverse mode: <v, J u> = <J^T v, u>, but for the conventions that docs/transforms.md lists."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from psgrad.errors import PsgradError
from tests.engine.transforms import derivatives
from tests.engine.transforms.operators import Program, entries, programs
from tests.engine.transforms.refused import UNJUDGED
from tests.seeds import set_seed

pytestmark = pytest.mark.filterwarnings("ignore")


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The real inner product of two lists of tensors."""
    products = [(x.to(torch.complex128).conj() * y).sum().real for x, y in zip(one, other, strict=True)]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=torch.float64)


def transposes(program: Program) -> bool:
    """Whether <v, J u> and <J^T v, u> are the same number, for random u and v. Operators that draw draw the same twice."""
    seeds, tangents = derivatives._seeds(program), derivatives._tangents(program)
    pulled = derivatives.PULL.ours(program, program.tensors, seeds).derivatives
    set_seed(0)
    pushed = derivatives.PUSH.ours(program, program.tensors, tangents).derivatives
    forward, back = inner(seeds, pushed), inner(pulled, tangents)
    return bool(torch.isclose(forward, back, 1e-8, 1e-9, equal_nan=True))


def differing(names: Sequence[str]) -> dict[str, str]:
    """The entries with a call in which the two modes differ, and the first such call."""
    found: dict[str, str] = {}
    for name in names:
        for program in programs(entries()[name]):
            try:
                if program.tracked and not transposes(program):
                    found.setdefault(name, program.name)
            except PsgradError:  # refused.py says which
                continue
    return found


if __name__ == "__main__":
    print(differing([name for name in entries() if name not in UNJUDGED]))
