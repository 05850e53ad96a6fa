"""Rows of tables that an index put there: added up by index in each sample, and brought together where two samples have the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.inner.tiles import budget
from psgrad.engine.gradients.terms import BLOCK_BYTES, Rows


@dataclass(frozen=True)
class Entries:
    """Rows of tables that are not zero, of each sample and index at most one.

    Attributes:
        sample, index: [q], in the order of (sample, index).
        rows: [q, b].
    """

    sample: torch.Tensor
    index: torch.Tensor
    rows: torch.Tensor


def entries(term: Rows) -> Entries:
    """The rows of each sample that have the same index added up; rows of zeros (padding) are left out."""
    columns = term.rows.shape[2]
    rows = term.rows.reshape(-1, columns)
    keys = (term.index + torch.arange(term.samples, device=term.device).unsqueeze(1) * term.count).reshape(-1)
    kept = (rows != 0).any(1)
    keys, places = keys[kept].unique(return_inverse=True)
    merged = rows.new_zeros(len(keys), columns).index_add_(0, places, rows[kept])
    return Entries(torch.div(keys, term.count, rounding_mode="floor"), keys % term.count, merged)


def count_matches(x: Rows, y: Rows) -> int:
    """How often a position of a sample of x and one of y have the same index; two numbers for each row of the table, whatever n and m."""
    counts = [torch.bincount(term.index.reshape(-1), minlength=term.count) for term in (x, y)]
    return int((counts[0].double() * counts[1]).sum()) if x.count else 0


def by_matches(x: Rows, y: Rows) -> torch.Tensor:
    """[k, l] float64: the inner products of the tables of k samples with those of l, by sorting one side and looking up the other."""
    out = torch.zeros(x.samples * y.samples, dtype=torch.float64, device=x.device)
    left, right = entries(x), entries(y)
    order = right.index.argsort()
    looked_up = right.index[order]
    first = torch.searchsorted(looked_up, left.index)
    counts = torch.searchsorted(looked_up, left.index, right=True) - first
    room = max(1, budget(BLOCK_BYTES, x.device) // max(1, 2 * left.rows.shape[1] * left.rows.element_size()))
    for some in _bounded(counts, room):
        repeated = torch.arange(some.start, some.stop, device=x.device).repeat_interleave(counts[some])
        within = torch.arange(len(repeated), device=x.device) - (counts[some].cumsum(0) - counts[some]).repeat_interleave(counts[some])
        partner = order[first[repeated] + within]
        dots = (left.rows[repeated] * right.rows[partner]).sum(1)
        out.index_add_(0, left.sample[repeated] * y.samples + right.sample[partner], dots.double())
    return out.reshape(x.samples, y.samples)


def _bounded(counts: torch.Tensor, room: int) -> Iterator[slice]:
    """Runs of entries with at most `room` matches together, or of one entry."""
    start, done = 0, 0
    totals = counts.cumsum(0)
    while start < len(counts):
        stop = max(start + 1, int(torch.searchsorted(totals, done + room, right=True)))
        yield slice(start, stop)
        start, done = stop, int(totals[stop - 1])
