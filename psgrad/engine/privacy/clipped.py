"""The clipped sum of one chunk of records: in one pass, and again by halves, down to single records, where one of them spoils it.

A norm that is finite promises a clipped gradient that is. But what it is made of may leave the range of float32 on the way, where large
factors are multiplied before the weight makes them small, or huge contributions cancel. Such a record is found, and written out by itself
in float64. If it is no number there, either, it adds nothing; nothing that it holds reaches the sum of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms, per_sample_gradients, per_sample_weighted_sum
from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.gradients.placed import DeferredGradient, Placed
from psgrad.engine.gradients.terms import accumulating_dtype
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.discrete import round_to_grid, tightened
from psgrad.engine.privacy.float32 import full_float32, with_autocast_inside

Sums = dict[str, torch.Tensor]

# Factors below it are of gradients whose squares are no numbers in float32.
_TINY = 2.0**-60


@dataclass(frozen=True)
class RecordColumns:
    """What is known of each record of a batch, on the CPU. NOT PRIVATE.

    Attributes:
        norms: [n] float64, the norm of the gradient in all parameters. losses: [n].
        factors: [n, groups] float64, what the gradient was multiplied by; 0 for a record that was left out.
        below: [n] bool, whether the norm was at most the bound, in every group.
    """

    norms: torch.Tensor
    losses: torch.Tensor
    factors: torch.Tensor
    below: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """`below` of the records that have a gradient: what an adaptive bound counts. One whose gradient is zero adds nothing to the sum,
        and may add nothing to the count either, as zero_out is accounted for a record in whose place there is nothing.
        """
        return self.below[self.norms != 0]

    @classmethod
    def joined(cls, parts: Sequence[RecordColumns], groups: int = 1) -> RecordColumns:
        """Those of several parts of a batch, in order. groups: how many there are, which nobody knows where there is no part."""
        if not parts:
            none = torch.zeros(0, dtype=torch.float64)
            return cls(none, none, none.reshape(0, groups), none.bool())
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("norms", "losses", "factors", "below")))


@dataclass(frozen=True)
class ClippedSum:
    """The sum of the clipped gradients of some records, without noise.

    Attributes:
        sums: name -> [*shape] on the parameters' device, in at least float32; int64, in steps of the grid, where the clipping has one.
            Always finite.
        records: what is known of each record.
    """

    sums: Sums
    records: RecordColumns


class Total:
    """Clipped sums, added up. Numbers that are rounded are added in float64, so that it doesn't show how many there were."""

    def __init__(self, clipping: Clipping, params: Mapping[str, torch.Tensor]) -> None:
        self._clipping, self._params = clipping, params
        self._sums: Sums = {}
        self._records: list[RecordColumns] = []

    def add(self, part: ClippedSum) -> None:
        if not self._records:
            self._sums = part.sums
        else:
            if len(self._records) == 1:
                wide = torch.float64 if self._clipping.grid is None else torch.int64
                self._sums = {name: value.to(wide, copy=True) for name, value in self._sums.items()}
            for name, value in self._sums.items():
                value.add_(part.sums[name])
        self._records.append(part.records)

    def found(self) -> ClippedSum:
        """The sum, zero where nothing was added: float32, or float64 where the parameter is, or int64."""
        sums = {}
        for name, parameter in self._params.items():
            kind = torch.int64 if self._clipping.grid is not None else accumulating_dtype(parameter.dtype)
            sums[name] = self._sums[name].to(kind) if self._sums else torch.zeros(parameter.shape, dtype=kind, device=parameter.device)
        return ClippedSum(sums, RecordColumns.joined(self._records, len(self._clipping.groups)))


class Clipper:
    """A way to compute a chunk, for a stream or by itself: its clipped sum.

    memory: as for `per_sample_weighted_sum`.
    """

    def __init__(self, clipping: Clipping, memory: float | None = None) -> None:
        self.clipping, self.memory = clipping, memory

    @torch.no_grad()
    def __call__(
        self,
        loss: Callable[..., Any],
        params: Mapping[str, torch.Tensor],
        *batch: Any,
        in_dims: Any = 0,
        has_aux: bool = False,
        randomness: str = "error",
    ) -> ClippedSum:
        """The clipped sum of at least one record. The arguments are those of `per_sample_gradients`."""
        device = next(iter(params.values())).device
        loss = with_autocast_inside(loss, device)
        with full_float32(device):
            return self._clipped(loss, params, batch, {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness})

    def _clipped(self, loss: Any, params: Mapping[str, torch.Tensor], batch: tuple[Any, ...], options: dict[str, Any]) -> ClippedSum:
        """In one pass if that may be done, else by halves."""
        job = Pass(loss, params, batch, **options)
        count, device = job.level.size, next(iter(params.values())).device
        total = Total(self.clipping, params)
        if self.clipping.grid is not None:
            inside = _inside_the_grid(self.clipping, params)
            for rows in torch.arange(count, device=device).split(1):
                total.add(_alone(inside, per_sample_gradients(loss, params, *job.batch_of(rows), **options), torch.float64))
            return total.found()
        found = self._at_once(loss, params, batch, options)
        if found is not None:
            return found
        if count == 1:
            return _alone(self.clipping, per_sample_gradients(loss, params, *batch, **options), _precision(params))
        for rows in torch.arange(count, device=device).tensor_split(2):
            total.add(self._clipped(loss, params, job.batch_of(rows), options))
        return total.found()

    def _at_once(self, loss: Any, params: Mapping[str, torch.Tensor], batch: tuple[Any, ...], options: dict[str, Any]) -> ClippedSum | None:
        """The clipped sum of all records together; None where that may not be done."""
        chosen: list[_Chosen] = []

        def weights(norms: SquareNorms) -> dict[str, torch.Tensor]:
            chosen.append(_Chosen.of(self.clipping, norms.by_parameter, _precision(params)))
            return self.clipping.by_parameter(chosen[0].factors)

        found = per_sample_weighted_sum(loss, params, *batch, weights=weights, memory=self.memory, **options)
        if not _all_finite(found.sums) or chosen[0].is_extreme():
            return None
        return ClippedSum(found.sums, chosen[0].columns(found.norms.losses))


def _alone(clipping: Clipping, gradients: PerSampleGradients, precision: torch.dtype) -> ClippedSum:
    """The clipped gradient of one record, written out in float64, and rounded to the grid if there is one; zero if it is not finite.

    precision: what it will be added up in. Integers promise that a record moves the sum by its own gradient and nothing else, which is
    why those that are rounded are computed by themselves, too: kernels round the gradients of a batch by its size.
    """
    values = {name: _in_float64(gradient) for name, gradient in gradients.gradients.items()}
    square_norms = {name: value.square().sum().reshape(1) for name, value in values.items()}
    chosen = _Chosen.of(clipping, square_norms, precision, rounded=False)
    factors = clipping.by_parameter(chosen.factors)
    sums = {name: torch.where(factors[name] == 0, 0.0, value * factors[name])[0] for name, value in values.items()}
    if clipping.grid is not None:
        sums = {name: round_to_grid(value, clipping.grid) for name, value in sums.items()}
    return ClippedSum(sums, chosen.columns(gradients.losses))


@dataclass(frozen=True)
class _Chosen:
    """The norms [groups, n] of some records, and what their gradients are multiplied by, [groups, n]."""

    clipping: Clipping
    norms: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, clipping: Clipping, square_norms: Mapping[str, torch.Tensor], precision: torch.dtype, rounded: bool = True) -> _Chosen:
        """precision, rounded: as for `Clipping.factors`."""
        norms = clipping.group_norms(square_norms)
        return cls(clipping, norms, clipping.factors(norms, precision, rounded=rounded))

    def is_extreme(self) -> bool:
        """Whether a factor is so small that it, or what it multiplies, leaves float32's range at its lower end, and loses its digits."""
        small = (self.factors < _TINY) & torch.isfinite(self.norms).all(0)  # where they are not, it is zero, and shall be
        return bool(small.any())

    def columns(self, losses: torch.Tensor) -> RecordColumns:
        bounds = self.norms.new_tensor([group.bound for group in self.clipping.groups]).unsqueeze(1)
        below = (self.norms <= bounds).all(0)
        return RecordColumns(
            torch.linalg.vector_norm(self.norms, dim=0).cpu(), losses.detach().double().cpu(), self.factors.t().cpu(), below.cpu()
        )


def _precision(params: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type that all sums can be told from their rounding in: float32 where any of them is in float32."""
    return torch.float64 if all(value.dtype == torch.float64 for value in params.values()) else torch.float32


def _inside_the_grid(clipping: Clipping, params: Mapping[str, torch.Tensor]) -> Clipping:
    """The clipping whose records, once rounded to the grid, keep to the bounds of this one."""
    assert clipping.grid is not None
    groups = []
    for group in clipping.groups:
        dimensions = sum(params[name].numel() for name in group.parameters)
        groups.append(replace(group, bound=tightened(group.bound, dimensions, clipping.grid)))
    return replace(clipping, groups=tuple(groups))


def _in_float64(gradient: DeferredGradient) -> torch.Tensor:
    """[1, *shape], multiplied and summed in float64."""
    if not gradient.terms:
        return torch.zeros(1, *gradient.shape, dtype=torch.float64, device=gradient.device)
    terms = [Placed(placed.term.at(slice(None), torch.float64), placed.layout) for placed in gradient.terms]
    return DeferredGradient(tuple(terms), gradient.shape, torch.float64, gradient.device).materialise()


def _all_finite(sums: Sums) -> bool:
    """Whether no entry is infinite or NaN: neither gets lost in a sum, and entries that are clipped don't add up to infinity."""
    totals = [value.sum() for value in sums.values()]
    if all(total.device.type == "cpu" for total in totals):
        return all(math.isfinite(float(total)) for total in totals)
    return bool(torch.stack([total.double() for total in totals]).isfinite().all())
