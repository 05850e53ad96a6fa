"""A checkpoint of private training as the bytes of one file: tensors, the optimiser's state and public
numbers; and the tensors of a model that may be published.

All of it is made of noisy sums that were paid for, so it may be published as the weights may. The file is
that of torch.save with the SHA-256 of its bytes behind it, and is read as data alone (weights_only).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.stored import as_stored
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import CheckpointError

_DIGEST = 32  # bytes of a SHA-256
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
            metadata: plain values.
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
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        file = io.BytesIO()
        try:
            torch.save(tree_map(lambda x: _own(x) if isinstance(x, Tensor) else x, content), file)
            file.seek(0)
            others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        except Exception as error:  # what can't be pickled at all raises a dozen types
            others = [str(error)]
        if others:
            raise CheckpointError(
                f"the optimiser's state can't be kept without running code when it is read: {others[0]};"
                " expected tensors, numbers, strings, and lists and dicts of them",
                hint="use an optimiser of torch.optim with plain arguments",
            )
        digest = hashlib.sha256(file.getbuffer()).digest()
        file.seek(0, io.SEEK_END)
        file.write(digest)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the checkpoint") -> Snapshot:
        """The state that `to_bytes` wrote, on the CPU, bit for bit; `name` is the file's name in messages.

        Raises CheckpointError for a file that is damaged, cut short, or something else.
        """
        content, digest = memoryview(data)[:-_DIGEST], data[-_DIGEST:]
        try:
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("its end is not the SHA-256 of what is before it")
            return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except Exception as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{name} is damaged, or no checkpoint of private training: {why}",
                hint="the file was cut short, or changed; put the checkpoint back that belongs to this run",
            ) from error

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


def _own(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with no more memory than its own numbers: torch.save writes all of the memory
    that a tensor is a part of.
    """
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


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
