"""Where code of one's own keeps things: each place is found, and what is written there is put back;
parameters are left alone.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import importlib
import itertools
import random
import sys
import types
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.model_state import ModelState
from psgrad.engine.privacy.reached import reached
from psgrad.engine.privacy.record_draws import OwnGenerators, RecordDraws
from psgrad.engine.privacy.records import RecordReader, Records
from psgrad.errors import DataError
from psgrad.ragged import Block

Keeps = tuple[Callable[[], float], Callable[[], object], Any]
"""A number that is kept somewhere, a write of another one, and the object from which it is to be found."""

COUNT = 0.0
KEPT: dict[str, float] = {}


class Settings:
    """A class that functions know by its name alone."""

    scale = 0.0


def with_a_default(write: bool = False, known: list[float] = [0.0]) -> float:  # noqa: B006
    if write:
        known[0] = 1.0
    return known[0]


def a_user_dict() -> Keeps:
    found = collections.UserDict(a=0.0)
    return (lambda: found["a"]), (lambda: found.update(a=1.0)), found


def an_array() -> Keeps:
    found = array("d", [0.0])
    return (lambda: found[0]), (lambda: found.__setitem__(0, 1.0)), found


def a_distribution() -> Keeps:
    found = torch.distributions.Normal(torch.zeros(1), 1.0)
    return (lambda: float(found.loc)), (lambda: setattr(found, "loc", torch.ones(1))), found


def closure_of_a_call() -> Keeps:
    value = 0.0

    class Act:
        def __call__(self) -> None:
            nonlocal value
            value = 1.0

    found = Act()
    return (lambda: value), found, found


def closure_of_a_property() -> Keeps:
    kept = [0.0]

    class Act:
        @property
        def value(self) -> list[float]:
            return kept

        @staticmethod
        def plain() -> list[float]:
            return kept

    found = Act()
    return (lambda: kept[0]), (lambda: found.value.__setitem__(0, 1.0)), found


def method_of_a_list() -> Keeps:
    kept: list[float] = []
    return (lambda: float(len(kept))), (lambda: kept.append(1.0)), kept.append


def a_cache() -> Keeps:
    calls = [0]

    @functools.lru_cache
    def first_call() -> int:
        calls[0] += 1
        return calls[0]

    return (lambda: float(first_call.cache_info().currsize)), first_call, first_call


def a_global() -> Keeps:
    def write() -> None:
        global COUNT
        COUNT = 1.0

    return (lambda: COUNT), write, write


def a_new_global() -> Keeps:
    def write() -> None:
        global LATER
        LATER = 1.0  # type: ignore[name-defined]

    return (lambda: float("LATER" in globals())), write, write


def a_global_dict() -> Keeps:
    def write() -> None:
        KEPT["a"] = 1.0

    return (lambda: KEPT.get("a", 0.0)), write, write


def a_class_by_name() -> Keeps:
    def write() -> None:
        Settings.scale = 1.0

    return (lambda: Settings.scale), write, write


def default_of_a_function_by_name() -> Keeps:
    def write() -> None:
        with_a_default(write=True)

    return with_a_default, write, write


class Kind(type):
    """A class of classes, with an attribute of its own."""

    scale = 0.0


class OfAKind(metaclass=Kind):
    pass


def a_metaclass() -> Keeps:
    return (lambda: Kind.scale), (lambda: setattr(Kind, "scale", 1.0)), OfAKind()


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=0.0)


def a_context_variable() -> Keeps:
    def write() -> None:
        VARIABLE.set(1.0)

    return VARIABLE.get, write, write


def behind_a_weak_reference() -> Keeps:
    found = Settings()
    return (lambda: found.scale), (lambda: setattr(found, "scale", 1.0)), weakref.ref(found)


def a_module_in_an_attribute() -> Keeps:
    module = types.ModuleType("__main__")  # as of a notebook
    module.value = 0.0  # type: ignore[attr-defined]
    holder = types.SimpleNamespace(settings=module)
    return (lambda: holder.settings.value), (lambda: setattr(module, "value", 1.0)), holder


def the_class_of_an_object() -> Keeps:
    class Other(Settings):
        scale = 1.0

    found = Settings()
    return (lambda: found.scale), (lambda: setattr(found, "__class__", Other)), found


def attribute_of_a_text() -> Keeps:
    class Name(str):
        value = 0.0

    found = Name("a")
    return (lambda: found.value), (lambda: setattr(found, "value", 1.0)), found


def the_code_of_a_function() -> Keeps:
    def found(value: float = 0.0) -> float:
        return value

    return found, (lambda: setattr(found, "__defaults__", (1.0,))), found


PLACES = [
    a_metaclass,
    a_context_variable,
    behind_a_weak_reference,
    a_module_in_an_attribute,
    the_class_of_an_object,
    attribute_of_a_text,
    the_code_of_a_function,
    a_user_dict,
    an_array,
    a_distribution,
    closure_of_a_call,
    closure_of_a_property,
    method_of_a_list,
    a_cache,
    a_global,
    a_new_global,
    a_global_dict,
    a_class_by_name,
    default_of_a_function_by_name,
]


@pytest.mark.parametrize("place", PLACES)
def test_reached_place_restored(place: Callable[[], Keeps]) -> None:
    read, write, root = place()
    model = nn.Linear(1, 1)
    model.kept = root
    state = ModelState(model)
    with state.held():
        write()
        assert read() == 1.0
        assert state.changes()
    assert read() == 0.0
    assert state.changes() == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of one's own, one module of which keeps things in another one."""
    (tmp_path / "reached_own").mkdir()
    for name, text in {
        "__init__": "",
        "kept": "COUNT = 0.0\nKNOWN = []\n",
        "late": "def late(): return 3\n",
        "model": (
            "from reached_own import kept\nimport reached_own\n\n\ndef write():\n    kept.COUNT = 1.0\n   "
            " kept.KNOWN.append(1)\n\n\ndef imports():\n    import reached_own.late\n    return"
            " reached_own.late.late()\n"
        ),
    }.items():
        (tmp_path / "reached_own" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("reached_own.model")
    for name in [name for name in sys.modules if name.startswith("reached_own")]:
        del sys.modules[name]


def test_reached_globals_of_another_module_restored(package: Any) -> None:
    with ModelState(package.write).held():
        package.write()
        assert package.kept.COUNT == 1.0
    assert package.kept.COUNT == 0.0
    assert package.kept.KNOWN == []


def test_reached_module_imported_meanwhile(package: Any) -> None:
    state = ModelState(package.imports)
    for _ in range(2):
        with state.held():
            assert package.imports() == 3


def test_reached_globals_of_installed_packages_ignored() -> None:
    """What they make may be in other threads' hands: of a function of theirs nothing is followed but what it
    closes over.
    """
    assert not [
        where
        for where, _ in reached([np.linalg.norm, torch.nn.functional.dropout, pytest.raises])
        if "globals" in where
    ]


@pytest.mark.parametrize(
    "alias",
    [lambda p: p.detach(), lambda p: p.detach().numpy(), lambda p: [p.data[1:]], lambda p: p.data.view(-1)],
)
def test_reached_alias_of_parameter_ignored(alias: Callable[[Any], Any]) -> None:
    """What the optimiser made of a parameter stays, also where the model has it under another name."""
    model = nn.Linear(3, 2)
    model.alias = alias(model.weight)
    state = ModelState(model)
    with torch.no_grad():
        model.weight.fill_(7.0)
    with state.held():
        pass
    assert bool((model.weight == 7).all())


def test_reached_tensor_sharing_memory_with_parameter_restored() -> None:
    memory = torch.zeros(6)
    model = nn.Module()
    model.weight, model.other = nn.Parameter(memory[:4]), memory[4:]
    with ModelState(model).held():
        model.other.data.numpy()[:] = 1.0
    assert memory.tolist() == [0.0] * 6


# -- Random generators ---------------------------------------------------------------------------------------

MADE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(0),
    "numpy": lambda: np.random.default_rng(0),
    "numpy, philox": lambda: np.random.Generator(np.random.Philox(0)),
    "numpy, legacy": lambda: np.random.RandomState(0),
    "random": lambda: random.Random(0),
}


def drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, dtype=torch.float64))
    return float(generator.random())


@pytest.mark.parametrize("name", MADE)
def test_own_generators_seeded_and_compared(name: str) -> None:
    first, second = MADE[name](), MADE[name]()
    own = OwnGenerators([first, {"second": second}])
    assert len(own) == 2
    own.seed([5, 6])
    states, before = own.states(), [drawn(first), drawn(second)]
    assert own.states() != states
    assert before[0] != before[1]
    own.seed([5, 6])
    assert own.states() == states
    assert [drawn(first), drawn(second)] == before
    with own.kept():
        own.seed([1, 2])
    own.seed([5, 6])
    assert own.states() == states
    own.seed([7, 2**64 - 1])
    assert not {drawn(first), drawn(second)} & set(before)


RNG = np.random.default_rng(0)


def test_own_generators_found() -> None:
    local, default = random.Random(1), random.Random(2)

    class Rows(TensorDataset):
        def __getitem__(self, row: int, known: Any = default) -> Any:
            return RNG.random() + local.random()

    rows: Any = Rows(torch.zeros(3))
    rows.kept = torch.Generator()
    found = [
        value
        for _, value in reached([Subset(rows, [0])])
        if isinstance(value, (torch.Generator, np.random.Generator, random.Random))
    ]
    assert {id(value) for value in found} == {id(value) for value in (RNG, local, default, rows.kept)}


def test_own_generators_not_searched_in_datasets() -> None:
    assert len(OwnGenerators({"rows": [random.Random(0)] * 20_000, "rng": random.Random(1)})) == 1


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_own_generators_reading_by_record_and_step(name: str, augmented: bool) -> None:
    """A dataset or an augmentation with a generator of its own, whose seed is in its code."""
    generator = MADE[name]()
    x = torch.arange(6.0)[:, None]

    def take(rows: np.ndarray) -> Block:
        found = x[torch.from_numpy(rows)]
        return Block((found if augmented else torch.stack([row + drawn(generator) for row in found]),), None)

    def augment(row: torch.Tensor) -> torch.Tensor:
        return row + drawn(generator)

    draws = RecordDraws(make_generator("aes", seed=3), OwnGenerators(take, augment))
    options: dict[str, Any] = {"augment": augment, "copies": 2} if augmented else {}
    reader = RecordReader(Records.of_rows(6), take, draws=draws, **options)

    def read(records: list[int], step: int = 0) -> dict[int, torch.Tensor]:
        drawn(generator)  # it is somewhere else
        reader.draw(records, step)
        return dict(zip(reader.drawn.tolist(), reader(0, len(records)).inputs[0], strict=True))

    everybody = read(list(range(6)))
    before = OwnGenerators(generator).states()
    reader.draw([2, 4])
    reader(0, 2)
    assert OwnGenerators(generator).states() == before
    for records in ([3], [5, 1, 3], [0, 2]):
        for record, found in read(records).items():
            assert torch.equal(found, everybody[record])
    assert not torch.equal(read([3], step=1)[3], everybody[3])
    noise = [everybody[record] - x[record] for record in range(6)]
    assert len({float(each.flatten()[0]) for each in noise}) == 6
    reader.require_memoryless(range(6))


def test_own_generators_changing_records_refused() -> None:
    reads = itertools.count()

    def take(rows: np.ndarray) -> Block:
        return Block((torch.tensor([[float(next(reads))] for _ in rows]),), None)

    with pytest.raises(
        DataError,
        match="record 0 of the records looked at is another one when it is read again, after others",
    ):
        RecordReader(Records.of_rows(4), take).require_memoryless(range(4))
    RecordReader(
        Records.of_rows(4), lambda rows: Block((torch.full((len(rows), 1), torch.nan),), None)
    ).require_memoryless(range(4))
