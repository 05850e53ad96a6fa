"""Clipped sums of the five networks, beside a loop over records in float64 and beside Opacus."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import ClippedSum, batch_source, stream_source
from psgrad.engine.privacy.clipping import MARGIN, Clipping
from tests.engine.privacy.clipped_loop import (
    Batch,
    clipped_loop,
    distance,
    gradients_of,
    group_norms,
    median_norm,
)
from tests.oracles import Gradients
from tests.small_models import ARCHITECTURES, Architecture

pytestmark = pytest.mark.usefixtures("on_device")

RECORDS = 9
GROUPINGS: dict[str, Callable[..., Clipping]] = {
    "flat": Clipping.flat,
    "per layer": Clipping.per_layer,
    "per parameter": Clipping.per_parameter,
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


@pytest.fixture(params=ARCHITECTURES, ids=lambda each: each.name)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return request.param  # type: ignore[no-any-return]


def sum_of(
    architecture: Architecture, model: nn.Module, batch: Batch, clipping: Clipping, **options: Any
) -> ClippedSum:
    objective = Objective(model, architecture.loss, autocast=options.pop("autocast", None))
    return batch_source(objective.loss, objective.params, *batch, has_aux=True, **options)(clipping)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_clipped_sum_equals_the_loop(architecture: Architecture, dtype: torch.dtype) -> None:
    model, batch = architecture.build(dtype=dtype), architecture.batch(RECORDS, dtype=dtype)
    gradients = gradients_of(architecture, model, batch)
    for grouping in GROUPINGS.values():
        clipping = grouping(gradients, median_norm(gradients))
        expected = clipped_loop(gradients, clipping)
        result = sum_of(architecture, model, batch, clipping)
        assert distance(result.sums, expected) <= TOLERANCE[dtype] * distance(expected)
        assert {value.dtype for value in result.sums.values()} == {torch.float64}
        assert (result.records.factors < 1).any()
        assert (result.records.factors > 0.99).any()


def test_clipped_sum_automatic_clipping(architecture: Architecture) -> None:
    model, batch = architecture.build(dtype=torch.float64), architecture.batch(RECORDS, dtype=torch.float64)
    gradients = gradients_of(architecture, model, batch)
    norms = torch.cat([value.flatten(1) for value in gradients.values()], 1).norm(dim=1)
    weights = 0.3 * (1 - MARGIN) / (norms + 0.01)
    result = sum_of(architecture, model, batch, Clipping.flat(gradients, 0.3, rule="automatic"))
    expected = {name: torch.einsum("n,n...->...", weights, value) for name, value in gradients.items()}
    assert distance(result.sums, expected) <= 1e-9 * distance(expected)
    torch.testing.assert_close(result.records.factors[:, 0], weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.records.norms, norms, rtol=1e-10, atol=0)


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_clipped_sum_independent_of_order_and_chunks(architecture: Architecture, dtype: torch.dtype) -> None:
    model, (inputs, target) = architecture.build(dtype=dtype), architecture.batch(RECORDS, dtype=dtype)
    objective = Objective(model, architecture.loss)
    clipping = Clipping.per_layer(objective.params, 0.4)
    whole = sum_of(architecture, model, (inputs, target), clipping)
    order = torch.arange(RECORDS).flip(0)
    turned = sum_of(architecture, model, (tuple(value[order] for value in inputs), target[order]), clipping)
    assert distance(turned.sums, whole.sums) <= TOLERANCE[dtype] * distance(whole.sums)
    torch.testing.assert_close(
        turned.records.norms[order.to(turned.records.norms.device)], whole.records.norms
    )
    for chunk_size in (1, 2, 4, "auto"):
        stream = Stream(
            objective.loss,
            objective.params,
            Block(tuple(inputs), target),
            chunk_size=chunk_size,  # type: ignore[arg-type]
        )
        result = stream_source(stream, RECORDS)(clipping)
        assert distance(result.sums, whole.sums) <= TOLERANCE[dtype] * distance(whole.sums)
        for name in ("norms", "losses", "factors", "below"):
            torch.testing.assert_close(
                getattr(result.records, name), getattr(whole.records, name), rtol=1e-5, atol=1e-8
            )


# -- Opacus --------------------------------------------------------------------------------------------------

# Opacus has no gradient for ViT's class token and positions, which are plain parameters, and takes the
# positions of GPT for samples: these two get their per-sample gradients from the loop, and Opacus clips them.
HAS_A_GRADIENT = ("cnn", "mlp", "resnet")


@pytest.fixture
def opacus() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip(
            "opacus",
            reason="Opacus, the other implementation that clipped sums are held against, is not installed",
        )


def of_opacus(
    architecture: Architecture, model: nn.Module, batch: Batch, gradients: Gradients, bounds: list[float]
) -> dict[str, Tensor]:
    """Opacus's clipped sums, in one group where there is one bound, else with a bound for each parameter."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

    inputs, target = batch
    parameters = dict(model.named_parameters())
    if architecture.name in HAS_A_GRADIENT:
        wrapped = GradSampleModule(model.train(), loss_reduction="sum")
        output = wrapped(*inputs)
        torch.stack(
            [architecture.loss(one, its) for one, its in zip(output, target, strict=True)]
        ).sum().backward()
    else:
        for name, parameter in parameters.items():
            parameter.grad_sample = gradients[name].to(parameter.dtype)  # type: ignore[attr-defined]
    kind, bound = (DPOptimizer, bounds[0]) if len(bounds) == 1 else (DPPerLayerOptimizer, bounds)
    sgd = torch.optim.SGD(parameters.values(), lr=0.0)
    optimizer = kind(
        sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=RECORDS, loss_reduction="sum"
    )
    optimizer.clip_and_accumulate()
    return {name: parameter.summed_grad for name, parameter in parameters.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("grouping", ["flat", "per parameter"])
def test_clipped_sum_equals_opacus(architecture: Architecture, grouping: str, opacus: Any) -> None:
    model, batch = architecture.build(), architecture.batch(RECORDS)
    gradients = gradients_of(architecture, model, batch)
    clipping = GROUPINGS[grouping](gradients, median_norm(gradients))
    result = sum_of(architecture, model, batch, clipping)
    expected = of_opacus(
        architecture, architecture.build(), batch, gradients, [group.bound for group in clipping.groups]
    )
    assert distance(result.sums, expected) <= 1e-5 * distance(expected)


# -- the bound -----------------------------------------------------------------------------------------------

SCALES = [0.0, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e38, float("nan"), float("inf")]
KINDS = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.float32, torch.bfloat16),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", list(KINDS))
def test_clipped_sum_bound_at_every_scale(
    architecture: Architecture, kind: str, request: pytest.FixtureRequest
) -> None:
    """Without any tolerance. bfloat16 is mixed precision: the factors of gradients are in halves, the weights
    may not be.
    """
    dtype, autocast = KINDS[kind]
    if autocast is not None:
        request.getfixturevalue("device_with_autocast")
    model, (inputs, target) = architecture.build(dtype=dtype), architecture.batch(len(SCALES), dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    automatic = Clipping.per_parameter(names, 1.0, rule="automatic")
    clippings = [Clipping.flat(names, 0.001), automatic, Clipping.per_layer(names, 0.1)]
    for place, scale in enumerate(SCALES):
        objective = Objective(model, lambda *both, s=scale: architecture.loss(*both) * s, autocast=autocast)
        clipping, record = clippings[place % len(clippings)], slice(place, place + 1)
        source = batch_source(
            objective.loss, objective.params, tuple(x[record] for x in inputs), target[record], has_aux=True
        )
        result = source(clipping)
        norms = group_norms(result.sums, clipping)
        assert all(norm <= group.bound for norm, group in zip(norms, clipping.groups, strict=True))
        if 1e20 <= scale <= 1e30:  # and it is clipped to the bound, not to nothing
            assert norms[0] >= 0.999999 * clipping.groups[0].bound


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("positions", [16, 64, 256])
def test_clipped_sum_bound_with_rounding(positions: int) -> None:
    """The worst that was found: inputs and cotangents that are one number each, whose products all err to the
    same side.
    """
    params = {"w": torch.randn(512, 512), "table": torch.randn(2000, 16)}
    clipping, same = Clipping.per_parameter(params, 1e-3), torch.zeros(1, positions, dtype=torch.int64)
    for number in torch.rand(8) + 0.1:

        def loss(params: dict[str, Tensor], x: Tensor, index: Tensor, k: float = float(number)) -> Tensor:
            return ((x @ params["w"].t()).sum() + nn.functional.embedding(index, params["table"]).sum()) * k

        sums = batch_source(loss, params, torch.full((1, positions, 512), float(torch.rand(()))), same)(
            clipping
        ).sums
        assert all(
            norm <= group.bound * (1 + 2**-18)
            for norm, group in zip(group_norms(sums, clipping), clipping.groups, strict=True)
        )


@pytest.mark.usefixtures("device_with_autocast")
def test_clipped_sum_bound_half_precision(architecture: Architecture) -> None:
    model, (inputs, target) = architecture.build(), architecture.batch(1)
    clipping = Clipping.flat([name for name, _ in model.named_parameters()], 1e-3)
    sums = sum_of(architecture, model, (inputs, target), clipping, autocast=torch.bfloat16).sums
    assert distance(sums) <= 1e-3
