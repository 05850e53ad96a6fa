"""Sums of bits: any write shows in them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.privacy.unchanged import BitSums, has_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool]
SHAPES = [(), (0,), (3,), (4097, 9), (8192, 8)]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_sums_of_a_copy_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = tensor_of(shape, dtype)
    assert BitSums.of(value).same(BitSums.of(value.clone()))


def last_bit(value: Tensor, place: int) -> None:
    value.view(torch.int32)[place] ^= 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "last bit of the first number": lambda x: last_bit(x, 0),
    "last bit of the last number": lambda x: last_bit(x, -1),
    "all by one": lambda x: x.add_(1),
    "another order": lambda x: x.copy_(x.flip(0).clone()),
    "two numbers exchanged": lambda x: x.put_(torch.tensor([0, 5000]), x[[5000, 0]]),
    "the sign of zero": lambda x: x.data.mul_(torch.where(x == 0, -1.0, 1.0)),
    "through numpy": lambda x: x.numpy().__setitem__(7, 1e-30),
}


@pytest.mark.parametrize("name", WRITES)
def test_bit_sums_of_a_write_differ(name: str) -> None:
    value = torch.arange(20000, dtype=torch.float32)
    before = BitSums.of(value)
    WRITES[name](value)
    assert not before.same(BitSums.of(value))


def test_bit_sums_of_parts_of_other_memory() -> None:
    value = tensor_of((20000,), torch.float32)
    assert BitSums.of(value[1:]).same(BitSums.of(value[1:].clone()))
    assert BitSums.of(value.view(200, 100).t()).same(BitSums.of(value.view(200, 100).t().contiguous()))
    assert not BitSums.of(value).same(BitSums.of(value.view(200, 100)))


def test_bit_sums_only_of_dense_tensors() -> None:
    assert has_bits(torch.ones(2))
    assert not has_bits(torch.ones(2).to_sparse())
    assert not has_bits(torch.ones(2, device="meta"))
