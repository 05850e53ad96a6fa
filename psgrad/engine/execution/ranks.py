"""The processes that share the rows of a dataset: one alone, or several ranks.

A rank takes the next range of rows that no other has taken, so that a slow rank does not hold up the others.
Ranges begin and end at multiples of the chunk size: the chunks, and so the numbers of a row, are those of one
process. What is gathered over all rows is merged when all ranks have come to the end of a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from psgrad.errors import DataError, DistributedError

_SHOWN = 5
Arrays = dict[str, torch.Tensor]
Result = TypeVar("Result")
Answer = Callable[[torch.Tensor], torch.Tensor]
"""The bytes (uint8) that answer a question: whole numbers [k], k at least 1, int64."""

PROGRESS_EVERY = 0.5
"""Seconds between two requests of a rank that add its finished rows to those of all."""

# The rows that are left are divided by this multiple of the number of ranks: ranges become smaller towards
# the end, so that ranks end at about the same time.
_RANGES_LEFT = 2


class Requests(Protocol):
    """Questions to other processes, which answer at any time."""

    def request(self, questions: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        """Fill the tensors `into` (uint8, on the CPU) with the answers of these processes."""


class Processes(Protocol):
    """What a workflow needs of the processes that run it.

    Attributes:
        rank: 0, 1, ... size: how many there are. backend: what carries tensors between them; None for one
            alone. leads: whether this one writes tables and reports. parts:
            of how many parts the run is made, one after another or at the same time; None for a whole run.
    """

    rank: int
    size: int
    backend: str | None
    leads: bool
    parts: int | None

    def part_of(self, rank: int) -> str:
        """The name of a rank's part of what is stored; empty for a process alone."""

    def own(self, every: Sequence[range]) -> list[range]:
        """The ranges of `every` that these processes compute."""

    def ranges(self, name: str, every: Sequence[range], first: Collection[int] = ()) -> Iterator[range]:
        """The ranges that this process computes in the pass `name`, one after another, from the ranges
        `every`, which are the same on each process. Ranges with a row of `first`, whose gradients it has in
        memory, come before the others.
        """

    def agreed(self, name: str, numbers: Callable[[], list[int]]) -> list[int]:
        """The whole numbers that rank 0 finds, on every rank."""

    def progress(self, name: str, rows: int) -> int:
        """Add `rows` finished rows; returns how many all processes had finished when this one last asked: at
        most every PROGRESS_EVERY seconds.
        """

    def meet(self, name: str) -> None:
        """Wait for all processes. Raises DistributedError as soon as one has failed."""

    def reduce(self, name: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        """What all processes have gathered, on each of them.

        state: returns what this process has gathered. merge: adds a state of another one to it.
        """

    def broadcast(self, name: str, arrays: Arrays) -> Arrays:
        """The tensors of rank 0, on the CPU of every rank; those of other ranks are ignored. It may be called
        for the same name any number of times.
        """

    def collect(
        self, name: str, state: Callable[[], Arrays], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        """Add the tensors of all ranks to those of rank 0; the other ranks get nothing back. It may be called
        for the same name any number of times.

        state: what this process has by then. add: adds one tensor of another process, by its name.
        """

    def texts(self, name: str, text: str) -> list[str]:
        """The texts of all processes, in their order, on rank 0; none on the others."""

    def requests(self, ranks: Sequence[int], answer: Answer) -> Requests:
        """The way to ask the processes `ranks`, all of which call this with the same ranks; this one is among
        them. answer: what this one answers, called in other threads until the run ends.
        """

    def hurry(self) -> None:
        """Wait only a few seconds for ranks that may be dead, from now on: this process was asked to end."""

    # For processes that all go through the same program, step by step.

    def step(self, what: str) -> str:
        """A name for the next thing that all processes do together. Raises DistributedError where another
        process is about to do something else.
        """

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        """What `compute` finds of this process's share, when all processes have theirs. Where it raises
        PsgradError on one of them, each raises the same error. `compute` takes no step.
        """

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        """The tensors of each process, on the CPU, in the order of their ranks."""

    def spent(self) -> tuple[float, float]:
        """Seconds that this process has computed in `together`, and that it has waited for others there."""


class OneProcess:
    """A process alone: it takes all rows."""

    rank, size, leads = 0, 1, True
    backend: str | None = None
    parts: int | None = None

    def __init__(self) -> None:
        self._done = Counter[str]()

    def part_of(self, rank: int) -> str:
        return ""

    def own(self, every: Sequence[range]) -> list[range]:
        return list(every)

    def ranges(self, name: str, every: Sequence[range], first: Collection[int] = ()) -> Iterator[range]:
        yield from every

    def agreed(self, name: str, numbers: Callable[[], list[int]]) -> list[int]:
        return numbers()

    def progress(self, name: str, rows: int) -> int:
        self._done[name] += rows
        return self._done[name]

    def meet(self, name: str) -> None:
        pass

    def reduce(self, name: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        return state()

    def broadcast(self, name: str, arrays: Arrays) -> Arrays:
        return arrays

    def collect(
        self, name: str, state: Callable[[], Arrays], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        pass

    def texts(self, name: str, text: str) -> list[str]:
        return [text]

    def requests(self, ranks: Sequence[int], answer: Answer) -> Requests:
        return _NobodyElse()

    def hurry(self) -> None:
        pass

    def step(self, what: str) -> str:
        return what

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        return compute()

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        return [own]

    def spent(self) -> tuple[float, float]:
        return 0.0, 0.0


class _NobodyElse:
    """The requests of a process alone."""

    def request(self, questions: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        assert not questions, "there are no other processes"


class RowPart(OneProcess):
    """One of several parts of a run, which run independently of each other: of a job array.

    Args:
        number: 1, 2, ..., count. rows: those of the dataset that this part computes.
    """

    leads = False

    def __init__(self, number: int, count: int, rows: range) -> None:
        super().__init__()
        self.number, self.parts, self.rows = number, count, rows

    @classmethod
    def of(cls, number: int, count: int, total: int, chunk: int) -> RowPart:
        """The part `number` of `count` of `total` rows; all parts together have each row once, in whole
        chunks.
        """
        chunks = -(-total // chunk)
        first, last = (min(total, chunks * each // count * chunk) for each in (number - 1, number))
        return cls(number, count, range(first, last))

    def part_of(self, rank: int) -> str:
        return f"part-{self.number:0{len(str(self.parts))}d}-of-{self.parts}"

    def own(self, every: Sequence[range]) -> list[range]:
        return [part for rows in every if (part := overlap(rows, self.rows))]


class MergingParts(OneProcess):
    """A process that merges what the parts of a run have computed, and computes no row itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = count

    def ranges(self, name: str, every: Sequence[range], first: Collection[int] = ()) -> Iterator[range]:
        if every:
            raise DataError(
                f"{sum(map(len, every)):,} rows of the pass {name} are missing:"
                f" {', '.join(f'{rows.start:,} to {rows.stop - 1:,}' for rows in every[:_SHOWN])}"
                + (f", and {len(every) - _SHOWN} more ranges" if len(every) > _SHOWN else ""),
                expected="all rows, each in one part",
                cause="a part has not run, or has not come to its end",
                next_step="run that part again; its finished rows are kept",
            )
        yield from ()


def step_within(what: str) -> DistributedError:
    """The error of a step that is taken within another one, where the ranks have different rows."""
    return DistributedError(
        f"a rank is about to share {what} while it computes its share of a pass",
        expected="passes one after another, as all ranks make each of them together",
        cause="a method or measure that goes over the rows in a query of a pass",
        next_step="keep what the first pass gives, and go over the rows when it is done; or run one process",
    )


def in_turn(processes: Processes, what: str, own: Iterator[Arrays]) -> Iterator[Arrays]:
    """What the processes make one after another, on each of them: the first of rank 0, of rank 1, ..., the
    second of rank 0, and so on. No process makes more than one more than another.
    """
    while True:
        found = processes.gathered(what, processes.together(what, lambda: next(own, {})))
        if not any(found):
            return
        yield from (each for each in found if each)


def guided_ranges(todo: Sequence[range], chunk: int, size: int) -> list[range]:
    """The rows of `todo` as ranges of whole chunks for `size` processes, large ones first; for one process
    `todo` itself.

    Source: Polychronopoulos, Kuck: Guided Self-Scheduling (IEEE Transactions on Computers C-36, 1987).
    """
    if size == 1:
        return list(todo)
    left, result = sum(map(len, todo)), list[range]()
    for rows in todo:
        start = rows.start
        while start < rows.stop:
            chunks = max(1, round(left / (_RANGES_LEFT * size * chunk)))
            stop = min(rows.stop, (start // chunk + chunks) * chunk)
            result.append(range(start, stop))
            left -= stop - start
            start = stop
    return result


def overlap(some: range, others: range) -> range:
    """The rows that are in both ranges."""
    return range(max(some.start, others.start), min(some.stop, others.stop))


def spread_rows(count: int, wanted: int) -> list[int]:
    """`wanted` rows, evenly spread over a dataset of `count`."""
    wanted = min(wanted, count)
    return [index * count // wanted for index in range(wanted)]


def gaps(count: int, done: Sequence[range]) -> list[range]:
    """The rows 0, ..., count - 1 that are in none of these ranges, as ranges in order."""
    result, reached = list[range](), 0
    for rows in sorted(done, key=lambda rows: rows.start):
        if rows.start > reached:
            result.append(range(reached, rows.start))
        reached = max(reached, rows.stop)
    if reached < count:
        result.append(range(reached, count))
    return result
