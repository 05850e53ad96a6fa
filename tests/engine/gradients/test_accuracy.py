"""The engine's promise: the numbers of a one-sample loop, for every architecture, precision and chunk
size.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_square_norms, terms
from tests.engine.gradients.agreement import (
    TOLERANCES,
    answers,
    assert_answers_agree,
    deferred_gradients,
    draw_weights_and_vector,
    joined,
)
from tests.oracles import one_sample_gradients
from tests.small_models import ARCHITECTURES, Architecture

# Not a multiple of any chunk size but 1, so that each also ends with a smaller chunk.
SAMPLES = 34


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_queries_equal_the_loop(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    model = architecture.build(dtype=dtype).to(device)
    inputs, target = architecture.batch(SAMPLES, dtype=dtype)
    inputs, target = tuple(value.to(device) for value in inputs), target.to(device)

    # The loop runs in float64 on the same weights and inputs, so that all of the error is the engine's own.
    exact_inputs = tuple(value.double() if value.is_floating_point() else value for value in inputs)
    expected = one_sample_gradients(copy.deepcopy(model).double(), architecture.loss, exact_inputs, target)
    weights, vector = draw_weights_and_vector(expected, dtype)

    for chunk_size in (1, 3, 32, SAMPLES):
        chunks = []
        for start in range(0, SAMPLES, chunk_size):
            rows = slice(start, start + chunk_size)
            grads = deferred_gradients(
                model, architecture.loss, tuple(value[rows] for value in inputs), target[rows]
            )
            chunks.append(answers(grads, weights[rows], vector))
        assert_answers_agree(joined(chunks), expected, weights, vector, TOLERANCES[dtype])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("block_bytes", [1, 30_000])
def test_queries_in_blocks_of_samples(
    architecture: Architecture,
    dtype: torch.dtype,
    block_bytes: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of one sample, and blocks of a few: the test models are too small to need any by themselves."""
    monkeypatch.setitem(terms.BLOCK_BYTES, device.type, block_bytes)
    model = architecture.build(dtype=dtype).to(device)
    inputs, target = architecture.batch(7, dtype=dtype)
    inputs, target = tuple(value.to(device) for value in inputs), target.to(device)
    exact_inputs = tuple(value.double() if value.is_floating_point() else value for value in inputs)
    expected = one_sample_gradients(copy.deepcopy(model).double(), architecture.loss, exact_inputs, target)
    weights, vector = draw_weights_and_vector(expected, dtype)
    grads = deferred_gradients(model, architecture.loss, inputs, target)
    assert_answers_agree(answers(grads, weights, vector), expected, weights, vector, TOLERANCES[dtype])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_per_sample_square_norms_equal_those_of_gradients(
    architecture: Architecture, device: torch.device
) -> None:
    """per_sample_square_norms contracts each gradient in the backward pass: each must be complete by then,
    shared weights too.
    """
    model = architecture.build(dtype=torch.float64).to(device)
    inputs, target = architecture.batch(5, dtype=torch.float64)
    inputs, target = tuple(value.to(device) for value in inputs), target.to(device)
    objective = Objective(model, architecture.loss)
    alone = per_sample_square_norms(objective.loss, objective.params, inputs, target, has_aux=True)
    grads = deferred_gradients(model, architecture.loss, inputs, target)
    torch.testing.assert_close(
        alone.square_norms("parameter"), grads.square_norms("parameter"), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(alone.square_norms("module"), grads.square_norms("module"), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone.square_norms(), grads.square_norms(), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone.losses, grads.losses, rtol=0, atol=0)
    assert alone.describe() == grads.describe()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_per_sample_gradients_leave_the_model(architecture: Architecture, device: torch.device) -> None:
    model = architecture.build().to(device)
    before = copy.deepcopy(model.state_dict())
    inputs, target = architecture.batch(2)
    deferred_gradients(
        model, architecture.loss, tuple(value.to(device) for value in inputs), target.to(device)
    ).materialise()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_per_sample_losses(architecture: Architecture, device: torch.device) -> None:
    model = architecture.build(dtype=torch.float64).to(device)
    inputs, target = architecture.batch(5, dtype=torch.float64)
    inputs, target = tuple(value.to(device) for value in inputs), target.to(device)
    outputs = model(*inputs)
    expected = torch.stack(
        [architecture.loss(output, wanted) for output, wanted in zip(outputs, target, strict=True)]
    )
    grads = deferred_gradients(model, architecture.loss, inputs, target)
    torch.testing.assert_close(grads.losses, expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("positions", [(), (5,)], ids=["vectors", "sequences"])
def test_per_sample_gradients_zero_times_infinity(positions: tuple[int, ...]) -> None:
    """As plain autograd has it: neither zero nor infinity."""
    x, k, weight = torch.randn(4, 6, *positions), torch.randn(4, 3, *positions), torch.randn(3, 6)
    x[1], k[1] = 0, math.inf
    x[2] = 0
    norms = per_sample_square_norms(
        lambda p, x, k: ((p["weight"] @ x) * k).sum(), {"weight": weight}, x, k
    ).square_norms()
    expected = torch.einsum("no...,ni...->noi", k, x).flatten(1).double().square().sum(1)
    assert norms.isnan().tolist() == expected.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("positions", [1, 2])
def test_square_norms_of_a_small_layer_out_of_the_range_of_float32(positions: int) -> None:
    """A value that underflows to zero, and one that overflows, beside an ordinary one."""
    weight = torch.randn(3, 4)
    x = torch.randn(3, positions, 4) * torch.tensor([1e-28, 1.0, 1e30])[:, None, None]
    scale = torch.tensor([1e-25, 1.0, 1e15])

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.linear(x, params["weight"]) * scale).sum()

    found = per_sample_square_norms(loss, {"weight": weight}, x, scale).square_norms()
    exact = 3 * (x.double().sum(1) * scale.double()[:, None]).square().sum(1)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
