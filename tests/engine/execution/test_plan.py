"""The planner against what happens: memory beside the allocator's own count, and chunks beside budgets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import GPT, cnn, mlp, resnet
from psgrad.commands import plan
from psgrad.engine.execution.chunk_memory import measured_memory, peak_bytes
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.ragged import Block
from tests.device.strict_or_gpu import named_device
from tests.small_models import ARCHITECTURES, Architecture

# How far a counted peak may be off, as a share of the measured one.
MEMORY_BAR = 0.25


def allocated(way: Callable[[], Any], device: torch.device) -> int:
    """Bytes of tensors that a call has at its highest beyond what was there before, by PyTorch's
    allocator.
    """
    way()  # what is made once is no part of it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = way()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = way()  # noqa: F841 - alive until all is counted
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def bound(objective: Objective, how: Callable[..., Any], randomness: str = "error") -> Callable[..., Any]:
    def way(params: Any, inputs: Any, target: Any) -> Any:
        return how(objective.loss, params, inputs, target, has_aux=True, randomness=randomness)

    return way


def hold_peak_against_the_allocator(
    model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, how: Any, loss: Any, randomness: str
) -> None:
    device = target.device
    objective = Objective(model, loss)
    way = bound(objective, how, randomness)
    counted = peak_bytes(way, objective.params, inputs, target)
    measured = allocated(lambda: way(objective.params, inputs, target), device)
    assert abs(counted - measured) <= MEMORY_BAR * measured, (counted, measured)


PASSES = pytest.mark.parametrize(
    "how", [per_sample_square_norms, per_sample_gradients], ids=["norms", "kept"]
)


not_in_blocks = pytest.mark.skipif(
    named_device().type == "cuda", reason="a GPU's allocator gives each tensor a multiple of 512 bytes"
)


@not_in_blocks
@pytest.mark.every(2)
@PASSES
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_counted_memory_of_small_networks(
    architecture: Architecture, n: int, how: Any, device: torch.device
) -> None:
    inputs, target = architecture.batch(n)
    model = architecture.build().to(device)
    placed = tuple(x.to(device) for x in inputs), target.to(device)
    hold_peak_against_the_allocator(model, *placed, how, architecture.loss, architecture.randomness)


@pytest.mark.long
@pytest.mark.every(2)
@PASSES
@pytest.mark.parametrize(
    ("build", "draw", "n"),
    [
        (cnn, lambda n: (torch.randn(n, 1, 28, 28), torch.randint(10, (n,))), 1),
        (cnn, lambda n: (torch.randn(n, 1, 28, 28), torch.randint(10, (n,))), 32),
        (mlp, lambda n: (torch.randn(n, 784), torch.randint(10, (n,))), 128),
        (resnet, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(10, (n,))), 1),
        (resnet, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(10, (n,))), 8),
        (
            lambda: GPT(vocabulary=1024, positions=64),
            lambda n: (torch.randint(1024, (n, 64)), torch.randint(1024, (n, 64))),
            4,
        ),
    ],
    ids=["cnn-1", "cnn-32", "mlp-128", "resnet-1", "resnet-8", "gpt-4"],
)
def test_counted_memory_of_benchmark_networks(
    build: Any, draw: Any, n: int, how: Any, device: torch.device
) -> None:
    if device.type == "cuda" and build in (cnn, resnet):
        pytest.skip("the memory that cuDNN takes for a convolution is not predicted")
    inputs, target = (x.to(device) for x in draw(n))
    hold_peak_against_the_allocator(build().to(device), (inputs,), target, how, F.cross_entropy, "error")


def test_memory_with_random_operators_and_in_float64(device: torch.device) -> None:
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 5))
        .double()
        .to(device)
    )
    inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64, device=device)
    target = torch.randint(5, (4,), device=device)
    hold_peak_against_the_allocator(
        model, (inputs,), target, per_sample_square_norms, F.cross_entropy, "different"
    )


# -- The chunk -----------------------------------------------------------------------------------------------


@given(
    fixed=st.integers(0, 10**6),
    each=st.integers(1, 10**5),
    rows=st.integers(0, 100),
    budget=st.integers(0, 10**8),
    most=st.integers(1, 2000),
)
def test_the_largest_chunk_that_fits(fixed: int, each: int, rows: int, budget: int, most: int) -> None:
    asked: list[int] = []

    def at(n: int) -> int:
        asked.append(n)
        return size(n)

    def size(n: int) -> int:
        return fixed + (each + rows) * n

    chunk = measured_memory(at, 8, budget, most).rows_within(budget, most)
    assert 1 <= chunk <= most
    assert len(asked) <= 2
    assert chunk < 8 or size(chunk) <= budget
    if len(asked) == 2:
        assert chunk == most or size(chunk + 2) > budget


@given(block=st.integers(1, 10**6), each=st.integers(1, 10**5), budget=st.integers(10**5, 10**8))
def test_a_chunk_fits_where_memory_bends(block: int, each: int, budget: int) -> None:
    """Intermediates fill a block and then stop growing."""

    def size(n: int) -> int:
        return each * n + min(block, 4 * each * n)

    chunk = measured_memory(size, 8, budget, 1024).rows_within(budget, 1024)
    assert chunk < 8 or size(chunk) <= budget
    assert chunk == 1024 or size(5 * chunk + 8) > budget  # and is no small share of what would


# -- A run ---------------------------------------------------------------------------------------------------


def stream_of(model: nn.Module, inputs: Tensor, target: Tensor, **options: Any) -> Stream:
    objective = Objective(model, options.pop("loss", F.cross_entropy))

    def take(rows: Any) -> Any:
        assert rows[-1] < len(inputs), "a row beyond the first few is read"
        return Block((inputs,), target).take(rows)

    return Stream(objective.loss, objective.params, SimpleNamespace(take=take), **options)  # type: ignore[arg-type]


def test_plan_run_reads_first_rows_only(device: torch.device) -> None:
    stream = stream_of(
        mlp((20, 16, 7)).to(device), torch.randn(8, 20), torch.randint(7, (8,)), chunk_size=100
    )
    found = plan.plan_run(stream, 10**6)
    assert (found.rows, found.chunk_size) == (10**6, 100)
    assert found.replayed
    assert 0 < found.chunk_seconds < found.seconds
    assert [(p.parameter, p.terms, p.way, p.factored) for p in found.parameters] == [
        ("0.weight", "Product", "outer product", True),
        ("0.bias", "Dense", "direct", True),
        ("2.weight", "Product", "outer product", True),
        ("2.bias", "Dense", "direct", True),
    ]
    assert found.parameters[0].bytes == (20 + 16) * 4
    assert found.parameter_bytes == 4 * (20 * 16 + 16 + 16 * 7 + 7)


@pytest.mark.long
def test_memory_of_a_pass_is_flat_in_depth_where_blocks_run_again(device: torch.device) -> None:
    """Beyond what goes into each block, which is kept. benchmarks/depth.py measures a decoder of 4 to 48
    layers.
    """
    rows, tokens, width = 4, 64, 64

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    x = torch.randn(rows, tokens, width, device=device)
    beyond: dict[bool, list[int]] = {False: [], True: []}
    for layers in (4, 16):
        model = nn.Sequential(nn.Sequential(*[block() for _ in range(layers)])).to(device)
        recompute = Recompute(False)
        recompute.add(model)
        assert len(recompute.modules) == layers
        objective = Objective(model, F.mse_loss)
        way = bound(objective, per_sample_square_norms)
        for again in (False, True):
            recompute.on = again
            planned = peak_bytes(way, objective.params, (x,), x)
            measured = allocated(partial(way, objective.params, (x,), x), device)
            assert planned == pytest.approx(measured, rel=0.15)
            beyond[again].append(measured - layers * rows * tokens * width * 4)
    assert beyond[True][1] <= 1.1 * beyond[True][0]  # each block keeps a generator's state, 5 KB
    assert beyond[False][1] > 3 * beyond[False][0]


class Branching(nn.Module):
    """Takes one of two courses, as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if x.sum() > 0 else -x)


@not_in_blocks
def test_plan_of_a_loss_that_branches_on_data(device: torch.device) -> None:
    stream = stream_of(Branching().to(device), torch.randn(8, 20), torch.randint(7, (8,)), chunk_size=64)
    found = plan.plan_run(stream, 640)
    assert not found.replayed
    assert [p.way for p in found.parameters] == ["outer product", "direct"]
    way = bound(Objective(Branching().to(device), F.cross_entropy), per_sample_square_norms)
    inputs, target = stream.load(range(8))
    measured = allocated(lambda: way(stream.params, inputs, target), device)
    assert found.peak_bytes == pytest.approx(8 * measured, rel=MEMORY_BAR)
