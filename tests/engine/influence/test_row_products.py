"""Products of queries with rows of 8-bit numbers: sums of whole numbers, without an error of their own."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psgrad.engine.influence.index import row_products
from psgrad.engine.influence.index.row_products import (
    Int8Rows,
    Queries,
    WholeQueries,
    quantised,
    whole_products,
)
from psgrad.engine.transforms.private_torch import int8_product


def rows_of(values: torch.Tensor, *spans: slice) -> Int8Rows:
    numbers, scales = quantised(values, spans)
    return Int8Rows(numbers, scales.double(), spans)


@pytest.mark.parametrize("exact", [True, False], ids=["int8", "float32"])
@settings(max_examples=25)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 300), st.integers(0, 99))
@example(3, 2, 1, 0)
@example(3, 2, 101, 0)
def test_whole_products_equal_int64(exact: bool, a: int, b: int, k: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(-128, 128, (n, k), generator=random).to(torch.int8) for n in (a, b))
    is_exact = exact and row_products._is_exact(int8_product)
    with (
        patch.object(row_products, "int8_products_are_exact", lambda: is_exact),
        patch.object(row_products, "_COLUMNS_OF_INT32", 100),
    ):
        found = whole_products(first, second)
    assert found.equal((first.long() @ second.long().t()).double())


@pytest.mark.parametrize("exact", [True, False], ids=["int8", "float32"])
def test_whole_products_of_largest_numbers(exact: bool) -> None:
    # 2^31 and 2^14: beyond 32 bits, and far beyond the 24 of a float32
    first = torch.full((3, (1 << 17) + 1), -128, dtype=torch.int8)
    with patch.object(
        row_products, "int8_products_are_exact", lambda: exact and row_products._is_exact(int8_product)
    ):
        assert whole_products(first, first).eq(float(first.shape[1] << 14)).all()


def test_product_cut_off_at_16_bits_is_refused() -> None:
    def by_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        # as processors without VNNI add: the first number without its sign, two products in 16 bits
        pairs = ((first.long() + 128).unsqueeze(2) * second.long()).unflatten(1, (-1, 2)).sum(2)
        whole = pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(1) - 128 * second.long().sum(0)
        return whole.to(torch.int32)

    def none(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    assert row_products._is_exact(lambda first, second: (first.long() @ second.long()).to(torch.int32))
    assert not row_products._is_exact(by_pairs)
    assert not row_products._is_exact(none)


@settings(max_examples=30)
@given(st.integers(-300, 300), st.integers(1, 40), st.integers(0, 99))
def test_int8_error_of_a_score(exponent: int, k: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(6, k, generator=random, dtype=torch.float64)
    values /= values.abs().amax(1, keepdim=True)
    asked = torch.randn(3, k, generator=random, dtype=torch.float64) * 2.0**exponent
    spans = (slice(0, k),) if k == 1 else (slice(0, k // 2), slice(k // 2, k))
    rows, queries = rows_of(values, *spans), Queries(asked, slice(0, k))
    # From the rows as they are stored: half a unit in the last of a query's 24 bits, for each number.
    stored = rows.double()
    units = asked.abs().amax(1) / (127 * (1 + 256 + 256**2))
    bound = stored.abs().sum(1, keepdim=True) * units * 0.501
    assert ((rows.products(queries) - stored @ asked.t()).abs() <= bound).all()
    # From the rows as they were: half of a scale for each number, of each span.
    bound = bound + sum(
        rows.scales[:, [number]] * 0.501 * asked[:, span].abs().sum(1) for number, span in enumerate(spans)
    )
    assert ((rows.products(queries) - values @ asked.t()).abs() <= bound).all()


def test_int8_products_in_some_columns() -> None:
    torch.manual_seed(0)
    values, asked = torch.rand(5, 9).double() - 0.5, torch.randn(2, 9, dtype=torch.float64)
    values[:, 3:5] *= 1e-9  # a parameter of small gradients keeps its digits
    rows = rows_of(values, slice(0, 3), slice(3, 5), slice(5, 9))
    for columns in (slice(3, 5), [0, 1, 2, 5, 6, 7, 8], slice(0, 9)):
        queries = Queries(asked, columns)
        expected = values[:, columns] @ asked[:, columns].t()
        torch.testing.assert_close(rows.products(queries), expected, rtol=0, atol=0.02 * expected.abs().max())
        torch.testing.assert_close(rows.norms(columns), values[:, columns].norm(dim=1), rtol=0.02, atol=0)


def test_int8_query_without_finite_numbers() -> None:
    rows = rows_of(torch.ones(2, 4, dtype=torch.float64), slice(0, 4))
    asked = torch.tensor([[1.0, 0, 0, torch.nan], [torch.inf, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).double()
    found = rows.products(Queries(asked, slice(0, 4)))
    assert found[:, :2].isnan().all()
    assert found[:, 2].eq(0).all()
    torch.testing.assert_close(found[:, 3], torch.full((2,), 4.0).double(), rtol=1e-6, atol=0)


def test_whole_queries_use_all_digits() -> None:
    asked = torch.tensor([[1.0, -1.0, 2**-22]], dtype=torch.float64)
    whole = WholeQueries.of(asked)
    back = whole.products(torch.eye(3, dtype=torch.int8))
    torch.testing.assert_close(back.t(), asked, rtol=0, atol=0.501 / (127 * (1 + 256 + 256**2)))
    assert whole.digits.shape == (16, 3)
