"""Counts in bins: each sample's are those that it has alone, at the edges too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import vmap

X = torch.tensor(
    [[0.0, 0.25, 0.5, 1.0, 1.5, -2.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.1, 0.2, 0.3, 0.7, 0.9, 0.25]],
    dtype=torch.float64,
)

COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "over its extent": lambda x: torch.histc(x, 4),
    "between limits": lambda x: torch.histc(x, 4, 0, 1),
    "equal limits": lambda x: torch.histc(x, 4, 1, 1),
    "histogram": lambda x: torch.cat(torch.histogram(x, 4)),
    "in a range": lambda x: torch.cat(torch.histogram(x, 4, range=(0.0, 1.0))),
    "in an empty range": lambda x: torch.cat(torch.histogram(x, 4, range=(1.0, 1.0))),
    "weighted": lambda x: torch.cat(torch.histogram(x, 3, weight=x)),
    "density": lambda x: torch.cat(torch.histogram(x, 3, density=True)),
    "edges": lambda x: torch.cat(torch.histogram(x, torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64))),
    "places": lambda x: torch.nonzero_static(x > 0.25, size=4).squeeze(1).double(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_vmap_histograms(name: str) -> None:
    torch.testing.assert_close(
        vmap(COUNTS[name])(X), torch.stack([COUNTS[name](x) for x in X]), equal_nan=True
    )
