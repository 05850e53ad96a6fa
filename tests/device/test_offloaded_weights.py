"""Offloaded weights on a GPU, or on the device that is as strict as one, with streams that check order: the
bits of weights that live on the device, whatever was copied ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_supply import Supply, _Arrival
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.transforms.private_torch import tree_leaves
from tests.architectures import ARCHITECTURES
from tests.device import streams
from tests.device.strict_or_gpu import STRICT, named_device, needs_a_device, needs_the_strict_device
from tests.engine.execution.test_stored import in_file
from tests.small_models import Architecture

pytestmark = needs_a_device
NAMES = {"gpt", "bert", "mixture-of-experts", "shared-layers", "resnet-batch-norm"}
SOME = [each for each in ARCHITECTURES if each.name in NAMES]


@pytest.fixture(autouse=True)
def _gpu_adds_in_one_order() -> Iterator[None]:
    """Not in the order in which threads come to the same row of a table."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _tied_weights_stay_tied() -> Iterator[None]:
    """As on a GPU. On a device that is not PyTorch's own Module.to makes a new parameter for each use."""
    torch.__future__.set_swap_module_params_on_conversion(STRICT)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> streams.Streams | None:
    """The strict device with streams of its own; a GPU has its streams."""
    if not STRICT:
        return None
    found, device = streams.Streams(), named_device()
    module: Callable[..., Any] = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda of=None: found if torch.device(of).type == device.type else module(of),
    )
    move = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda tensor, *args, **kwargs: found.to(move, tensor, *args, **kwargs))
    on_device = _Arrival.on_device

    def used(arrival: _Arrival) -> Tensor:
        there = on_device(arrival)
        found.used.add(there.data_ptr())
        return there

    monkeypatch.setattr(_Arrival, "on_device", used)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: found.recorded(tensor))
    return found


def found_on_the_device(model: nn.Module, architecture: Architecture) -> list[Tensor]:
    inputs, target = architecture.batch(3)
    there = tuple(x.to(named_device()) for x in inputs), target.to(named_device())
    Recompute(True).add(model)
    objective = Objective(model, architecture.loss)
    options: dict[str, Any] = {"in_dims": (0, 0), "has_aux": True}
    found: list[Any] = []
    for _ in range(2):  # the second pass knows the order
        gradients = per_sample_gradients(objective.loss, objective.params, *there, **options)
        norms = per_sample_square_norms(objective.loss, objective.params, *there, **options)
        weights = torch.ones(3, device=named_device())
        found += [gradients.materialise(), gradients.weighted_sum(weights), norms.by_parameter]
    return [each.cpu() for each in tree_leaves(found) if isinstance(each, Tensor)]


@pytest.mark.parametrize("where", ["in memory", "in a file"])
@pytest.mark.parametrize("architecture", SOME, ids=lambda architecture: architecture.name)
def test_weights_that_are_copied_ahead_have_the_bits_of_resident_ones(
    ordered: streams.Streams | None, architecture: Architecture, where: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return architecture.factory().eval()

    torch.manual_seed(0)
    expected = found_on_the_device(place(build(), named_device(), torch.float32, "as-saved"), architecture)
    torch.manual_seed(0)
    model = build() if where == "in memory" else in_file(build, tmp_path / "weights.safetensors")
    supply = Supply(named_device(), 4096)
    model = place(model, named_device(), torch.float32, "as-saved", supply)
    found = found_on_the_device(model, architecture)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert any(isinstance(each.data, Stored) for each in model.parameters())
    if ordered is not None:
        assert ordered.copies > 0
        assert not ordered.unrecorded & ordered.used


@needs_the_strict_device
def test_a_copy_that_was_not_waited_for_shows(
    ordered: streams.Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams.Stream, "wait_event", lambda stream, event: None)
    layer = place(nn.Linear(3, 2), named_device(), torch.float32, "as-saved", Supply(named_device(), 4096))
    assert layer(torch.ones(1, 3, device=named_device())).isnan().all()
