"""Canaries: records whose gradients are given, in the clipped sum of a batch.

A canary has one coordinate of its own in each clipping group, far above the bound, so that clipping acts on
it. In each group it then adds exactly the group's bound, and in all the whole sensitivity: the worst record
that the guarantee allows for (Nasr et al., "Tight Auditing of Differentially Private Machine Learning", 2023,
call them Dirac canaries). Groups with fewer coordinates than canaries have no spikes; `reach` is the share of
the sensitivity that remains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipped_sums import ClippedNorms, ClippedSum, RecordColumns, Total
from psgrad.engine.privacy.clipping import Clipping
from psgrad.errors import ConfigError

# A spike as a multiple of its group's bound.
_FAR_ABOVE = 1e3


@dataclass(frozen=True)
class Spikes:
    """The spikes in one parameter: canaries [k] int64, their places in the flat parameter [k] int64, and the
    spikes' group's number.
    """

    canaries: torch.Tensor
    places: torch.Tensor
    group: int


@dataclass(frozen=True)
class Canaries:
    """`count` canaries.

    Attributes:
        spikes: name -> the spikes in that parameter; parameters without are absent.
        params: name -> each parameter of the clipping, for its shape, dtype and device.
        groups: the numbers of the clipping groups that have spikes.
        sizes: name -> how large its spikes are.
    """

    count: int
    spikes: dict[str, Spikes]
    params: dict[str, torch.Tensor]
    groups: tuple[int, ...]
    sizes: dict[str, float]

    @classmethod
    def plant(
        cls, params: Mapping[str, torch.Tensor], clipping: Clipping, count: int, random: np.random.Generator
    ) -> Canaries:
        """`count` canaries at coordinates of params, name -> [*shape], drawn from `random`, no two at one.

        Raises ConfigError where no clipping group has that many coordinates.
        """
        if count < 1:
            raise ConfigError(
                f"an audit with {count} canaries; expected one or more; bounds mean something from some"
                " hundreds on",
            )
        totals = [sum(params[name].numel() for name in group.parameters) for group in clipping.groups]
        groups = tuple(place for place, total in enumerate(totals) if total >= count)
        if not groups:
            raise ConfigError(
                f"an audit with {count} canaries, and no clipping group with as many coordinates; expected"
                f" at most {max(totals)} canaries, each with a coordinate of its own",
                hint=f"--canaries {max(totals)}",
            )
        spikes: dict[str, Spikes] = {}
        sizes: dict[str, float] = {}
        for number in groups:
            group, start = clipping.groups[number], 0
            places = random.choice(totals[number], count, replace=False)
            for name in group.parameters:
                here = np.flatnonzero((places >= start) & (places < start + params[name].numel()))
                if len(here):
                    spikes[name] = Spikes(
                        torch.from_numpy(here), torch.from_numpy(places[here] - start), number
                    )
                    sizes[name] = _FAR_ABOVE * group.bound
                start += params[name].numel()
        return cls(count, spikes, {name: params[name] for name in clipping.parameters}, groups, sizes)

    def reach(self, clipping: Clipping) -> float:
        """The norm that a clipped canary has, as a share of the most that a record can have: 1 where each
        group has spikes.
        """
        whole = math.fsum(group.bound**2 for group in clipping.groups)
        return math.sqrt(math.fsum(clipping.groups[number].bound ** 2 for number in self.groups) / whole)

    def square_norms(self, who: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [n] float64: the squared norms of these canaries' gradients, given as places [n]."""
        result = {name: torch.zeros(self.count, dtype=torch.float64) for name in self.params}
        for name, spikes in self.spikes.items():
            result[name][spikes.canaries] = self.sizes[name] ** 2
        return {name: norms[who] for name, norms in result.items()}

    def read(self, sums: Mapping[str, torch.Tensor], clipping: Clipping) -> np.ndarray:
        """[count] float64: each canary's part in these sums, the unit being the whole norm that a record can
        have.

        A canary that was drawn adds `reach` to its number, and noise of standard deviation s on every
        coordinate adds s / unit: the spikes' places are weighed with their groups' bounds, which is the best
        linear way.
        """
        scores = torch.zeros(self.count, dtype=torch.float64)
        for name, spikes in self.spikes.items():
            values = sums[name].detach().cpu().flatten()[spikes.places].double()
            scores.index_add_(0, spikes.canaries, clipping.groups[spikes.group].bound * values)
        squares = [group.bound**2 for group in clipping.groups]
        used = math.fsum(squares[number] for number in self.groups)
        return (scores / math.sqrt(used * math.fsum(squares))).numpy()


class StoringSource:
    """A source that stores the last clipped sum that it returned, in `last`."""

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._last: ClippedSum | None = None

    def __call__(self, clipping: Clipping) -> ClippedSum:
        self._last = self._source(clipping)
        return self._last

    @property
    def last(self) -> ClippedSum:
        assert self._last is not None
        return self._last


def with_canaries(
    source: GradientSource | None, canaries: Canaries, who: np.ndarray, signs: np.ndarray | None = None
) -> GradientSource:
    """The source's clipped sum with canaries `who` ([n] places) as further records; None for canaries alone.

    They go through the clipping's norms and factors, as records do. signs: [n] of +1 and
    -1, what each gradient is multiplied by.
    """
    chosen = torch.from_numpy(np.asarray(who, dtype=np.int64))
    turned = (
        torch.ones(len(chosen), dtype=torch.float64)
        if signs is None
        else torch.from_numpy(np.asarray(signs, dtype=np.float64))
    )

    def found(clipping: Clipping) -> ClippedSum:
        bounds = clipping.bounds(torch.device("cpu"))
        clipped = ClippedNorms.of(clipping, canaries.square_norms(chosen), bounds)
        weights = clipping.by_parameter(clipped.factors)
        base = Total(clipping, canaries.params).result() if source is None else source(clipping)
        sums = dict(base.sums)
        position = torch.full((canaries.count,), -1, dtype=torch.int64)
        position[chosen] = torch.arange(len(chosen))
        for name, spikes in canaries.spikes.items():
            here = position[spikes.canaries]
            mine, places = here[here >= 0], spikes.places[here >= 0]
            values = weights[name][mine] * turned[mine] * canaries.sizes[name]
            total = sums[name].clone(memory_format=torch.contiguous_format)
            total.view(-1).index_add_(0, places.to(total.device), values.to(total.device, total.dtype))
            sums[name] = total
        columns = clipped.columns(torch.zeros(len(chosen)))
        return ClippedSum(sums, RecordColumns.joined([base.records, columns]))

    return found
