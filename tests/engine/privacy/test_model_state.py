"""State that a model keeps: whatever it writes, in whatever place, the next run finds what the first one
found.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.model_state import ModelState
from psgrad.engine.privacy.snapshot import PublishedTensors
from psgrad.errors import ModelError


@dataclass(slots=True)
class Slots:
    value: float = 0.0


def remembering(seen: list[float]) -> Callable[[float], float]:
    """A function with a closure, an attribute and a default that can change."""
    last = 0.0

    def asked(value: float, known: list[float] = []) -> float:  # noqa: B006
        nonlocal last
        before = last + math.fsum(seen) + math.fsum(known) + getattr(asked, "noted", 0.0)
        if value > 1:
            last = value
            seen.append(value)
            known.append(value)
            asked.noted = value  # type: ignore[attr-defined]
        return before

    return asked


class Keeper(nn.Module):
    """A model with a place of every kind to keep something in."""

    of_the_class = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.part = nn.Linear(2, 2)
        self.register_buffer("largest", torch.zeros(3))
        self.register_buffer("wide", torch.zeros(2, 40_000))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex128))
        self.plain = torch.zeros(4)
        self.number = 0.0
        self.mapping: dict[str, Any] = {"deep": [{"down": torch.zeros(2)}]}
        self.ordered = OrderedDict(a=0.0, b=1.0)
        self.listed = [0.0]
        self.some = {1.0}
        self.queue = deque([0.0], maxlen=3)
        self.letters = bytearray(b"abc")
        self.array = np.zeros((2, 3))[:, ::2]
        self.wide_array = np.zeros(30_000, dtype=np.float32)
        self.objects = np.array([[0.0], {}], dtype=object)
        self.helper = types.SimpleNamespace(value=0.0, inner=Slots())
        self.inside = (Slots(), [0.0])
        self.asked = remembering([])
        self.bound = functools.partial(remembering([]), 2.0)


def rebind(model: Any) -> None:
    model.largest = torch.full((3,), 2.0)


def new_buffer(model: Any) -> None:
    model.register_buffer("later", torch.ones(1))


def new_module(model: Any) -> None:
    model.part.later = nn.Linear(1, 1)


def on_the_class(model: Any) -> None:
    Keeper.of_the_class = 2.0
    Keeper.new = [1]  # type: ignore[attr-defined]


def through_numpy(model: Any) -> None:
    model.largest.numpy()[1] = 3.0


def another_memory(model: Any) -> None:
    model.largest.data = torch.ones(3)


def smaller(model: Any) -> None:
    model.plain.resize_(2)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a buffer": rebind,
    "a buffer in place": lambda m: m.largest.add_(1),
    "a buffer's data": lambda m: m.largest.data.add_(1),
    "a buffer through numpy": through_numpy,
    "a buffer's memory": another_memory,
    "the last number of a large buffer": lambda m: m.wide.data[1, -1:].fill_(1e-30),
    "the sign of zero": lambda m: m.largest.data.neg_(),
    "a bfloat16 buffer": lambda m: m.brief.data.fill_(1),
    "a complex buffer": lambda m: m.complex.data.fill_(1j),
    "an unregistered tensor": lambda m: m.plain.data.add_(1),
    "a tensor's shape": smaller,
    "a tensor's attribute": lambda m: setattr(m.scale, "seen", 2.0),
    "a new buffer": new_buffer,
    "a new module": new_module,
    "a removed buffer": lambda m: delattr(m, "brief"),
    "a number": lambda m: setattr(m, "number", 2.0),
    "a new attribute": lambda m: setattr(m.part, "seen", 2.0),
    "a removed attribute": lambda m: delattr(m, "number"),
    "a tensor deep in containers": lambda m: m.mapping["deep"][0]["down"].add_(1),
    "a new key": lambda m: m.mapping["deep"].append(3),
    "the order of keys": lambda m: m.ordered.move_to_end("a"),
    "a key": lambda m: m.ordered.update(a=2.0),
    "a list": lambda m: m.listed.__setitem__(0, 2.0),
    "a set": lambda m: m.some.add(2.0),
    "a deque": lambda m: m.queue.append(2.0),
    "bytes": lambda m: m.letters.__setitem__(0, 5),
    "an array": lambda m: m.array.__setitem__((1, 1), 2.0),
    "a large array": lambda m: m.wide_array.__setitem__(-1, -0.0),
    "an array of objects": lambda m: m.objects[0].append(2.0),
    "an object's attribute": lambda m: setattr(m.helper, "value", 2.0),
    "a slot": lambda m: setattr(m.helper.inner, "value", 2.0),
    "a slot in a tuple": lambda m: setattr(m.inside[0], "value", 2.0),
    "a list in a tuple": lambda m: m.inside[1].append(2.0),
    "a class attribute": on_the_class,
    "a closure, a default and a function's attribute": lambda m: m.asked(2.0),
    "a partial function's": lambda m: m.bound(),
    "the mode": lambda m: m.eval(),
    "whether a buffer requires a gradient": lambda m: m.largest.requires_grad_(),
    "whether a parameter requires a gradient": lambda m: m.scale.requires_grad_(False),
}


def shown(value: Any, depth: int = 0) -> Any:
    """All that can be told of a value, by another way than the guard's: bits as bytes, containers as what
    they hold.
    """
    if isinstance(value, Tensor):
        array = value.detach().resolve_conj()
        array = (torch.view_as_real(array) if array.is_complex() else array).contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
            array.view(torch.uint8).numpy().tobytes() if array.numel() else b"",
        )
    if isinstance(value, np.ndarray):
        return (
            value.shape,
            value.dtype.str,
            [shown(item) for item in value] if value.dtype == object else value.tobytes(),
        )
    if isinstance(value, nn.Module):
        marks: dict[str, Any] = (
            {**vars(value.scale), "trained": value.scale.requires_grad} if isinstance(value, Keeper) else {}
        )
        return type(value).__name__, [(key, shown(item)) for key, item in vars(value).items()], marks
    if isinstance(value, dict):
        return [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [shown(item) for item in value]
    if isinstance(value, Slots):
        return value.value
    if isinstance(value, types.SimpleNamespace):
        return shown(vars(value))
    if isinstance(value, functools.partial):
        return shown(value.func)
    if isinstance(value, types.FunctionType):
        return (
            value.__defaults__ and [list(item) for item in value.__defaults__],
            dict(vars(value)),
            [
                copy.deepcopy(cell.cell_contents)
                for cell in value.__closure__ or ()
                if not callable(cell.cell_contents)
            ],
        )
    return copy.deepcopy(value)


def told(model: Keeper) -> Any:
    return shown(model), {
        key: shown(value)
        for key, value in vars(Keeper).items()
        if not key.startswith("__") and not callable(value)
    }


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_model_state_restores_every_kind_of_write(write: Callable[[Any], Any]) -> None:
    model = Keeper()
    state = ModelState(model)
    before = told(model)
    with state.held():
        write(model)
        assert told(model) != before  # that it is a write at all
        assert state.changes()
    assert told(model) == before
    assert state.changes() == []
    write(model)  # between two runs, as in the backward pass
    with state.held():
        assert told(model) == before


@given(st.lists(st.sampled_from(list(WRITES)), min_size=1, max_size=8, unique=True))
def test_model_state_restores_several_writes(writes: list[str]) -> None:
    if {"a removed buffer", "a bfloat16 buffer"} <= set(writes):
        writes.remove("a removed buffer")
    if {"a removed attribute", "a number"} <= set(writes):
        writes.remove("a number")
    model = Keeper()
    state = ModelState(model)
    before = told(model)
    for write in writes:
        WRITES[write](model)
    state.restore()
    assert told(model) == before


VALUES = st.recursive(
    st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just("tensor")
    | st.just("array")
    | st.just("slots"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def made(value: Any) -> Any:
    """The value with tensors, arrays and objects where it has their names."""
    if isinstance(value, str) and value in ("tensor", "array", "slots"):
        return {"tensor": torch.zeros(3), "array": np.zeros(3), "slots": Slots()}[value]
    if isinstance(value, (list, tuple)):
        return type(value)(made(item) for item in value)
    return {key: made(item) for key, item in value.items()} if isinstance(value, dict) else value


def scrambled(value: Any, random: np.random.Generator) -> None:
    """Writes into everything that can be written into, or into nothing, as it comes."""
    if isinstance(value, (list, tuple, dict)):
        for item in list(value.values() if isinstance(value, dict) else value):
            scrambled(item, random)
    if random.random() < 0.5:
        return
    if isinstance(value, Tensor):
        value.data[0] = 1
    elif isinstance(value, np.ndarray):
        value[-1] = 1
    elif isinstance(value, Slots):
        value.value = 1.0
    elif isinstance(value, list):
        (value.clear, value.reverse, lambda: value.append(7))[random.integers(3)]()
    elif isinstance(value, dict):
        (value.clear, lambda: value.update(new=[3]), lambda: value and value.popitem())[random.integers(3)]()


@given(VALUES, st.integers(0, 2**32))
def test_model_state_restores_random_structures(value: Any, seed: int) -> None:
    model = nn.Module()
    model.kept = made(value)
    before = shown(model)
    with ModelState(model).held():
        scrambled(model.kept, np.random.default_rng(seed))
    assert shown(model) == before or "nan" in str(before)


@pytest.mark.parametrize(
    "write",
    [lambda p: p.add_(1), lambda p: setattr(p, "data", torch.ones(2))],
    ids=["in place", "another memory"],
)
def test_model_state_refuses_a_write_into_a_parameter(write: Callable[[Tensor], Any]) -> None:
    model = Keeper()
    alias = model.scale
    with pytest.raises(ModelError) as caught, ModelState(model).held(), torch.no_grad():
        write(alias)
    assert caught.value.arrived == "the model or the loss wrote into scale while a record was computed"
    assert caught.value.next_step


def test_model_state_unrestorable_write_refused() -> None:
    model = Keeper()
    state = ModelState(model)
    model.array.setflags(write=False)
    state.restore()
    model.array.setflags(write=True)
    model.array[0, 0] = 2
    model.array.setflags(write=False)
    with pytest.raises(
        ModelError, match=r"wrote into array while a record was computed, and it can't be put back"
    ):
        state.restore()


def test_model_state_of_the_loss() -> None:
    seen: list[float] = []

    def loss(output: float) -> float:
        seen.append(output)
        return output

    state = ModelState(nn.Linear(1, 1), loss)
    held = state.holding(loss)
    assert held(3.0) == 3.0
    assert seen == []
    assert held.__name__ == "loss"


def test_model_state_restored_after_error() -> None:
    model = Keeper()

    def fails() -> None:
        model.number = 5.0
        raise ZeroDivisionError

    failing = ModelState(model).holding(fails)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert model.number == 0.0


# -- in a private sum ----------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """Multiplies by what it has seen, which it writes down where a record leads it to."""

    factor: Any

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor
        if x[0, 0] > 2:
            self.factor = 50.0
        result: Tensor = self.last(x) * factor
        return result


@pytest.mark.parametrize("guarded", [True, False])
def test_model_state_private_sum_of_stateful_model(guarded: bool) -> None:
    """One record, whose branch writes, among others: what each adds is what it adds alone, in whatever order
    and company.
    """
    torch.manual_seed(0)
    model = Doubling()
    objective = Objective(model, nn.functional.cross_entropy)
    loss = ModelState(model).holding(objective.loss) if guarded else objective.loss
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    x[:, 0] = x[:, 0].clamp(max=1)
    x[7, 0] = 3.0
    clipping = Clipping.flat(objective.params, 1e6)

    def total(rows: list[int]) -> Tensor:
        source = batch_source(loss, objective.params, (x[rows],), y[rows], has_aux=True)
        return source(clipping).sums["last.weight"]

    alone = sum(total([row]) for row in range(20))
    apart = (total(list(range(20))) - alone).abs().max()
    if guarded:
        assert apart < 1e-4
        assert model.factor == 1.0
    else:
        assert apart > 1


# -- what is published ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["largest", "brief", "part.bias"])
def test_published_untrained_tensors_unchanged(name: str) -> None:
    model = Keeper()
    published = PublishedTensors(model, ["scale", "part.weight"])
    with torch.no_grad():
        model.scale.add_(1)  # trained
    named, state = published.checked()
    assert set(state) == set(model.state_dict())
    assert set(named) == {"scale", "part.weight", "part.bias", "largest", "wide", "brief", "complex"}
    tensor = named[name]
    tensor.data.neg_()  # zero has a sign
    tensor.data[0] = -tensor.data[0] if name == "part.bias" else tensor.data[0]
    with pytest.raises(ModelError) as caught:
        published.checked()
    assert caught.value.arrived.startswith(
        f"{name}, which is not trained, is not what it was before the first record was read"
    )
    assert published.differing() == [name]


def test_published_tensors_added_and_removed() -> None:
    model = Keeper()
    published = PublishedTensors(model, ["scale"])
    model.register_buffer("later", torch.ones(1))
    del model.brief
    assert published.differing() == ["brief", "later"]
    model = Keeper()
    published = PublishedTensors(model, ["scale"])
    model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda module, state, prefix, _: state.update(seen=torch.ones(1))
    )
    assert published.differing() == ["seen"]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_model_state_sparse_tensor_kept_and_write_refused(layout: torch.layout) -> None:
    model = nn.Linear(2, 2)
    model.graph = torch.eye(3).to_sparse(layout=layout)
    state = ModelState(model)
    with state.held():
        model.graph @ torch.ones(3, 1)
    with pytest.raises(ModelError, match="wrote into graph"), state.held():
        model.graph.values().mul_(2) if layout == torch.sparse_csr else model.graph.mul_(2)


def numbers() -> Iterator[int]:
    yield from range(9)


@pytest.mark.parametrize(
    "make", [itertools.count, numbers, lambda: iter([1, 2]), lambda: zip([1], [2], strict=True)]
)
def test_model_state_iterator_refused(make: Callable[[], Iterator[Any]]) -> None:
    model = nn.Linear(2, 2)
    model.parts = [make()]
    with pytest.raises(ModelError, match=r"keeps an iterator, parts\[0\]"):
        ModelState(model)


@contextlib.contextmanager
def noted(names: list[str]) -> Iterator[None]:
    names.append("entered")
    yield


def test_model_state_context_as_decorator_is_looked_into() -> None:
    """Classes of transformers have such methods. What it was made with is put back; its generator is new in
    each call.
    """
    names: list[str] = []

    class Noting(nn.Linear):
        @noted(names)
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.T

    model = Noting(2, 2)
    with ModelState(model).held():
        model(torch.ones(2))
        assert names == ["entered"]
    assert names == []


def test_model_state_entered_context_refused() -> None:
    model = nn.Linear(2, 2)
    model.context = noted([])
    model.context.__enter__()
    with pytest.raises(ModelError, match="keeps an iterator"):
        ModelState(model)


UNCOUNTED: dict[str, Callable[[nn.Linear], Any]] = {
    "numpy": lambda m: m.weight.detach().numpy().__setitem__((0, 0), 9.0),
    "the storage": lambda m: m.weight.untyped_storage().__setitem__(1, 9),
    ".data": lambda m: m.weight.data.mul_(-1),
    "a large buffer": lambda m: m.wide.data.neg_(),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_model_state_write_that_pytorch_does_not_count_refused_after_the_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psgrad.engine.privacy.kept_values._LARGE", 100)
    model = nn.Linear(3, 3)
    model.register_buffer("wide", torch.ones(40))
    state = ModelState(model)
    with state.unwritten(), state.held():
        model(torch.ones(1, 3))
    with pytest.raises(ModelError, match="wrote into"), state.unwritten(), state.held():
        UNCOUNTED[name](model)
