"""Models: built, filled and set to their mode, or refused with the parameter or layer that is to blame."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from psgrad.config import ModelConfig
from psgrad.errors import EXIT_RUNTIME, CheckpointError, ConfigError, ModelError
from psgrad.models.factory import LoadedModel, load_model

CODE = """\
import torch
from torch import nn

def linear(width=2):
    return nn.Linear(width, 1)

def normalised(**options):
    norm = nn.ModuleDict({"norm": nn.BatchNorm2d(2, **options)})
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.BatchNorm1d(2, **options))

def renormalised(): return nn.Sequential(nn.Dropout(), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True))
def number(): return 3
def empty(): return nn.ReLU()
def frozen(): return nn.Linear(2, 1).requires_grad_(False)
def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(2, 1)), nn.Tanh())


def lazy(): return nn.Sequential(nn.LazyLinear(3))
def complex_(): return nn.Linear(2, 1, dtype=torch.complex64)
def float8(): return nn.Linear(2, 1).to(torch.float8_e4m3fn)
def quantised():
    model = nn.Linear(2, 1)
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    model.bits = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    return model
def meta():
    with torch.device("meta"):
        return nn.Linear(2, 1)
def half(): return nn.Linear(2, 1, dtype=torch.bfloat16)
def fails(): raise RuntimeError("no such width\\nand more")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path


def load(folder: Path, factory: str, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(factory=f"code.py:{factory}", **options), folder)


def refusal(folder: Path, factory: str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, factory, **options)
    assert caught.value.exit_code == EXIT_RUNTIME
    return str(caught.value)


def test_without_a_checkpoint(folder: Path) -> None:
    loaded = load(folder, "linear", kwargs={"width": 3})

    assert isinstance(loaded.model, nn.Linear)
    assert loaded.model.in_features == 3
    assert not loaded.model.training
    assert loaded.notes == ["no checkpoint: the weights are those that the factory gave"]
    assert loaded.modules_imported == ["code.py"]
    assert loaded.sha256 is None


def test_with_a_checkpoint(folder: Path) -> None:
    save_file({"module.weight": torch.ones(1, 2), "module.bias": torch.ones(1)}, folder / "model.safetensors")
    loaded = load(folder, "linear", checkpoint="model.safetensors")

    assert all((parameter == 1).all() for parameter in loaded.model.parameters())
    assert loaded.notes == ["stripped the prefix 'module.' from the 2 names of model.safetensors"]
    assert loaded.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_hash_of_a_sharded_checkpoint_covers_every_shard(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}')
    save_file({"weight": torch.ones(1, 2)}, folder / "a.safetensors")
    hashes = set()
    for value in (1.0, 2.0):
        save_file({"bias": torch.full((1,), value)}, folder / "b.safetensors")
        hashes.add(load(folder, "linear", checkpoint=index.name).sha256)
    assert len(hashes) == 2


def test_a_checkpoint_that_does_not_fit(folder: Path) -> None:
    save_file({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight: \[1, 3\] in the checkpoint, \[1, 2\] in the model"):
        load(folder, "linear", checkpoint="model.safetensors")


def test_modes_and_layers_that_keep_samples_apart(folder: Path) -> None:
    assert load(folder, "renormalised", mode="train").model.training
    assert not load(folder, "renormalised").model.training
    assert not load(folder, "normalised").model.training


def test_batch_norm_in_train_mode_is_refused_by_its_name(folder: Path) -> None:
    message = refusal(folder, "normalised", mode="train")
    assert "the layer 1.norm (BatchNorm2d) (and 1 more) is in train mode" in message
    assert "set model.mode: eval, or replace the layer by nn.GroupNorm" in message


def test_batch_norm_without_running_statistics_is_refused_in_eval_mode_too(folder: Path) -> None:
    message = refusal(folder, "normalised", kwargs={"track_running_stats": False})
    assert "the layer 1.norm (BatchNorm2d) (and 1 more) keeps no running statistics" in message


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("number", "the factory code.py:number returned an object of type int"),
        ("empty", "the model of code.py:empty has no parameters"),
        ("frozen", "has only frozen parameters"),
        ("scripted", "holds a module of TorchScript"),
        ("lazy", "the parameter 0.weight of a lazy layer has no shape yet"),
        ("complex_", "the parameter weight is of type torch.complex64"),
        ("float8", "the parameter weight is of type torch.float8_e4m3fn; expected real floating-point"),
        ("meta", "the parameter weight is on the meta device"),
        ("fails", "the factory code.py:fails raised RuntimeError: no such width ("),
    ],
)
def test_models_that_can_not_be_used(folder: Path, factory: str, expected: str) -> None:
    assert expected in refusal(folder, factory)


def test_frozen_parameters_of_whole_numbers_and_float8_are_kept(folder: Path) -> None:
    model = load(folder, "quantised").model
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
        "weight": torch.float32,
        "bias": torch.float32,
        "codes": torch.int8,
        "bits": torch.float8_e4m3fn,
    }


def test_the_factorys_dtype_is_kept(folder: Path) -> None:
    assert {parameter.dtype for parameter in load(folder, "half").model.parameters()} == {torch.bfloat16}


def test_a_missing_factory_and_a_missing_checkpoint(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean linear"):
        load(folder, "linaer")
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        load(folder, "linear", checkpoint="nowhere.safetensors")


def test_patterns_choose_what_is_trained_before_the_model_is_looked_at(folder: Path) -> None:
    model = load_model(ModelConfig(factory="code.py:frozen"), folder, ["bias"]).model
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["bias"]
    with pytest.raises(ConfigError, match=r"no parameter matches 'biases'; did you mean bias\?"):
        load_model(ModelConfig(factory="code.py:linear"), folder, ["biases"])
