"""Random numbers of a private run by record and step: a record's draws depend on no other record.

A record moves the sum of a batch by its bound only if the others' gradients do not change when it comes or
goes. So each record draws by the run's secret key, the step, its own number and its own program: its dropout
masks, its augmentations, what a dataset draws for it. What a model draws outside of PyTorch's operators
(NumPy, Python's random) can't be told apart by record in a run on several records. A model that does so on
the first rows runs on one record at a time (`fixed_chunks.py`), with generators seeded for it. In a run on
several records they are seeded by the step alone, so that no record's numbers depend on the others.

`rng = np.random.default_rng(0)` in a dataset or an augmentation advances from call to call, so a record's
draws would depend on the records that were read before it; and with a known seed the draws are known. Such
generators are found (`reached.py`), and seeded from the run's secret key wherever the global ones are.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psgrad import random_state
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.reached import GENERATORS, reached
from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.operators import Op, is_random
from psgrad.engine.transforms.private_torch import FakeTensor, schema_of, without_modes
from psgrad.engine.transforms.random_draws import draw_by_label, drawing_by_label
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import innermost
from psgrad.errors import ModelError

Labels = npt.NDArray[np.int64]

# A label is the record's number times this, and one more than the place of a row, or of its copy, among the
# record's own.
_PLACES = 1 << 24
# A cipher block is the label, and the number of the draw times this and of the block in the draw.
_BLOCKS = 1 << 40
_PIECE = 1 << 13  # blocks that are encrypted at a time, or those of one label: they stay in the cache
# Numbers of draws that no program reaches: seeds for the model's run, for reading a row and for making a copy
# of it.
RUN, ROW, COPY = _PLACES - 3, _PLACES - 2, _PLACES - 1


class RecordDraws:
    """The draws of a run, by step, from AES-256 with a key of their own.

    Args:
        generator: gives the key; the draws are as secret as its numbers are.
        own: generators of the user's code, which are then seeded with the global ones.
    """

    def __init__(self, generator: Generator, own: OwnGenerators | None = None) -> None:
        self._key = hashlib.sha256(b"psgrad draws" + generator.uint64(4).tobytes()).digest()
        self.own = OwnGenerators() if own is None else own

    def share(self, exchange: Callable[[bytes], bytes]) -> None:
        """Take the key that `exchange` returns for the own one: a record draws the same in all processes of a
        run then. It must stay in memory.
        """
        self._key = exchange(self._key)

    def at(self, step: int) -> StepDraws:
        """The draws of step number 0, 1, ..."""
        return StepDraws(hashlib.sha256(self._key + step.to_bytes(8, "little")).digest(), self.own)


class StepDraws:
    """The draws of one step. They are the same, however often and in whatever parts a batch is computed."""

    def __init__(self, key: bytes, own: OwnGenerators) -> None:
        self._key, self.own = key, own

    def bits(self, labels: npt.NDArray[np.uint64], number: int, size: int) -> npt.NDArray[np.uint8]:
        """[n, size] bytes of draw `number` for each label: AES-256 of the label, the number and a counter."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        each = -(-size // 16)
        result = np.empty(
            16 * each * len(labels) + 15, dtype=np.uint8
        )  # older versions of the library ask for room for one more block
        encryptor = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor()
        together = max(1, _PIECE // max(each, 1))
        blocks = np.empty((together, each, 2), dtype="<u8")
        blocks[:, :, 1] = np.arange(each, dtype=np.uint64) + np.uint64(number * _BLOCKS)
        for start in range(0, len(labels), together):
            some = labels[start : start + together]
            blocks[: len(some), :, 0] = some[:, None]
            encryptor.update_into(
                blocks[: len(some)].reshape(-1).view(np.uint8).data, result[16 * each * start :].data
            )
        return result[: 16 * each * len(labels)].reshape(len(labels), 16 * each)[:, :size]

    def seed(self, label: int, number: int) -> None:
        """Seeds the global generators of PyTorch, NumPy and Python, and those of the code's own."""
        numbers = self.bits(np.array([label], dtype=np.uint64), number, 8 * (3 + len(self.own))).view(
            np.uint64
        )[0]
        random_state.seed_all(*(int(number) for number in numbers[:3]))
        self.own.seed(numbers[3:].tolist())

    def states(self) -> tuple[Any, ...]:
        """The states of all of these, to be compared."""
        return (*random_state.all_states(), *self.own.states())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """All of these states are restored at the end."""
        with random_state.restored(), self.own.kept():
            yield


def labels_of(records: npt.ArrayLike, width: int) -> Labels:
    """[n, width]: the labels of the rows, or copies of rows, of the records with these numbers."""
    if width >= _PLACES:
        raise ValueError(f"a record of {width} rows or copies: fewer than {_PLACES} are told apart")
    return np.asarray(records, dtype=np.int64)[:, None] * _PLACES + np.arange(1, width + 1)


def by_record(loss: Callable[..., Any], now: Callable[[], StepDraws]) -> Callable[..., Any]:
    """The loss, whose draws are by record: (params, inputs, target), the label [] of the row the last of its
    inputs.

    now: the draws of the step.
    """

    def of_row(params: Any, inputs: tuple[Any, ...], target: Any) -> Any:
        *rest, label = inputs
        begin_run(now(), label)
        return loss(params, tuple(rest), target)

    return of_row


def begin_run(draws: StepDraws, label: torch.Tensor) -> None:
    """Prepares the draws of a run of the model on the row with this label [] (or the batched rows): operators
    draw by it, and global generators start as in each run.
    """
    if _watch.begins_none:
        return
    labels = innermost(label)
    if not isinstance(labels, FakeTensor):  # else the run has no values: it predicts memory
        if _watch.seeded:
            _require_no_other_draws()
        _watch.run = draws, _record_alone(labels)
        draws.seed(_watch.run[1], RUN)
        _watch.seeded = _watch.watching
    draw_by_label(draws.bits, label)


def _record_alone(labels: torch.Tensor) -> int:
    """The label, of no row, of the record that all rows of a run belong to; 0 for several records, or for
    copies of one, which fill a chunk up.
    """
    with without_modes():  # a level of a transform would take the copy of a GPU's numbers for its own
        rows = labels.flatten().tolist()
    (record, *others) = {row // _PLACES for row in rows} or {0}
    return 0 if others or len(set(rows)) < len(rows) else record * _PLACES


def drawn_outside_of_torch() -> bool:
    """Whether the last run drew from NumPy's or Python's generators, or from the code's own."""
    if _watch.run is None:
        return False
    draws, label = _watch.run
    now = draws.states()
    with draws.kept():
        draws.seed(label, RUN)
        return draws.states() != now


@contextmanager
def drawing_by_record(draws: RecordDraws | StepDraws) -> Iterator[None]:
    """Around the computation of a batch: restores the global generators, and the code's own, at the end.

    Raises ModelError where an operator drew from PyTorch's: such draws go by the place in the batch.
    """
    before = _watch.watching, _watch.seeded, _watch.run
    with random_state.restored(), draws.own.kept():
        random_state.seed_all(0, 0, 0)
        # A second pass restores this state, which must not look as if an operator had drawn from it.
        _watch.watching, _watch.seeded, _watch.run = True, False, None
        try:
            yield
            if _watch.seeded:
                _require_no_other_draws()
        finally:
            _watch.watching, _watch.seeded, _watch.run = before


@contextmanager
def without_draws() -> Iterator[None]:
    """Around the computation of a batch without draws by record. Raises ModelError if something draws from a
    generator.

    Inside `drawing_by_record` a loss may begin runs of its own.
    """

    def refuse(op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        if is_random(op, args, kwargs) and not drawing_by_label():
            raise _no_draws_by_record(
                f"the model or the loss draws random numbers by {schema_of(op).name}{diagnostics.where()}"
            )

    before, state.watchers = state.watchers, (*state.watchers, refuse)
    drawn = random_state.states()
    try:
        yield
    finally:
        state.watchers = before
    if not _watch.watching and any(
        not torch.equal(was, random_state.state_of(generator)) for generator, was in drawn
    ):
        raise _no_draws_by_record(
            "random numbers were drawn from PyTorch's generators while a batch was read and summed"
        )


def _no_draws_by_record(arrived: str) -> ModelError:
    return ModelError(
        f"{arrived}, and the records have no draws of their own",
        expected="draws by record, from a key and each record's number; or nothing that draws",
        cause=(
            "dropout or other noise in train mode, or an augmentation. What a record gets then depends on the"
            " records beside it: one record more moves the sum by any amount, and clipping bounds nothing"
        ),
        next_step=(
            "give batch_source draws=RecordDraws(generator).at(step) and records=their numbers (RecordReader"
            " and RecordStreams: draws=RecordDraws(generator)), or call model.eval()"
        ),
    )


@contextmanager
def beginning_no_runs() -> Iterator[None]:
    """A context in which `begin_run` does nothing: what draws there, draws by its operators."""
    before, _watch.begins_none = _watch.begins_none, True
    try:
        yield
    finally:
        _watch.begins_none = before


class _SeedWatch:
    """Whether runs are not begun, whether `drawing_by_record` watches the global generators, whether a run
    has seeded them since, and by what the last run did: they belong to the process, not to a thread.
    """

    watching = seeded = begins_none = False
    run: tuple[StepDraws, int] | None = None


_watch = _SeedWatch()


def _require_no_other_draws() -> None:
    if not random_state.torch_has_drawn():
        return
    raise ModelError(
        "the model or the loss draws random numbers by an operator that PyTorch doesn't say of that it draws",
        expected="random numbers from PyTorch's operators, which are drawn for each record by itself",
        cause=(
            "an operator of a library or of your own; what it draws goes by a record's place in the batch,"
            " which depends on others"
        ),
        next_step=(
            "draw with torch.rand or its like and give the operator the result, or set model.mode: eval"
        ),
    )


# Containers with more parts are rows of a dataset, which hold no generators.
_MOST = 10_000


class OwnGenerators:
    """The random generators that can be reached from some objects: a dataset, an augmentation, a model, a
    loss.

    Those of PyTorch (on any device), NumPy and Python; not those of other libraries, nor those that draw from
    the operating system.
    """

    def __init__(self, *roots: object) -> None:
        self._found: list[Any] = [
            value for _, value in reached(roots, _MOST) if isinstance(value, GENERATORS)
        ]

    def __len__(self) -> int:
        return len(self._found)

    def states(self) -> tuple[bytes, ...]:
        """The state of each, to be compared."""
        return tuple(pickle.dumps(_state(generator)) for generator in self._found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The states are restored at the end."""
        before = [_state(generator) for generator in self._found]
        try:
            yield
        finally:
            for generator, state in zip(self._found, before, strict=True):
                _restore(generator, state)

    def seed(self, numbers: Sequence[int]) -> None:
        """Seed each by a whole number from 0 to 2^64 - 1 of its own."""
        for generator, number in zip(self._found, numbers, strict=True):
            _seed(generator, int(number))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return random_state.state_of(generator).numpy().tobytes()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    return (
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    else:  # NumPy's, the old one and the new
        bits = (
            generator.bit_generator
            if isinstance(generator, np.random.Generator)
            else generator._bit_generator
        )
        _restore(generator, type(bits)(number).state)
