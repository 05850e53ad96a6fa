"""Where weights live, by the size of the model's files, the free memory and the processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import nn

from psgrad.commands import residence
from psgrad.commands.loaded_parts import pick_device
from psgrad.commands.residence import Ranks, Residence, residence_of
from psgrad.config import load_config
from psgrad.engine.execution.ranks import OneProcess
from psgrad.errors import ConfigError
from tests.workplace import Workplace

CPU = torch.device("cpu")
ONE, HOST, HOSTS = (Ranks(OneProcess(), count, min(count, 8)) for count in (1, 8, 32))


def where(
    place: Workplace, patch: pytest.MonkeyPatch, share: float, ranks: Ranks, **engine: Any
) -> Residence:
    """Of a model whose files take so many times the free memory of a process."""
    place.config["engine"] = engine
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    config = load_config(place.folder / "config.yaml")
    size = residence.weight_bytes(config.model, config.base)
    patch.setattr(residence, "free_memory", lambda device: round(size / share))
    return residence_of(config, CPU, ranks)


@pytest.mark.parametrize(
    ("share", "ranks", "engine", "expected"),
    [
        (0.4, HOSTS, {}, ("resident", 1)),
        (0.4, HOSTS, {"parameters": "offloaded"}, ("offloaded", 1)),
        (0.4, HOSTS, {"parameters": "sharded"}, ("sharded", 8)),
        (3.0, ONE, {}, ("offloaded", 1)),
        (3.0, HOST, {}, ("sharded", 8)),
        (3.0, HOSTS, {}, ("sharded", 8)),
        (10.0, HOST, {}, ("offloaded", 1)),  # parts that are too large
        (10.0, HOSTS, {}, ("sharded", 32)),
        (100.0, HOSTS, {}, ("offloaded", 1)),
        (100.0, HOSTS, {"parameters": "sharded"}, ("sharded", 32)),
        (3.0, HOSTS, {"shard_ranks": 16}, ("sharded", 16)),
        (3.0, ONE, {"parameters": "sharded"}, ("offloaded", 1)),
        (3.0, ONE, {"parameters": "sharded", "shard_ranks": 2}, ("offloaded", 1)),
        (3.0, HOSTS, {"parameters": "resident"}, ("resident", 1)),
    ],
)
def test_where_weights_live(
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    ranks: Ranks,
    engine: dict[str, Any],
    expected: tuple[str, int],
) -> None:
    found = where(workplace, monkeypatch, share, ranks, **engine)
    assert (found.where, found.shard_ranks) == expected


def test_groups_that_do_not_divide_the_ranks(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine\.shard_ranks: 5, and there are 32 ranks"):
        where(workplace, monkeypatch, 3.0, HOSTS, parameters="sharded", shard_ranks=5)


def test_groups_of_ranks_stand_side_by_side() -> None:
    of_two = Residence("", room=1, shard_ranks=2)
    assert [of_two.ranks(rank) for rank in range(4)] == [range(2), range(2), range(2, 4), range(2, 4)]


def test_weights_in_use_take_as_much_as_a_part() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(20)])  # 400 bytes each, 8,000 in all
    for room, ranks, automatic, expected in (
        (10**6, 2, True, 4000),
        (10**6, 16, True, 800),  # two weights
        (600, 2, True, 600),
        (10**6, 2, False, 10**6),
        (10**6, 1, True, 10**6),
    ):
        found = Residence("", room, ranks).supplied(model, CPU, automatic)
        assert found.supply is not None
        assert found.supply.budget == expected


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("auto", "3", "cuda:3"),
        ("cuda", "3", "cuda:3"),
        ("cuda", "9", "cuda:1"),  # of more processes than GPUs
        ("cuda:2", "3", "cuda:2"),
        ("cpu", "3", "cpu"),
        ("auto", None, "cuda"),
    ],
)
def test_process_takes_the_gpu_of_its_own_number(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert str(pick_device(name)) == expected
