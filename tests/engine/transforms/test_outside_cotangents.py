"""The caller's autograd around vmap, with cotangents that are infinite or NaN too: which of a reduction's
places get the cotangent, and whether a zero slope meets it, goes by the formula of the operator's derivative.
It must be that of one sample's operator, not that of the kernel that computes all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import vjp, vmap

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(),
    "amax of an axis": lambda x: x.amax(-1),
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "min of an axis": lambda x: x.min(0).values,
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "kthvalue": lambda x: x.kthvalue(1, 0).values,
    "mode": lambda x: x.mode(-1).values,
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(1, -1).values,
    "cummax": lambda x: x.cummax(0).values,
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "logsumexp": lambda x: x.logsumexp(0),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "prod of an axis": lambda x: x.prod(-1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "std": lambda x: x.std(-1, correction=0),
    "quantile": lambda x: x.quantile(0.3),
    "nansum": lambda x: x.nansum(),
    "count of nonzero, and sum": lambda x: x.sum() * x.count_nonzero(),
}
VALUES = {
    "scalars": torch.tensor([0.3, -1.2], dtype=torch.float64),
    "vectors": torch.tensor([[0.3, 2.0, 2.0], [0.0, -1.0, -1.0]], dtype=torch.float64),
    "matrices": torch.tensor([[[1.0, 4.0], [4.0, 1.0]], [[0.5, -3.0], [2.0, 0.7]]], dtype=torch.float64),
    "vectors with NaN": torch.tensor([[0.3, math.nan, 2.0], [math.nan, -1.0, math.nan]], dtype=torch.float64),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_autograd_of_vmap_cotangent_not_finite(name: str, values: str) -> None:
    f = REDUCTIONS[name]
    for cotangent in (math.nan, math.inf, -math.inf, 1.5):
        found = []
        for run in (vmap(f), lambda x: torch.stack([f(one) for one in x])):
            leaf = VALUES[values].clone().requires_grad_()
            out = run(leaf)
            seed = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape)
            seed[0].reshape(-1)[0] = cotangent
            found.append((out.detach(), torch.autograd.grad(out, leaf, seed)[0]))
        torch.testing.assert_close(*found, equal_nan=True)
        ours = vmap(lambda x, seed: vjp(f, x)[1](seed))(VALUES[values], seed)[0]
        torch.testing.assert_close(ours, found[1][1], equal_nan=True)
