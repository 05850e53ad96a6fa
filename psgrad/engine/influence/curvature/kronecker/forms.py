"""How parameters lie as matrices whose gradients are sums over positions of outer products.

Nothing here knows layers: what a gradient's terms say of themselves decides. A product of factors ([n, g, t, a], [n, g, t, b]) makes
the parameter g matrices [a, b], a convolution its groups' matrices over channels and places of the kernel, a looked-up table one matrix
whose left factor is one-hot. Several uses of one weight are more positions of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.placed import DeferredGradient, Placed, upright
from psgrad.engine.gradients.terms import Convolution, Product, Rows, Term


@dataclass(frozen=True)
class Form:
    """A parameter, or a part of it, as matrices.

    Attributes:
        layout: how the matrices' elements lie in the parameter; None for one that is taken as a single row.
        shape: (groups, rows, columns).
    """

    layout: Layout | None
    shape: tuple[int, int, int]

    def matrices(self, value: torch.Tensor) -> torch.Tensor:
        """[k, groups, rows, columns] of k values [k, *parameter]."""
        return value.reshape(len(value), *self.shape) if self.layout is None else self.layout.invert(value, self.shape, lead=1)

    def values(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[k, *shape] of k matrices; zero in what the form does not cover."""
        return matrices.reshape(len(matrices), *shape) if self.layout is None else self.layout.apply(matrices, lead=1)

    @property
    def place(self) -> str:
        """Which part of the parameter it is, as an index; empty for all of it."""
        if self.layout is None or self.layout.window is None:
            return ""
        return "[" + ", ".join(f"{s.start}:{s.stop}" + (f":{s.step}" if s.step > 1 else "") for s in self.layout.slices) + "]"


def factored(gradient: DeferredGradient) -> dict[Form, list[Product | Convolution | Rows]]:
    """The terms that are sums of outer products, by the matrices that they say the parameter is."""
    found: dict[Form, list[Product | Convolution | Rows]] = {}
    for placed in map(upright, gradient.terms):
        term = placed.term
        if isinstance(term, Product | Convolution | Rows):
            found.setdefault(Form(placed.layout, _matrix_shape(term)), []).append(term)
    return found


def _matrix_shape(term: Term) -> tuple[int, int, int]:
    if isinstance(term, Convolution):
        groups = term.geometry.groups
        return groups, term.shape[0] // groups, term.weight_shape[1:].numel()
    return term.shape if len(term.shape) == 3 else (1, *term.shape)  # type: ignore[return-value]


def as_product(term: Product | Convolution) -> Product:
    """The term with a convolution's patches written out."""
    return term.as_product() if isinstance(term, Convolution) else term


def only_product(gradient: DeferredGradient, form: Form) -> Product | None:
    """The gradient as one product in this form; None where it is anything else, more terms or one that has been written out, say."""
    if len(gradient.terms) != 1:
        return None
    placed: Placed = upright(gradient.terms[0])
    if not isinstance(placed.term, Product) or Form(placed.layout, _matrix_shape(placed.term)) != form:
        return None
    return placed.term


def cover(forms: Iterable[Form], shape: torch.Size) -> bool:
    """Whether each element of the parameter lies in one of the forms, and in no more."""
    forms = list(forms)
    places = [[set(range(size)[run]) for run, size in zip(form.layout.slices, shape, strict=True)] for form in forms if form.layout]
    apart = all(any(x.isdisjoint(y) for x, y in zip(one, other, strict=True)) for one, other in itertools.combinations(places, 2))
    return apart and sum(math.prod(form.shape) for form in forms) == shape.numel()
