"""One private step by two processes is the step that one process takes: the same sums, and noise once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.distributed import SharedGenerator, paid_once, share_of, shared_source
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import private_sum

COUNT = 23
CLIPPING = Clipping.per_parameter(["weight", "bias"], 0.7)


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((params["weight"] @ x + params["bias"]).tanh() - y).square().sum()


def problem() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    params = {
        "weight": torch.randn(40, 7, dtype=torch.float64, generator=generator),
        "bias": torch.zeros(40, dtype=torch.float64),
    }
    x = torch.randn(COUNT, 7, dtype=torch.float64, generator=generator)
    return params, x, torch.randn(COUNT, 40, dtype=torch.float64, generator=generator)


def one_process(rank: int, folder: str) -> None:
    """What each of the processes does: a step of a drawn batch, then steps on nothing, for the noise."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    params, x, y = problem()
    generator = SharedGenerator(make_generator("aes") if rank == 0 else None)
    drawn = Sampling("poisson", sample_rate=0.6).draw(COUNT, generator)
    mine = torch.from_numpy(share_of(drawn))
    source = shared_source(batch_source(loss, params, x[mine], y[mine]))
    payments: list[str] = []
    pay = paid_once(lambda: payments.append("paid"))
    exact = private_sum(source, CLIPPING, Noise(0.0), "add_or_remove_one", generator, pay=pay)
    empty = shared_source(batch_source(loss, params, x[:0], y[:0]))
    noisy = private_sum(empty, CLIPPING, Noise(1.5), "add_or_remove_one", generator, pay=pay)

    def broken() -> None:
        raise OSError("the disk is full")

    refused = ""
    try:
        private_sum(empty, CLIPPING, Noise(1.5), "add_or_remove_one", generator, pay=paid_once(broken))
    except (OSError, RuntimeError) as error:
        refused = f"{type(error).__name__}: {error}"
    found = {
        "drawn": drawn,
        "exact": exact.sums,
        "norms": exact.records.norms,
        "noisy": noisy.sums,
        "payments": len(payments),
        "refused": refused,
        "secure": generator.secure,
    }
    torch.save(found, Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(one_process, (str(folder),), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(2)]  # our own file


@pytest.mark.sweep
def test_distributed_same_records_in_all_processes(found: list[dict[str, Any]]) -> None:
    assert found[0]["drawn"].tolist() == found[1]["drawn"].tolist()
    assert found[0]["secure"]
    assert found[1]["secure"]


@pytest.mark.long
def test_distributed_sum_equals_one_process(found: list[dict[str, Any]]) -> None:
    params, x, y = problem()
    drawn = torch.from_numpy(found[0]["drawn"])
    alone = batch_source(loss, params, x[drawn], y[drawn])(CLIPPING)
    for part in found:
        for name, value in alone.sums.items():
            torch.testing.assert_close(part["exact"][name], value, rtol=1e-12, atol=1e-12)
        assert part["norms"].sort().values.tolist() == pytest.approx(
            alone.records.norms.sort().values.tolist(), rel=1e-12
        )


@pytest.mark.long
def test_distributed_noise_added_once(found: list[dict[str, Any]]) -> None:
    first, second = (torch.cat([value.flatten() for value in part["noisy"].values()]) for part in found)
    assert torch.equal(first, second)
    # 320 draws: their standard deviation is within 20 % of 1.5 * 0.7 but once in 10^6; two draws, or halves
    # of one, would be 41 % off.
    assert first.std().item() == pytest.approx(1.5 * 0.7, rel=0.2)


@pytest.mark.long
def test_distributed_ledger_failure_stops_all(found: list[dict[str, Any]]) -> None:
    assert [part["payments"] for part in found] == [2, 0]
    assert found[0]["refused"] == "OSError: the disk is full"
    assert (
        found[1]["refused"]
        == "RuntimeError: the first process could not write the step into the ledger, so nothing is released"
    )
