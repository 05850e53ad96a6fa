"""Coins: the random numbers of a private run besides its noise and its batches, as of dropout, noise layers
and datasets that change their rows.

Operators and user code draw from the generators of PyTorch, NumPy and Python. These are seeded from a secret
stream for each chunk of records, so that coins are secret, and independent and identically distributed over
the places of a chunk: neighbouring datasets can be coupled so that every common record has the same coins
(docs/explanation/dp.md has the proof). Two things would break this, and end the run: a model that seeds
PyTorch's generator itself, and a model that draws from NumPy's or Python's generators, whose numbers all
records of a chunk share. A chunk of one record may do both: its coins are its own.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psgrad import random_state
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.unchanged import attributes_of
from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.private_torch import DisableTorchFunction, without_modes
from psgrad.engine.transforms.state import state
from psgrad.errors import ModelError

Seeds = npt.NDArray[np.uint64]
"""Of all generators of a run: `_TORCH` numbers for PyTorch's, and `_EACH` for each of the others."""

# What seeds a generator, in numbers of 64 bits. PyTorch's generator of the CPU takes 32 bits of a seed alone,
# which could be tried, so it gets all of its state: a number that tells it from others, and 624 words.
_STATE_WORDS, _EACH = 624, 4
_TORCH = 1 + _STATE_WORDS // 2
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Containers with more parts are rows of a dataset, which hold no generators.
_MOST_PARTS = 10_000


class Coins:
    """The coins of a run, from AES-256 with a key of their own.

    Args:
        generator: gives the key, and coins are as secret as its numbers; None for a cryptographic one.
        roots: the model, the loss, the dataset: generators of PyTorch, NumPy and Python in
            their attributes are seeded with the global ones.

    Raises ModelError for a generator that can't be seeded.
    """

    def __init__(self, generator: Generator | None = None, *roots: object) -> None:
        generator = generator or make_generator()
        self._key = hashlib.sha256(b"psgrad coins" + generator.uint64(4).tobytes()).digest()
        self._own = generators_of(*roots)
        self._stream: Generator | None = None
        self._seeded = b""

    def begin(self, *place: int) -> None:
        """Begin the stream of a step, or of a rank and a step, as one or two whole numbers."""
        numbers = b"".join(number.to_bytes(8, "little") for number in place)
        self._stream = Generator(hashlib.sha256(self._key + numbers).digest(), "coins")

    def next(self) -> Seeds:
        """The next seeds of the stream."""
        if self._stream is None:
            self.begin(0)
        assert self._stream is not None
        return self._stream.uint64(_TORCH + _EACH * (2 + len(self._own)))

    def seed(self, seeds: Seeds) -> None:
        """Seed all generators."""
        of_torch, each = seeds[:_TORCH], seeds[_TORCH:].reshape(-1, _EACH)
        of_numpy, of_python, *of_own = each
        with DisableTorchFunction():
            for generator in random_state.generators():
                _seed_torch(generator, of_torch)
            np.random.seed(_words(of_numpy))
            random.seed(_whole(of_python))
            for own, numbers in zip(self._own, of_own, strict=True):
                _seed(own, numbers)
        self._seeded = self._states()

    def _states(self) -> bytes:
        """The states of all generators but PyTorch's, for comparison."""
        own = [_state(each) for each in self._own if not isinstance(each, torch.Generator)]
        return pickle.dumps([random.getstate(), np.random.get_state(legacy=False), *own])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context at whose end all generators are as they were before."""
        with random_state.restored(), _kept(self._own):
            yield

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """`kept`, beginning with the next seeds."""
        with self.kept():
            self.seed(self.next())
            yield

    @contextmanager
    def of_chunk(self, seeds: Seeds, records: int, draws: Draws | None = None) -> Iterator[None]:
        """A context, around the computation of a chunk of so many records, that begins with these seeds.

        draws: gets what is drawn.

        Raises ModelError where PyTorch's generators are seeded again in a chunk of several records, or one
        that is not seeded here is drawn from.
        """
        self.seed(seeds)
        if records == 1:
            yield
            return
        own = [generator for generator in self._own if isinstance(generator, torch.Generator)]
        with _seeds_watched([*random_state.generators(), *own], draws):
            yield

    def shared(self) -> bool:
        """Whether something has drawn from generators of NumPy or Python since they were seeded: all records
        of a chunk share such a number.
        """
        return self._states() != self._seeded

    def require_own(self) -> None:
        """Raises ModelError where numbers are `shared`."""
        if self.shared():
            raise ModelError(
                "the model or the loss draws from NumPy's or Python's random generators while records are"
                " computed, and the records of a chunk share such a number",
                hint="draw with torch.rand and its like, or set privacy.records: alone",
            )

    def __getstate__(self) -> dict[str, Any]:
        # A loader's workers take a copy, and begin a stream for each batch. A stream itself has no copies.
        return {**self.__dict__, "_stream": None}


class Draws:
    """What was drawn while some records of a chunk were computed: each draw once, in their order, and the
    end.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[bytes, Any], None] = {}  # where generators stand, and what is drawn there

    def note(self, generators: list[torch.Generator], op: Any, args: Any) -> None:
        """Note a draw before it is made. generators: all that may be drawn from. op: None for the end."""
        states = random_state.states(generators)
        where = hashlib.sha256(b"".join(state.numpy().tobytes() for _, state in states)).digest()
        shapes = [tuple(getattr(x, "shape", x)) for x in args if isinstance(x, torch.Tensor | list | tuple)]
        self._noted[where, None if op is None else (str(op), str(shapes))] = None

    def require_same(self, others: Sequence[Draws]) -> None:
        """Raises ModelError where two have drawn other numbers than one of them alone: a number of one
        record may be another record's then.
        """
        most = list(max((self, *others), key=lambda draws: len(draws._noted))._noted)
        for each in (self, *others):
            for (where, what), (other_where, other_what) in zip(each._noted, most, strict=False):
                if where != other_where or not (what == other_what or None in (what, other_what)):
                    raise ModelError(
                        "records take several branches of the model or the loss, which draw random"
                        " numbers of other shapes, and records would share some",
                        hint="draw before the branch, or set privacy.records: alone",
                    )


@contextmanager
def _seeds_watched(generators: list[torch.Generator], draws: Draws | None) -> Iterator[None]:
    """A context in which operators draw from these generators alone, which keep their seeds. Each draw is
    noted, and the end.
    """
    seeds = [generator.initial_seed() for generator in generators]

    def require(op: Any, args: Any, generator: torch.Generator | None) -> None:
        known = generator is None or generator.initial_seed() in seeds  # operators get another object
        if not known or [each.initial_seed() for each in generators] != seeds:
            raise _seeded_by_the_model()
        if draws is not None:
            with DisableTorchFunction(), without_modes():
                draws.note(generators, op, args)

    before = state.draws
    state.draws = (*before, require)
    try:
        yield
    finally:
        state.draws = before
    require(None, (), None)


def _seeded_by_the_model() -> ModelError:
    return ModelError(
        "the model or the loss seeds PyTorch's random generator while records are computed, or draws from"
        f" one that it has made there{diagnostics.where()}",
        hint=(
            "leave the seed out of the forward pass; draw a number that stays the same where the model is"
            " built; keep a generator in an attribute"
        ),
    )


# -- generators in attributes --------------------------------------------------------------------------------


def generators_of(*roots: object) -> list[Any]:
    """The random generators in the attributes of some objects, and of the objects in these. Those that draw
    from the operating system are left out.

    Raises ModelError for one that can't be seeded.
    """
    found: list[Any] = []
    seen: dict[int, object] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that its number stays its own
        if isinstance(value, _GENERATORS):
            if not isinstance(value, random.SystemRandom):
                _require_seedable(value)
                found.append(value)
        elif isinstance(value, dict) and len(value) <= _MOST_PARTS:
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque) and len(value) <= _MOST_PARTS:
            waiting += value
        elif not isinstance(value, type | ModuleType | FunctionType | torch.Tensor | np.ndarray):
            waiting += [*attributes_of(value).values(), *getattr(value, "__dict__", {}).values()]
    return found


def _require_seedable(generator: Any) -> None:
    before = _state(generator)
    try:
        _seed(generator, np.zeros(_EACH, dtype=np.uint64))
        _restore(generator, before)
    except Exception as error:
        raise ModelError(
            f"a random generator of type {type(generator).__name__} is among the attributes of the model,"
            f" the loss or the dataset, and can't be seeded: {error}",
            hint="use torch.Generator, numpy.random.default_rng or random.Random",
        ) from error


@contextmanager
def _kept(generators: list[Any]) -> Iterator[None]:
    """The generators' states are restored at the end."""
    before = [_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, own in zip(generators, before, strict=True):
            _restore(generator, own)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return random_state.state_of(generator)
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _restore(generator: Any, own: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(own)
    elif isinstance(generator, random.Random):
        generator.setstate(own)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = own
    else:
        generator.set_state(own)


def _words(numbers: Seeds) -> list[int]:
    """The numbers as words of 32 bits."""
    words: list[int] = numbers.view(np.uint32).tolist()
    return words


def _whole(numbers: Seeds) -> int:
    """The numbers as one."""
    return int.from_bytes(numbers.tobytes(), "little")


def _seed_torch(generator: torch.Generator, numbers: Seeds) -> None:
    """Seed a generator of PyTorch by `_TORCH` numbers, of which a GPU's takes the first."""
    generator.manual_seed(int(numbers[0]))
    if generator.device.type == "cpu":
        state = random_state.state_of(generator)
        head, words = 3, torch.from_numpy(numbers[1:].view(np.uint32).astype(np.int64))
        state.view(torch.int64)[head : head + _STATE_WORDS] = words  # behind its seed and place: the words
        generator.set_state(state)


def _seed(generator: Any, numbers: Seeds) -> None:
    if isinstance(generator, torch.Generator):
        _seed_torch(generator, Generator(numbers.tobytes(), "coins").uint64(_TORCH))
    else:
        _restore(generator, _seeded_state(generator, numbers))


def _seeded_state(generator: Any, numbers: Seeds) -> Any:
    """The state of a generator of NumPy or Python with this seed."""
    if isinstance(generator, random.Random):
        return random.Random(_whole(numbers)).getstate()
    legacy = isinstance(generator, np.random.RandomState)
    bits = type(generator._bit_generator if legacy else generator.bit_generator)
    return bits(_whole(numbers)).state
