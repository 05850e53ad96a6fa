"""Tensors from rank to rank: each arrives as it was sent, and a rank that waits is not held up for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from psgrad.engine.execution import rank_tensors

ARRAYS = {
    "scalar": torch.tensor(3.5),
    "none": torch.zeros(0, 4, dtype=torch.float64),
    "one of a stride": torch.from_numpy(np.arange(9)[2::7]),
    "none of a stride": torch.from_numpy(np.arange(2)[2::7]),
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "half": torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j]),
    "needs a gradient": torch.ones(2, requires_grad=True),
    "large": torch.randn(300_000, generator=torch.Generator().manual_seed(0)),
    "after it": torch.tensor([7], dtype=torch.int64),
}


class Wires:
    """In place of torch.distributed for ranks that are threads: what is on the way from rank to rank."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.own = threading.local()

    def send(self, value: torch.Tensor, to: int) -> None:
        assert value.numel()
        self.sent[self.own.rank, to].put(value.clone())

    def isend(self, value: torch.Tensor, to: int) -> Any:
        self.send(value, to)
        return SimpleNamespace(wait=lambda: None)

    def recv(self, value: torch.Tensor, source: int) -> None:
        arrived = self.sent[source, self.own.rank].get(timeout=20)
        assert (arrived.shape, arrived.dtype) == (value.shape, value.dtype)
        value.copy_(arrived)

    def run(self, size: int, work: Callable[[int], Any]) -> list[Any]:
        """What the work of each rank returns."""

        def as_rank(rank: int) -> Any:
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(as_rank, range(size)))


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    wires = Wires()
    monkeypatch.setattr(rank_tensors, "dist", wires)
    return wires


def assert_arrived(found: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(ARRAYS)
    for name, value in ARRAYS.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_tensors_arrive_as_they_were_sent_and_are_passed_on(wires: Wires) -> None:
    """Rank 0 sends to 2 and 1, which sends to 3."""

    def work(rank: int) -> dict[str, torch.Tensor]:
        if rank == 0:
            rank_tensors.send(ARRAYS, [2, 1])
            return ARRAYS
        return dict(rank_tensors.received(rank // 3, [3] if rank == 1 else []))

    for found in wires.run(4, work):
        assert_arrived(found)


def test_small_tensors_travel_together(wires: Wires) -> None:
    wires.own.rank = 0
    rank_tensors.send(ARRAYS, [1])
    # the number of bytes of the names, the names, small tensors, the large one, and what comes after it
    assert [len(value) for value in wires.sent[0, 1].queue][2:] == [83, 1_200_000, 8]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_gathers_the_tensors_of_all(wires: Wires, size: int) -> None:
    def own(rank: int) -> dict[str, torch.Tensor]:
        return ARRAYS if rank == 1 else {"rows": torch.full((rank, 3), rank), f"of {rank}": torch.zeros(0)}

    for every in wires.run(size, lambda rank: rank_tensors.gathered(own(rank), rank, size)):
        assert len(every) == size
        for rank, found in enumerate(every):
            if rank == 1:
                assert_arrived(found)
                continue
            assert found.keys() == {"rows", f"of {rank}"}
            assert torch.equal(found["rows"], torch.full((rank, 3), rank))


def test_failure_of_an_exchange_is_raised_here() -> None:
    def fails() -> None:
        raise RuntimeError("connection closed")

    with pytest.raises(RuntimeError, match="connection closed"):
        rank_tensors.watched(fails, lambda: None, 0.01)


def test_exchange_that_hangs_is_left_when_a_rank_is_dead() -> None:
    """A rank that is stopped keeps its connections."""
    ended, looks = threading.Event(), [0]

    def look() -> None:
        looks[0] += 1
        if looks[0] == 3:
            raise ValueError("rank 1 has sent no heartbeat")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no heartbeat"):
        rank_tensors.watched(lambda: hang(ended), look, 0.01)
    assert time.monotonic() - began < 5
    ended.set()


def hang(ended: threading.Event) -> Any:
    ended.wait(60)
