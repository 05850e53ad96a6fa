"""Rows of an index as factors of low rank: exact where gradients have no more, and nearest otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.index.row_products import RowForm, low_rank
from psgrad.engine.influence.index.stored_index import IndexSpec
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence
from psgrad.errors import ConfigError
from tests.engine.influence.problems import cross_entropy, examples
from tests.engine.influence.rows_of_gradients import matrix_of
from tests.engine.influence.test_index import both, built, by_index, network


def kept(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("gradients-*.safetensors"))


@pytest.mark.parametrize(
    "method", [GradientDot(), GradientCosine(), ProjectedInfluence(), TRAK()], ids=lambda m: m.name
)
def test_factors_of_one_position_are_exact(tmp_path: Path, method: Any) -> None:
    # the gradient of a linear layer that is used once is a vector for the outputs times one for the inputs
    training, queries = both(network())
    options: dict[str, Any] = {"projection": "none", "dtype": "float64", "features": "margin"}
    whole = built(tmp_path / "whole", IndexSpec(**options), training)
    factored = built(tmp_path / "factored", IndexSpec(**options, rank=1), training)
    expected = by_index(method, whole, queries)
    torch.testing.assert_close(by_index(method, factored, queries), expected, rtol=1e-9, atol=1e-11)
    # 6 x 7 and 7 x 3 numbers by 6 + 7 and 7 + 3, beside the biases
    assert factored.description["columns"] == 6 + 7 + 7 + 3 + 7 + 3
    assert kept(tmp_path / "factored") < kept(tmp_path / "whole") - 13 * 8 * (42 + 21 - 23) + 64


class Positions(nn.Module):
    """A layer that is used at each of 5 positions: its gradients have ranks up to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_factors_of_positions(tmp_path: Path, dtype: Any) -> None:
    torch.manual_seed(0)
    model = Positions().double()
    x, y = torch.randn(12, 5, 6, dtype=torch.float64), torch.arange(12) % 3
    training, queries = (examples(model, cross_entropy, *some) for some in ((x[:9], y[:9]), (x[9:], y[9:])))
    exact = matrix_of(GradientDot().fit(training, Checkpoint()), queries)[""]
    errors = []
    for rank in (1, 2, 3):
        store = built(tmp_path / str(rank), IndexSpec(projection="none", dtype=dtype, rank=rank), training)
        errors.append(float((by_index(GradientDot(), store, queries) - exact).norm() / exact.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.03


def test_factors_of_a_two_sided_projection(tmp_path: Path) -> None:
    training, queries = both(network())
    spec: dict[str, Any] = {"projection": "two-sided", "dimension": 9, "dtype": "float64"}
    expected = by_index(GradientDot(), built(tmp_path / "whole", IndexSpec(**spec), training), queries)
    store = built(tmp_path / "factored", IndexSpec(**spec, rank=1), training)
    torch.testing.assert_close(by_index(GradientDot(), store, queries), expected, rtol=1e-9, atol=1e-11)
    # weights by factors; the biases' 7 and 3 entries have columns of their own, and the others are zero
    assert store.description["columns"] == 2 * (3 + 3) + 7 + 3


@pytest.mark.parametrize(("height", "width"), [(9, 7), (3, 20), (20, 3), (1, 5)])
@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_is_nearest(height: int, width: int, rank: int) -> None:
    torch.manual_seed(0)
    sizes = 0.5 ** torch.arange(min(height, width), dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(4, n, len(sizes), dtype=torch.float64))[0] for n in (height, width))
    matrices = u * sizes @ v.mT
    matrices[3] = 0
    left, right = low_rank(matrices, rank)
    error = torch.linalg.matrix_norm(left.mT @ right - matrices)
    nearest = sizes[rank:].norm()  # Eckart and Young
    torch.testing.assert_close(error[:3], nearest.expand(3), rtol=1e-3, atol=1e-12)
    assert error[3] == 0
    assert left.norm(dim=2).allclose(right.norm(dim=2))


def test_factors_have_a_scale_for_each_vector() -> None:
    params = {"weight": torch.empty(9, 7), "small": torch.empty(2, 2), "bias": torch.empty(5)}
    form = RowForm(Projector("none", 1, 0, 0, params), 2)
    assert [span.stop - span.start for span in form.spans] == [9, 9, 7, 7, 4, 5]
    assert form.width == 41


def test_factors_of_shared_columns_refused() -> None:
    params = {"weight": torch.empty(8, 9)}
    with pytest.raises(ConfigError, match="an index with rank: 2 and projection: sparse") as refusal:
        RowForm(Projector("sparse", 5, 0, 0, params), 2)
    assert "projection: two-sided or none" in str(refusal.value)
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match="an index with rank"):
            IndexSpec(rank=wrong)  # type: ignore[arg-type]
