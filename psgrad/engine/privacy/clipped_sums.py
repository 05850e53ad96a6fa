"""The clipped sum of one chunk of records, in which no record's part is longer than its bound, rounding
included.

For a record with the norms a (by parameter) and the factor w of a group with bound C:

1. w * |a| <= (1 - MARGIN) * C, by `Clipping.factors`, in float64 (to 2^-50).
2. What the record adds to a parameter's sum is no longer than w * (a + e), by `bounded_sum`: the norm is
   computed from the numbers that are added up. Here e = (k + c) * 2^-53 * S, S being the absolute sum of the
   record's gradient and k at most ROWS + the pieces of the batch.
3. w * S <= MOST_ABSOLUTE * C is checked for each record. Where it does not hold, as the record's positions
   cancel, or the numbers leave float32's range, the record is computed alone: a pass of its own, whose
   gradient is materialised in float64, and norm and part are those of this one tensor. In such a record the
   last digits of the factors decide the whole gradient, and they depend on the other records of a chunk;
   alone it does not depend on any.
4. Sums are float64 from the first product to `ClippedSum.sums`, over chunks too. Two sums of N and N - 1
   records differ by the one record's part and the rounding of both, at most 2 * k * 2^-53 * N * R * C, with R
   the mean of w * S / C (1 where nothing cancels). Several ranks add their sums in pairs (rank_steps.py),
   which adds at most log2(ranks) to k.

Together the sum moves by at most (1 - MARGIN) * C + (MOST_ABSOLUTE + 2 * N * R) * (k + c) * 2^-53 * C, which
is at most C as long as N * R * k <= 2^30: with k = ROWS = 2^11, half a million records.

All this is of the record that comes or goes. The factors of the others (what the forward and backward pass
computes) may be rounded in another way at another place of a chunk, or in a chunk of another size: where a
unit of the model is at a kink, as of ReLU, a last digit changes a gradient. Chunks of one record each
(`privacy.records: alone`) have no such places.

A record whose gradient is not finite adds nothing, and none of its numbers reaches the sum of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from psgrad.engine.execution.ladder import rung
from psgrad.engine.execution.memory import keep_freed_memory
from psgrad.engine.gradients import (
    PerSampleGradients,
    SquareNorms,
    per_sample_gradients,
    per_sample_weighted_sum,
)
from psgrad.engine.gradients.batch_pass import BatchPass, SamplesDisagree
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.terms import square_norm
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins, Draws, Seeds
from psgrad.engine.privacy.full_precision import autocast_on, in_full_precision
from psgrad.engine.privacy.sum_programs import SumPrograms

Sums = dict[str, torch.Tensor]

# How many times its bound the absolute sum of a clipped record may be, before it is computed alone: rounding
# of the factors to float32 then turns its gradient by less than 2^-13.
MOST_ABSOLUTE = 2.0**10
# Absolute sums above it are of numbers that may leave float32's range.
_LARGEST = 2.0**100


@dataclass(frozen=True)
class RecordColumns:
    """The columns of each record of a batch, on the CPU. NOT PRIVATE.

    Attributes:
        norms: [n] float64, the norm of the gradient in all parameters.
        losses: [n].
        factors: [n, groups] float64, the gradient's factor; 0 for a record that was left out.
        below: [n] bool, whether the norm was at most the bound, in every group.
    """

    norms: torch.Tensor
    losses: torch.Tensor
    factors: torch.Tensor
    below: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[RecordColumns], groups: int = 1) -> RecordColumns:
        """The columns of several parts of a batch, joined in order. groups: the number of clipping groups,
        used if `parts` is empty.
        """
        if not parts:
            none = torch.zeros(0, dtype=torch.float64)
            return cls(none, none, none.reshape(0, groups), none.bool())
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS))

    @classmethod
    def without_gradient(cls, groups: int) -> RecordColumns:
        """Those of one record that has no finite gradient."""
        nan = torch.full((1,), torch.nan, dtype=torch.float64)
        return cls(nan, nan, torch.zeros(1, groups, dtype=torch.float64), torch.zeros(1, dtype=torch.bool))

    def at(self, places: torch.Tensor) -> RecordColumns:
        """The columns of the records at these indices."""
        return RecordColumns(*(getattr(self, name)[places] for name in COLUMNS))

    def with_record(self, place: int, other: RecordColumns) -> RecordColumns:
        """These columns with the only record of `other` at one index."""
        where = torch.tensor([place])
        return RecordColumns(
            *(getattr(self, name).index_copy(0, where, getattr(other, name)) for name in COLUMNS)
        )


COLUMNS = tuple(each.name for each in fields(RecordColumns))


@dataclass(frozen=True)
class ClippedSum:
    """The sum of the clipped gradients of some records, without noise.

    Attributes:
        sums: name -> [*shape] float64 on the parameters' device. Always finite. They become a parameter's
            type with noise on them, not before: rounding to float32 would move a sum of N records by N *
            2^-24 of the bound.
        records: the columns of each record.
    """

    sums: Sums
    records: RecordColumns

    @classmethod
    def of_groups(cls, parts: list[ClippedSum], groups: list[torch.Tensor]) -> ClippedSum:
        """The clipped sum of groups of records as one; `groups` holds each one's places."""
        total = Total()
        for part in parts:
            total.add(part)
        whole, order = total.result(), torch.cat(groups).cpu().argsort()
        return cls(whole.sums, whole.records.at(order))


class Total:
    """Clipped sums, added up in float64.

    Args:
        clipping, params: of the sum of no records; None where one is added at least.
    """

    def __init__(
        self, clipping: Clipping | None = None, params: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._groups, self._params = 1 if clipping is None else len(clipping.groups), params or {}
        self._sums: Sums = {}
        self._records: list[RecordColumns] = []

    def add(self, part: ClippedSum) -> None:
        if not self._records:
            self._sums = part.sums
        else:
            if len(self._records) == 1:
                self._sums = {name: value.clone() for name, value in self._sums.items()}
            for name, value in self._sums.items():
                value.add_(part.sums[name])
        self._records.append(part.records)

    def result(self) -> ClippedSum:
        """The sum, zero where nothing was added."""
        sums = self._sums or {
            name: torch.zeros(value.shape, dtype=torch.float64, device=value.device)
            for name, value in self._params.items()
        }
        sums = {name: sums[name] for name in self._params or sums}
        return ClippedSum(sums, RecordColumns.joined(self._records, self._groups))


class Clipper:
    """The computation of a chunk, for a stream or by itself: its clipped sum.

    Args:
        coins: of the run; they seed the generators for each chunk.
        programs: of the loss that it is called with; None for none. With them, chunks are filled up with
            copies of a record, which add nothing, so that they have few sizes.
        rows: how many of a chunk's first records count; None for all.
    """

    keeps_factors = False  # what is found of a chunk is no larger for more records

    def __init__(
        self,
        clipping: Clipping,
        coins: Coins,
        programs: SumPrograms | None = None,
        rows: int | None = None,
    ) -> None:
        self.clipping, self.coins, self.programs, self.rows = clipping, coins, programs, rows
        self.few_shapes = programs is not None

    def of_rows(self, rows: int) -> Clipper:
        """A clipper of chunks of which so many of the first records count."""
        return Clipper(self.clipping, self.coins, self.programs, rows)

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
        keep_freed_memory()
        options = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}
        self._autocast = autocast_on(params)
        with in_full_precision(loss, params) as loss, self.coins.kept():
            chunk = _RecordChunk(loss, params, batch, options)
            records = torch.arange(self.rows or chunk.records, device=chunk.device)
            return self._together(chunk, records, self.coins.next(), len(records))

    def _together(
        self,
        chunk: _RecordChunk,
        records: torch.Tensor,
        seeds: Seeds,
        of: int,
        passes: list[Draws] | None = None,
    ) -> ClippedSum:
        """The clipped sum of these records [k], out of `of` in a chunk, in one pass, but for those that are
        computed alone; in a pass for the records of each outcome where they disagree on a branch. These
        passes have the coins of the first one: whether records disagree depends on the coins of all.

        passes: what these passes have drawn; None for the first one.
        """
        samples = rung(chunk.records) if self.few_shapes else chunk.records
        places = torch.arange(samples, device=chunk.device)
        counted = torch.isin(places, records)
        batch = chunk.batch_of(torch.where(counted, places, records[0]))
        bounds = self.clipping.bounds(chunk.device)

        def compute(batch: tuple[Any, ...], counted: torch.Tensor, bounds: torch.Tensor) -> Any:
            found = self._full(chunk, batch, counted, bounds)
            if of > 1:
                self.coins.require_own()
            return found

        try:
            draws = None if passes is None else Draws()
            with self.coins.of_chunk(seeds, of, draws):
                if self.programs is None or draws is not None:  # what a program draws is not seen
                    found = compute(batch, counted, bounds)
                else:
                    made_for = self._made_for(chunk)
                    found = self.programs(made_for, self.coins.shared, compute, batch, counted, bounds)
        except SamplesDisagree as disagreement:
            groups = [group[counted[group]] for group in disagreement.groups]
            groups = [group for group in groups if len(group)]
            drawn: list[Draws] = [] if passes is None else passes
            parts = [self._together(chunk, group, seeds, of, drawn) for group in groups]
            if passes is None and drawn:
                drawn[0].require_same(drawn[1:])
            return ClippedSum.of_groups(parts, groups)
        if passes is not None and draws is not None:
            passes.append(draws)
        sums, losses, norms, factors, cancelling = found
        chosen = ClippedNorms(self.clipping, bounds, norms, factors)
        columns = chosen.columns(losses).at(records.cpu())
        for place in torch.nonzero(cancelling[records]).flatten().tolist():
            # With new coins: whether a record cancels depends on its own ones alone.
            with self.coins.of_chunk(self.coins.next(), 1):
                one = _alone(self.clipping, chunk.of_record(int(records[place])).gradients())
            sums = {name: value.add_(one.sums[name]) for name, value in sums.items()}
            columns = columns.with_record(place, one.records)
        return ClippedSum(sums, columns)

    def _full(
        self, chunk: _RecordChunk, batch: tuple[Any, ...], counted: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[Sums, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a full batch: the sums over the samples that count [n], without those that cancel; losses [n],
        norms and factors [groups, n], and which samples cancel [n].
        """
        chosen: list[ClippedNorms] = []
        cancelling = counted

        def weights(norms: SquareNorms) -> dict[str, torch.Tensor]:
            nonlocal cancelling
            chosen.append(ClippedNorms.of(self.clipping, norms.by_parameter, bounds))
            cancelling = chosen[0].cancelling(norms.absolute)
            return self.clipping.by_parameter(chosen[0].factors.masked_fill(cancelling, 0.0))

        weighted = per_sample_weighted_sum(
            chunk.loss,
            chunk.params,
            *batch,
            weights=weights,
            bounded=True,
            counted=counted,
            **chunk.options,
        )
        return weighted.sums, weighted.norms.losses, chosen[0].norms, chosen[0].factors, cancelling

    def _made_for(self, chunk: _RecordChunk) -> Any:
        """What `_full` depends on beside its arguments, and the loss, and the values of parameters."""
        clipping = self.clipping
        groups = tuple(group.parameters for group in clipping.groups)
        options = repr(sorted(chunk.options.items()))
        return groups, clipping.rule, options, self._autocast


class _RecordChunk:
    """Records that are computed in one chunk, with the arguments of `per_sample_gradients`."""

    def __init__(
        self, loss: Any, params: Mapping[str, torch.Tensor], batch: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.loss, self.params, self.batch, self.options = loss, params, batch, options
        self.device = next(iter(params.values())).device
        self._pass = BatchPass(loss, params, batch, **options)
        self.records = self._pass.size

    def batch_of(self, records: torch.Tensor) -> tuple[Any, ...]:
        """The batch of these records [k], any of them more than once."""
        if len(records) == self.records and torch.equal(records, torch.arange(len(records)).to(records)):
            return self.batch
        return self._pass.batch_of(records)

    def of_record(self, record: int) -> _RecordChunk:
        """This record as a chunk of its own."""
        batch = self.batch_of(torch.tensor([record], device=self.device))
        return _RecordChunk(self.loss, self.params, batch, self.options)

    def gradients(self) -> PerSampleGradients:
        return per_sample_gradients(self.loss, self.params, *self.batch, **self.options)


def _alone(clipping: Clipping, gradients: PerSampleGradients) -> ClippedSum:
    """The clipped gradient of one record, materialised in float64; zero if it is not finite."""
    (part,) = gradients.parts  # a record agrees with itself
    values = {name: _in_float64(gradient) for name, gradient in part.gradients.items()}
    squares = {name: square_norm(value) for name, value in values.items()}
    chosen = ClippedNorms.of(clipping, squares, clipping.bounds(gradients.losses.device))
    factors = clipping.by_parameter(chosen.factors)
    sums = {
        name: torch.where(factors[name] == 0, 0.0, value * factors[name])[0] for name, value in values.items()
    }
    return ClippedSum(sums, chosen.columns(gradients.losses))


@dataclass(frozen=True)
class ClippedNorms:
    """The bounds [groups, 1], the norms [groups, n] of some records, and their factors [groups, n]."""

    clipping: Clipping
    bounds: torch.Tensor
    norms: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(
        cls, clipping: Clipping, square_norms: Mapping[str, torch.Tensor], bounds: torch.Tensor
    ) -> ClippedNorms:
        """The factors of these norms."""
        norms = clipping.group_norms(square_norms)
        factors = clipping.factors(norms, bounds)
        return cls(clipping, bounds, norms, factors)

    def cancelling(self, absolute: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[n] bool: the records whose clipped absolute sums, given by parameter, are too large beside their
        bounds.
        """
        sums = self.clipping.group_sums(absolute)
        small = (sums * self.factors <= MOST_ABSOLUTE * self.bounds) & (sums <= _LARGEST)
        return ~small.all(0) & torch.isfinite(self.norms).all(0)

    def columns(self, losses: torch.Tensor) -> RecordColumns:
        below = (self.norms <= self.bounds).all(0)
        return RecordColumns(
            torch.linalg.vector_norm(self.norms, dim=0).cpu(),
            losses.detach().double().cpu(),
            self.factors.t().cpu(),
            below.cpu(),
        )


def _in_float64(gradient: DeferredGradient) -> torch.Tensor:
    """[1, *shape], multiplied and summed in float64."""
    if gradient.is_zero:
        return torch.zeros(1, *gradient.shape, dtype=torch.float64, device=gradient.device)
    return gradient.at(slice(None), torch.float64).materialise()
