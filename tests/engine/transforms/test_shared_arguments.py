"""Normalisations, losses and pools where any subset of the arguments is batched, and the memory that their
kernels are given.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import date

import pytest
import torch
import torch.nn.functional as F

from psgrad.engine.transforms import grad, operators, vmap
from tests.engine.transforms.kernel_layouts import Kernels, reads_as_contiguous
from tests.engine.transforms.operators import entries, programs
from tests.engine.transforms.refused import UNJUDGED
from tests.engine.transforms.shared_arguments import (
    FAMILIES,
    SAMPLES,
    Program,
    by_loop,
    by_vmap_of_grad,
    loss,
    subsets,
    tensors,
    wrong_ways,
)
from tests.engine.transforms.sweep import ROWS
from tools.operators_page import judged_rows

pytestmark = pytest.mark.filterwarnings("ignore")


def found_wrong(family: str, *, everything: bool, samples: int = SAMPLES) -> list[str]:
    """The programs of a family, and which of their arguments are mapped, where a transform gives other
    numbers than the loop.
    """
    every = 1 if everything else 8  # the short version leaves programs out
    return [
        f"{name} mapped {mapped}: {ways}"
        for name, program in list(FAMILIES[family]())[::every]
        for mapped in subsets(len(program.shapes) + 1, everything)
        if (ways := wrong_ways(program, mapped, samples))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_shared_arguments(family: str) -> None:
    assert found_wrong(family, everything=False) == []


@pytest.mark.sweep
@pytest.mark.parametrize("samples", [1, SAMPLES])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_every_subset_of_arguments_shared(family: str, samples: int) -> None:
    assert found_wrong(family, everything=True, samples=samples) == []


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 1, 4), (2, 4, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm_of_shared_parameter(shape: tuple[int, ...], groups: int) -> None:
    if shape[1] % groups:
        pytest.skip("channels do not divide into groups")
    program = Program(lambda p: F.group_norm(p, groups), (shape,))
    given, mapped = tensors(program, (False, True)), (False, True)
    result = vmap(grad(loss(program)), (None, 0))(*given)
    torch.testing.assert_close(result, by_loop(loss(program), given, mapped)[0])
    assert result.abs().max() > 0
    assert len(result) == SAMPLES


# -- the kernels themselves ----------------------------------------------------------------------------------


def listed() -> dict[str, set[int]]:
    return {op.name(): set(positions) for op, positions in operators.READ_AS_CONTIGUOUS.items()}


def called_by_programs() -> Kernels:
    """Kernel calls of the normalisations, losses and pools, where all arguments are mapped."""
    kernels = Kernels(most=2)
    for family in FAMILIES.values():
        for _, program in list(family())[::6]:
            mapped = (True,) * (len(program.shapes) + 1)
            with kernels:
                by_vmap_of_grad(loss(program), tensors(program, mapped), mapped)
    return kernels


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
def test_kernels_reading_contiguous_memory_listed() -> None:
    kernels = called_by_programs()
    assert unlisted(kernels) == []
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


def test_kernels_checker_notices_expanded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    right, backward = (
        operators.contiguous,
        operators.READ_AS_CONTIGUOUS[torch.ops.aten.native_group_norm_backward.default],
    )
    monkeypatch.setattr(
        operators,
        "contiguous",
        lambda positions, args: args if positions == backward else right(positions, args),
    )
    assert [line for line in found_wrong("norms", everything=False) if line.startswith("group_norm")] != []


def test_kernels_checker_notices_missing_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(operators.READ_AS_CONTIGUOUS, torch.ops.aten.adaptive_max_pool3d_backward.default)
    assert unlisted(called_by_operators("nn.functional.adaptive_max_pool3d")) == [
        "aten::adaptive_max_pool3d_backward {2}"
    ]
