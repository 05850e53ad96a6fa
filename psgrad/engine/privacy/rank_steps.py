"""A private step by several ranks: each sums the clipped gradients of its share of the batch.

Rank 0 takes the step: it alone draws the batch and the noise, writes the ledger and updates the weights. To
the others it sends the weights, the bounds and the numbers of the drawn records; from them it receives the
sums of their shares. So no other rank learns a noisy sum; weights with noise in them reach it with the next
step, after the step that made them was paid for.

Sums are float64, and are added in pairs of ranks. For the bound on what a record adds
(clipped_sums.py) each rank is one more piece of the batch. Before anything is paid rank 0 requires that each
drawn record was summed once, by the rank that it was given to.

What travels is private: clipped sums without noise, norms and losses. It travels over the process group, and
none of it is written to a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.execution.ranks import Arrays, Processes
from psgrad.engine.privacy.clipped_sums import ClippedSum, RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.records import Records
from psgrad.errors import DistributedError

RowNumbers = np.ndarray[Any, np.dtype[np.int64]]
Source = Callable[[RowNumbers, int], Callable[[Clipping], ClippedSum]]
"""Record numbers and a step to the clipped sum of these records, with their coins of the step."""

_STEP, _SUMS = "private step", "private sums"  # what is sent to all, and what comes back
_COLUMNS = ("norms", "losses", "factors", "below")
_WEIGHT, _SUM = "weight.", "sum."
_ENDED = -1  # in place of the number of a step


@dataclass
class SummedRecords:
    """How many records a rank has summed so far, and the seconds that it took."""

    records: int = 0
    seconds: float = 0.0


@dataclass
class _Shares:
    """The sum of one rank's share of a batch, or of several ranks' shares.

    Attributes:
        sums: name -> [*shape].
        columns: of each record, and its number as `records`, its rank as `ranks`; a part for each rank.
        seconds: rank -> what the sum took.
    """

    sums: Arrays
    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, clipped: ClippedSum, records: RowNumbers, rank: int, step: int, seconds: float) -> _Shares:
        about = {
            "records": torch.from_numpy(records),
            "ranks": torch.full((len(records),), rank),
            "took": torch.tensor([[rank, step, seconds]], dtype=torch.float64),
            **{name: getattr(clipped.records, name) for name in _COLUMNS},
        }
        return cls(dict(clipped.sums), {name: [value] for name, value in about.items()})

    def state(self) -> Arrays:
        return {name: torch.cat(parts) for name, parts in self.columns.items()} | {
            _SUM + name: value for name, value in self.sums.items()
        }

    def add(self, name: str, value: Tensor) -> None:
        if name.startswith(_SUM):
            own = self.sums[name.removeprefix(_SUM)]
            self.sums[name.removeprefix(_SUM)] = own + value.to(own.device)  # the source may keep its own
        else:
            self.columns[name].append(value)

    def whole(self, drawn: RowNumbers, size: int, step: int) -> ClippedSum:
        """The clipped sum of the whole batch, whose records are `drawn`. Raises DistributedError unless each
        rank has summed the records that it was given, in this step.
        """
        found = {name: torch.cat(parts) for name, parts in self.columns.items()}
        order = np.empty(len(drawn), dtype=np.int64)
        steps = {int(rank): int(of_step) for rank, of_step, _ in found["took"].tolist()}
        for rank in range(size):
            places = torch.nonzero(found["ranks"] == rank).flatten()
            given = share_of(drawn, rank, size)
            if steps.get(rank) != step or not np.array_equal(found["records"][places].numpy(), given):
                raise DistributedError(
                    f"rank {rank} has not summed the records of step {step + 1} that it was given",
                    expected="each drawn record in the sum once; nothing was paid for or released",
                    cause="a process of another run in the group, or a mistake in psgrad",
                    next_step="run again with --resume; report it if it comes back",
                )
            order[drawn % size == rank] = places.numpy()
        if len(found["records"]) != len(drawn):
            raise DistributedError(
                f"the ranks have summed {len(found['records'])} records, and {len(drawn)} were drawn",
                expected="each drawn record in the sum once; nothing was paid for or released",
                cause="a rank that is not of this group has answered",
                next_step="run again with --resume; report it if it comes back",
            )
        at = torch.from_numpy(order)
        return ClippedSum(self.sums, RecordColumns(**{name: found[name][at] for name in _COLUMNS}))


class LeadingRank:
    """Rank 0 of a private run.

    Args:
        params: name -> the parameters that steps change.
        own: computes the sum of rank 0's share.
        first: name -> all tensors of the model that the others begin with; called at the first step.

    Attributes:
        work: what each rank has done so far.
    """

    def __init__(
        self,
        processes: Processes,
        records: Records,
        params: Mapping[str, Tensor],
        own: Source,
        first: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._processes, self._records, self._params, self._own = processes, records, params, own
        self._first: Callable[[], Mapping[str, Tensor]] | None = first
        self._sending = self._ended = False
        self.work = [SummedRecords() for _ in range(processes.size)]

    def source(self, drawn: RowNumbers, step: int) -> Callable[[Clipping], ClippedSum]:
        """The clipped sum of these records by all ranks."""

        def found(clipping: Clipping) -> ClippedSum:
            ordered = longest_first(self._records, drawn)
            self._send(step, clipping, ordered)
            own = share_of(ordered, 0, self._processes.size)
            shares = _computed(self._own, own, step, clipping, 0)
            self._processes.collect(_SUMS, shares.state, shares.add)
            whole = shares.whole(ordered, self._processes.size, step)
            for rank, _, seconds in torch.cat(shares.columns["took"]).tolist():
                self.work[int(rank)].records += len(share_of(ordered, int(rank), self._processes.size))
                self.work[int(rank)].seconds += seconds
            return whole

        return found

    def end(self) -> None:
        """Let the others end, and wait for them; only once."""
        if (
            self._ended or self._sending
        ):  # after a second Ctrl-C in the middle of a message no rank is waited for
            return
        self._ended = True
        self._processes.broadcast(_STEP, {"step": torch.tensor([_ENDED])})
        self._processes.meet(_STEP)

    def _send(self, step: int, clipping: Clipping, ordered: RowNumbers) -> None:
        weights = self._params if self._first is None else self._first()
        bounds = [group.bound for group in clipping.groups]
        self._sending = True
        self._processes.broadcast(
            _STEP,
            {
                "step": torch.tensor([step]),
                "bounds": torch.tensor(bounds, dtype=torch.float64),
                "records": torch.from_numpy(ordered),
            }
            | {_WEIGHT + name: value for name, value in weights.items()},
        )
        self._sending, self._first = False, None


@dataclass
class FollowingRank:
    """Another rank of a private run, which sums its share of each batch until rank 0 ends.

    Args:
        clipping: with the run's groups; their bounds come with each step.
        own: computes the sum of this rank's share.
        begin: takes all tensors of the model as rank 0 has them; called once, before the first share.
        take: takes the parameters that the last step has changed.
        on_step: called with the number of each step, before its share is computed.
    """

    processes: Processes
    clipping: Clipping
    own: Source
    begin: Callable[[Arrays], None]
    take: Callable[[Arrays], None]
    on_step: Callable[[int], None] = lambda _: None

    def serve(self) -> None:
        """Compute shares until rank 0 ends."""
        take, rank = self.begin, self.processes.rank
        while True:
            message = self.processes.broadcast(_STEP, {})
            step = int(message["step"])
            if step == _ENDED:
                self.processes.meet(_STEP)
                return
            self.on_step(step)
            take(
                {
                    name.removeprefix(_WEIGHT): value
                    for name, value in message.items()
                    if name.startswith(_WEIGHT)
                }
            )
            take = self.take
            groups = zip(self.clipping.groups, message["bounds"].tolist(), strict=True)
            clipping = replace(
                self.clipping, groups=tuple(replace(group, bound=bound) for group, bound in groups)
            )
            mine = share_of(message["records"].numpy(), rank, self.processes.size)
            shares = _computed(self.own, mine, step, clipping, rank)
            self.processes.collect(_SUMS, shares.state, shares.add)


def longest_first(records: Records, drawn: RowNumbers) -> RowNumbers:
    """The drawn records, those with most rows first."""
    return drawn[np.argsort(-records.sizes[drawn], kind="stable")]


def share_of(drawn: RowNumbers, rank: int, size: int) -> RowNumbers:
    """The records that a rank sums: always the same ones, whatever else is drawn, as machines and chunk sizes
    differ in how they round.
    """
    return drawn[drawn % size == rank]


def _computed(own: Source, mine: RowNumbers, step: int, clipping: Clipping, rank: int) -> _Shares:
    began = time.perf_counter()
    clipped = own(mine, step)(clipping)
    return _Shares.of(clipped, np.ascontiguousarray(mine), rank, step, time.perf_counter() - began)
