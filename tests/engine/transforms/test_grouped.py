"""Grouped matrix products, as a layer of experts takes them: each transform beside PyTorch's autograd on a
loop over groups, with groups of each sample's own, empty groups and rows behind the last group.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, jacfwd, jacrev, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

# Ends of three groups of seven rows, for each of four samples.
ENDS = torch.tensor([[2, 2, 7], [0, 3, 5], [7, 7, 7], [1, 4, 6]], dtype=torch.int32)
N, ROWS, GROUPS, INNER, OUTER = 4, 7, 3, 8, 16


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_loop(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """What PyTorch documents, for the groups in rows, in columns and in the axis that is summed."""
    stops = ends.tolist()
    slices = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in slices])
    if a.dim() == 3:
        parts = [a[group] @ b[:, part] for group, part in enumerate(slices)]
        return torch.cat([*parts, b.new_zeros(a.shape[1], b.shape[1] - stops[-1])], 1)
    parts = [a[part] @ b[group] for group, part in enumerate(slices)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - stops[-1], b.shape[2])])


ROW_GROUPS = randn(N, ROWS, INNER, seed=0), randn(N, GROUPS, INNER, OUTER, seed=1)
COLUMN_GROUPS = randn(N, GROUPS, OUTER, INNER, seed=2), randn(N, INNER, ROWS, seed=3)
SUMMED_GROUPS = randn(N, INNER, ROWS, seed=4), randn(N, ROWS, OUTER, seed=5)
each_form = pytest.mark.parametrize(
    ("a", "b"), [ROW_GROUPS, COLUMN_GROUPS, SUMMED_GROUPS], ids=["rows", "columns", "summed"]
)


def losses(
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda a, b, ends: (product(a, b, ends).sin() * 1.5).pow(2).sum()


loss = losses(lambda a, b, ends: F.grouped_mm(a, b, offs=ends))
loop = losses(by_loop)


@each_form
@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, 0), (0, None, 0), (0, 0, None), (None, None, 0)])
def test_grouped_mm_gradients_per_sample(a: Tensor, b: Tensor, mapped: tuple[int | None, ...]) -> None:
    given = [x if d == 0 else x[0] for x, d in zip((a, b, ENDS), mapped, strict=True)]
    repeated = [x if d == 0 else x[:1].expand_as(x) for x, d in zip((a, b, ENDS), mapped, strict=True)]
    expected = gradients_by_loop(loop, *repeated, argnums=(0, 1))
    found = vmap(grad(loss, argnums=(0, 1)), in_dims=mapped)(*given)
    torch.testing.assert_close(found, expected)


@each_form
def test_grouped_mm_second_derivatives(a: Tensor, b: Tensor) -> None:
    expected = torch.autograd.functional.hessian(lambda a, b: loop(a, b, ENDS[3]), (a[0], b[0]))
    arguments = (a[0], b[0], ENDS[3])
    reverse = jacrev(grad(loss, argnums=(0, 1)), argnums=(0, 1))(*arguments)
    forward = jacfwd(grad(loss, argnums=(0, 1)), argnums=(0, 1))(*arguments)
    torch.testing.assert_close(reverse, expected)
    torch.testing.assert_close(forward, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_equals_pytorch_kernel(dtype: torch.dtype) -> None:
    a, b = (x.to(dtype) for x in ROW_GROUPS)
    found = vmap(lambda x, y, ends: F.grouped_mm(x, y, offs=ends))(a, b, ENDS)
    for sample, ends in enumerate(ENDS):
        whole = slice(0, int(ends[-1]))  # the kernel leaves rows behind the last group as they are
        expected = F.grouped_mm(a[sample], b[sample], offs=ends)
        torch.testing.assert_close(found[sample][whole], expected[whole])
        assert not found[sample][whole.stop :].any()


def test_grouped_mm_without_groups_is_bmm() -> None:
    a, b = COLUMN_GROUPS[0], ROW_GROUPS[1]
    torch.testing.assert_close(vmap(lambda x, y: F.grouped_mm(x, y))(a, b), torch.matmul(a, b))


def experts(params: dict[str, Tensor], x: Tensor, expert: Tensor) -> Tensor:
    """Two matrices an expert, the tokens sorted by expert as `transformers` sorts them."""
    order = torch.sort(expert)[1]
    counts = torch.histc(expert.float(), bins=GROUPS, min=0, max=GROUPS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    hidden = F.grouped_mm(x[order], params["up"].transpose(1, 2), offs=ends).tanh()
    return F.grouped_mm(hidden, params["down"], offs=ends)[order.argsort()].square().sum()


def test_grouped_mm_weight_gradients_stay_factors() -> None:
    params = {"up": randn(GROUPS, OUTER, INNER, seed=6), "down": randn(GROUPS, OUTER, INNER, seed=7)}
    x = randn(N, ROWS, INNER, seed=8)
    # The number behind the last expert's: of no expert, its row is zero.
    expert = torch.randint(GROUPS + 1, (N, ROWS), generator=torch.Generator().manual_seed(9))

    def one(up: Tensor, down: Tensor, x: Tensor, expert: Tensor) -> Tensor:
        up, down = (torch.cat([weight, torch.zeros_like(weight[:1])]) for weight in (up, down))
        weights = up[expert], down[expert]
        hidden = torch.einsum("toi,ti->to", weights[0], x).tanh()
        return torch.einsum("toi,to->ti", weights[1], hidden).square().sum()

    repeated = [value.expand(N, *value.shape) for value in params.values()]
    expected = dict(zip(params, gradients_by_loop(one, *repeated, x, expert, argnums=(0, 1)), strict=True))
    found = per_sample_gradients(experts, params, x, expert, settle=False)
    for name, gradient in found.parts[0].gradients.items():
        assert [type(placed.term).__name__ for placed in gradient.terms] == ["GroupedProduct"], name
    torch.testing.assert_close(found.materialise(), expected)
    flat = torch.cat([value.flatten(1) for value in expected.values()], 1)
    torch.testing.assert_close(found.square_norms(), flat.square().sum(1))
    torch.testing.assert_close(found.inner(found), flat @ flat.t())


@each_form
def test_grouped_mm_followed_by_autograd(a: Tensor, b: Tensor) -> None:
    given = [x.clone().requires_grad_() for x in (a, b)]
    vmap(loss)(*given, ENDS).sum().backward()
    for x, expected in zip(given, gradients_by_loop(loop, a, b, ENDS, argnums=(0, 1)), strict=True):
        torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        (ROW_GROUPS[0][0], ROW_GROUPS[1][0, :2], ENDS[0]),
        (ROW_GROUPS[0][0, :, 1:], ROW_GROUPS[1][0], ENDS[0]),
        (ROW_GROUPS[0][0].float(), ROW_GROUPS[1][0], ENDS[0]),
        (ROW_GROUPS[0][0], ROW_GROUPS[1][0], ENDS[0].long()),
        (ROW_GROUPS[0][0], ROW_GROUPS[1][0], None),
    ],
    ids=["groups", "inner", "dtype", "int64", "no ends"],
)
def test_grouped_mm_wrong_arguments(a: Tensor, b: Tensor, ends: Tensor | None) -> None:
    with pytest.raises(TransformError, match="grouped matrix product"):
        grad(lambda a: torch.ops.aten._grouped_mm(a, b, ends).sum())(a)


def test_grouped_mm_with_bias() -> None:
    a, b = ROW_GROUPS[0][0], ROW_GROUPS[1][0]
    with pytest.raises(TransformError, match="with bias or out_dtype"):
        grad(lambda a: torch.ops.aten._grouped_mm(a, b, ENDS[0], torch.ones(OUTER)).sum())(a)
