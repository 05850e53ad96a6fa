"""The tensors of a model as they may be published: trained parameters, and all others as they were before a record was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.errors import ModelError, PsgradError


class PublishedTensors:
    """What of a model may be published. What is not trained is held against its SHA-256 of when this was made.

    Args:
        trained: the names of the parameters that are trained.
    """

    def __init__(self, model: nn.Module, trained: Iterable[str]) -> None:
        self._model, self._trained = model, tuple(trained)
        self._built = self._of_trained()
        self.renew()

    def renew(self) -> None:
        """Take what is there now for what it was: after a checkpoint of the run was read."""
        self._began = self._digests(*self._now())

    def require_unwritten(self) -> None:
        """Raises ModelError where a trained parameter is not, bit for bit, what it was when this was made: to be called before training."""
        now = self._of_trained()
        written = [name for name, digest in self._built.items() if now[name] != digest]
        if written:
            more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
            raise ModelError(
                f"a forward pass changes the parameter {written[0]}{more}: it was run on rows of the data before the first step",
                expected="parameters that the optimiser alone changes: what a row writes into them is published without noise",
                cause="a first pass that sets the model up from the data it sees (data-dependent initialisation)",
                next_step="set it up from public data, where the model is built, or load weights that were set up so",
            )

    def checked(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(name -> parameter or buffer, the tensors of the state dict).

        Raises ModelError where one that is not trained is not, bit for bit, what it was, or was not there.
        """
        named, state = self._now()
        differing = self._differing(named, state)
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ModelError(
                f"{differing[0]}{more}, which is not trained, is not what it was before the first record was read",
                expected="the same bits: it would be published without noise",
                cause="a model or a loss that writes what it has seen into its buffers or frozen parameters",
                next_step="keep nothing of the data in them; what was paid for is in the ledger, and none of these tensors was written",
            )
        return named, state

    def differing(self) -> list[str]:
        """The names of tensors that are not trained and no longer what they were, or were not there."""
        return self._differing(*self._now())

    def _differing(self, named: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
        now = self._digests(named, state)
        return sorted({name for name, kind in now.keys() | self._began.keys() if now.get((name, kind)) != self._began.get((name, kind))})

    def _now(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state = {name: value for name, value in self._model.state_dict().items() if isinstance(value, Tensor)}
        return tensors_of(self._model), state

    def _of_trained(self) -> dict[str, str]:
        """name -> the SHA-256 of a parameter that is trained."""
        return {name: _sha256(self._model.get_parameter(name)) for name in self._trained}

    def _digests(self, named: dict[str, Tensor], state: dict[str, Tensor]) -> dict[tuple[str, str], str]:
        """(name, where from) -> the SHA-256 of a tensor that is not trained."""
        trained = {_extent(self._model.get_parameter(name)) for name in self._trained}
        of_memory: dict[tuple[Any, ...], str] = {}  # most are in both
        found = {}
        for kind, tensors in (("named", named), ("state", state)):
            for name, value in tensors.items():
                try:
                    extent = _extent(value)
                except PsgradError:  # a traced one, which outlived the run that made it
                    found[name, kind] = "of no memory"
                    continue
                if extent not in trained:
                    found[name, kind] = of_memory[extent] = of_memory[extent] if extent in of_memory else _sha256(value)
        return found


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is of."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _sha256(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
