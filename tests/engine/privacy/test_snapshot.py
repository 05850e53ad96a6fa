"""Checkpoints of private training: every optimiser goes on from one as if it had never stopped; what is
damaged or foreign is refused.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from psgrad.engine.privacy.snapshot import Snapshot, tensors_of
from psgrad.errors import CheckpointError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD with lr as a tensor": lambda p: torch.optim.SGD(
        p, lr=torch.tensor(0.1), momentum=0.5, foreach=False
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.99)),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2.0),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "two groups": lambda p: torch.optim.SGD(
        [{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], lr=0.1, momentum=0.9
    ),
}


class Net(nn.Module):
    """Two layers, a scalar, a buffer, one that is not persistent, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.randn(2, 2).to(torch.bfloat16), persistent=False)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step's number alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in trainable(model):
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter
            )
        optimizer.step()


def identical(a: Any, b: Any) -> bool:
    """Same structure, types and bits. Same devices, but for single numbers, which PyTorch moves to the
    parameter's when it loads a state.
    """
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and (a.device == b.device or a.dim() == 0)
            and bool(torch.equal(a.cpu(), b.cpu()))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_snapshot_resumed_training_equals_uninterrupted(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    model = Net().to(device, dtype)
    optimizer = OPTIMIZERS[name](trainable(model))
    train(model, optimizer, range(3))
    data = Snapshot.take(tensors_of(model), optimizer, {"step": 3}).to_bytes()
    state_then = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 6))

    other = Net().to(device, dtype)
    resumed = OPTIMIZERS[name](trainable(other))
    Snapshot.from_bytes(data).restore(tensors_of(other), resumed)
    assert identical(resumed.state_dict(), state_then)
    train(other, resumed, range(3, 6))
    assert identical(tensors_of(other), tensors_of(model))
    assert identical(resumed.state_dict(), optimizer.state_dict())


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    shapes=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)), max_size=4),
    state=values,
    metadata=st.dictionaries(
        st.text(max_size=5),
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        max_size=3,
    ),
)
def test_snapshot_round_trip(
    shapes: list[tuple[list[int], torch.dtype]], state: Any, metadata: dict[str, Any]
) -> None:
    tensors = {f"t/{i}.ü": (10 * torch.randn(shape)).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    before = Snapshot(
        tensors, "x", [["a"]], {"state": state, "nested": (list(tensors.values()), {})}, metadata
    )
    after = Snapshot.from_bytes(before.to_bytes())
    assert identical(dict(sorted(after.tensors.items())), tensors)
    assert identical(after.state, before.state)
    assert identical(after.metadata, metadata)
    assert (after.optimizer, after.trained) == ("x", [["a"]])


def test_snapshot_views() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": whole,
        "same": whole,
        "column": whole[:, 1],
        "transposed": whole.t(),
        "row": whole[1],
        "repeated": whole[:1].expand(3, 4),
    }
    after = Snapshot.from_bytes(Snapshot(tensors, "x", [], {}, {}).to_bytes()).tensors
    assert {name: tensor.tolist() for name, tensor in after.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_snapshot_tied_weight() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    data = Snapshot.take(tensors_of(model), torch.optim.SGD(model.parameters()), {}).to_bytes()
    Snapshot.from_bytes(data).restore(tensors_of(other), torch.optim.SGD(other.parameters()))
    assert other[0].weight is other[1].weight
    assert torch.equal(other[1].weight, model[1].weight)


def test_snapshot_holds_no_memory_beside_the_tensors() -> None:
    """What a buffer is a view of may be private, and the file is published."""
    secret = torch.full((40, 8), 1.625, dtype=torch.float64)
    for view in (secret[:1], secret[:, 0], secret[:1].expand(40, 8), secret.t()[:, :1]):
        view.zero_()
        for snapshot in (Snapshot({"view": view}, "x", [], {}, {}), Snapshot({}, "x", [], {"m": [view]}, {})):
            assert secret[1, 1].numpy().tobytes() not in snapshot.to_bytes()


@pytest.mark.parametrize("value", [lambda step: step, nn.Linear(1, 1), Exception, iter([])])
def test_snapshot_other_values_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="can't be kept without running code"):
        Snapshot({}, "x", [], {"schedule": value}, {}).to_bytes()


# -- Files that are refused ----------------------------------------------------------------------------------


def a_file(**metadata: Any) -> bytes:
    model = Net()
    optimizer = torch.optim.Adam(trainable(model))
    train(model, optimizer, range(1))
    return Snapshot.take(tensors_of(model), optimizer, metadata).to_bytes()


def test_snapshot_truncated_file_refused() -> None:
    data = a_file()
    for length in [*range(0, 64), *range(64, len(data), 97), len(data) - 1]:
        with pytest.raises(CheckpointError, match=r"run/checkpoint.pt is damaged, or no checkpoint"):
            Snapshot.from_bytes(data[:length], "run/checkpoint.pt")
    with pytest.raises(CheckpointError):
        Snapshot.from_bytes(data + b"\0")


def test_snapshot_flipped_bit_refused() -> None:
    data = a_file(step=7)
    for place in range(0, len(data), 41):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(CheckpointError, match="is damaged"):
            Snapshot.from_bytes(bytes(changed))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"not a checkpoint at all",
        bytes(100),
        json.dumps({"a": 1}).encode(),
        save({"weight": torch.ones(2)}),
    ],
)
def test_snapshot_other_file_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="is damaged, or no checkpoint"):
        Snapshot.from_bytes(data)


class Runs:
    """Code that an unpickler would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a file",)


def test_snapshot_runs_no_code_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    torch.save({"tensors": Runs()}, file)
    with pytest.raises(CheckpointError, match="is damaged, or no checkpoint"):
        Snapshot.from_bytes(file.getvalue() + hashlib.sha256(file.getvalue()).digest())
    assert not capsys.readouterr().out


# -- Models that are refused ---------------------------------------------------------------------------------


class Other(Net):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        change(self)


def set_(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_("third", nn.Linear(1, 1)), r"third.weight is missing from it; third.bias is missing from it"),
        (set_("first", None), "first.weight is unknown to the model"),
        (
            set_("first", nn.Linear(3, 5)),
            r"first.weight is float32 \[4, 3\] in it and float32 \[5, 3\] in the model",
        ),
        (
            set_("scale", nn.Parameter(torch.ones((), dtype=torch.float64))),
            r"scale is float32 \[\] in it and float64 \[\] in the model",
        ),
        (
            set_("scale", nn.Parameter(torch.ones(()), requires_grad=False)),
            "the optimiser has other parameters",
        ),
    ],
)
def test_snapshot_other_model_refused(change: Callable[[Any], None], words: str) -> None:
    snapshot = Snapshot.from_bytes(a_file())
    model = Other(change)
    optimizer = torch.optim.Adam(trainable(model))
    before = copy.deepcopy(tensors_of(model))
    with pytest.raises(CheckpointError, match=words) as refusal:
        snapshot.restore(tensors_of(model), optimizer, "out/checkpoint.pt")
    assert str(refusal.value).startswith("out/checkpoint.pt does not fit: ")
    assert identical(tensors_of(model), before)
    assert not optimizer.state


def test_snapshot_other_optimiser_refused() -> None:
    model = Net()
    with pytest.raises(
        CheckpointError, match=r"made with torch.optim.adam.Adam, and the optimiser is torch.optim.sgd.SGD"
    ):
        Snapshot.from_bytes(a_file()).restore(tensors_of(model), torch.optim.SGD(trainable(model)))


def test_snapshot_swapped_layers_refused() -> None:
    # their names and shapes are the same, but the optimiser would give each the other's state
    model = Net()
    parameters = trainable(model)
    with pytest.raises(CheckpointError, match="has them in another order"):
        Snapshot.from_bytes(a_file()).restore(tensors_of(model), torch.optim.Adam(parameters[::-1]))
