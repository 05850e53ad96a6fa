"""Prices grow with the work, and choices follow prices."""

from __future__ import annotations

import dataclasses

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


def test_matmul_cost_from_rates() -> None:
    """Half of the rate where one axis has the length `thin`."""
    on = dataclasses.replace(
        machine.machine(CPU), product=1e11, halves=3, thin=0, thin_inner=0, cached=1e10, streamed=1e10
    )
    for dtype, rate in ((torch.float32, 1e11), (torch.float64, 5e10), (torch.bfloat16, 3e11)):
        expected = on.call_seconds + 2 * 4000**3 / rate + 3 * 4000**2 * dtype.itemsize / 1e10
        assert on.matmul_seconds(1, 4000, 4000, 4000, dtype) == pytest.approx(expected, rel=1e-9)
    for thin in (dataclasses.replace(on, thin=2), dataclasses.replace(on, thin_inner=8)):
        sizes = (2, 4000, 8)
        added = thin.matmul_seconds(1, *sizes, torch.float32) - on.matmul_seconds(1, *sizes, torch.float32)
        assert added == pytest.approx(2 * 2 * 4000 * 8 / 1e11, rel=2e-3)


def test_memory_cost_by_size_of_result() -> None:
    on = dataclasses.replace(machine.machine(CPU), cached=1e10, streamed=1e9, cache=10**6, call_seconds=1e-6)
    assert on.stream_seconds(3e6, 1e6) == pytest.approx(1e-6 + 3e6 / 1e10)
    assert on.stream_seconds(3e6, 1e6 + 1) == pytest.approx(1e-6 + 3e6 / 1e9)
    assert on.stream_seconds(3e6) == on.stream_seconds(3e6, 1e6)


def test_machine_constants_by_device_and_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = machine.machine(CPU)
        assert machine.machine(CPU) is one  # prices are kept by machine
        torch.set_num_threads(2)
        two = machine.machine(CPU)
    finally:
        torch.set_num_threads(threads)
    assert (two.product, two.cached) == (2 * one.product, 2 * one.cached)


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


def test_norm_order_depends_on_machine() -> None:
    on, block = machine.machine(CPU), BLOCK_BYTES["cpu"]
    sizes = (1, 64, 256, 256, torch.float32, block)
    # where writing is dear: 2 * 64 * 64 numbers are less than 256 * 256
    dear = dataclasses.replace(on, cached=1e6, streamed=1e6)
    assert cheapest(norm_order_costs(dear, *sizes), block) == "gram"
    slow = dataclasses.replace(on, call_seconds=1.0)  # where each call is: there are fewer of them
    assert cheapest(norm_order_costs(slow, *sizes), block) == "materialise"
