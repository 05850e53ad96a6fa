"""Frozen weights in half precision: stored so, and computed with as if the whole model had been widened."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from psgrad.engine.execution.placement import place
from psgrad.engine.execution.stored import Stored
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import functional_call
from psgrad.errors import ModelError
from tests.hugging_face import tiny_model

CPU = torch.device("cpu")


def stored_in(model: nn.Module) -> Mapping[str, int]:
    """The types that the model's numbers are stored in -> how many numbers."""
    found: dict[str, int] = {}
    for parameter in model.parameters():
        data = parameter.data
        kind = data.stored_dtype if isinstance(data, Stored) else data.dtype
        name = str(kind).removeprefix("torch.")
        found[name] = found.get(name, 0) + parameter.numel()
    return found


def frozen_but(model: nn.Module, *trained: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    def loss(params: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, params, (), {"input_ids": row[None], "use_cache": False}).logits
        return nn.functional.cross_entropy(logits[0, :-1], row[1:])

    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return per_sample_gradients(loss, params, ids).materialise()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_the_numbers_are_those_of_the_widened_model(
    architecture: str, stored: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("causal-lm", tmp_path, architecture=architecture).to(stored)
    frozen_but(model, "1.self_attn.q_proj", "1.attn.c_attn")
    whole = copy.deepcopy(model).float()
    place(model, CPU, torch.float32, "as-saved")
    ids = torch.randint(7, 300, (3, 9))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert set(stored_in(model)) == {"float32", str(stored).removeprefix("torch.")}

    found, expected = gradients(model, ids), gradients(whole, ids)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_one_weight_at_a_time_is_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("causal-lm", tmp_path).to(torch.bfloat16)
    place(frozen_but(model, "0.self_attn.q_proj"), CPU, torch.float32, "as-saved")
    alive: set[int] = set()
    most = 0
    widened = Stored.numbers

    def counted(stored: Stored) -> torch.Tensor:
        nonlocal most
        found = widened(stored)
        alive.add(number := id(found))
        weakref.finalize(found, alive.discard, number)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(Stored, "numbers", counted)
    gradients(model, torch.randint(7, 300, (3, 9)))
    assert most == 1
    assert not alive


@pytest.mark.parametrize(
    ("frozen", "dtype", "expected"),
    [
        ("as-saved", torch.float32, {"bfloat16": 6, "float32": 2}),
        ("float32", torch.float32, {"float32": 8}),
        ("bfloat16", torch.float32, {"bfloat16": 6, "float32": 2}),
        ("as-saved", torch.float64, {"float64": 8}),
        ("bfloat16", torch.float64, {"bfloat16": 6, "float64": 2}),
    ],
)
def test_types(frozen: str, dtype: torch.dtype, expected: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).to(torch.bfloat16)
    frozen_but(model, "1.weight")
    assert stored_in(place(model, CPU, dtype, frozen)) == expected
    assert model(torch.ones(3, 2, dtype=dtype)).dtype == dtype


def test_buffers_have_the_type_of_the_engine() -> None:
    model = nn.BatchNorm1d(2).to(torch.bfloat16)
    place(model, CPU, torch.float64, "as-saved")
    assert model.running_mean is not None
    assert model.running_mean.dtype == torch.float64
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.dtype == torch.int64


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    place(frozen_but(model, "2."), CPU, torch.float32, "as-saved")
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight.data, Stored)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers(layer: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(layer(3, 4, batch_first=True)).to(torch.bfloat16).requires_grad_(False)
    rows = torch.randn(2, 5, 3)
    expected = copy.deepcopy(model).float()(rows)[0]
    assert torch.equal(place(model, CPU, torch.float32, "as-saved")(rows)[0], expected)


def test_a_write_into_a_weight_is_refused() -> None:
    model = place(nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False), CPU, torch.float32, "as-saved")
    with pytest.raises(ModelError, match=r"writes into a frozen weight that is stored as torch\.bfloat16"):
        model.weight.data.mul_(2)
