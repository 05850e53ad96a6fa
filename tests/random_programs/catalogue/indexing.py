# ruff: noqa: E501 -- tables, a row as wide as it is
"""Reads by index and mask."""

from __future__ import annotations

from tests.random_programs.catalogue.elementwise import entries
from tests.random_programs.writer import Line, Operator, Writer

ALONG = """
{x}.index_select({d}, {i}) | {x}.gather({d}, {k}) | {x}.take_along_dim({k}, {d}) | {x}.scatter({d}, {k}, {n}) | {x}.scatter_add({d}, {k}, {y})
{x}.index_add({d}, {i}, {y}) | {x}.index_fill({d}, {i}, {n}) | {x}.scatter_reduce({d}, {k}, {y}, 'amax') | {x}.scatter_reduce({d}, {k}, {y}, 'prod')
{x}.select_scatter({y}.select({d}, 0), {d}, 0) | {x}.slice_scatter({y}.narrow({d}, 0, 1), {d}, 0, 1) | {x}.scatter_reduce({d}, {k}, {y}, 'mean')
{x}.max({d}).indices.to({x}.dtype) * {x}.sum() | {x}.index_copy({d}, {p}, {y}) | F.one_hot({x}.argmax({d}), {size}).to({x}.dtype) * {x}.mean()
"""


def _along(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    d, shape = w.axis(x), w.shape(x)
    size = shape[d]
    text = w.random.choice(entries(ALONG))
    makers = {
        "y": lambda: w.other(shape),
        "i": lambda: w.integers((size,), size),
        "k": lambda: w.integers(shape, size),
        "p": lambda: f"{w.mask((size,))}.long().argsort(stable=True)",
    }
    used = {letter: make() if f"{{{letter}}}" in text else "" for letter, make in makers.items()}
    return Line(text.format(x=x, d=d, n=w.number(), size=size, **used))


def _by_index(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    shape = w.shape(x)
    i, last = w.integers((2,), shape[0], -shape[0]), w.integers((2,), shape[-1])
    scalar = w.integers((), shape[0])
    ways = [
        f"{x}[{i}]",
        f"{x}[..., {last}]",
        f"{x}[{scalar}]",
        f"{x}[[0, -1]]",
        f"{x}.take({last})",
        f"{x}[{i}[:, None], ...]",
    ]
    if len(shape) >= 2:
        j = w.integers((2,), shape[1])
        ways += [f"{x}[{i}, {j}]", f"{x}[{i}[:, None], {j}]", f"{x}[0, {j}]", f"{x}[:, {j}]"]
    return Line(w.random.choice(ways))


def _masked(w: Writer) -> Line:
    x = w.tensor()
    m, y = w.mask(w.shape(x)), w.broadcasting(x)
    ways = (
        f"torch.where({m}, {x}, {y})",
        f"{x}.masked_fill({m}, {w.number()})",
        f"{x}.masked_scatter({m}, {w.other(w.shape(x))})",
        f"{x}.where({m}, {y})",
        f"{x} * {m}",
        f"torch.where({x}.isnan(), {y}, {x})",
        f"{x}.masked_fill({m}, {w.other(())})",
        f"torch.where({m}, {x}, 0.0).sum()",
        f"{x}[{m}].sum()",
    )
    return Line(w.random.choice(ways))


def _embedding(w: Writer) -> Line:
    table = w.other((w.random.randint(2, 4), w.random.randint(1, 3)))
    rows = w.shape(table)[0]
    i = w.integers(w.random.choice(((), (2,), (3,), (2, 2))), rows)
    bags = w.integers((2, 2), rows)
    ways = (
        f"F.embedding({i}, {table})",
        f"F.embedding({i}, {table}, padding_idx=0)",
        f"F.embedding_bag({bags}, {table}, mode='sum')",
        f"F.embedding_bag({bags}, {table}, mode='mean')",
        f"F.embedding_bag({bags}, {table}, mode='max')",
        f"F.linear(F.embedding({i}, {table}), {table})",
        f"{table}[{i}]",
    )
    return Line(w.random.choice(ways))


INDEXING: tuple[Operator, ...] = (_along, _along, _by_index, _masked, _embedding)
