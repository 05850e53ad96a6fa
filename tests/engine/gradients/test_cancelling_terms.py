"""Queries on gradients whose terms cancel, of any magnitude up to the limits of the type, beside the value in
extended precision.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from psgrad.engine.gradients.deferral import Placed
from psgrad.engine.gradients.terms import Dense, Image, Lookup, Product, Term
from tests.engine.gradients.test_terms import gradients_of

N, POSITIONS, ROWS, COLUMNS = 3, 4, 5, 6
SHAPE = torch.Size((ROWS, COLUMNS))
PAIRS = ("product, value", "product, product", "one product", "rows, value", "multiples, value")
LIMITS = {torch.float32: 38, torch.float64: 307}


def cancelling(pair: str, left: Tensor, right: Tensor, rest: Tensor) -> list[Term]:
    """Terms whose sum is `rest` times one of them, but for rounding."""
    product = Product(left, right)
    if pair == "product, product":
        return [product, Product(-left * (1 + rest.reshape(N, 1, 1, 1)), right)]
    if pair == "one product":
        return [
            Product(torch.cat([left, -left * (1 + rest.reshape(N, 1, 1, 1))], 2), torch.cat([right] * 2, 2))
        ]
    first: Term = product
    if pair == "rows, value":
        index = torch.arange(N * POSITIONS).reshape(N, POSITIONS) % ROWS
        first = Lookup(index, right.squeeze(1), ROWS)
    elif pair == "multiples, value":
        first = Image(
            (Placed.plain(Dense(left[:, 0, :1, :1])),),
            (right[0, 0, 0].expand(SHAPE),),
            torch.mul,
            tuple(SHAPE),
        )
    return [first, Dense(-first.materialise().reshape(N, *SHAPE) * (1 + rest.reshape(N, 1, 1)))]


def extended(x: Tensor) -> np.ndarray:
    return x.double().numpy().astype(np.longdouble)


@pytest.mark.every(1)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", range(12))
def test_queries_of_cancelling_terms_at_any_magnitude(pair: str, dtype: torch.dtype, seed: int) -> None:
    """A query is finite where its value is, and as exact as the rounding of its products allows."""
    chance = torch.Generator().manual_seed(seed)
    limit = LIMITS[dtype] - 1
    power = (
        float(torch.rand((), generator=chance)) * 2 * limit - limit if seed % 2 else limit * (seed + 4) / 16
    )
    share = float(torch.rand((), generator=chance))
    draw = lambda *shape: torch.randn(shape, generator=chance, dtype=torch.float64)
    left = (draw(N, 1, POSITIONS, ROWS) * 10 ** (power * share)).to(dtype)
    right = (draw(N, 1, POSITIONS, COLUMNS) * 10 ** (power * (1 - share))).to(dtype)
    rest = (draw(N) * (0.0, 1e-3)[seed // 2 % 2]).to(dtype)
    terms = cancelling(pair, left, right, rest)
    grads, vector, weights = gradients_of(*terms, shape=SHAPE), draw(*SHAPE), torch.tensor([0.5, 2.0, 1.0])
    parts = [extended(term.at(slice(None), torch.float64).materialise().reshape(N, -1)) for term in terms]
    value, size = sum(parts), sum(np.abs(part) for part in parts)
    size = size + extended((left.abs().double().transpose(2, 3) @ right.abs().double()).reshape(N, -1))
    v, w = extended(vector.to(dtype).flatten()), extended(weights)
    wanted = {
        "norms": (grads.square_norms(), (value**2).sum(1), (size**2).sum(1)),
        "gram": (grads.gram(), value @ value.T, size @ size.T),
        "inner": (grads.inner(grads), value @ value.T, size @ size.T),
        "dot": (grads.dot({"p": vector.to(dtype)}), value @ v, size @ np.abs(v)),
        "sum": (grads.weighted_sum(weights.to(dtype))["p"].flatten(), w @ value, w @ size),
        "moment": (grads.second_moment()["p"].flatten(), (value**2).mean(0), (size**2).mean(0)),
    }
    info = torch.finfo(dtype)
    for query, (found, exact, largest) in wanted.items():
        kind = torch.finfo(found.dtype)
        inside = np.abs(exact) < kind.max / 16
        error = np.abs(extended(found) - exact)
        allowed = 64 * info.eps * largest + math.sqrt(kind.tiny) * info.eps
        assert np.isfinite(found.numpy()[inside]).all(), (query, power, found, exact)
        assert (error[inside] <= allowed[inside]).all(), (query, power, found, exact)


def test_square_norms_of_terms_whose_own_overflow_together() -> None:
    """The norms of the terms add up to infinity, and their inner product, which takes from it, does not."""
    row = torch.full((N, 1, 1, 1), 1.2e308, dtype=torch.float64).sqrt()
    left = torch.cat([row, torch.zeros(N, 1, 1, ROWS - 1, dtype=torch.float64)], 3)
    right = torch.nn.functional.one_hot(torch.zeros(N, 1, 1, dtype=torch.int64), COLUMNS).double()
    product = Product(left, right)
    terms: list[Term] = [product, Dense(-0.72 * product.materialise().reshape(N, *SHAPE))]
    found = gradients_of(*terms, shape=SHAPE).square_norms()
    torch.testing.assert_close(found, torch.full((N,), 0.28**2, dtype=torch.float64) * 1.2e308)
