"""Weights that lie in a file, or in half precision: the numbers are those of weights in memory, bit for bit,
whatever a network does with them; and what fails on the way is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.recompute import Recompute, repeated_modules
from psgrad.engine.execution.stored import InFile, InMemory, Stored, Supply, WeightFile
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.engine.transforms.private_torch import tree_leaves
from psgrad.errors import CheckpointError, ModelError
from psgrad.inputs.models.checkpoints import load_into
from psgrad.inputs.models.in_files import built_without_memory, tensors_in_files
from tests.architectures import ARCHITECTURES
from tests.models import Architecture

CPU = torch.device("cpu")
SAMPLES = 3


def in_file(build: Callable[[], nn.Module], file: Path) -> nn.Module:
    """The model that `build` makes, its weights in a file; one with weights in memory if they must be there."""
    torch.manual_seed(0)
    whole = build()
    save_file({name: value.clone().contiguous() for name, value in whole.state_dict().items()}, file)
    model, tensors = built_without_memory(build), tensors_in_files(file)
    if model is None or tensors is None:
        return whole
    load_into(model, tensors, file.name)
    return model


def found_by(model: nn.Module, architecture: Architecture, dtype: torch.dtype) -> list[Tensor]:
    """All that is asked of a network: gradients, norms, sums, inner products."""
    objective = Objective(model, architecture.loss)
    inputs, target = architecture.batch(SAMPLES, dtype=dtype)
    options: dict[str, Any] = {
        "in_dims": (0, 0),
        "has_aux": True,
        "randomness": architecture.randomness,
    }
    torch.manual_seed(0)
    gradients = per_sample_gradients(objective.loss, objective.params, inputs, target, **options)
    torch.manual_seed(0)
    norms = per_sample_square_norms(objective.loss, objective.params, inputs, target, **options)
    weights = torch.tensor([0.5, 2.0, -1.0], dtype=dtype)
    found = [gradients.materialise(), gradients.gram(), gradients.weighted_sum(weights), norms.by_parameter]
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


@pytest.mark.every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_weights_in_a_file_give_the_numbers_of_weights_in_memory(
    architecture: Architecture, dtype: torch.dtype, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return architecture.factory().eval()

    torch.manual_seed(0)
    resident = place(build(), CPU, dtype, "as-saved")
    supply = Supply(CPU, 4096)
    model = place(in_file(build, tmp_path / "weights.safetensors"), CPU, dtype, "as-saved", supply)
    expected = found_by(resident, architecture, dtype)
    found = found_by(model, architecture, dtype)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    if all(isinstance(each, Stored) for each in model.parameters()):
        assert supply.moved > 0


def test_most_networks_can_be_built_without_memory() -> None:
    found = [built_without_memory(architecture.factory) is not None for architecture in ARCHITECTURES]
    assert sum(found) > 0.9 * len(found)
