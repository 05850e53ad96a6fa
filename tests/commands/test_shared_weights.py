"""Weights that the processes of a host have in memory once."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psgrad.commands import loaded_parts, residence
from psgrad.commands.loaded_parts import Trained, load
from psgrad.commands.residence import share_weights
from psgrad.config import load_config
from psgrad.engine.execution.placement import place
from psgrad.run.host_files import shared_on_host, turn
from tests.workplace import Workplace

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


def _share(rank: int, answers: Any, go_on: Any) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    torch.set_num_threads(1)
    with shared_on_host("a run", removes=False):
        model = share_weights(_model())
        go_on.wait()  # all have mapped the file, and it is gone
        expected = _model()
        same = all(
            torch.equal(a, b)
            for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
        )
        found = {_of_mapping(value.data_ptr()) for value in model.state_dict().values()}
        with torch.no_grad():
            model[0].weight.add_(rank)  # copies the pages of this process
        go_on.wait()
        answers.put((same, torch.equal(model[0].weight, expected[0].weight + rank), found))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the memory is read from /proc")
def test_weights_are_in_memory_once_for_all_processes_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    go_on = context.Barrier(PROCESSES)
    ranks = [context.Process(target=_share, args=(rank, answers, go_on)) for rank in range(PROCESSES)]
    for rank in ranks:
        rank.start()
    files = set()
    for same, own_pages, found in (answers.get(timeout=60) for _ in ranks):
        assert same
        assert own_pages
        assert len(found) == 1, found  # one mapping has them all
        ((file, changed),) = found
        assert changed == 0
        files.add(file)
    assert len(files) == 1
    assert files.pop().endswith("(deleted)")
    for rank in ranks:
        rank.join()
    (folder,) = tmp_path.iterdir()
    assert [each for each in folder.iterdir() if not each.name.endswith(".turn")] == []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host whose second process has not come yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with shared_on_host("a run", removes=True):
        (folder,) = tmp_path.iterdir()
        yield folder


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in model.state_dict().items()}


def test_tied_weights_stay_tied_and_views_stay_views(shared: Path) -> None:
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.b = nn.Linear(4, 4)
    model.b.weight = model.a.weight
    whole = torch.arange(8.0)
    model.register_buffer("first", whole[:4])
    model.register_buffer("second", whole[4:])
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    before = _addresses(model)
    share_weights(model)
    assert model.b.weight is model.a.weight
    model.first[0] = 5.0
    assert whole[0] == 5.0
    moved = {name for name, place in _addresses(model).items() if place != before[name]}
    assert moved == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert all(place % 64 == 0 for name, place in _addresses(model).items() if name in moved)


def test_frozen_weights_in_half_precision_are_shared_as_stored(shared: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 5)
    expected = plain(x)
    place(model, torch.device("cpu"), torch.float32, "as-saved")
    before = model[0].weight.data_ptr()
    share_weights(model)
    assert model[0].weight.data_ptr() != before
    assert torch.equal(model(x), expected)


def test_a_process_keeps_its_weights_where_the_disk_is_full(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(residence, "_write", full)
    model = nn.Linear(3, 2)
    before = _addresses(model)
    assert _addresses(share_weights(model)) == before


def test_other_weights_are_another_file(shared: Path) -> None:
    share_weights(nn.Linear(3, 2))
    share_weights(nn.Linear(3, 2))
    assert len([each for each in shared.iterdir() if not each.suffix]) == 2


def test_a_process_alone_keeps_its_weights_where_they_are() -> None:
    model = nn.Linear(3, 2)
    before = _addresses(model)
    assert share_weights(model) is model
    assert _addresses(model) == before


def _take_turn(most: int, inside: Any, together: Any, seen: Any) -> None:
    with shared_on_host("a run", removes=False), turn("model", most):
        with inside.get_lock():
            inside.value += 1
            seen.put(inside.value)
        together.wait(timeout=20)  # so many are inside at the same time
        with inside.get_lock():
            inside.value -= 1


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_processes_of_a_host_have_their_turn_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    inside: Any = context.Value("i", 0)
    together = context.Barrier(most)
    seen: Any = context.Queue()
    ranks = [context.Process(target=_take_turn, args=(most, inside, together, seen)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    found = [seen.get(timeout=30) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert max(found) == most


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the memory is read from /proc")
def test_model_of_a_config_and_those_of_its_checkpoints_are_shared(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(workplace.folder))
    workplace.refused(2, "", options=("--part", "0/1"))  # which writes the config
    with shared_on_host("a run", removes=True):
        loaded = load(load_config(workplace.folder / "config.yaml"), trained=Trained(None, "parameters"))
        other = loaded.placed(_model())
        for model in (loaded.model, other):
            files = {_of_mapping(value.data_ptr())[0] for value in model.parameters()}
            assert len(files) == 1
            assert "psgrad-" in files.pop()


def test_model_of_a_config_is_read_in_turn(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes at a time, where there is no memory for more."""
    monkeypatch.setattr("tempfile.tempdir", str(workplace.folder))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(residence, "free_host_memory", lambda: 0)
    workplace.refused(2, "", options=("--part", "0/1"))  # which writes the config
    read, held = loaded_parts.load_model, []

    def load_model(*arguments: Any, **options: Any) -> Any:
        (turn,) = workplace.folder.glob("psgrad-*/model-*.turn")
        with turn.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(turn)
        return read(*arguments, **options)

    monkeypatch.setattr(loaded_parts, "load_model", load_model)
    with shared_on_host("a run", removes=True):
        load(load_config(workplace.folder / "config.yaml"), trained=Trained(None, "parameters"))
    assert held
