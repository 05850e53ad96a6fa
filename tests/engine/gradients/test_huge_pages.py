"""Large results on the CPU get memory of their own, and are the numbers they were."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from psgrad.engine.gradients.huge_pages import FROM_BYTES, room
from psgrad.engine.gradients.terms import Product
from psgrad.engine.transforms import grad


def factors(positions: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    left, right = torch.randn(17, 2, positions, 130, dtype=dtype), torch.randn(17, 2, positions, 1001, dtype=dtype)
    assert 17 * 2 * 130 * 1001 * dtype.itemsize > FROM_BYTES or dtype.itemsize < 4
    return left, right


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_product_is_what_einsum_makes_of_it(positions: int, dtype: torch.dtype) -> None:
    left, right = factors(positions, dtype)
    assert room((17, 2, 130, 1001), (left, right)) is not None
    expected = torch.einsum("ngta,ngtb->ngab", left, right)
    torch.testing.assert_close(Product(left, right).materialise(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_memory_is_aligned_contiguous_and_outlives_its_maker(dtype: torch.dtype) -> None:
    shape = (9, FROM_BYTES // 16)
    found = room(shape, (torch.empty(0, dtype=dtype),))
    assert found is not None
    assert (found.shape, found.dtype, found.is_contiguous(), found.data_ptr() % 64) == (shape, dtype, True, 0)
    found.fill_(3)
    assert bool((found == 3).all())


class Following(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_operators_allocate_by_themselves_where_something_follows_them() -> None:
    left, right = factors(1)
    assert room((2, 3), (left, right)) is None  # small
    assert room((17, 2, 130, 1001), (left, right.double())) is None
    with Following():
        assert room((17, 2, 130, 1001), (left, right)) is None
    leaf = left.clone().requires_grad_()
    Product(leaf, right).materialise().sum().backward()
    assert leaf.grad is not None
    traced = grad(lambda x: Product(x, right).materialise().sum())(left)
    torch.testing.assert_close(leaf.grad, traced)
