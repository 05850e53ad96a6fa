"""The state of a model and its loss while records are computed: each kind of write ends the step before it is
paid for.
"""

from __future__ import annotations

import functools
import queue
import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.step import private_sum
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.engine.transforms import functional_call
from psgrad.errors import PsgradError
from tests.small_models import ARCHITECTURES, Architecture


class Slots:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0


class Writing(nn.Module):
    """A model that writes somewhere while it runs; nothing for None."""

    def __init__(self, write: Callable[[Any, Tensor], Any] | None) -> None:
        super().__init__()
        self.last, self.write = nn.Linear(4, 3), write
        self.register_buffer("buffer", torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.count, self.seen, self.cache, self.names = 0, [], {"a": torch.zeros(2)}, {1}
        self.array, self.nested, self.nothing = np.zeros(3), [{"x": [torch.zeros(2)]}], None
        self.settings, self.slots, self.waiting = SimpleNamespace(scale=1.0), Slots(), queue.Queue()
        self.called, self.bytes, self.small = threading.Event(), bytearray(b"a"), np.float32(0)
        self.numbers, self.objects = array("d", [0.0]), np.array([{}], dtype=object)
        self.layers, self.among = [nn.Linear(2, 2)], [SimpleNamespace(scale=torch.zeros(2))]
        self.called_by, self.other = functools.partial(print, [0]), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self, x)
        return self.last(x)  # type: ignore[no-any-return]


def as_numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "buffer in place": lambda m, x: m.buffer.add_(1),
    "buffer replaced": lambda m, x: setattr(m, "buffer", m.buffer + 1),
    "buffer by data": lambda m, x: m.buffer.data.add_(1),
    "buffer by numpy": lambda m, x: as_numpy(m.buffer).fill(1),
    "frozen parameter": lambda m, x: m.frozen.data.add_(1),
    "counter": lambda m, x: setattr(m, "count", m.count + 1),
    "list": lambda m, x: m.seen.append(1),
    "dict": lambda m, x: m.cache.update(b=1),
    "tensor in a dict": lambda m, x: m.cache["a"].add_(1),
    "set": lambda m, x: m.names.add(2),
    "array": lambda m, x: m.array.fill(1),
    "nested tensor by numpy": lambda m, x: as_numpy(m.nested[0]["x"][0]).fill(1),
    "new attribute": lambda m, x: setattr(m, "added", 1),
    "attribute that goes": lambda m, x: m.__dict__.pop("nothing", None),
    "attribute of a layer": lambda m, x: setattr(m.last, "seen", 1.0),
    "attribute of an object": lambda m, x: setattr(m.settings, "scale", 2.0),
    "slot of an object": lambda m, x: setattr(m.slots, "seen", 1),
    "queue": lambda m, x: m.waiting.put(1),
    "event": lambda m, x: m.called.set(),
    "bytes": lambda m, x: m.bytes.extend(b"b"),
    "number of numpy": lambda m, x: setattr(m, "small", np.float32(1)),
    "array of Python": lambda m, x: m.numbers.append(1.0),
    "array of objects": lambda m, x: m.objects[0].update(a=1),
    "layer in a list": lambda m, x: m.layers[0].weight.data.add_(1),
    "object in a list": lambda m, x: m.among[0].scale.add_(1),
    "argument of a partial": lambda m, x: m.called_by.args[0].append(1),
    "layer replaced": lambda m, x: setattr(m, "other", nn.Identity()),
    "layer of a layer": lambda m, x: m.last.add_module("late", nn.Identity()),
    "gradient required": lambda m, x: m.cache["a"].requires_grad_(True),
}


def paid(model: nn.Module, loss: Any = F.cross_entropy, write: Any = None) -> list[str]:
    """What was paid for by one step of the model on four records. write: called once in the sum."""
    objective, steps = Objective(model, loss), []
    state = Unchanged(model, loss)
    inner = batch_source(
        state.checked(objective.loss),
        objective.params,
        (torch.ones(4, 4),),
        torch.arange(4) % 3,
        has_aux=True,
    )

    def source(clipping: Clipping) -> Any:
        with state.throughout():
            found = inner(clipping)
            if write is not None:
                write()
            return found

    try:
        private_sum(
            source,
            Clipping.flat(objective.params, 1.0),
            Noise(1.0),
            "add_or_remove_one",
            make_generator(),
        )
        steps.append("paid")
    except PsgradError as error:
        steps.append(str(error))
    return steps


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_state_that_is_written_ends_the_step_before_it_is_paid_for(write: Any) -> None:
    (message,) = paid(Writing(write))
    assert "wrote into" in message or "writes in place" in message


def test_trained_parameter_that_is_written_by_numpy_ends_the_step() -> None:
    model = Writing(None)
    weight = as_numpy(model.last.weight)
    (message,) = paid(model, write=lambda: weight.fill(1))
    assert "wrote into last.weight" in message


def test_object_in_the_place_of_another_that_is_gone_is_a_change() -> None:
    """Python gives the number of an object that is gone to a new one."""
    model = Writing(None)
    model.nothing = object()
    state = Unchanged(model)
    for _ in range(99):
        model.nothing = None
        model.nothing = object()
        assert state.changes() == ["nothing"]


def test_state_that_refers_to_itself_is_compared() -> None:
    model = Writing(None)
    model.seen += [model.seen, model]
    state = Unchanged(model)
    assert not state.changes(by_bits=True)
    model.seen.append(1)
    assert "seen" in state.changes()


def test_state_of_a_loss_that_is_written_ends_the_step() -> None:
    class Loss:
        seen = 0.0

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.seen = self.seen + 1.0
            return F.cross_entropy(output, target)

    (message,) = paid(Writing(None), Loss())
    assert "wrote into Loss.seen" in message


def test_state_that_is_not_written_passes() -> None:
    assert paid(Writing(None)) == ["paid"]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_state_of_architectures_is_unchanged_by_a_forward_pass(architecture: Architecture) -> None:
    """From the second pass on: the first may set a cache up."""
    model = architecture.build().eval()
    inputs, _ = architecture.batch(2)
    with torch.no_grad():
        model(*inputs)
        state = Unchanged(model)
        model(*inputs)
    state.require(by_bits=True)


def test_state_that_an_optimiser_changes_between_steps_is_taken() -> None:
    model = Writing(None)
    state = Unchanged(model)
    with state.throughout():
        pass
    with torch.no_grad():
        model.last.weight.add_(1.0)
    with state.throughout():
        pass
    assert state.version == 1
    model.count = 3
    state.renew()
    assert state.version == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_keeps_nothing_of_a_call_with_other_parameters(kind: type[nn.RNNBase]) -> None:
    layer = kind(3, 4)
    state = Unchanged(layer)
    others = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    functional_call(layer, others, (torch.ones(2, 3),))
    assert state.changes(by_bits=True) == []
