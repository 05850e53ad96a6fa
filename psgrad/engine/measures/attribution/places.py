"""Where a model takes its inputs in: floats as they are, ids by the embeddings that look them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Place:
    """One tensor that attribution is about.

    Attributes:
        input: which of the model's inputs it belongs to, counted from 0.
        module: the embedding that looks this input's ids up, by name; None where the input holds floats, and is the tensor itself.
        call: which of that embedding's calls in a forward pass, counted from 0.
    """

    input: int
    module: str | None = None
    call: int = 0

    @property
    def name(self) -> str:
        return f"input {self.input}" if self.module is None else f"{self.module}, call {self.call}, of input {self.input}"


def places_of(model: nn.Module, inputs: Inputs) -> list[Place]:
    """The places of a model, seen in one plain forward pass of the first sample, inputs [1, ...] each. What the model raises comes out.

    An embedding counts where it is given all of an input's ids, as they are: a view of them, no shifted, clipped or cut copy. Inputs of
    whole numbers that no embedding takes have none.
    """
    found = [Place(number) for number, x in enumerate(inputs) if x.is_floating_point()]
    calls: dict[str, int] = {}
    handles = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        for number, x in enumerate(inputs):
            if not x.is_floating_point() and args and _same_numbers(args[0], x):
                found.append(Place(number, name, call))

    try:
        for name, module in _embeddings(model).items():
            handles.append(module.register_forward_hook(lambda *seen, name=name: note(name, *seen)))
        devices = [inputs[0].device] if inputs and inputs[0].is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(found, key=lambda place: place.input)


@contextmanager
def in_place(model: nn.Module, places: list[Place], values: Mapping[Place, torch.Tensor]) -> Iterator[None]:
    """Inside, what embeddings look up is replaced by these values, [1, ...] each; afterwards the model is as it was."""
    with _hooked(model, places, lambda place, output: values[place]):
        yield


@contextmanager
def looked_up(model: nn.Module, places: list[Place]) -> Iterator[dict[Place, torch.Tensor]]:
    """Inside, what embeddings look up is noted: a dict that fills as the model runs."""
    noted: dict[Place, torch.Tensor] = {}

    def note(place: Place, output: torch.Tensor) -> None:
        noted[place] = output

    with _hooked(model, places, note):
        yield noted


@contextmanager
def _hooked(model: nn.Module, places: list[Place], act: Any) -> Iterator[None]:
    """Inside, act(place, output) is called for each place in an embedding; what it returns, if anything, replaces the output."""
    wanted = {(place.module, place.call): place for place in places if place.module is not None}
    calls: dict[str, int] = {}
    handles = []

    def hook(name: str, output: torch.Tensor) -> torch.Tensor | None:
        call = calls[name] = calls.get(name, -1) + 1
        place = wanted.get((name, call))
        return None if place is None else act(place, output)  # type: ignore[no-any-return]

    try:
        for name, module in _embeddings(model).items():
            if any(name == place.module for place in places):
                handles.append(module.register_forward_hook(lambda module, args, output, name=name: hook(name, output)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embeddings(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}


def _same_numbers(given: Any, ids: torch.Tensor) -> bool:
    """Whether a module was given these ids: the same memory, from the same place on, and all of it."""
    return isinstance(given, torch.Tensor) and given.data_ptr() == ids.data_ptr() and given.numel() == ids.numel()
