"""Prices grow with the work, and choices follow prices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.gradients import machine
from psgrad.engine.gradients.costs import Cost, cheapest, norm_order_costs
from psgrad.engine.gradients.terms import BLOCK_BYTES, Product

CPU, GPU = torch.device("cpu"), torch.device("cuda")


# -- Prices --------------------------------------------------------------------------------------------------

sizes = st.integers(1, 3000)


@given(
    batch=st.integers(1, 64),
    rows=sizes,
    columns=sizes,
    inner=sizes,
    axis=st.integers(0, 3),
    factor=st.integers(2, 9),
)
def test_matmul_cost_grows_with_size(
    batch: int, rows: int, columns: int, inner: int, axis: int, factor: int
) -> None:
    on, shape = machine.machine(CPU), [batch, rows, columns, inner]
    smaller = on.matmul_seconds(*shape, torch.float32)
    shape[axis] *= factor
    assert on.matmul_seconds(*shape, torch.float32) >= smaller


# -- Choices -------------------------------------------------------------------------------------------------


def test_cheapest_order_that_fits() -> None:
    ways = {"quick": Cost(1.0, 100), "slow": Cost(2.0, 10), "slower": Cost(3.0, 1)}
    assert cheapest(ways, 1000) == "quick"
    assert cheapest(ways, 99) == "slow"
    assert cheapest(ways, 0) == "quick"  # nothing fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_order_by_number_of_positions(dtype: torch.dtype) -> None:
    on = machine.machine(CPU)

    def order(positions: int) -> str:
        return cheapest(
            norm_order_costs(on, 1, positions, 1024, 1024, dtype, BLOCK_BYTES["cpu"]), BLOCK_BYTES["cpu"]
        )

    assert (order(1), order(2), order(8), order(64), order(2048), order(8192)) == (
        "outer product",
        "gram",
        "gram",
        "gram",
        "materialise",
        "materialise",
    )


def test_norm_order_independent_of_chunk() -> None:
    for positions in (2, 16, 128):
        assert (
            len(
                {
                    Product(torch.ones(n, 1, positions, 64), torch.ones(n, 1, positions, 96)).order()
                    for n in (1, 3, 50)
                }
            )
            == 1
        )
