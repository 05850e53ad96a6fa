"""A checkpoint of private training as the bytes of one file: tensors, the optimiser's state and public
numbers; and the tensors of a model that may be published.

All of it is made of noisy sums that were paid for, so it may be published as the weights may. The file is
safetensors, and its plain values are JSON in the header: nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.stored import as_stored
from psgrad.errors import CheckpointError

_KEY = "psgrad_private_training"
_TENSORS, _STATE = "tensors/", "optimizer/"
_SHOWN = 5


@dataclass(frozen=True)
class Snapshot:
    """The state of training after one step.

    Attributes:
        tensors: name -> [*shape], parameters and buffers.
        optimizer: the class of the optimiser, such as "torch.optim.sgd.SGD".
        trained: the names of the parameters in each of its groups, in its order.
        state: its state_dict.
        metadata: public JSON values: the place in the ledger, the number of the step.
    """

    tensors: dict[str, Tensor]
    optimizer: str
    trained: list[list[str]]
    state: dict[str, Any]
    metadata: dict[str, Any]

    @classmethod
    def take(
        cls, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, metadata: Mapping[str, Any]
    ) -> Snapshot:
        """The present state. Nothing is copied: turn it into bytes before the next step.

        Args:
            tensors: name -> [*shape], as from `tensors_of`, or a part of it with every parameter of the
                optimiser.
            metadata: NaN and infinities are no JSON (ValueError from `to_bytes`).
        """
        return cls(
            dict(tensors),
            _name_of(optimizer),
            _trained(tensors, optimizer),
            optimizer.state_dict(),
            dict(metadata),
        )

    def to_bytes(self) -> bytes:
        """The file's content. Raises CheckpointError for a state that is neither tensors nor plain values."""
        from safetensors.torch import save

        packed: dict[str, Tensor] = {_TENSORS + name: tensor for name, tensor in self.tensors.items()}
        state = _packed(self.state, packed, "the optimiser's state")
        packed = _apart(packed)
        content = {
            "optimizer": self.optimizer,
            "trained": self.trained,
            "state": state,
            "metadata": self.metadata,
        }
        text = json.dumps(content, allow_nan=False)
        return save(packed, {_KEY: text, "sha256": _digest(text, packed)})

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the checkpoint") -> Snapshot:
        """The state that `to_bytes` wrote, on the CPU, bit for bit; `name` is the file's name in messages.

        Raises CheckpointError for a file that is damaged, cut short, or something else.
        """
        from safetensors.torch import load

        hint = "the file was cut short, or changed; put the checkpoint back that belongs to this run"
        try:
            tensors = load(data)
            # `load` has checked the header's length, and does not return the header's own strings
            strings = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        except Exception as error:  # the library raises a dozen types for a damaged file
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(f"{name} is damaged, or no checkpoint: {why}", hint=hint) from error
        text = strings.get(_KEY)
        if text is None:
            raise CheckpointError(
                f"{name} is a safetensors file, but not a checkpoint of private training",
                hint="weights alone don't say where training stood; put this run's checkpoint back",
            )
        if strings.get("sha256") != _digest(text, tensors):
            raise CheckpointError(f"{name} is damaged: its SHA-256 is not that written into it", hint=hint)
        content = json.loads(text)
        state = _unpacked(content["state"], tensors)
        own = {
            key.removeprefix(_TENSORS): tensor for key, tensor in tensors.items() if key.startswith(_TENSORS)
        }
        return cls(own, content["optimizer"], content["trained"], state, content["metadata"])

    def restore(
        self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, name: str = "the checkpoint"
    ) -> None:
        """Restores everything in place: values into these tensors, name -> [*shape], on their devices, and
        the state into this optimiser.

        The optimiser's hyperparameters are then those of the checkpoint.

        Raises CheckpointError where model or optimiser are not those of the checkpoint; nothing is changed
        then.
        """
        self._require_fit(tensors, optimizer, name)
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(self.tensors[key])
        optimizer.load_state_dict(self.state)
        # PyTorch casts all of the state to the parameter's type, which changes a scalar in another one.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, values in self.state["state"].items():
            live = optimizer.state[parameters[number]]
            for key, value in values.items():
                if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                    live[key] = value.to(live[key].device, copy=True)

    def _require_fit(
        self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, name: str
    ) -> None:
        wrong = [f"{key} is missing from it" for key in tensors if key not in self.tensors]
        wrong += [f"{key} is unknown to the model" for key in self.tensors if key not in tensors]
        wrong += [
            f"{key} is {_kind(self.tensors[key])} in it and {_kind(tensor)} in the model"
            for key, tensor in tensors.items()
            if key in self.tensors and _kind(self.tensors[key]) != _kind(tensor)
        ]
        if not wrong and _name_of(optimizer) != self.optimizer:
            wrong = [f"it was made with {self.optimizer}, and the optimiser is {_name_of(optimizer)}"]
        if not wrong and _trained(tensors, optimizer) != self.trained:
            wrong = ["the optimiser has other parameters, or has them in another order"]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise CheckpointError(
                f"{name} does not fit: {'; '.join(wrong[:_SHOWN])}{more}; expected the model, the"
                " trainable parameters and the optimiser that the run began with",
                hint="go on with the config that the run began with",
            )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """name -> [*shape]: all parameters and buffers of a model, a shared one once; the tensors themselves,
    those in half precision as they are stored. Without quantised weights, which nothing can write to.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: as_stored(tensor) for name, tensor in tensors.items() if not is_quantised(tensor)}


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _trained(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(tensor): name for name, tensor in tensors.items()}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise ValueError("the optimiser has a parameter that is not among the tensors")
    return [[str(name) for name in group] for group in groups]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, and each with a memory of its own, as safetensors requires."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if address in seen else plain
        seen.add(address)
    return own


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the plain values and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {_kind(tensor)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _packed(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The value as JSON from which `_unpacked` makes the same value, its tensors put aside under names of
    their own.
    """
    if isinstance(value, Tensor):
        name = f"{_STATE}{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_packed(key, tensors, where), _packed(item, tensors, f"{where}, {key!r}")]
                for key, item in value.items()
            ]
        }
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, tensors, where) for item in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which can't be kept without running code when it is"
        " read; expected tensors, numbers, strings, and lists and dicts of them",
        hint="use an optimiser of torch.optim with plain arguments",
    )


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in content}
    if kind == "float":
        return float(content)
    items = [_unpacked(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """name -> [*shape]: the parameters and buffers that the state dict names, as they are stored. What else a
    hook of the state dict makes may hold what nothing has checked.
    """
    named = dict(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )
    return {
        name: as_stored(named[name])
        for name in model.state_dict()
        if name in named and not is_quantised(named[name])
    }
