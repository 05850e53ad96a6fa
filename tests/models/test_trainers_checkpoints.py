"""Checkpoints as trainers write them: Lightning, DDP, torch.compile, timm, with what lies beside the
weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from psgrad.config import ModelConfig
from psgrad.errors import CheckpointError, ConfigError, ModelError
from psgrad.models.checkpoint_files import read_checkpoint, require_checkpoint
from psgrad.models.checkpoints import load_into
from psgrad.models.factory import load_model
from psgrad.run.results.manifest import content_of


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def state(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.randn_like(value) if value.is_floating_point() else value
        for name, value in network().state_dict().items()
    }


def prefixed(prefix: str, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in (state() if tensors is None else tensors).items()}


def loaded(tensors: Mapping[str, Tensor], **options: Any) -> str | None:
    model = network()
    note = load_into(model, tensors, "run.ckpt", **options)
    assert all(torch.equal(value, state()[name]) for name, value in model.state_dict().items())
    return note


# -- What lies beside the weights ----------------------------------------------------------------------------


def test_lightning_with_hyperparameters_in_a_namespace(tmp_path: Path) -> None:
    content = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "hyper_parameters": {"args": argparse.Namespace(lr=0.1)},
        "state_dict": prefixed("model."),
    }
    torch.save(content, tmp_path / "run.ckpt")
    found = read_checkpoint(tmp_path / "run.ckpt")
    assert loaded(found.tensors) == "stripped the prefix 'model.' from the 9 names of run.ckpt"
    assert found.notes == ("took the weights 'state_dict' of run.ckpt",)


def make(canary: str) -> None:
    Path(canary).mkdir()


class Command:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (make, (str(self.canary),))


def test_code_beside_the_weights_does_not_run(tmp_path: Path) -> None:
    content = {"state_dict": state(), "hyper_parameters": Command(tmp_path / "canary")}
    torch.save(content, tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="where it was made, save the state dict alone"):
        read_checkpoint(tmp_path / "run.ckpt")
    assert not (tmp_path / "canary").exists()
    torch.load(tmp_path / "run.ckpt", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("key", [None, "state_dict"])
def test_a_whole_module_is_code(key: str | None, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 1) if key is None else {key: nn.Linear(2, 1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear, which is code"):
        read_checkpoint(tmp_path / "model.pt", key)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_the_only_candidate_is_taken(key: str, tmp_path: Path) -> None:
    torch.save({key: state(), "optimizer": {"state": {}}, "step": 4}, tmp_path / "run.pt")
    found = read_checkpoint(tmp_path / "run.pt")
    assert found.notes == (f"took the weights {key!r} of run.pt",)
    assert loaded(found.tensors) is None


def test_two_candidates_are_not_guessed(tmp_path: Path) -> None:
    torch.save({"state_dict": state(), "model_state_dict": state(1)}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="the state dict that you mean: state_dict, model_state_dict"):
        read_checkpoint(tmp_path / "run.pt")


@pytest.mark.parametrize("key", ["state_dict_ema", "callbacks.EMA.weights"])
def test_averaged_weights_by_key(key: str, tmp_path: Path) -> None:
    torch.save(
        {
            "state_dict": state(1),
            "state_dict_ema": state(),
            "callbacks": {"EMA": {"weights": state(), "decay": 0.99}},
        },
        tmp_path / "run.pth.tar",
    )
    assert loaded(read_checkpoint(tmp_path / "run.pth.tar", key).tensors) is None


# -- Names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["model.", "module.", "_orig_mod.", "model._orig_mod.", "module.model.model."]
)
def test_tensors_of_others_do_not_keep_a_prefix(prefix: str) -> None:
    others = {"criterion.weight": torch.ones(3), "val_acc.total": torch.ones(1)}
    note = loaded({**prefixed(prefix), **others})
    assert note == (
        f"stripped the prefix {prefix!r} from the 9 names of run.ckpt;"
        " left out 2 others: criterion.weight, val_acc.total"
    )


def test_tensors_of_others_without_a_prefix_are_unexpected() -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded({**state(), "criterion.weight": torch.ones(3)})
    assert "1 unexpected" in str(caught.value)
    assert "state_dict_prefix" in str(caught.value)


def test_a_prefix_that_is_said() -> None:
    both = {**prefixed("student."), **prefixed("teacher.", state(1))}
    assert loaded(both, prefix="student.") == (
        "stripped the prefix 'student.' from the 9 names of run.ckpt; left out 9 others:"
        f" {', '.join(prefixed('teacher.'))}"
    )
    with pytest.raises(CheckpointError, match=r"begins with 'pupil\.' \(model\.state_dict_prefix\)"):
        loaded(both, prefix="pupil.")


@pytest.mark.parametrize("name", [".metadata", "zero_to_fp32.py"])
def test_a_folder_of_sharded_training_is_refused_with_the_converter(name: str, tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / name).touch()
    with pytest.raises(ConfigError, match=r"make one file of it by .*(dcp_to_torch|zero_to_fp32)"):
        require_checkpoint(tmp_path / "step-4")


# -- timm ----------------------------------------------------------------------------------------------------


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in with the functions of timm that psgrad calls, for machines without torchvision."""
    module = ModuleType("timm")

    def create_model(name: str, pretrained: bool = False, num_classes: int = 1000, **_: Any) -> nn.Module:
        assert not pretrained
        return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))

    contents = {
        "__version__": "1.0",
        "create_model": create_model,
        "is_model": lambda name: name == "resnet50",
        "list_models": lambda: ["resnet50", "vit_small"],
    }
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def load_timm(folder: Path, **options: Any) -> Any:
    content = {"timm": "resnet50", "checkpoint": "best.safetensors", "kwargs": {"num_classes": 3}, **options}
    return load_model(ModelConfig.model_validate(content), folder)


def test_a_model_of_timm(timm: ModuleType, tmp_path: Path) -> None:
    weights = {"1.weight": torch.ones(3, 4), "1.bias": torch.zeros(3)}
    save_file(weights, tmp_path / "best.safetensors")
    found = load_timm(tmp_path)
    assert torch.equal(found.model(torch.ones(1, 2, 2)), torch.full((1, 3), 4.0))
    assert content_of(found.origin) == {"timm": "resnet50", "version": "1.0", "adapters": []}


def test_a_checkpoint_of_timms_training(timm: ModuleType, tmp_path: Path) -> None:
    weights = {"1.weight": torch.ones(3, 4), "1.bias": torch.zeros(3)}
    content = {"epoch": 1, "arch": "resnet50", "args": argparse.Namespace(lr=1), "state_dict": weights}
    torch.save(content, tmp_path / "best.pth.tar")
    found = load_timm(tmp_path, checkpoint="best.pth.tar")
    assert torch.equal(found.model[1].weight, weights["1.weight"])


def test_names_and_arguments_that_timm_does_not_know(timm: ModuleType, tmp_path: Path) -> None:
    save_file({"1.weight": torch.ones(3, 4)}, tmp_path / "best.safetensors")
    with pytest.raises(ConfigError, match=r"timm has no model 'resnet5'; did you mean resnet50\?"):
        load_timm(tmp_path, timm="resnet5")
    with pytest.raises(ModelError, match="timm can't build resnet50"):
        load_timm(tmp_path, kwargs={"num_classes": "three"})
    with pytest.raises(ConfigError, match="pretrained would download weights"):
        load_timm(tmp_path, kwargs={"pretrained": True})
    with pytest.raises(ValueError, match="timm builds its models with random weights"):
        load_timm(tmp_path, checkpoint=None)


def test_timm_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    save_file({"1.weight": torch.ones(3, 4)}, tmp_path / "best.safetensors")
    with pytest.raises(ModelError, match=r"pip install 'psgrad\[vision\]'"):
        load_timm(tmp_path)
