"""Tensors from rank to rank: each arrives as it was sent, and a rank that waits is not held up for ever."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
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
    """In place of torch.distributed: what was sent to each rank."""

    def __init__(self) -> None:
        self.sent: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.rank = 1

    def send(self, value: torch.Tensor, to: int) -> None:
        assert value.numel()
        self.sent[to].append(value.clone())

    def recv(self, value: torch.Tensor, source: int) -> None:
        value.copy_(self.sent[self.rank].pop(0))


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    wires = Wires()
    monkeypatch.setattr(rank_tensors, "dist", wires)
    return wires


def test_tensors_arrive_as_they_were_sent_and_are_passed_on(wires: Wires) -> None:
    rank_tensors.send(ARRAYS, [1, 2])
    arrived = [dict(rank_tensors.received(0, onwards=[3]))]
    for wires.rank in (2, 3):
        arrived.append(dict(rank_tensors.received(0)))
    for found in arrived:
        assert list(found) == list(ARRAYS)
        for name, value in ARRAYS.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name


def test_small_tensors_travel_together(wires: Wires) -> None:
    rank_tensors.send(ARRAYS, [1])
    # the number of bytes of the names, the names, small tensors, the large one, and what comes after it
    assert [len(value) for value in wires.sent[1]][2:] == [83, 1_200_000, 8]


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
            raise ValueError("rank 1 has given no sign of life")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no sign of life"):
        rank_tensors.watched(lambda: hang(ended), look, 0.01)
    assert time.monotonic() - began < 5
    ended.set()


def hang(ended: threading.Event) -> Any:
    ended.wait(60)
