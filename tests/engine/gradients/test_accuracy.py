"""The engine's promise: the numbers of a one-sample loop, for every architecture, precision and chunk
size.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from psgrad.engine.gradients import PerSampleGradients, per_sample_square_norms, terms
from tests.engine.gradients.agreement import (
    SMALLEST_SHARE,
    TOLERANCES,
    assert_close,
    assert_vectors_close,
    flat,
    rows,
)
from tests.engine.transforms.test_architectures import Case
from tests.oracles import Gradients
from tests.small_models import ARCHITECTURES, Architecture

# Not a multiple of any chunk size but 1, so that each also ends with a smaller chunk.
SAMPLES = 34

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def draw_weights_and_vector(expected: Gradients, dtype: torch.dtype) -> tuple[Tensor, Gradients]:
    """Weights [n] in 0..1, such as clipping gives, and a random vector of the parameters' shapes."""
    some = next(iter(expected.values()))
    weights = torch.rand(len(some), dtype=dtype, device=some.device)
    return weights, {name: torch.randn_like(gradient[0], dtype=dtype) for name, gradient in expected.items()}


def assert_queries_agree(
    grads: PerSampleGradients, expected: Gradients, weights: Tensor, vector: Gradients, tolerance: float
) -> None:
    """Hold every query against the materialised float64 gradients `expected`, name -> [n, *shape].

    An error is relative to the quantity itself; for a dot product to the sum of the absolute products, as its
    terms cancel.
    """
    every, direction = flat(expected), flat({name: value.double()[None] for name, value in vector.items()})[0]
    whole = every.norm(dim=1)
    assert_close("norms", grads.square_norms().sqrt(), whole, whole, tolerance)

    norms = {name: rows(gradient).norm(dim=1) for name, gradient in expected.items()}
    found = grads.square_norms(per="parameter")
    assert found.keys() == norms.keys()
    for name, norm in norms.items():
        scale = torch.maximum(norm, SMALLEST_SHARE * whole)
        assert_close(f"norm of {name}", found[name].sqrt(), norm, scale, tolerance)

    assert_close("dot", grads.dot(vector), every @ direction, every.abs() @ direction.abs(), tolerance)
    assert_vectors_close("materialised", grads.materialise(), expected, whole, tolerance)

    sums = {
        name: torch.einsum("n,n...->...", weights.double(), gradient)[None]
        for name, gradient in expected.items()
    }
    summed = {name: value[None] for name, value in grads.weighted_sum(weights).items()}
    assert_vectors_close("weighted sum", summed, sums, flat(sums).norm(dim=1), tolerance)


@pytest.mark.long
@each_architecture
@each_dtype
def test_queries_equal_the_loop(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    case = Case.of(architecture, SAMPLES, dtype, device)
    expected = case.exact().by_loop()
    weights, vector = draw_weights_and_vector(expected, dtype)
    for chunk_size in (1, 3, 32, SAMPLES):
        for start in range(0, SAMPLES, chunk_size):
            part = slice(start, start + chunk_size)
            chunk = replace(case, inputs=tuple(x[part] for x in case.inputs), target=case.target[part])
            own = {name: gradient[part] for name, gradient in expected.items()}
            assert_queries_agree(chunk.deferred(), own, weights[part], vector, TOLERANCES[dtype])


@each_architecture
@each_dtype
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
    case = Case.of(architecture, 7, dtype, device)
    expected = case.exact().by_loop()
    weights, vector = draw_weights_and_vector(expected, dtype)
    assert_queries_agree(case.deferred(), expected, weights, vector, TOLERANCES[dtype])


@each_architecture
def test_per_sample_square_norms_and_losses_equal_those_of_gradients(
    architecture: Architecture, device: torch.device
) -> None:
    """per_sample_square_norms contracts each gradient in the backward pass: each must be complete by then,
    shared weights too.
    """
    case = Case.of(architecture, 5, torch.float64, device)
    objective = case.objective
    alone = per_sample_square_norms(objective.loss, objective.params, case.inputs, case.target, has_aux=True)
    grads = case.deferred()
    torch.testing.assert_close(
        alone.square_norms("parameter"), grads.square_norms("parameter"), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(alone.square_norms("module"), grads.square_norms("module"), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone.square_norms(), grads.square_norms(), rtol=1e-12, atol=0)
    torch.testing.assert_close(alone.losses, grads.losses, rtol=0, atol=0)
    assert alone.describe() == grads.describe()
    outputs = zip(case.model(*case.inputs), case.target, strict=True)
    losses = torch.stack([architecture.loss(output, wanted) for output, wanted in outputs])
    torch.testing.assert_close(grads.losses, losses.detach(), rtol=1e-10, atol=0)


@each_architecture
def test_per_sample_gradients_leave_the_model(architecture: Architecture, device: torch.device) -> None:
    case = Case.of(architecture, 2, torch.float32, device)
    before = copy.deepcopy(case.model.state_dict())
    case.deferred().materialise()
    torch.testing.assert_close(case.model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in case.model.parameters())


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
