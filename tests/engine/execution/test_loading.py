"""Reading ahead: the same rows in the same order, from one reader at a time, beside the computation; and no
thread left behind.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.loading import Chunk, Loader
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.errors import DataError, ModelError

ROWS = 40


def block(start: int, stop: int) -> Block:
    """Rows that say which they are."""
    return Block((torch.arange(start, stop).float().unsqueeze(1),), torch.zeros(stop - start))


def slowly(read: Callable[[int, int], Block]) -> Callable[[int, int], Block]:
    """A reader that takes long enough to be worth a thread."""

    def slow(start: int, stop: int) -> Block:
        time.sleep(0.002)
        return read(start, stop)

    return slow


def taking(read: Callable[[int, int], Block]) -> Any:
    """The rows that a reader of neighbours has."""
    return SimpleNamespace(take=lambda rows: read(rows[0], rows[-1] + 1))


def chunks(loader: Loader, size: int, count: int = ROWS) -> Iterator[Chunk]:
    """All chunks of a dataset, each next one expected before this one is used."""
    with loader:
        for start in range(0, count, size):
            chunk = loader.take(start, min(start + size, count))
            loader.expect(chunk.stop, min(chunk.stop + size, count))
            yield chunk


def rows_of(chunk: Chunk) -> list[int]:
    assert chunk.block.inputs[0][:, 0].tolist() == list(chunk.rows)
    return list(chunk.rows)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "psgrad-reader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    assert readers() == []


def stream_of(read: Callable[[int, int], Any], criterion: Any = F.mse_loss, **options: Any) -> Stream:
    objective = Objective(nn.Linear(1, 1), lambda output, target: criterion(output[0], target))
    return Stream(objective.loss, objective.params, taking(read), chunk_size=5, **options)


def losses(stream: Stream, count: int = ROWS) -> Tensor:
    return torch.cat([chunk.values["loss"] for chunk in stream.run(count, [GradientNorms()])])


# -- Order and threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 40, 100])
def test_every_row_is_read_once_and_in_order(size: int) -> None:
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Block:
        asked.append((start, stop))
        return block(start, stop)

    assert [row for chunk in chunks(Loader(taking(read).take), size) for row in rows_of(chunk)] == list(
        range(ROWS)
    )
    assert asked == [(start, min(start + size, ROWS)) for start in range(0, ROWS, size)]


def test_one_chunk_is_read_ahead_and_no_more() -> None:
    asked: list[int] = []
    gate = threading.Event()

    def read(start: int, stop: int) -> Block:
        asked.append(start)
        gate.set()
        return block(start, stop)

    for chunk in chunks(Loader(taking(slowly(read)).take), 10):
        if 10 < chunk.stop < ROWS:  # the first two chunks show that a thread is worth it
            while chunk.stop not in asked:  # it is read while this one is in use
                gate.wait(1)
        time.sleep(0.01)
        assert max(asked) <= chunk.stop


def test_a_reader_is_never_called_twice_at_once_not_even_for_a_failure() -> None:
    inside, most = 0, 0

    def read(start: int, stop: int) -> Block:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.1)  # longer than a pass takes
        inside -= 1
        return block(start, stop)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        if calls.pop():
            raise ValueError("this one")
        return F.mse_loss(output, target)

    calls = [True, True, False, False]  # the third chunk fails, and its first row alone
    stream = stream_of(read, criterion)

    def run() -> None:
        for _ in stream.run(ROWS, [GradientNorms()]):
            stream.load(range(3, 4))  # while the next chunk is being read

    with pytest.raises(ModelError, match="raised ValueError on row 10: this one"):
        run()
    assert most == 1


# -- What goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 5, 17, 39])
@pytest.mark.parametrize("error", [DataError("ragged"), ValueError("odd"), KeyError("x")])
def test_an_error_of_the_reader_comes_after_the_rows_before_it(row: int, error: Exception) -> None:
    def read(start: int, stop: int) -> Block:
        if start <= row < stop:
            raise error
        return block(start, stop)

    done: list[int] = []

    def run() -> None:
        for columns in stream_of(read).run(ROWS, [GradientNorms()]):
            done.extend(range(columns.start, columns.stop))

    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error
    assert done == list(range(row // 5 * 5))


def test_a_reader_that_is_bound_to_its_thread_is_called_from_there() -> None:
    table = sqlite3.connect(":memory:")  # refuses other threads than this one
    table.execute("create table numbers (value real)")
    table.executemany("insert into numbers values (?)", [(float(row),) for row in range(ROWS)])

    def read(start: int, stop: int) -> Block:
        found = table.execute("select value from numbers limit ? offset ?", (stop - start, start)).fetchall()
        return Block((torch.tensor(found),), torch.zeros(stop - start))

    said: list[str] = []
    stream = stream_of(slowly(read), say=said.append)
    torch.testing.assert_close(
        losses(stream), losses(Stream(stream.loss, stream.params, taking(block), chunk_size=5))
    )
    assert said == [
        "rows are read between chunks, not beside them: beside the computation the reader raised"
        " ProgrammingError"
    ]
    table.close()


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_ends_the_thread(after: int) -> None:
    def criterion(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == after:
            raise KeyboardInterrupt
        return F.mse_loss(output, target)

    calls = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        losses(stream_of(slowly(block), criterion))


def test_a_run_that_is_given_up_ends_the_thread() -> None:
    running = stream_of(slowly(block)).run(ROWS, [GradientNorms()])
    next(running), next(running)
    assert len(readers()) == 1
    running.close()


# -- Random numbers ------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_reader_that_draws_gets_the_numbers_that_it_would_get_alone(kind: str) -> None:
    """The model's draws and the reader's come from one generator, in the order in which they would without a
    thread.
    """
    draw = DRAWS[kind]

    def seeded(read_ahead: bool) -> tuple[list[float], Tensor]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn: list[float] = []

        def read(start: int, stop: int) -> Block:
            drawn.append(draw())
            time.sleep(0.002)
            return block(start, stop)

        def criterion(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) * (torch.rand(()) if kind == "torch" else draw())

        stream = stream_of(read, criterion, randomness="different", capture="off")
        if read_ahead:
            return drawn, losses(stream)
        found = []
        for start in range(0, ROWS, 5):
            found.append(stream.gradients(range(start, start + 5)).losses.double())
        return drawn, torch.cat(found)

    ahead, alone = seeded(True), seeded(False)
    assert ahead[0] == alone[0]
    torch.testing.assert_close(ahead[1], alone[1])


def test_a_reader_that_draws_late_is_read_between_chunks_from_then_on() -> None:
    threads: list[str] = []

    def read(start: int, stop: int) -> Block:
        threads.append(threading.current_thread().name)
        if start >= 10:
            random.random()
        return block(start, stop)

    said: list[str] = []
    losses(stream_of(slowly(read), say=said.append))
    assert [name == "psgrad-reader" for name in threads] == [False, False, True, *[False] * 5]
    assert said == [
        "rows are read between chunks, not beside them: random numbers were drawn while they were read, by"
        " the reader or by the model, and a reader's draws would change those of the model"
    ]


def test_rows_are_not_read_while_a_chunk_is_recorded() -> None:
    """The recorder would take the reader's draws for the model's."""
    recording = threading.Event()
    calls: list[int] = []

    def read(start: int, stop: int) -> Block:
        if start == 10:  # beside the second chunk, which is recorded
            recording.wait(timeout=0.2)
            random.random()
        return block(start, stop)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            recording.set()
        return F.mse_loss(output, target)

    said: list[str] = []
    losses(stream_of(slowly(read), criterion, say=said.append))
    assert [text for text in said if "replayed" in text] == []
    assert len(said) == 1  # the reader drew


def test_a_part_of_a_chunk_is_not_copied() -> None:
    chunk = Chunk(range(10, 20), Block((torch.arange(10),), torch.arange(10)))
    part = chunk.part(3, 5)
    assert (part.start, part.stop, part.block.inputs[0].tolist()) == (13, 15, [3, 4])
    assert (
        part.block.inputs[0].untyped_storage().data_ptr()
        == chunk.block.inputs[0].untyped_storage().data_ptr()
    )
    assert chunk.part(0, 10) is chunk
