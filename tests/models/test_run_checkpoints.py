"""RunCheckpoints: which steps are saved, what is in the files, and that a config reads it again; and Adam's
state beside a checkpoint, against what torch.optim keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import psgrad
from psgrad.config import load_config
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.run_checkpoints import (
    RunCheckpoints,
    adam_state,
    geometric,
    optimizer_state,
    second_moments,
    weights_of,
)
from tests.config.test_config import MINIMAL


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def test_geometric_numbers_end_with_the_run() -> None:
    assert geometric(80, 5) == (2, 5, 13, 32, 80)
    assert geometric(80, 10) == (1, 2, 3, 4, 7, 11, 19, 30, 49, 80)
    assert geometric(60, 5) == (2, 4, 10, 24, 60)
    assert geometric(3, 5) == (1, 2, 3)
    assert geometric(1, 5) == (1,)
    assert geometric(1000, 1) == (1000,)


def test_save_writes_weights_metadata_and_state_at_these_epochs_only(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoints = psgrad.RunCheckpoints(tmp_path / "run", epochs=8, count=3, steps_per_epoch=2)
    saved = {}
    for epoch in range(8):
        trained(model, optimizer, 2)
        optimizer.param_groups[0]["lr"] = 0.01 / (epoch + 1)
        if path := checkpoints.save(model, epoch + 1, optimizer):
            saved[epoch + 1] = (path, {name: value.clone() for name, value in model.state_dict().items()})
    assert list(saved) == [1, 3, 8]
    for epoch, (path, weights) in saved.items():
        assert path.name == f"epoch-{epoch}.safetensors"
        found = load_file(path)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        with safe_open(path, "pt") as file:
            assert file.metadata() == {
                "format": "pt",
                "epoch": str(epoch),
                "step": str(2 * epoch),
                "optimizer": "Adam",
                "learning_rate": repr(0.01 / epoch),
            }
    state = load_file(tmp_path / "run" / "epoch-8.optimizer")
    second = next(iter(optimizer.state.values()))["exp_avg_sq"]
    assert torch.equal(state["0.weight/exp_avg_sq"], second)
    assert float(state["0.weight/step"]) == 16


def test_a_pattern_reads_the_run_in_order_with_its_learning_rates(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoints = RunCheckpoints(tmp_path / "run", epochs=27, count=4, steps_per_epoch=3)
    for epoch in range(1, 28):
        optimizer.param_groups[0]["lr"] = 0.5 / epoch
        trained(model, optimizer)
        checkpoints.save(model, epoch, optimizer)
    config = tmp_path / "config.yaml"
    config.write_text(MINIMAL + "influence: {checkpoints: run/*.safetensors, method: tracin}\n")
    found = load_config(config).influence.checkpoints or []
    names = [f"run/epoch-{epoch:02d}.safetensors" for epoch in (2, 4, 11, 27)]
    assert [str(each.path) for each in found] == names
    assert [each.learning_rate for each in found] == [0.5 / epoch for epoch in (2, 4, 11, 27)]


def test_order_is_that_of_the_metadata_and_not_of_the_names(tmp_path: Path) -> None:
    for name, step in (("a", 30), ("b", 10), ("c", 20)):
        save_file(network().state_dict(), tmp_path / f"{name}.safetensors", {"step": str(step)})
    config = tmp_path / "config.yaml"
    config.write_text(MINIMAL + "influence: {checkpoints: '*.safetensors'}\n")
    found = load_config(config).influence.checkpoints or []
    assert [each.path.stem for each in found] == ["b", "c", "a"]


def test_learning_rates_of_another_length_are_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_file(network().state_dict(), tmp_path / f"step-{step}.safetensors")
    config = tmp_path / "config.yaml"
    section = "influence: {{method: tracin, checkpoints: [{{path: 'step-*', learning_rate: {rates}}}]}}\n"
    config.write_text(MINIMAL + section.format(rates=[0.3, 0.2, 0.1]))
    assert [each.learning_rate for each in load_config(config).influence.checkpoints or []] == [0.3, 0.2, 0.1]
    config.write_text(MINIMAL + section.format(rates=[0.3, 0.2]))
    with pytest.raises(ConfigError, match="matches 3 checkpoints, and learning_rate lists 2 numbers"):
        load_config(config)


def test_a_damaged_file_has_no_metadata(tmp_path: Path) -> None:
    for name, content in (
        ("a-1", b"\xff" * 40),
        ("a-2", b""),
        ("a-3", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"),
    ):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    config = tmp_path / "config.yaml"
    config.write_text(MINIMAL + "influence: {checkpoints: 'a-*.safetensors'}\n")
    found = load_config(config).influence.checkpoints or []
    assert [(each.path.stem, each.learning_rate) for each in found] == [(f"a-{n}", None) for n in (1, 2, 3)]


def test_names_are_those_of_the_model_without_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = network()
    assert weights_of(Wrapper(model)).keys() == model.state_dict().keys()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    assert "0.weight/exp_avg" in optimizer_state(Wrapper(model), optimizer)


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    path = RunCheckpoints(tmp_path, steps=1).save(model, 1)
    assert path is not None
    assert {"0.weight", "1.weight"} <= load_file(path).keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "epochs is None and steps is None"),
        ({"epochs": 3, "steps": 3}, "epochs is 3 and steps is 3"),
        ({"epochs": 0}, "epochs 0, count 5"),
        ({"epochs": 3, "count": 0}, "whole numbers from 1 on"),
    ],
)
def test_a_length_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunCheckpoints(tmp_path, **options)  # type: ignore[arg-type]


def test_a_number_beyond_the_run_and_a_folder_of_another_run_are_refused(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, epochs=4, count=2)
    for number in (0, 5):
        with pytest.raises(ConfigError, match=f"epoch {number} of a run of 4 epochs"):
            checkpoints.save(network(), number)
    checkpoints.save(network(), 4)
    RunCheckpoints(tmp_path, epochs=4, count=2)
    with pytest.raises(ConfigError, match=r"has epoch-4\.safetensors, which is none of this run's"):
        RunCheckpoints(tmp_path, epochs=10)


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


def trained_on_random_rows(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
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
    trained_on_random_rows(optimizer, model)
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
    trained_on_random_rows(optimizer, model)
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
    trained_on_random_rows(momentum, model)
    torch.save(momentum.state_dict(), path)
    with pytest.raises(CheckpointError, match=r"has momentum_buffer of embed\.weight"):
        second_moments(tmp_path, model)
    other = Small(5)
    adam = torch.optim.Adam(other.parameters())
    trained_on_random_rows(adam, other)
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


@pytest.mark.parametrize(
    ("make", "adams"),
    [
        (lambda values: torch.optim.AdamW(values, lr=0.1), True),
        (lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9), False),
    ],
)
def test_adam_state_is_found_beside_a_checkpoint(tmp_path: Path, make: Any, adams: bool) -> None:
    model = network()
    optimizer = make(model.parameters())
    trained(model, optimizer)
    path = RunCheckpoints(tmp_path / "run", epochs=1).save(model, 1, optimizer)
    assert path is not None
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    assert adam_state(folder) is None
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    states = [path.with_suffix(".optimizer"), folder / "optimizer.pt"]
    assert [adam_state(each) for each in (path, folder)] == (states if adams else [None, None])
    for each in states:  # plain steps don't need it
        each.write_bytes(b"damaged")
    assert [adam_state(each) for each in (path, folder)] == [None, None]
