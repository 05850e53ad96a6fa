"""Second moments of the factors of gradients, summed over samples and positions: the bases of
Kronecker-factored blocks are their eigenvectors.

Layers are not needed: the terms of a gradient say how the parameter is a set of matrices. A product of
factors ([n, g, t, a], [n, g, t, b]) makes it g matrices [a, b], a convolution its groups' matrices over
channels and kernel positions, an embedding table one matrix whose left factor is one-hot. Several uses of one
weight are more positions of it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import torch

from psgrad.engine.execution.ranks import Arrays, Processes
from psgrad.engine.gradients.deferred import DeferredGradient, oriented_if_free
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.parts import Part
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import Convolution, Lookup, Product, Term, blocks


@dataclass(frozen=True)
class Form:
    """A parameter, or a part of it, as matrices.

    Attributes:
        layout: how the matrices' elements lie in the parameter; None for one that is taken as a single row.
        shape: (groups, rows, columns).
    """

    layout: AxisLayout | None
    shape: tuple[int, int, int]

    def matrices(self, value: torch.Tensor) -> torch.Tensor:
        """[k, groups, rows, columns] of k values [k, *parameter]."""
        return (
            value.reshape(len(value), *self.shape)
            if self.layout is None
            else self.layout.invert(value, self.shape, lead=1)
        )

    def values(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[k, *shape] of k matrices; zero in what the form does not cover."""
        return (
            matrices.reshape(len(matrices), *shape)
            if self.layout is None
            else self.layout.apply(matrices, lead=1)
        )

    @property
    def slice_text(self) -> str:
        """The part of the parameter, as an index; empty for all of it."""
        if self.layout is None or self.layout.window is None:
            return ""
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.layout.slices) + "]"


def factored(gradient: DeferredGradient) -> dict[Form, list[Term]]:
    """The terms that are sums of outer products, by their form of the parameter."""
    by_form: dict[Form, list[Term]] = {}
    for placed in map(oriented_if_free, gradient.terms):
        term = placed.term
        if (shape := term.matrix_shape) is not None:
            by_form.setdefault(Form(placed.layout, shape), []).append(term)
    return by_form


def only_product(gradient: DeferredGradient, form: Form) -> Product | None:
    """The gradient as one product in this form; None if it is anything else, such as several terms or a
    materialised one.
    """
    (term,) = factored(gradient).get(form, [None]) if len(gradient.terms) == 1 else [None]
    return term if isinstance(term, Product) else None


def cover(forms: Iterable[Form], shape: torch.Size) -> bool:
    """Whether each element of the parameter lies in one of the forms, and in no more."""
    forms = list(forms)
    places = [
        [set(range(size)[run]) for run, size in zip(form.layout.slices, shape, strict=True)]
        for form in forms
        if form.layout
    ]
    apart = all(
        any(x.isdisjoint(y) for x, y in zip(one, other, strict=True))
        for one, other in itertools.combinations(places, 2)
    )
    return apart and sum(math.prod(form.shape) for form in forms) == shape.numel()


Side = Literal["left", "right"]
Use = tuple[str, Form]

# A factor with more entries has no basis of its own: 128 MiB for its covariance, and minutes for its
# eigenvectors.
LARGEST_SIDE = 4096


@dataclass(frozen=True)
class Tie:
    """A parameter that may be a bias: its gradient would be the sum over positions of one factor of the use's
    gradient.
    """

    bias: str
    use: Use
    side: Side


@dataclass
class FactorSums:
    """Sums of the factors of some samples.

    Attributes:
        moments: for each use of a parameter float64 tensors: `left` [g, a, a] and `right` [g, b, b], the
            second moments of its factors (absent where a side is too large); `left_sum` [g, a], `right_sum`
            [g, b] and `positions` [], those with a one that would be appended; `one_hot` [a], how often a
            table's rows were looked up.
        ties: whether each of them held for all of the samples.
    """

    moments: dict[Use, dict[str, torch.Tensor]] = field(default_factory=dict)
    ties: dict[Tie, bool] = field(default_factory=dict)

    def add(self, other: FactorSums) -> None:
        for use, moment in other.moments.items():
            _add(self.moments.setdefault(use, {}), moment)
        for tie, held in other.ties.items():
            self.ties[tie] = self.ties.get(tie, True) and held

    def over(self, processes: Processes, device: torch.device) -> FactorSums:
        """The sums of all processes, on each of them."""
        if processes.size == 1:
            return self

        def add(other: Arrays) -> None:
            self.add(FactorSums.of_state(other, device))

        return FactorSums.of_state(processes.reduce("factors", self.state, add), device)

    def state(self) -> Arrays:
        """The sums as tensors alone, for another process; see `of_state`."""
        result: Arrays = {}
        for use, moment in self.moments.items():
            result |= {json.dumps(["moment", *_plain(use), part]): value for part, value in moment.items()}
        for tie, held in self.ties.items():
            result[json.dumps(["tie", *_plain(tie.use), tie.bias, tie.side])] = torch.tensor(held)
        return result

    @classmethod
    def of_state(cls, state: Arrays, device: torch.device) -> FactorSums:
        result = cls()
        for key, value in state.items():
            kind, name, *rest = json.loads(key)
            value = value.to(device)
            layout, shape, *which = rest
            use = name, Form(None if layout is None else AxisLayout.of_plain(layout), tuple(shape))
            if kind == "moment":
                result.moments.setdefault(use, {})[which[0]] = value
            else:
                result.ties[Tie(which[0], use, which[1])] = bool(value)
        return result


def _plain(use: Use) -> tuple[Any, ...]:
    """The name, layout and shape of a use, as JSON has them."""
    name, form = use
    return name, None if form.layout is None else asdict(form.layout), form.shape


def _add(totals: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


class Covariances:
    """Gathers `FactorSums` over the samples of a stream. It needs gradients that keep their factors
    (settle=False).
    """

    needs_factors = True

    def __init__(self) -> None:
        self.sums = FactorSums()
        self._chunk = FactorSums()

    def columns(self, gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        self._chunk = FactorSums()
        for part in gradients.parts:
            self._chunk.add(self._of_part(part))
        return {}

    def _of_part(self, part: Part) -> FactorSums:
        """The sums of samples that were computed together."""
        sums = FactorSums()
        for name, gradient in part.gradients.items():
            terms = factored(gradient)
            for form, of_form in terms.items():
                along = _FactorMoments(form)
                for term in of_form:
                    along.add(term)
                sums.moments[name, form] = along.totals
                if not any(isinstance(term, Lookup) for term in of_form):
                    sums.ties.update(self._ties(part, (name, form), along))
        return sums

    def keep(self) -> None:
        self.sums.add(self._chunk)
        self._chunk = FactorSums()

    def _ties(self, part: Part, use: Use, along: _FactorMoments) -> dict[Tie, bool]:
        """Which parameters of the same owner have a gradient that is the sum over positions of one of the
        factors.
        """
        name, found = use[0], {}
        owner = name.rpartition(".")[0]
        sums: dict[Side, torch.Tensor] = {"left": along.sums_of("left"), "right": along.sums_of("right")}
        for other, gradient in part.gradients.items():
            if other == name or other.rpartition(".")[0] != owner or factored(gradient):
                continue
            for side, of_factor in sums.items():
                if gradient.shape.numel() == of_factor.shape[1]:
                    found[Tie(other, use, side)] = _same(gradient, of_factor)
        return found


def _same(gradient: DeferredGradient, sums: torch.Tensor) -> bool:
    value = gradient.materialise().reshape(sums.shape) if gradient.terms else torch.zeros_like(sums)
    tolerance = torch.finfo(sums.dtype).eps ** 0.5 * float(sums.abs().max()) if sums.numel() else 0.0
    return bool(((value - sums).abs() <= tolerance).all())


def _as_product(term: Term) -> Product:
    return term.as_product() if isinstance(term, Convolution) else cast(Product, term)


class _FactorMoments:
    """The moments of one use, and each sample's sums over positions."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.totals: dict[str, torch.Tensor] = {}
        self._sums: dict[str, list[torch.Tensor]] = {"left": [], "right": []}  # [n, g * a] of each term

    def sums_of(self, side: Side) -> torch.Tensor:
        """[n, g * a]"""
        return torch.stack(self._sums[side]).sum(0)

    def add(self, term: Term) -> None:
        if isinstance(term, Lookup):
            self._second_moment("right", term.rows.unsqueeze(1))
            counts = torch.bincount(term.index.reshape(-1), minlength=self.form.shape[1]).double()
            _add(self.totals, {"one_hot": counts})
            return
        columns = self.form.shape[2]
        each = term.factors[0][:1].numel() * (1 + columns // max(self.form.shape[1], 1)) * 8
        parts = [
            self._add_product(_as_product(term.at(block)))
            for block in blocks(term.samples, each, term.device)
        ]
        for place, side in enumerate(("left", "right")):
            self._sums[side].append(torch.cat([part[place] for part in parts]))

    def _add_product(self, term: Product) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums over positions of both factors, [n, g * a] and [n, g * b]."""
        left, right = term.factors
        sums = left.sum(2), right.sum(2)
        for side, factor, along in (("left", left, sums[0]), ("right", right, sums[1])):
            self._second_moment(side, factor)
            _add(self.totals, {f"{side}_sum": along.sum(0, dtype=torch.float64)})
        positions = torch.tensor(float(term.samples * left.shape[2]), dtype=torch.float64, device=term.device)
        _add(self.totals, {"positions": positions})
        return sums[0].flatten(1), sums[1].flatten(1)

    def _second_moment(self, side: str, factor: torch.Tensor) -> None:
        """Add the second moment of a factor [n, g, t, a]."""
        if factor.shape[3] <= LARGEST_SIDE:
            rows = factor.double().transpose(0, 1).flatten(1, 2)
            _add(self.totals, {side: torch.bmm(rows.transpose(1, 2), rows)})
