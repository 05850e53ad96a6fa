"""Adam's state beside a checkpoint, against what torch.optim keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psgrad.errors import CheckpointError
from psgrad.inputs.models.run_checkpoints import RunCheckpoints, second_moments


class Small(nn.Module):
    """With a norm and biases, which a trainer does not decay; one parameter has no gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(inputs)).square())
        return found


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def expected(model: nn.Module, optimizer: Any, beta2: float, steps: int = 3) -> dict[str, torch.Tensor]:
    return {
        name: optimizer.state[parameter]["exp_avg_sq"].double() / (1 - beta2**steps)
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def assert_equal(found: dict[str, torch.Tensor] | None, truth: dict[str, torch.Tensor]) -> None:
    assert found is not None
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


def test_optimizer_state_of_run_checkpoints(tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    trained(optimizer, model)
    path = RunCheckpoints(tmp_path, epochs=1).save(model, 1, optimizer)
    assert path is not None
    assert_equal(second_moments(path, model), expected(model, optimizer, 0.95))
    path.with_suffix(".optimizer").unlink()
    assert second_moments(path, model) is None


@pytest.mark.parametrize("apart", [True, False])
def test_optimizer_state_of_a_trainer(tmp_path: Path, apart: bool) -> None:
    """apart: with what has no weight decay in a group of its own, as transformers.Trainer has it."""
    model = Small()
    late = [name for name, _ in model.named_parameters() if "bias" in name or "norm" in name]
    groups: Any = [
        {"params": [p for name, p in model.named_parameters() if (name in late) is after]}
        for after in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups if apart else model.parameters(), betas=(0.9, 0.99))
    trained(optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert_equal(second_moments(tmp_path, model), expected(model, optimizer, 0.99))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_optimizer_state_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, path = Small(), tmp_path / "optimizer.pt"
    assert second_moments(tmp_path, model) is None
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(momentum, model)
    torch.save(momentum.state_dict(), path)
    with pytest.raises(CheckpointError, match=r"has momentum_buffer of embed\.weight"):
        second_moments(tmp_path, model)
    other = Small(5)
    adam = torch.optim.Adam(other.parameters())
    trained(adam, other)
    torch.save(adam.state_dict(), path)
    with pytest.raises(CheckpointError, match=r"embed.weight of shape \[5, 3\], not \[4, 3\]"):
        second_moments(tmp_path, model)
    torch.save(torch.optim.Adam(nn.Linear(2, 2).parameters()).state_dict(), path)
    with pytest.raises(CheckpointError, match="has groups of 2 parameters, and the model has 7"):
        second_moments(tmp_path, model)
    torch.save({"state": Evil(), "param_groups": []}, path)
    with pytest.raises(CheckpointError):
        second_moments(tmp_path, model)
    assert not (tmp_path / "touched").exists()
    path.unlink()
    (tmp_path / "epoch-1.optimizer").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="can't be read"):
        second_moments(tmp_path / "epoch-1.safetensors", model)
