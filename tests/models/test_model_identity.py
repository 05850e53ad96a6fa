"""The hashes of a model: others for every change of a number or an attribute, the same however the same
numbers lie in memory.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from psgrad.models import model_identity
from psgrad.models.in_files import tensors_in_files
from psgrad.models.model_identity import identify, tensor_digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes counted up from 0, as numbers of a type."""
    size = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape)) * size
    bytes_ = (torch.arange(count) % (2 if dtype == torch.bool else 120)).to(torch.uint8)
    return bytes_.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_digest_every_byte_counts(dtype: torch.dtype) -> None:
    tensor = filled(dtype, (3, 4))
    digest = tensor_digest(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    for place in range(len(raw)):
        raw[place] ^= 1
        assert tensor_digest(tensor) != digest, place
        raw[place] ^= 1
    assert tensor_digest(tensor) == digest


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 3, 8, 64]),
    st.randoms(),
)
def test_tensor_digest_does_not_depend_on_memory_layout_or_block_size(
    shape: list[int], dtype: torch.dtype, block: int, random: Any
) -> None:
    tensor = filled(dtype, tuple(shape))
    digest = tensor_digest(tensor)
    order = list(range(len(shape)))
    random.shuffle(order)
    back = sorted(range(len(order)), key=order.__getitem__)
    strange = tensor.permute(order).contiguous().permute(back)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_identity, "_BLOCK_BYTES", block)
        assert tensor_digest(strange) == digest
        assert tensor_digest(tensor) == digest


def test_tensor_digest_type_and_shape_count() -> None:
    zeros = torch.zeros(4)
    others = [
        zeros.view(2, 2),
        zeros.double(),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, device="meta"),
        zeros.to_sparse(),
    ]
    assert len({tensor_digest(each) for each in [zeros, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.quantize_per_channel(
            x, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
        lambda x: torch.nested.nested_tensor([x, x[0]]) if x.dim() == 1 else torch.nested.nested_tensor([x]),
        lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
        lambda x: torch.view_as_complex(x.view(2, 2, 2)).conj(),
        lambda x: x.expand(3, 2, 4),
        lambda x: x.t(),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensor_digest_of_unusual_tensors_is_of_their_numbers(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 4]])
    assert tensor_digest(make(x)) == tensor_digest(make(x.clone()))
    other = x.clone()
    other[1, 3] = 5
    assert tensor_digest(make(x)) != tensor_digest(make(other))


class Settings:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Model(nn.Module):
    """With a part of every kind that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.body[0].weight
        self.register_buffer("late", torch.zeros(2), persistent=False)
        self.listed = [nn.Linear(2, 2)]
        self.array, self.settings = np.zeros(2), Settings(1.0)
        self.table = {"b": torch.zeros(1), "a": {1, 2}}
        self.act, self.partial = torch.relu, partial(torch.softmax, dim=0)
        self.space = types.SimpleNamespace(power=2)
        self.functions = torch.nn.functional
        self.parts = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})


CHANGES: dict[str, Callable[[Model], Any]] = {
    "parameter": lambda m: m.body[0].weight.data[0, 0].add_(1),
    "buffer": lambda m: m.body[2].running_mean.add_(1),
    "buffer that is not persistent": lambda m: m.late.add_(1),
    "frozen": lambda m: m.body[0].bias.requires_grad_(False),
    "mode": lambda m: m.eval(),
    "mode of one layer": lambda m: m.body[1].eval(),
    "dropout": lambda m: setattr(m.body[1], "p", 0.2),
    "tie": lambda m: setattr(m.tied, "weight", nn.Parameter(m.tied.weight.detach().clone())),
    "module in a list": lambda m: m.listed[0].bias.data.add_(1),
    "array": lambda m: m.array.__setitem__(0, 1.0),
    "slot": lambda m: setattr(m.settings, "scale", 2.0),
    "tensor in a dict": lambda m: m.table["b"].add_(1),
    "set in a dict": lambda m: m.table["a"].add(3),
    "function": lambda m: setattr(m, "act", torch.tanh),
    "argument of a partial": lambda m: setattr(m, "partial", partial(torch.softmax, dim=1)),
    "namespace": lambda m: setattr(m.space, "power", 3),
    "class": lambda m: m.body.__setitem__(1, nn.AlphaDropout(0.1)),
    "hook": lambda m: m.body[0].register_forward_hook(lambda *_: None),
    "order of modules": lambda m: setattr(m, "parts", nn.ModuleDict({"b": nn.Tanh(), "a": nn.ReLU()})),
}


def hashes(model: nn.Module) -> tuple[str, str]:
    found = identify(model)
    return found.weights_sha256, found.modules_sha256


def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("name", CHANGES)
def test_identify_sees_every_change(name: str) -> None:
    before, changed = hashes(model()), model()
    CHANGES[name](changed)
    assert hashes(changed) != before
    assert hashes(model()) == before


def test_identify_names_and_sources() -> None:
    found = identify(model())
    assert {"body.0.weight", "late", "listed.0.weight", "table.b"} <= set(found.tensors)
    assert "tied.weight" not in found.tensors, "a shared tensor is hashed once"
    assert __name__ in found.sources


def test_identify_cycles() -> None:
    made = model()
    made.parent, made.itself = [made], made.table  # type: ignore[assignment]
    assert hashes(made) == hashes(made)


PROGRAM = """
import torch
from torch import nn
from psgrad.models.model_identity import identify

def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))
    model.names = {"a", "b", "c", "d"}
    model.table = {name: 1 for name in model.names}
    model.function = lambda x: x in {"a", "b"}
    return model
"""


@pytest.mark.long
@pytest.mark.parametrize("wrap", ["", pytest.param("torch.compile", marks=pytest.mark.sweep)])
def test_identify_is_the_same_in_every_process(wrap: str) -> None:
    """Python's hash of a text, and so the order of a set, is another one in each process."""
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(f"{PROGRAM}\nfound = identify({wrap}(made()))", here)
    program = (
        f"{PROGRAM}\nfound = identify({wrap}(made()))\nprint(found.weights_sha256, found.modules_sha256)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [here["found"].weights_sha256, here["found"].modules_sha256]


def test_weights_in_a_file_have_the_identity_that_they_have_in_memory(tmp_path: Path) -> None:
    resident, in_file = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(resident.state_dict(), tmp_path / "weights.safetensors")
    tensors = tensors_in_files(tmp_path / "weights.safetensors")
    assert tensors is not None
    for name, value in tensors.items():
        setattr(in_file, name, nn.Parameter(value))
    assert identify(in_file) == identify(resident)
