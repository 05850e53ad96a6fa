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
from torch.utils.checkpoint import checkpoint

from psgrad.engine.execution import stored
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.recompute import Recompute, repeated_modules
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InMemory
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients import (
    Sparse,
    per_sample_gradients,
    per_sample_projections,
    per_sample_square_norms,
    per_sample_weighted_sum,
)
from psgrad.engine.transforms.private_torch import tree_leaves
from psgrad.errors import CheckpointError, ModelError, TransformError
from psgrad.models.checkpoints import load_into
from psgrad.models.in_files import built_without_memory, tensors_in_files
from tests.architectures import ARCHITECTURES
from tests.oracles import one_sample_gradients
from tests.small_models import Architecture

CPU = torch.device("cpu")
SAMPLES = 3


def in_file(build: Callable[[], nn.Module], file: Path) -> nn.Module:
    """The model that `build` makes, its weights in a file, or in memory if they must be there."""
    torch.manual_seed(0)
    whole = build()
    save_file({name: value.clone().contiguous() for name, value in whole.state_dict().items()}, file)
    model, tensors = built_without_memory(build), tensors_in_files(file)
    if model is None or tensors is None:
        return whole
    load_into(model, tensors, file.name)
    return model


def computed(how: Callable[..., Any], objective: Objective, x: Tensor, target: Tensor) -> Any:
    return how(objective.loss, objective.params, (x,), target, in_dims=(0, 0), has_aux=True)


def found_by(model: nn.Module, architecture: Architecture, dtype: torch.dtype) -> list[Tensor]:
    """All that is asked of a network: losses, gradients, norms, projections, inner products with vectors and
    with other samples, sums, and clipped sums.
    """
    objective = Objective(model, architecture.loss)
    inputs, target = architecture.batch(SAMPLES, dtype=dtype)

    def seeded(how: Callable[..., Any], **more: Any) -> Any:
        torch.manual_seed(0)
        options = {"in_dims": (0, 0), "has_aux": True, "randomness": architecture.randomness}
        return how(objective.loss, objective.params, inputs, target, **options, **more)

    gradients, norms = seeded(per_sample_gradients), seeded(per_sample_square_norms)
    weights = torch.tensor([0.5, 2.0, -1.0], dtype=dtype)
    vector = {name: torch.ones_like(value) for name, value in objective.params.items()}
    found = [
        gradients.losses,
        gradients.materialise(),
        gradients.inner(gradients),
        gradients.dot(vector),
        gradients.project(Sparse(8, seed=0)),
        gradients.weighted_sum(weights),
        gradients.square_norms(per="parameter"),
        norms.losses,
        norms.by_parameter,
        seeded(per_sample_projections, projection=Sparse(8, seed=0)).rows,
        seeded(per_sample_weighted_sum, weights=_clipped).sums,
    ]
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _clipped(norms: Any) -> Tensor:
    """The weights that scale each sample's gradient to a norm of at most 0.1."""
    found: Tensor = (0.1 / norms.square_norms().sqrt()).clamp(max=1)
    return found


@pytest.mark.every(13)
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


# -- a file that fails ---------------------------------------------------------------------------------------


def weight_in(file: Path) -> Stored:
    save_file({"w": torch.arange(24.0).reshape(4, 6)}, file)
    found = tensors_in_files(file)
    assert found is not None
    assert isinstance(found["w"], Stored)
    return found["w"]


def test_views_of_a_weight_read_their_part_alone(tmp_path: Path) -> None:
    stored, whole = weight_in(tmp_path / "w.safetensors"), torch.arange(24.0).reshape(4, 6)
    supply = Supply(CPU, 1 << 20)
    weight = Stored(stored.source, torch.float64, supply)
    view = weight[1:3].t()[2:, :].unsqueeze(0)
    assert isinstance(view, Stored)
    assert supply.moved == 0
    assert torch.equal(view + 0, whole[1:3].t()[2:, :].unsqueeze(0).double())
    assert 0 < supply.moved <= 4 * 12
    ids = torch.tensor([[3, 0], [3, 3]])
    assert torch.equal(nn.functional.embedding(ids, weight), whole[ids].double())


def test_as_many_weights_stay_as_the_budget_has_room_for(tmp_path: Path) -> None:
    save_file(
        {str(number): torch.full((256,), float(number)) for number in range(6)}, tmp_path / "w.safetensors"
    )
    stored = tensors_in_files(tmp_path / "w.safetensors")
    assert stored is not None
    moved = []
    for room in (1, 3, 6):
        supply = Supply(CPU, room * 1024)
        weights = [Stored(each.source, torch.float32, supply) for each in stored.values()]  # type: ignore[attr-defined]
        for _ in range(4):
            for weight in (*weights, *reversed(weights)):
                assert float(weight.sum()) == 256 * float(weight[0])
        moved.append(supply.moved // 1024)
    assert moved[0] >= 40
    assert moved[0] > moved[1] > moved[2] == 6


@pytest.mark.parametrize("how", ["written", "cut"])
def test_a_file_that_changes_is_refused(tmp_path: Path, how: str) -> None:
    file = tmp_path / "w.safetensors"
    weight = weight_in(file)
    assert float(weight.sum()) == 276
    with file.open("r+b") as opened:
        if how == "written":
            opened.seek(-4, os.SEEK_END)
            opened.write(b"\0\0\0\0")
        else:
            opened.truncate(file.stat().st_size - 8)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    words = "it was written to" if how == "written" else "it is shorter than it was"
    with pytest.raises(CheckpointError, match=words) as refusal:
        weight.sum()
    assert "has changed while weights were read from it" in str(refusal.value)
    assert "engine.parameters: resident" in str(refusal.value)


def test_a_file_that_is_replaced_under_its_name_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    weight = weight_in(file)
    save_file({"w": torch.zeros(4, 6)}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(file)
    assert float(weight.sum()) == 276


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_in(tmp_path / "w.safetensors")

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match=r"w\.safetensors can't be read: Input/output error") as refusal:
        weight.sum()
    assert "--resume" in str(refusal.value)


class Writing(nn.Module):
    """Writes into its weight in one way, before it uses it."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.bias, self.write = (
            nn.Parameter(torch.randn(4, 3)),
            nn.Parameter(torch.randn(4)),
            write,
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.write(self.weight).t() + self.bias).tanh()


def _without_gradients(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.clamp_(-0.5, 0.5)


def _one_row(weight: Tensor) -> Tensor:
    weight[1] = 0
    return weight


def _in_a_view(weight: Tensor) -> Tensor:
    weight.t()[0].mul_(3)
    return weight


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda weight: weight.mul_(2),
    "one row": _one_row,
    "in a view": _in_a_view,
    "without gradients": _without_gradients,
    "into a copy": lambda weight: weight.clone().add_(1) * weight,
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_into_a_weight_in_a_file(write: str, frozen: bool, tmp_path: Path) -> None:
    """Each pass writes into a copy for this use, as for a weight in memory: the same numbers twice, or
    the same refusal.
    """
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))

    def norms_twice(model: nn.Module) -> list[Tensor] | str:
        objective = Objective(model, lambda output, target: (output - target.sum()).square().sum())
        found = []
        try:
            for _ in range(2):
                found.append(computed(per_sample_square_norms, objective, x, x).square_norms())
        except TransformError as error:
            return str(error)
        return found

    def build() -> nn.Module:
        model = Writing(WRITES[write])
        model.weight.requires_grad_(not frozen)
        return model

    torch.manual_seed(0)
    resident = build()
    model = in_file(build, tmp_path / "w.safetensors")
    model.weight.requires_grad_(not frozen)
    before = model.weight + 0
    model = place(model, CPU, torch.float32, "as-saved", Supply(CPU, 4096))
    assert isinstance(model.weight.data, Stored)
    expected, found = norms_twice(resident), norms_twice(model)
    if isinstance(expected, str):
        assert frozen
        assert found == expected
    else:
        assert torch.equal(torch.stack(found), torch.stack(expected))  # type: ignore[arg-type]
        assert torch.equal(expected[0], expected[1])
    assert torch.equal(model.weight + 0, before)


def test_a_write_into_an_offloaded_weight_outside_of_a_pass_is_refused(tmp_path: Path) -> None:
    weight = weight_in(tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"writes into an offloaded weight of shape \(4, 6\)") as refusal:
        weight.mul_(2)
    assert "engine.parameters: resident" in str(refusal.value)


# -- built without memory ------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """With a buffer that no checkpoint has: drawn, or computed from a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        values = {
            "drawn": lambda: torch.randn(3),
            "of a parameter": lambda: self.layer.weight.detach().sum(0),
            "constant": lambda: torch.arange(3.0),
        }
        self.register_buffer("values", values[how](), persistent=False)


@pytest.mark.parametrize(
    ("how", "without"), [("drawn", False), ("of a parameter", False), ("constant", True)]
)
def test_a_model_is_built_without_memory_only_if_it_is_the_same(how: str, without: bool) -> None:
    assert (built_without_memory(lambda: Drawn(how)) is not None) is without


def test_tied_weights_stay_tied_and_nothing_of_pytorch_stays_replaced(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model

    register = nn.Module.register_parameter
    model = in_file(build, tmp_path / "w.safetensors")
    assert nn.Module.register_parameter is register
    assert model[2].weight is model[0].weight  # type: ignore[index]
    assert isinstance(model[0].weight, Stored)  # type: ignore[index]
    assert nn.Linear(2, 2).weight.device == CPU


# -- blocks that run again -----------------------------------------------------------------------------------


def test_repeated_modules_are_the_layers_of_stacks() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = nn.ModuleDict({"body": nn.ModuleList([block(), block()]), "head": nn.Sequential(nn.Linear(2, 2))})
    assert [name for name, _ in repeated_modules(model)] == ["body.0", "body.1"]


@pytest.mark.every(7)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_blocks_that_run_again_give_the_same_numbers(architecture: Architecture) -> None:
    model = architecture.build()
    expected = found_by(model, architecture, torch.float32)
    Recompute(True).add(model)
    for one, other in zip(found_by(model, architecture, torch.float32), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class OwnCheckpoints(nn.Module):
    """A stack whose blocks are under torch.utils.checkpoint; its weights are sliced, tied and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
        )
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
            x = x @ self.experts[number].t() + x @ self.experts[number][:, 1:].sum(1, keepdim=True)
        return x


@pytest.mark.parametrize("again", [False, True], ids=["values kept", "blocks run again"])
def test_models_with_checkpoints_of_their_own(tmp_path: Path, again: bool) -> None:
    """The oracle: autograd, sample by sample, with the weights in memory."""
    torch.manual_seed(0)
    resident = OwnCheckpoints().double()
    x, target = torch.randn(2, SAMPLES, 5, 4, dtype=torch.float64)
    model = in_file(OwnCheckpoints, tmp_path / "w.safetensors")
    model = place(model, CPU, torch.float64, "as-saved", Supply(CPU, 4096))
    Recompute(again).add(model)
    loss = lambda output, target: (output - target).square().sum()
    objective = Objective(model, loss)
    gradients, norms = (
        computed(how, objective, x, target) for how in (per_sample_gradients, per_sample_square_norms)
    )
    expected = one_sample_gradients(resident, loss, (x,), target)
    torch.testing.assert_close(gradients.materialise(), expected, rtol=1e-10, atol=1e-12)
    squares = torch.stack([value.flatten(1).square().sum(1) for value in expected.values()]).sum(0)
    torch.testing.assert_close(norms.square_norms(), squares, rtol=1e-10, atol=0)


class Counting(nn.Module):
    """A block that counts how often it has run, and computes something else each time."""

    def __init__(self, block: Callable[[nn.Linear, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer, self.runs, self.block = nn.Linear(3, 3), 0, block

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.block(self.layer, x, self.runs)


@pytest.mark.parametrize(
    "block",
    [
        lambda layer, x, runs: layer(x + runs).tanh(),
        lambda layer, x, runs: layer(x) + x.sin() * runs,
        lambda layer, x, runs: torch.add(x, layer(x), alpha=runs),
        lambda layer, x, runs: x - layer(x) if runs == 1 else layer(x) - x,
        lambda layer, x, runs: torch.cat([layer(x), x.sin() * runs], dim=-1)[..., ::2],
    ],
    ids=[
        "before",
        "beside it",
        "a keyword",
        "another order",
        "another part",
    ],
)
def test_a_block_that_computes_something_else_the_second_time_is_refused(
    block: Callable[[nn.Linear, Tensor, int], Tensor],
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Counting(block), Counting(block)))
    Recompute(True).add(model)
    objective = Objective(model, lambda output, target: (output - target).square().sum())
    x = torch.randn(2, 3)
    with pytest.raises(
        ModelError, match=r"the block 1\.1 computes something else when it runs again"
    ) as refusal:
        computed(per_sample_square_norms, objective, x, x)
    assert "engine.recompute: none" in str(refusal.value)


@pytest.mark.parametrize("outputs", [3, 60])
@pytest.mark.parametrize("kind", ["linear", "linear with bias", "matmul", "mm", "addmm"])
def test_a_weight_of_many_numbers_is_widened_in_slices(
    outputs: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: the product with all of it widened. No more than a slice is widened at a time."""
    monkeypatch.setattr(stored, "LARGEST_WHOLE", 500)
    monkeypatch.setattr(stored, "SLICE", 200)
    sizes: list[int] = []
    wide = Stored.numbers

    def noted(self: Stored) -> Tensor:
        sizes.append(self.numel() * 4)
        return wide(self)

    monkeypatch.setattr(Stored, "numbers", noted)
    inputs = 180 // outputs
    x = torch.randn(2, inputs) if "mm" in kind else torch.randn(2, 3, inputs)
    narrow = (torch.randn(outputs, inputs) if "linear" in kind else torch.randn(inputs, outputs)).bfloat16()
    bias = [torch.randn(outputs)] if kind == "linear with bias" else []
    addmm = lambda x, weight: torch.addmm(torch.ones(outputs), x, weight)
    op = {"mm": torch.mm, "addmm": addmm, "matmul": torch.matmul}.get(kind, torch.ops.aten.linear.default)
    found = op(x, Stored(InMemory(narrow), torch.float32), *bias)
    torch.testing.assert_close(found, op(x, narrow.float(), *bias), rtol=1e-5, atol=1e-5)
    assert max(sizes) <= 240
    assert sum(sizes) == 180 * 4
