"""Weights that the processes of a host have in memory once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from psgrad.commands.residence import share_weights
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.process_group import RankGroup
from psgrad.engine.execution.ranks import OneProcess
from tests.forked_ranks import run_in_group

PROCESSES = 4
_SIDE = 2048  # 16 MiB of float32


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_SIDE, _SIDE), nn.BatchNorm1d(_SIDE), nn.Linear(_SIDE, 3))


def _of_mapping(address: int) -> tuple[str, int]:
    """The file at an address of this process, and how many bytes of its mapping are this process's own."""
    name, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
            name = found[3] if inside else name
        elif inside and line.startswith("Anonymous"):
            return name, int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the memory is read from /proc")
@pytest.mark.parametrize("other", [False, True])
def test_weights_are_in_memory_once_for_all_processes_of_a_host(tmp_path: Path, other: bool) -> None:
    """A process that has other weights keeps them."""

    def work(group: RankGroup) -> None:
        seed = int(other and group.rank == 1)
        model, expected = share_weights(_model(seed), group), _model(seed)
        for value, wanted in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, wanted)
        found = {_of_mapping(value.data_ptr()) for value in model.state_dict().values()}
        if seed:
            assert not any("psgrad-" in file for file, _ in found)
            group.meet("written")
            return
        ((file, changed),) = found  # one mapping has them all
        assert file.endswith("(deleted)")
        assert changed == 0
        with torch.no_grad():
            model[0].weight.add_(group.rank)  # copies the pages of this process
        group.meet("written")
        assert torch.equal(model[0].weight, expected[0].weight + group.rank)

    ended = run_in_group(tmp_path, PROCESSES, work)
    assert [rank.code for rank in ended] == [0] * PROCESSES, ended


class First(OneProcess):
    """The first of two processes of a host, of which the other waits."""

    size = 2


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in model.state_dict().items()}


def test_tied_weights_stay_tied_and_views_stay_views() -> None:
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.b = nn.Linear(4, 4)
    model.b.weight = model.a.weight
    whole = torch.arange(8.0)
    model.register_buffer("first", whole[:4])
    model.register_buffer("second", whole[4:])
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    before = _addresses(model)
    share_weights(model, First())
    assert model.b.weight is model.a.weight
    model.first[0] = 5.0
    assert whole[0] == 5.0
    moved = {name for name, place in _addresses(model).items() if place != before[name]}
    assert moved == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert all(place % 64 == 0 for name, place in _addresses(model).items() if name in moved)


def test_frozen_weights_in_half_precision_are_shared_as_stored() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 5)
    expected = plain(x)
    place(model, torch.device("cpu"), torch.float32, "as-saved")
    before = model[0].weight.data_ptr()
    share_weights(model, First())
    assert model[0].weight.data_ptr() != before
    assert torch.equal(model(x), expected)


def test_a_process_keeps_its_weights_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))  # a file, where no folder can be made
    (tmp_path / "full").touch()
    model = nn.Linear(3, 2)
    before = _addresses(model)
    assert _addresses(share_weights(model, First())) == before


def test_a_process_alone_keeps_its_weights_where_they_are() -> None:
    model = nn.Linear(3, 2)
    before = _addresses(model)
    assert share_weights(model, OneProcess()) is model
    assert _addresses(model) == before
