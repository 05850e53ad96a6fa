"""The processes that share the rows of a dataset: one alone, the ranks of torch.distributed, or a part of a
job array.

Each takes its share of the rows in whole chunks, which begin at multiples of the chunk size: the chunks, and
so the numbers of a row, are those of one process. What is gathered over all rows is merged at the end of a
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from psgrad.errors import DataError, one_line

_SHOWN = 5
Arrays = dict[str, torch.Tensor]
Result = TypeVar("Result")


class Processes:
    """What a command needs of the processes that run it: here of one alone, which takes all rows. All ranks
    call the same methods in the same order; `what` names a call, and a rank that makes another one raises
    DistributedError.

    Attributes:
        rank: 0, 1, ... size: how many there are. backend: what carries tensors between them; None for one
            alone. leads: whether this one writes tables and reports. parts: of how many parts the run is
            made, one after another or at the same time; None for a whole run.
    """

    rank: int = 0
    size: int = 1
    backend: str | None = None
    leads: bool = True
    parts: int | None = None

    def part_of(self, rank: int) -> str:
        """The name of a rank's part of what is stored; empty for a process alone."""
        return ""

    def my_rows(self, name: str, chunks: Sequence[range]) -> list[range]:
        """This process's share of these chunks of the pass `name`, in order; those that follow each other in
        one range.
        """
        return joined(chunks)

    def meet(self, what: str) -> None:
        """Wait for all processes."""

    def agreed(self, what: str, numbers: Callable[[], list[int]]) -> list[int]:
        """The whole numbers that rank 0 finds, on every rank."""
        return numbers()

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        """The tensors of each process, on the CPU, in the order of their ranks."""
        return [own]

    def texts(self, what: str, text: str) -> list[str]:
        """The texts of all processes, in the order of their ranks."""
        return [text]

    def broadcast(self, what: str, arrays: Arrays) -> Arrays:
        """The tensors of rank 0, on the CPU of every rank; those of other ranks are ignored."""
        return arrays

    def collect(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> None:
        """Merge what all processes have gathered on rank 0; the other ranks get nothing back.

        state: returns what this process has gathered. merge: adds a state of another one to it.
        """

    def reduce(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        """What all processes have gathered, on each of them. The arguments are those of `collect`."""
        return state()

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        """What `compute` finds of this process's share, when all processes have theirs. Where it raises
        PsgradError on one of them, each raises the same error.
        """
        return compute()


class OneProcess(Processes):
    """A process alone."""


class RowPart(OneProcess):
    """One of several parts of a run, which run independently of each other: of a job array.

    Args:
        number: 1, 2, ..., count. rows: those of the dataset that this part computes.
    """

    leads = False

    def __init__(self, number: int, count: int, rows: range) -> None:
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

    def my_rows(self, name: str, chunks: Sequence[range]) -> list[range]:
        return joined([part for rows in chunks if (part := overlap(rows, self.rows))])


class MergingParts(OneProcess):
    """A process that merges what the parts of a run have computed, and computes no row itself."""

    def __init__(self, count: int) -> None:
        self.parts = count

    def my_rows(self, name: str, chunks: Sequence[range]) -> list[range]:
        if todo := joined(chunks):
            raise DataError(
                one_line(
                    f"{sum(map(len, todo)):,} rows of the pass {name} are missing:"
                    f" {', '.join(f'{rows.start:,} to {rows.stop - 1:,}' for rows in todo[:_SHOWN])}"
                    + (f", and {len(todo) - _SHOWN} more ranges" if len(todo) > _SHOWN else ""),
                    "expected " + ("all rows, each in one part"),
                ),
                hint=(
                    "a part has not run, or has not come to its end; run that part again; its finished"
                    " rows are kept"
                ),
            )
        return []


def in_chunks(todo: Sequence[range], chunk: int) -> list[range]:
    """These rows in chunks, which begin at multiples of `chunk`."""
    return [
        range(max(rows.start, first), min(rows.stop, first + chunk))
        for rows in todo
        for first in range(rows.start // chunk * chunk, rows.stop, chunk)
    ]


def joined(chunks: Sequence[range]) -> list[range]:
    """The same rows, with those that follow each other in one range."""
    result = list[range]()
    for rows in chunks:
        if result and result[-1].stop == rows.start:
            result[-1] = range(result[-1].start, rows.stop)
        else:
            result.append(rows)
    return result


def in_turn(processes: Processes, what: str, own: Iterator[Arrays]) -> Iterator[Arrays]:
    """What the processes make one after another, on each of them: the first of rank 0, of rank 1, ..., the
    second of rank 0, and so on. No process makes more than one more than another.
    """
    while True:
        found = processes.gathered(what, processes.together(what, lambda: next(own, {})))
        if not any(found):
            return
        yield from (each for each in found if each)


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
