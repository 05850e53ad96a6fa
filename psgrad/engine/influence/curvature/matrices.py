"""Materialised curvature matrices [p, p] in float64, of the sum of the losses, for models with some thousands
of parameters.

If the rows of a sample are outer products with one common factor, j_r = u_r ⊗ v, their sum of j_r j_r' is
(sum_r u_r u_r') ⊗ v v'. Over samples that is one matrix product of n columns, in place of n * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.execution.buckets import SumOverSamples
from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import OutputRows
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Flat, Vectors
from psgrad.engine.gradients.parts import Part
from psgrad.engine.influence.curvature.row_blocks import SharedFactorRows, part_of
from psgrad.engine.transforms import grad, vjp, vmap

# Columns of a product of a matrix with itself that are computed at once: only what lies on or below the
# diagonal is.
_PANEL = 512
# The numbers of products of factors, and the samples from which on their product is fast.
_NUMBERS, _SAMPLES = 1 << 25, 32
# Bytes of factors that are kept before their products are added.
_KEPT = 1 << 27


def own_products(rows: torch.Tensor) -> torch.Tensor:
    """[p, p]: X'X of X [N, p], half of it computed."""
    size = rows.shape[1]
    whole = rows.new_empty(size, size)
    for start in range(0, size, _PANEL):
        panel = rows[:, start : start + _PANEL].t() @ rows[:, start:]
        whole[start : start + _PANEL, start:] = panel
        whole[start:, start : start + _PANEL] = panel.t()
    return whole


class _RowSums:
    """Gathers the sum of j j' [p, p] float64 over gradients that are rows, `per_sample` for each sample, next
    to one another.

    Each sum takes some passes over a matrix [p, p]. So chunks are kept as factors until they are many.
    """

    needs_factors = True

    def __init__(self, flat: Flat, per_sample: int, device: torch.device) -> None:
        self.flat, self.per_sample = flat, per_sample
        self.whole = torch.zeros(flat.size, flat.size, dtype=torch.float64, device=device)
        self._chunk: list[list[_OuterRows]] = []
        self._kept: list[list[_OuterRows]] = []

    def columns(self, gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        self._chunk = [_parts(part, self.flat, self.per_sample) for part in gradients.parts]
        return {}

    def keep(self) -> None:
        self._kept += self._chunk
        self._chunk = []
        if sum(part.bytes for parts in self._kept for part in parts) > _KEPT:
            self.add_kept()

    def add_kept(self) -> None:
        """Add what is kept to `whole`."""
        alike: dict[tuple[Any, ...], list[list[_OuterRows]]] = {}
        for parts in self._kept:
            alike.setdefault(tuple(part.form for part in parts), []).append(parts)
        self._kept = []
        for chunks in alike.values():
            self._add([_OuterRows.joined(same) for same in zip(*chunks, strict=True)])

    def _add(self, parts: list[_OuterRows]) -> None:
        for number, left in enumerate(parts):
            for right in parts[number:]:
                block = left.with_itself() if left is right else left.times(right)
                self.whole[_places(left, right)] += block
                if left is not right:
                    self.whole[_places(right, left)] += block.t()


def _places(left: _OuterRows, right: _OuterRows) -> tuple[slice | torch.Tensor, slice | torch.Tensor]:
    """Where in a matrix of all parameters the products of two parts are."""
    rows, columns = left.columns, right.columns
    if isinstance(rows, torch.Tensor) and isinstance(columns, torch.Tensor):
        rows = rows.unsqueeze(1)
    return rows, columns


@dataclass(frozen=True)
class _OuterRows:
    """Rows own_r ⊗ shared, float64. own: [n, R, a], shared: [n, b], columns: [a * b], where in a row of all
    parameters they are. form: parts of one form have the same columns.
    """

    form: tuple[Any, ...]
    own: torch.Tensor
    shared: torch.Tensor
    columns: slice | torch.Tensor

    @property
    def bytes(self) -> int:
        return self.own.nbytes + self.shared.nbytes

    @classmethod
    def joined(cls, parts: Sequence[_OuterRows]) -> _OuterRows:
        """Parts of one form as one, of all their samples."""
        if len(parts) == 1:
            return parts[0]
        owns, shareds = [part.own for part in parts], [part.shared for part in parts]
        return replace(parts[0], own=torch.cat(owns), shared=torch.cat(shareds))

    def with_itself(self) -> torch.Tensor:
        """[a * b, a * b]: the sum over rows of their outer products with themselves.

        Both factors of a sample's part, (sum_r u_r u_r') and v v', are symmetric, so that a quarter of the
        products of their entries is all of them.
        """
        a, b = self.own.shape[2], self.shared.shape[1]
        step = _NUMBERS // (a * a + b * b)
        if b == 1 or step < _SAMPLES:
            return own_products(self._materialised())
        (of_own, own_places), (of_shared, shared_places) = (_half(size, self.own.device) for size in (a, b))
        total = self.own.new_zeros(len(of_own[0]), len(of_shared[0]))
        for start in range(0, len(self.own), step):
            some = slice(start, start + step)
            owns = torch.bmm(self.own[some].transpose(1, 2), self.own[some])
            shared = self.shared[some]
            total.addmm_(owns[:, of_own[0], of_own[1]].t(), shared[:, of_shared[0]] * shared[:, of_shared[1]])
        # [a * a, b * b], by rows first, which are contiguous
        whole = total[own_places.flatten()][:, shared_places.flatten()]
        return whole.reshape(a, a, b, b).transpose(1, 2).reshape(a * b, a * b)

    def times(self, other: _OuterRows) -> torch.Tensor:
        """[a * b, a' * b']: the sum over rows of the outer products of this part with another's."""
        a, b, c, d = self.own.shape[2], self.shared.shape[1], other.own.shape[2], other.shared.shape[1]
        step = _NUMBERS // (a * c + b * d)
        if b * d == 1 or step < _SAMPLES:
            return self._materialised().t() @ other._materialised()
        total = self.own.new_zeros(a * c, b * d)
        for start in range(0, len(self.own), step):
            some = slice(start, start + step)
            owns = torch.bmm(self.own[some].transpose(1, 2), other.own[some])
            shared = self.shared[some].unsqueeze(2) * other.shared[some].unsqueeze(1)
            total.addmm_(owns.flatten(1).t(), shared.flatten(1))
        return total.reshape(a, c, b, d).transpose(1, 2).reshape(a * b, c * d)

    def _materialised(self) -> torch.Tensor:
        """[n * R, a * b]"""
        return (self.own.unsqueeze(3) * self.shared.unsqueeze(1).unsqueeze(1)).flatten(2).flatten(0, 1)


def _half(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper half of a symmetric matrix [size, size]: (rows and columns of its h entries [2, h], for each
    entry of the whole matrix the number of the entry that equals it [size, size]).
    """
    places = torch.triu_indices(size, size, device=device)
    which = torch.empty(size, size, dtype=torch.int64, device=device)
    numbers = torch.arange(places.shape[1], device=device)
    which[places[0], places[1]] = numbers
    which[places[1], places[0]] = numbers
    return places, which


def _parts(samples: Part, flat: Flat, per_sample: int) -> list[_OuterRows]:
    """One for each parameter whose rows share a factor, and one for all others together."""
    device = samples.device
    parts: list[_OuterRows] = []
    values, rest = [], []
    for name, gradient in samples.gradients.items():
        if gradient.is_zero:
            continue
        columns = flat.columns[name]
        part = part_of(gradient, per_sample)
        if isinstance(part, SharedFactorRows) and part.own.shape[2] == 1:
            own, shared = part.own.squeeze(2).double(), part.shared.squeeze(1).double()
            parts.append(_OuterRows((name, part.form), own, shared, columns))
            if part.transposed:
                order = torch.arange(columns.start, columns.stop, device=device).reshape(shared.shape[1], -1)
                parts[-1] = replace(parts[-1], columns=order.t().reshape(-1))
        else:
            value = gradient.materialise()
            values.append(value.reshape(-1, per_sample, columns.stop - columns.start).double())
            rest.append((name, torch.arange(columns.start, columns.stop, device=device)))
    if values:
        own, form = torch.cat(values, dim=2), tuple(name for name, _ in rest)
        parts.append(_OuterRows(form, own, own.new_ones(len(own), 1), torch.cat([each for _, each in rest])))
    return parts


# The numbers of the intermediates of a block of Hessian columns, estimated as one for each sample and
# parameter.
_BLOCK = 1 << 25


def sum_of_outer_products(rows: Examples) -> torch.Tensor:
    """[p, p], on the rows' device: the sum of g g' over the rows' gradients.

    Of a training set it is the empirical Fisher; of `gauss_newton_rows` the Gauss-Newton matrix. Products and
    sums are float64.
    """
    flat = rows.flat
    if isinstance(rows, OutputRows):
        sums = _RowSums(flat, rows.per_sample, rows.device)
        replace(rows, settle=False).gather(sums)
        sums.add_kept()
        return rows.summed(sums.whole)
    return rows.fold(lambda gradients: own_products(flat.join(gradients.materialise()).double()))


def loss_hessian(training: Examples) -> torch.Tensor:
    """[p, p], on the rows' device: the second derivatives of the sum of the losses.

    One pass over the rows; of each chunk the gradient is differentiated, and the columns come in blocks.
    """
    total: torch.Tensor = training.fold(lambda found: found.value, _of_chunk)
    return 0.5 * (total + total.t())


@replayable("sum")
def _of_chunk(
    loss: Any,
    params: Vectors,
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    **options: Any,
) -> SumOverSamples:
    flat, dims = Flat(params), (None, 0, None if target is None else 0)
    each = vmap(lambda *arguments: loss(*arguments)[0], in_dims=dims, randomness=options["randomness"])
    # As in PassProducts: not by tangents, which an embedding's padding row has.
    _, along = vjp(grad(lambda params: each(params, inputs, target).sum()), params)
    reference = next(iter(params.values()))
    columns = []
    step = max(1, _BLOCK // max(1, flat.size * len(inputs[0])))
    for start in range(0, flat.size, step):
        stop = min(start + step, flat.size)
        basis = torch.zeros(stop - start, flat.size, dtype=reference.dtype, device=reference.device)
        basis[:, start:stop] = torch.eye(stop - start, dtype=reference.dtype, device=reference.device)
        columns.append(flat.join(vmap(along)(flat.split(basis))[0]).double())
    return SumOverSamples(torch.cat(columns))
