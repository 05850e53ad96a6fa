"""A private step by several ranks: each sums the clipped gradients of its share of the batch.

Rank 0 takes the step: it alone draws the batch and the noise, writes the ledger and updates the weights. To
the others it sends the weights, the bounds and the numbers of the drawn records; from them it receives the
sums of their shares. So no other rank learns a noisy sum; weights with noise in them reach it with the next
step, after the step that made them was paid for.

Sums are float64, and are added in pairs of ranks. For the bound on what a record adds
(clipped_sums.py) each rank is one more piece of the batch. Before anything is paid rank 0 requires that each
drawn record was summed once.

What travels is private: clipped sums without noise, norms and losses. It travels over the process group, and
none of it is written to a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.execution.ranks import Arrays, Processes
from psgrad.engine.privacy.clipped_sums import COLUMNS, ClippedSum, RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.errors import DistributedError

RowNumbers = np.ndarray[Any, np.dtype[np.int64]]
Source = Callable[[RowNumbers, int], Callable[[Clipping], ClippedSum]]
"""Record numbers and a step to the clipped sum of these records, with their coins of the step."""

_MODEL, _STEP, _SUMS = "private model", "private step", "private sums"  # what ranks send
_WEIGHT, _SUM = "weight.", "sum."
_ENDED = -1  # in place of the number of a step


class RankSteps:
    """The private steps of a rank, one of several.

    Args:
        params: name -> the parameters that steps change; those of rank 0 are sent with each step.
        model: name -> all tensors of the model. All ranks begin with those of rank 0.
        own: computes the sum of this rank's share.
    """

    def __init__(
        self, processes: Processes, params: Mapping[str, Tensor], model: Mapping[str, Tensor], own: Source
    ) -> None:
        self._processes, self._params, self._own = processes, params, own
        self._sending = False
        first = processes.broadcast(_MODEL, dict(model) if processes.leads else {})
        if not processes.leads:
            _copy(first, model)

    def source(self, drawn: RowNumbers, step: int) -> Callable[[Clipping], ClippedSum]:
        """The clipped sum of these records by all ranks, on rank 0."""

        def found(clipping: Clipping) -> ClippedSum:
            bounds = torch.tensor([group.bound for group in clipping.groups], dtype=torch.float64)
            weights = {_WEIGHT + name: value for name, value in self._params.items()}
            numbers = {"step": torch.tensor([step]), "records": torch.from_numpy(drawn), "bounds": bounds}
            self._sending = True
            self._processes.broadcast(_STEP, numbers | weights)
            self._sending = False
            share = self._summed(drawn, step, clipping)
            _require_each_once(share, drawn, step)
            columns = {name: torch.cat(share.columns[name]) for name in COLUMNS}
            return ClippedSum(share.sums, RecordColumns(**columns))

        return found

    def end(self) -> None:
        """Let the others end, and wait for them. After a Ctrl-C in the middle of a message no rank is waited
        for.
        """
        if not self._sending:
            self._processes.broadcast(_STEP, {"step": torch.tensor([_ENDED])})
            self._processes.meet(_STEP)

    def serve(self, clipping: Clipping, on_step: Callable[[int], None]) -> None:
        """Compute shares of each batch until rank 0 ends, on the other ranks.

        clipping: with the run's groups; their bounds come with each step. on_step: called with the number of
        each step, before its share is computed.
        """
        while True:
            message = self._processes.broadcast(_STEP, {})
            step = int(message["step"])
            if step == _ENDED:
                self._processes.meet(_STEP)
                return
            on_step(step)
            _copy({name: message[_WEIGHT + name] for name in self._params}, self._params)
            groups = zip(clipping.groups, message["bounds"].tolist(), strict=True)
            bounded = replace(clipping, groups=tuple(replace(group, bound=bound) for group, bound in groups))
            self._summed(message["records"].numpy(), step, bounded)

    def _summed(self, drawn: RowNumbers, step: int, clipping: Clipping) -> _Share:
        """The sum of this rank's share; on rank 0 of all ranks' shares."""
        share = summed_share(self._own, share_of(drawn, self._processes), step, clipping)
        self._processes.collect(_SUMS, share.state, share.merge)
        return share


class _Share:
    """The sum of one rank's share of a batch, to which those of others are added.

    Attributes:
        sums: name -> [*shape].
        columns: of each record, with its number as `records`; and the number of the step. A part a rank.
    """

    def __init__(self, clipped: ClippedSum, records: RowNumbers, step: int) -> None:
        self.sums: Arrays = dict(clipped.sums)
        about = {"records": torch.from_numpy(records), "step": torch.tensor([step])}
        about |= {name: getattr(clipped.records, name) for name in COLUMNS}
        self.columns = {name: [value] for name, value in about.items()}

    def state(self) -> Arrays:
        return {name: torch.cat(parts) for name, parts in self.columns.items()} | {
            _SUM + name: value for name, value in self.sums.items()
        }

    def merge(self, other: Arrays) -> None:
        """Add the `state` of another rank's share."""
        for name, own in self.sums.items():
            self.sums[name] = own + other[_SUM + name].to(own.device)  # the source may keep its own
        for name, parts in self.columns.items():
            parts.append(other[name])


def share_of(drawn: RowNumbers, processes: Processes) -> RowNumbers:
    """The records that a rank sums: always the same ones, whatever else is drawn, as machines and chunk sizes
    differ in how they round.
    """
    return np.ascontiguousarray(drawn[drawn % processes.size == processes.rank])


def summed_share(own: Source, records: RowNumbers, step: int, clipping: Clipping) -> _Share:
    """The sum of the records that a rank was given."""
    return _Share(own(records, step)(clipping), records, step)


def _require_each_once(share: _Share, drawn: RowNumbers, step: int) -> None:
    """Raises DistributedError unless each drawn record is in the sum once, and of this step."""
    summed = torch.cat(share.columns["records"]).sort().values.numpy()
    steps = set(torch.cat(share.columns["step"]).tolist())
    if steps != {step} or not np.array_equal(summed, np.sort(drawn)):
        raise DistributedError(
            f"the ranks have summed other records than those that were drawn for step {step + 1}; nothing was"
            " paid for or released",
            hint=(
                "a process of another run in the group, or a mistake in psgrad; run again with"
                " --resume; report it if it comes back"
            ),
        )


def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(values[name])
