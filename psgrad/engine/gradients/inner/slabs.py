"""Gradients that are written out, all of a parameter or some of its rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from psgrad.engine.gradients.deferral import Placed
from psgrad.engine.gradients.terms import Convolution, Dense, Product, Rows, Term


def rows_of(terms: Sequence[Term]) -> int:
    """Into how many rows the value of aligned terms can be cut, the same for all of them; 1 where it can't be."""
    sizes = {_rows(term) for term in terms if not isinstance(term, Dense)}
    if not sizes:
        return terms[0].shape[0] if terms[0].shape else 1
    if len(sizes) > 1:
        return 1
    rows = sizes.pop()
    return rows if rows and all(math.prod(term.shape) % rows == 0 for term in terms) else 1


def _rows(term: Term) -> int:
    if isinstance(term, Product):
        return term.shape[1] if term.shape[0] == 1 else term.shape[0]
    if isinstance(term, Rows):
        return term.count
    if isinstance(term, Convolution) and term.geometry.groups == 1:
        return term.weight_shape[0]
    return 1


def written_parts(side: Sequence[Placed], elements: int, rows: slice | None = None, count: int = 1) -> list[torch.Tensor]:
    """[k, elements] of each term; with `rows` those of `count` rows alone, [k, elements in them], which takes aligned terms."""
    if rows is None:
        return [placed.layout.apply(placed.term.materialise(), lead=1).reshape(placed.term.samples, elements) for placed in side]
    width = elements // count * (rows.stop - rows.start)
    return [_some_rows(placed.term, rows, count).reshape(placed.term.samples, width) for placed in side]


def _some_rows(term: Term, rows: slice, count: int) -> torch.Tensor:
    if isinstance(term, Dense):
        return term.value.reshape(term.samples, count, -1)[:, rows]
    if isinstance(term, Rows):
        return _some_rows_of_table(term, rows)
    if isinstance(term, Product):
        if term.shape[0] == 1:
            return Product(term.left[..., rows], term.right).materialise()
        return Product(term.left[:, rows], term.right[:, rows]).materialise()
    assert isinstance(term, Convolution)
    shape = torch.Size([rows.stop - rows.start, *term.weight_shape[1:]])
    if term.geometry.transposed:
        return replace(term, inputs=term.inputs[:, :, rows], weight_shape=shape).materialise()
    return replace(term, cotangents=term.cotangents[:, :, rows], weight_shape=shape).materialise()


def _some_rows_of_table(term: Rows, rows: slice) -> torch.Tensor:
    """[k, rows, b]; the positions that lie elsewhere are not touched."""
    n, _, columns = term.rows.shape
    size = rows.stop - rows.start
    inside = ((term.index >= rows.start) & (term.index < rows.stop)).reshape(-1).nonzero().squeeze(1)
    samples = torch.arange(n, device=term.device).unsqueeze(1).expand_as(term.index).reshape(-1)[inside]
    places = samples * size + term.index.reshape(-1)[inside] - rows.start
    value = term.rows.new_zeros(n * size, columns)
    return value.index_add_(0, places, term.rows.reshape(-1, columns)[inside]).reshape(n, size, columns)
