"""The memory that kernels are given: those that read expanded memory as contiguous are listed."""

from __future__ import annotations

from contextlib import suppress
from datetime import date

import pytest
import torch

from psgrad.engine.transforms import grad, operators, vmap
from tests.engine.transforms.kernel_layouts import Kernels, reads_as_contiguous
from tests.engine.transforms.operators import entries, programs
from tests.engine.transforms.refused import UNJUDGED
from tests.engine.transforms.sweep import ROWS
from tools.operators_page import judged_rows

pytestmark = pytest.mark.filterwarnings("ignore")


# -- the kernels themselves ----------------------------------------------------------------------------------


def listed() -> dict[str, set[int]]:
    return {op.name(): set(positions) for op, positions in operators.READ_AS_CONTIGUOUS.items()}


def called_by_operators(name: str) -> Kernels:
    """Kernel calls of an entry of PyTorch's operator database, forward, back and under `vmap`."""
    kernels, entry = Kernels(most=4), entries()[name]
    for program in programs(entry):
        for row in {"vmap(vjp)", "vjp of vjp"}.intersection(judged_rows(name, entry)):
            derivative = ROWS[row].derivative
            directions = derivative.directions(program)
            with suppress(Exception), kernels:  # what is refused is refused.py's
                derivative.ours(program, program.tensors, directions)
    return kernels


def unlisted(kernels: Kernels) -> list[str]:
    """The arguments that a kernel was found to read as contiguous memory, and that the table does not
    name.
    """
    table = listed()
    return [
        f"{name} {positions}"
        for name, positions in reads_as_contiguous(kernels).items()
        if not positions <= table.get(name, set())
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["nn.functional.group_norm", "nn.functional.layer_norm", "cdist"])
def test_kernels_reading_contiguous_memory_listed(name: str) -> None:
    kernels = called_by_operators(name)
    assert unlisted(kernels) == []
    if name == "nn.functional.group_norm":
        assert "aten::native_group_norm_backward" in reads_as_contiguous(kernels), "the search finds nothing"


@pytest.mark.sweep
def test_kernels_reading_contiguous_memory_listed_fifth_of_all_operators() -> None:
    names = sorted(set(entries()) - set(UNJUDGED))[
        date.today().toordinal() % 5 :: 5
    ]  # another fifth each day
    assert {name: result for name in names if (result := unlisted(called_by_operators(name)))} == {}


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_expanded_memory(name: str) -> None:
    """PyTorch's kernel reads outside the tensor."""
    x = torch.tensor([0.5, 2.0, -3.0], dtype=torch.float64)
    median = lambda x: getattr(x, name)
    assert torch.equal(vmap(lambda x: median(x.expand(4))())(x), x)
    assert torch.equal(vmap(lambda x: median(x.expand(4))(0).values)(x), x)
    assert torch.equal(
        vmap(lambda x: getattr(torch, name)(x.expand(2, 4), 1).values)(x), x[:, None].expand(3, 2)
    )
    assert torch.equal(vmap(grad(lambda x: median(x.expand(4))()))(x), torch.ones_like(x))


def test_kernels_order_statistics_of_expanded_memory_listed() -> None:
    kernels, x = Kernels(most=4), torch.linspace(-1, 1, 12).sin().reshape(3, 4)
    with kernels:
        x.median(1), x.nanmedian(1), x.kthvalue(2, 1), x.topk(2, 1), x.sort(1), x.mode(1)
    assert unlisted(kernels) == []
    assert {"aten::median.dim", "aten::nanmedian.dim"} <= set(reads_as_contiguous(kernels))


def test_kernels_checker_notices_missing_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(operators.READ_AS_CONTIGUOUS, torch.ops.aten.adaptive_max_pool3d_backward.default)
    assert unlisted(called_by_operators("nn.functional.adaptive_max_pool3d")) == [
        "aten::adaptive_max_pool3d_backward {2}"
    ]
