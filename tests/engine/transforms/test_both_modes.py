"""Forward mode is the transpose of reverse mode: <v, J u> = <J^T v, u>, except the conventions in
docs/explanation/transforms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from psgrad.engine import transforms
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
    """Whether <v, J u> and <J^T v, u> are the same number, for random u and v. Operators that draw draw the
    same twice.
    """
    seeds, tangents = derivatives._seeds(program), derivatives._tangents(program)
    pulled = derivatives.PULL.ours(program, program.tensors, seeds).derivatives
    set_seed(0)
    pushed = derivatives.PUSH.ours(program, program.tensors, tangents).derivatives
    forward, back = inner(seeds, pushed), inner(pulled, tangents)
    return bool(torch.isclose(forward, back, 1e-8, 1e-9, equal_nan=True))


def differing(names: Sequence[str]) -> dict[str, str]:
    """The entries with a call in which the two modes differ, and the first such call."""
    result: dict[str, str] = {}
    for name in names:
        for program in programs(entries()[name]):
            try:
                if program.tracked and not transposes(program):
                    result.setdefault(name, program.name)
            except PsgradError:  # refused.py says which
                continue
    return result


# Results in a type of fewer bits: the two modes round at different places.
ROUNDED = "bfloat16 half chalf"

PLACES = torch.tensor([0, 2, 2, 0])
# The conventions of docs/explanation/transforms.md: a function and the shape of its argument.
CONVENTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "`embedding` with `padding_idx`": (lambda table: F.embedding(PLACES, table, padding_idx=0), (3, 2)),
    "`max_unpool1d`, `max_unpool2d`, `max_unpool3d`": (
        lambda x: F.max_unpool1d(x, torch.tensor([[[0, 0]]]), 2),
        (1, 1, 2),
    ),
}
ENTRIES = (  # of the database, among the conventions
    "nn.functional.max_unpool1d nn.functional.max_unpool2d nn.functional.max_unpool3d"
)
PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "transforms.md"


def modes(tf: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(J u, J^T v) for fixed u and v."""
    out, pushed = tf.jvp(function, (x,), (x.cos(),))
    return pushed, tf.vjp(function, x)[1](out.sin() + 1)[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For a kernel that writes a place twice: with several threads any of the two writes may be the last."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CONVENTIONS)
def test_forward_and_reverse_mode_conventions_as_torch_func(name: str) -> None:
    function, shape = CONVENTIONS[name]
    x = torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    pushed, pulled = modes(transforms, function, x)
    assert not torch.isclose(((function(x).sin() + 1) * pushed).sum(), (pulled * x.cos()).sum())
    theirs = modes(torch.func, function, x)
    torch.testing.assert_close((pushed, pulled), theirs)


def test_page_lists_forward_and_reverse_conventions() -> None:
    listed = [
        line.split("|")[1].strip()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `embedding`")
    ]
    listed += [
        line.split("|")[1].strip()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `max_unpool")
    ]
    assert listed == list(CONVENTIONS)


@pytest.mark.parametrize("name", ["sin", "mm", "cumsum", "nn.functional.layer_norm", "fft.rfft"])
def test_forward_mode_transpose_of_reverse_mode(name: str) -> None:
    assert differing([name]) == {}


@pytest.mark.sweep
def test_forward_mode_transpose_of_reverse_mode_all_operators() -> None:
    names = [name for name in entries() if name not in UNJUDGED and name not in ROUNDED.split()]
    assert set(differing(names)) == set(ENTRIES.split())


def test_forward_mode_checker_notices_wrong_jvp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        derivatives, "jvp", lambda *args, **keywords: (*_doubled(transforms.jvp(*args, **keywords)),)
    )
    assert set(differing(["sin"])) == {"sin"}


def _doubled(found: Any) -> Any:
    out, tangents, *rest = found
    return out, tuple(2 * t for t in tangents), *rest
