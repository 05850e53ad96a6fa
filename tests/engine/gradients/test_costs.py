"""Prices grow with the work, choices follow prices, and a machine's constants come from where they are said
to come from.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.execution.machine_calibration import measure
from psgrad.engine.gradients import machine
from psgrad.engine.gradients.costs import Cost, Machine, cheapest, machine_of, norm_order_costs
from psgrad.engine.gradients.terms import BLOCK_BYTES, Convolution, Dense, Product, Rows
from psgrad.engine.transforms.rules.convolution_weights import Geometry
from psgrad.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own, and no override left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(machine.VARIABLE)
    machine.use(None)
    yield
    monkeypatch.undo()
    machine.use(None)


def as_json(on: Machine, **changes: Any) -> str:
    return json.dumps(on.to_json() | changes)


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
    on, shape = machine.built_in(CPU), [batch, rows, columns, inner]
    smaller = on.matmul_seconds(*shape, torch.float32)
    shape[axis] *= factor
    # a thin axis that grows is worked off at a better rate, which is measured in steps
    assert on.matmul_seconds(*shape, torch.float32) >= 0.7 * smaller


def test_matmul_cost_from_measured_rates() -> None:
    on = dataclasses.replace(
        machine.built_in(CPU), product={"float32": 1e11}, stream=((1e9, 1e10),), call_seconds=1e-6
    )
    for dtype, rate in (
        (torch.float32, 1e11),
        (torch.float64, 5e10),
        (torch.bfloat16, 1e11),
    ):  # of the last two nothing is known
        expected = 1e-6 + 2 * 4000**3 / rate + 3 * 4000**2 * dtype.itemsize / 1e10
        assert on.matmul_seconds(1, 4000, 4000, 4000, dtype) == pytest.approx(expected, rel=1e-6)
    thin = dataclasses.replace(on, thin_inner=(0.05, 1.0, 1.0, 1.0, 1.0))
    assert thin.matmul_seconds(1, 4000, 4000, 1, torch.float32) > on.matmul_seconds(
        1, 4000, 4000, 1, torch.float32
    )


def test_memory_cost_from_measured_rate() -> None:
    on = dataclasses.replace(machine.built_in(CPU), stream=((1e3, 1e9), (1e6, 1e10)), call_seconds=1e-6)
    assert on.stream_seconds(3e6, 1e6) == pytest.approx(1e-6 + 3e6 / 1e10)
    assert on.stream_seconds(3e9, 1e9) == pytest.approx(3e9 / 1e10, rel=1e-3)  # the last rate holds beyond
    assert on.bandwidth(10**4.5) == pytest.approx(10**9.5)  # halfway, in logarithms
    assert on.bandwidth(1) == 1e9


# -- Choices -------------------------------------------------------------------------------------------------


def test_cheapest_order_that_fits() -> None:
    ways = {"quick": Cost(1.0, 100), "slow": Cost(2.0, 10), "slower": Cost(3.0, 1)}
    assert cheapest(ways, 1000) == "quick"
    assert cheapest(ways, 99) == "slow"
    assert cheapest(ways, 0) == "quick"  # nothing fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_order_by_number_of_positions(dtype: torch.dtype) -> None:
    on = machine.built_in(CPU)

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
    term = Product(torch.ones(2, 1, 64, 256), torch.ones(2, 1, 64, 256))
    on = machine.built_in(CPU)
    machine.use(
        dataclasses.replace(on, stream=((1.0, 1e6),))
    )  # where writing is dear: 2 * 64 * 64 numbers are less than 256 * 256
    assert term.order() == "gram"
    machine.use(dataclasses.replace(on, call_seconds=1.0))  # where each call is: there are fewer of them
    assert term.order() == "materialise"
    assert term.describe() == "materialise"


def test_norm_order_of_every_term() -> None:
    index, rows = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, 4)
    geometry = Geometry([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for term in (
        Dense(torch.ones(2, 5)),
        Rows(index, rows, 7),
        Product(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 5)),
        Convolution(torch.ones(2, 1, 8, 4, 4), torch.ones(2, 1, 8, 6, 6), torch.Size((8, 8, 3, 3)), geometry),
    ):
        cost = term.order_costs()[term.describe()]
        assert cost.seconds > 0
        assert cost.bytes >= 0


# -- Machines ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_machine_measured_within_seconds() -> None:
    start = time.perf_counter()
    result = measure(CPU)
    assert time.perf_counter() - start < 30  # on a machine that does nothing else, 3
    assert result.origin == "measured"
    again = machine_of(json.loads(json.dumps(result.to_json())), "a file")
    assert again.to_json() == result.to_json() | {"origin": "a file"}
    assert result.product_rate(torch.float32) > result.product_rate(torch.float64) / 2
    assert 0 < result.call_seconds < 1e-3


def test_machine_cache_round_trip(tmp_path: Path) -> None:
    assert machine.machine(CPU).origin == "built in"
    assert not machine.is_known(CPU)
    measured = dataclasses.replace(machine.built_in(CPU), origin="measured", attention=0.123)
    path = machine.keep(measured, CPU)
    assert path is not None
    assert path.is_relative_to(tmp_path)
    assert machine.machine(CPU) is measured
    machine.use(None)  # as in another process
    assert machine.machine(CPU).attention == 0.123
    assert machine.machine(CPU).origin == str(path)
    assert machine.is_known(CPU)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "x"}', None])
def test_machine_cache_unreadable(text: str | None) -> None:
    path = machine.cache_file(CPU)
    path.parent.mkdir(parents=True)
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    assert machine.machine(CPU).origin == "built in"


def test_machine_cache_not_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "folder"))
    measured = dataclasses.replace(machine.built_in(CPU), origin="measured")
    assert machine.keep(measured, CPU) is None
    assert machine.machine(CPU) is measured


def test_machine_override_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.keep(dataclasses.replace(machine.built_in(CPU), attention=0.1), CPU)
    for name, attention in (("environment", 0.2), ("config", 0.3)):
        (tmp_path / f"{name}.json").write_text(as_json(machine.built_in(CPU), attention=attention))
    monkeypatch.setenv(machine.VARIABLE, str(tmp_path / "environment.json"))
    machine.use(None)
    assert machine.machine(CPU).attention == 0.2
    machine.use(tmp_path / "config.json")
    assert machine.machine(CPU).attention == 0.3
    machine.use(None)
    monkeypatch.setenv(machine.VARIABLE, "default")
    assert machine.machine(CPU).attention == machine.built_in(CPU).attention


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention": -1}, "'attention' holds -1"),
        ({"scattered": "fast"}, "'scattered' holds 'fast'"),
        ({"thin_rows": [1, 1]}, "'thin_rows' has 2 shares"),
        ({"product": {}}, "float32"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"pooling": None}, "'pooling' holds None"),
    ],
)
def test_machine_override_invalid(
    changes: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "machine.json").write_text(as_json(machine.built_in(CPU), **changes))
    monkeypatch.setenv(machine.VARIABLE, str(tmp_path / "machine.json"))
    with pytest.raises(ConfigError) as error:
        machine.machine(CPU)
    for said in (word, "PSGRAD_MACHINE", "next step"):
        assert said in str(error.value)


def test_machine_override_missing(tmp_path: Path) -> None:
    machine.use(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"engine.machine: .*nowhere.json can't be read"):
        machine.machine(CPU)
