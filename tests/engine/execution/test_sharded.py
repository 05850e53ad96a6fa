"""Weights of which each rank keeps a part: the numbers are those of weights in memory, bit for bit, whatever
ranks compute meanwhile; and a rank that dies ends the others with its name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from psgrad.engine.execution import sharded
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.sharded import WeightParts, shard
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InFile
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.errors import DistributedError, ModelError
from psgrad.models.checkpoints import load_into
from psgrad.models.in_files import built_without_memory, tensors_in_files
from tests.architectures import ARCHITECTURES
from tests.engine.execution.test_stored import CPU, found_by, in_file
from tests.engine.execution.thread_ranks import ThreadRank, by_ranks
from tests.forked_ranks import die, hasty, run_in_group
from tests.small_models import Architecture

DTYPES = (torch.float32, torch.float64)
CHOSEN = [
    "cnn",
    "unet-transposed",
    "torch-transformer",
    "mixture-of-experts",
    "lora",
    "tied-autoencoder",
    "rnn-packed",
    "graph-isomorphism",
    "siamese",
    "normalising-flow",
    "spectral-norm",
    "shared-layers",
]


@pytest.fixture(autouse=True)
def all_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "WHOLE_BELOW", 0)
    hasty(monkeypatch)


def in_parts(
    processes: Processes, model: nn.Module, dtype: torch.dtype, room: int = 4096
) -> tuple[nn.Module, WeightParts]:
    parts, supply = WeightParts(processes, range(processes.size)), Supply(CPU, room)
    model = place(shard(model, dtype, "as-saved", parts), CPU, dtype, "as-saved", supply)
    parts.serve("weights")
    return model, parts


def compare(processes: Processes, architecture: Architecture, dtype: torch.dtype, folder: Path) -> None:
    file = folder / f"{processes.rank}-{architecture.name}.safetensors"

    def build() -> nn.Module:
        return architecture.factory().eval()

    torch.manual_seed(0)
    resident = place(build(), CPU, dtype, "as-saved")
    model, parts = in_parts(processes, in_file(build, file), dtype)
    expected, found = (found_by(each, architecture, dtype) for each in (resident, model))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    if processes.rank:  # so that ranks never ask at the same time for the same weights
        found_by(model, architecture, dtype)
    if all(isinstance(each.data, Stored) for each in model.parameters()):
        assert parts.received > 0


def over_two_ranks(folder: Path, work: Callable[[Any], None]) -> None:
    ended = run_in_group(folder, 2, work)
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.err for rank in ended)


@pytest.mark.sweep
def test_weights_in_parts_give_the_numbers_of_weights_in_memory(tmp_path: Path) -> None:
    chosen = [each for each in ARCHITECTURES if each.name in CHOSEN]
    assert len(chosen) == len(CHOSEN)

    def work(group: Any) -> None:
        for architecture in chosen:
            for dtype in DTYPES:
                compare(group, architecture, dtype, tmp_path)

    over_two_ranks(tmp_path, work)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", range(0, len(ARCHITECTURES), 20))
def test_weights_of_all_networks_in_parts(first: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def work(group: Any) -> None:
        for architecture in ARCHITECTURES[first : first + 20]:
            compare(group, architecture, dtype, tmp_path)

    over_two_ranks(tmp_path, work)


# -- parts of one weight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (64, 6), (65, 2, 3)])
def test_each_view_of_a_weight_in_parts(ranks: int, shape: tuple[int, ...]) -> None:
    """Whole, sliced, transposed, and row by row; each rank keeps a part, and all parts are the weight."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1

    def work(rank: ThreadRank) -> int:
        parts = WeightParts(rank, range(ranks))
        own = parts.keep(whole, torch.float32)
        parts.serve("weights")
        weight = Stored(own, torch.float64, Supply(CPU, 1 << 20))
        for stored in (weight, Stored(own, torch.float64)):
            assert torch.equal(stored + 0, whole.double())
            if whole.dim() > 1:
                assert torch.equal(stored[1:, 1:].transpose(0, 1) + 0, whole[1:, 1:].transpose(0, 1).double())
                assert torch.equal(stored[-1] + 0, whole[-1].double())
        if whole.dim() == 2:
            ids = torch.tensor([[len(whole) - 1, 0], [0, len(whole) // 2]])
            fresh = Stored(own, torch.float64, Supply(CPU, 1 << 20))
            assert torch.equal(nn.functional.embedding(ids, fresh), whole.double()[ids])
            assert torch.equal(nn.functional.embedding(ids // 2, fresh[1:]), whole.double()[1:][ids // 2])
        assert own.own.untyped_storage().nbytes() == own.own.nbytes  # nothing else is kept
        return own.own.numel()

    kept = by_ranks(ranks, work)
    assert sum(kept) == whole.numel()
    assert max(kept) <= -(-whole.numel() // ranks) + (whole[0].numel() if whole.dim() > 1 else 0)


def test_weights_with_other_strides_in_parts() -> None:
    images = torch.randn(16, 3, 4, 4).to(memory_format=torch.channels_last)
    expanded = torch.randn(5, 1).expand(5, 4)

    def work(rank: ThreadRank) -> None:
        model = nn.ParameterDict(
            {"images": nn.Parameter(images), "matrix": nn.Parameter(torch.arange(12.0).reshape(3, 4).t())}
        )
        model["expanded"] = nn.Parameter(expanded)
        found, _ = in_parts(rank, model, torch.float32, 1 << 20)
        assert isinstance(found["images"].data, Stored)
        assert found["images"].stride() == images.stride()
        assert torch.equal(found["images"] + 0, images)
        assert torch.equal(found["matrix"] + 0, torch.arange(12.0).reshape(3, 4).t())
        assert not isinstance(found["expanded"].data, Stored)

    by_ranks(2, work)


def test_rows_of_a_table_come_alone() -> None:
    table = torch.randn(100, 8)

    def work(rank: ThreadRank) -> int:
        parts = WeightParts(rank, range(2))
        own = parts.keep(table, torch.float32)
        parts.serve("weights")
        ids = torch.tensor([3, 60, 3, 99, 50, 49])
        weight = Stored(own, torch.float32, Supply(CPU, 1 << 20))
        assert torch.equal(nn.functional.embedding(ids, weight), table[ids])
        return parts.received

    assert by_ranks(2, work) == [3 * 8 * 4, 2 * 8 * 4]  # rows 60, 99, 50, and 3, 49


def test_a_rank_reads_its_part_of_a_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.randn(64, 8), "b": torch.randn(33)}
    save_file(weights, tmp_path / "w.safetensors")
    read = list[int]()
    numbers = InFile._numbers

    def counted(file: InFile, first: int, count: int, pinned: bool = False) -> Tensor:
        read.append(count)
        return numbers(file, first, count, pinned)

    monkeypatch.setattr(InFile, "_numbers", counted)

    def work(rank: ThreadRank) -> None:
        model = nn.ParameterDict(tensors_in_files(tmp_path / "w.safetensors"))
        found, _ = in_parts(rank, model, torch.float32, 1 << 20)
        for name, value in weights.items():
            assert torch.equal(found[name] + 0, value)

    by_ranks(2, work)
    assert sorted(read) == [16, 17, 256, 256]


def test_ranks_with_other_weights_are_refused() -> None:
    def work(rank: ThreadRank) -> None:
        parts = WeightParts(rank, range(2))
        parts.keep(torch.ones(4), torch.float32)
        parts.serve(f"weights {rank.rank}")

    with pytest.raises(DistributedError, match="rank 1 has another model, or other weights, than rank 0"):
        by_ranks(2, work)


def test_a_written_weight_is_refused() -> None:
    def work(rank: ThreadRank) -> None:
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(8, 2))})
        found, _ = in_parts(rank, model, torch.float32)
        found["w"].data.mul_(2)

    with pytest.raises(ModelError, match="writes into an offloaded weight"):
        by_ranks(2, work)


# -- memory --------------------------------------------------------------------------------------------------


def anonymous_memory() -> int:
    """Bytes of this process that are no pages of files, without free places in its heap: a forked process
    fills those of its parent one after another, which is no use of memory.
    """
    with suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is used")
def test_a_rank_holds_its_share_of_the_weights_alone(tmp_path: Path) -> None:
    """256 MiB of weights in a file; each of two ranks has its 128 MiB and 8 MiB of weights in use."""
    size, layers = 1024, 64
    all_weights = 4 * size * size * layers
    file = tmp_path / "weights.safetensors"
    save_file({f"{number}.weight": torch.full((size, size), 1e-3) for number in range(layers)}, file)

    def work(group: Any) -> None:
        def build() -> nn.Module:
            return nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(layers)])

        most, bring = 0, Supply.bring

        def measured(supply: Supply, source: Any, view: Tensor) -> Tensor:
            nonlocal most
            found = bring(supply, source, view)
            most = max(most, anonymous_memory())
            return found

        Supply.bring = measured  # type: ignore[method-assign]
        x = torch.ones(2, size)
        assert float((x @ torch.ones(size, size)).sum())  # what libraries take at their first product
        before, tensors, model = anonymous_memory(), tensors_in_files(file), built_without_memory(build)
        assert model is not None
        assert tensors is not None
        load_into(model, tensors, file.name)
        model, parts = in_parts(group, model, torch.float32, 8 << 20)
        assert parts.kept == all_weights // 2
        objective = Objective(model, lambda output, target: (output - target).square().sum())
        loss, params = objective.loss, objective.params
        norms = per_sample_square_norms(loss, params, (x,), x, in_dims=(0, 0), has_aux=True)
        assert norms.square_norms().shape == (2,)
        print(most - before, flush=True)

    ended = run_in_group(tmp_path, 2, work)
    assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.err for rank in ended)
    for rank in ended:
        used = int(rank.out) - all_weights // 2
        # 64 MiB: free places in the parent's heap, which a part may fill, or which may stay beside it
        assert -(64 << 20) < used < (8 << 20) + (80 << 20), rank.out


# -- ranks that do other things ------------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_that_ask_in_other_orders_and_unequally_often(tmp_path: Path) -> None:
    """Three ranks at one time, each in an order of its own and reading ahead; one of them asks nothing."""
    weights = [torch.full((40, 50), float(number)) for number in range(12)]

    def work(group: Any) -> None:
        model = nn.ParameterList([nn.Parameter(each.clone()) for each in weights])
        found, parts = in_parts(group, model, torch.float32, 2 * weights[0].nbytes)
        if group.rank == 2:
            return
        order = torch.Generator().manual_seed(group.rank)
        for _ in range(20 * (1 + group.rank)):
            for number in torch.randperm(len(weights), generator=order).tolist():
                assert torch.equal(found[number] + 0, weights[number])
        assert parts.received > 20 * len(weights) * weights[0].nbytes / 3

    ended = run_in_group(tmp_path, 3, work)
    assert [rank.code for rank in ended] == [0, 0, 0], "\n".join(rank.err for rank in ended)


@pytest.mark.long
def test_a_rank_that_can_not_answer_ends_the_one_that_asks(tmp_path: Path) -> None:
    def work(group: Any) -> None:
        def answer(question: Tensor) -> Tensor:
            raise IndexError(f"no weight {int(question[1])}")

        requests = group.requests(range(2), answer)
        if group.rank == 0:
            with pytest.raises(DistributedError, match="rank 1 failed: IndexError: no weight 9"):
                requests.request({1: torch.tensor([0, 9])}, {1: torch.zeros(4, dtype=torch.uint8)})
            os._exit(7)
        time.sleep(3)

    first, _ = run_in_group(tmp_path, 2, work)
    assert first.code == 7, first.err
    assert first.seconds < 15


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["dies", "hangs", "fails"])
def test_a_rank_that_is_gone_ends_the_one_that_needs_its_part(tmp_path: Path, how: str) -> None:
    def work(group: Any) -> None:
        found, _ = in_parts(group, nn.ParameterList([torch.ones(400, 50)] * 2), torch.float32, 0)
        if group.rank == 1:
            (tmp_path / "process").write_text(str(os.getpid()))
            time.sleep(0.5)
            if how == "dies":
                die()
            elif how == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            group.fail("the disk is full")
            os._exit(3)
        words = "failed: the disk is full" if how == "fails" else "has sent no heartbeat"
        try:
            for turn in range(10**6):
                assert float((found[turn % 2] + 0).sum()) == 20_000
        except DistributedError as error:
            print(f"rank 1 {words}" in str(error), flush=True)
            if how == "hangs":
                os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
            os._exit(7)

    first, _ = run_in_group(tmp_path, 2, work)
    assert (first.code, first.out) == (7, "True\n"), first.err
    assert first.seconds < 15
