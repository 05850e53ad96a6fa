"""Models that branch on a sample's data, as a mixture of experts does: the branch that a sample takes leaves
parameters out. The same model written with torch.where is the oracle.
"""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import PRIVACY
from tests.workplace import Workplace

MODEL = """\
class Experts(nn.Module):
    def __init__(self, branches):
        super().__init__()
        torch.manual_seed(0)
        self.branches = branches
        self.first, self.one, self.other = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        h = self.first(x)
        if not self.branches:
            h = torch.where(x[..., :1] > 0, h.tanh(), h.sigmoid())
            return torch.where(x[..., 1:2] > 0, self.one(h), self.other(h))
        h = h.tanh() if bool(x[..., 0].sum() > 0) else h.sigmoid()
        return self.one(h) if bool(x[..., 1].sum() > 0) else self.other(h)


class Routed(Experts):
    # Rows are sent to one of two experts; an expert may have none.

    def forward(self, x):
        if not self.branches:
            return super().forward(x)
        h, out = self.first(x), x.new_zeros(len(x), 3)
        h = torch.where(x[:, :1] > 0, h.tanh(), h.sigmoid())
        for expert, chosen in ((self.one, x[:, 1] > 0), (self.other, x[:, 1] <= 0)):
            rows = chosen.nonzero()[:, 0]
            out = out.index_add(0, rows, expert(h[rows]))
        return out


def branching():
    return Experts(True)


def routed():
    return Routed(True)


def selecting():
    return Experts(False)
"""
MEASURES = ["layer_norms", "cosine_to_mean", "projected_gradients", "noise_scale", "hessian_trace"]
METHODS: list[Any] = [
    {"name": "influence", "curvature": "gauss_newton", "damping": 0.1},
    {"name": "influence", "curvature": "gauss_newton", "damping": 0.1, "solver": "conjugate_gradient"},
    {"name": "influence", "curvature": "fisher", "damping": 0.1, "solver": "dual"},
    {"name": "ekfac", "damping": 0.1},
    "trak",
]


def use(place: Workplace, model: str) -> None:
    place.use_model(MODEL)
    place.config["model"] = {"factory": f"model.py:{model}"}
    place.config["output"] = model


def assert_same_tables(place: Workplace, model: str, *names: str) -> None:
    for name in names:
        ours, expected = (
            pd.read_parquet(place.folder / each / f"{name}.parquet") for each in (model, "selecting")
        )
        ways = ["computed_as"] if "computed_as" in expected else []  # a branch may leave a parameter out
        pd.testing.assert_frame_equal(
            ours.drop(columns=ways), expected.drop(columns=ways), rtol=1e-4, atol=1e-6
        )


def assert_every_outcome(place: Workplace) -> None:
    """Samples disagree on both branches, so that they are split twice."""
    signs = {tuple(row) for row in (place.arrays["x"][:, :2] > 0).tolist()}
    assert signs == set(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize("model", ["branching", "routed"])
def test_analyze_model_that_branches_on_data(workplace: Workplace, model: str) -> None:
    assert_every_outcome(workplace)
    workplace.config["analyze"] = {"measures": MEASURES}
    for each in (model, "selecting"):
        use(workplace, each)
        outcome = workplace.succeeded("--no-report")
        assert "self-check: worst relative error" in outcome.out + outcome.err
    assert_same_tables(workplace, model, "samples", "parameters")


@pytest.mark.parametrize("model", ["branching", "routed"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_influence_model_that_branches_on_data(
    influence_place: InfluenceWorkplace, method: Any, model: str
) -> None:
    assert_every_outcome(influence_place)
    influence_place.section["method"] = method
    for each in (model, "selecting"):
        use(influence_place, each)
        influence_place.influence("--no-report").succeeded()
    assert_same_tables(influence_place, model, "self_influence", "scores")


def test_dp_step_model_that_sends_nothing_to_a_layer(workplace: Workplace) -> None:
    workplace.config["privacy"] = PRIVACY | {"steps": 2, "noise": {"multiplier": 1.0, "seed": 3}}
    released = []
    for model in ("routed", "selecting"):
        use(workplace, model)
        (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
        workplace.command("dp-step", "config.yaml", "--steps", "all", "--insecure-deterministic").succeeded()
        weights = workplace.folder / model / "public" / "model.safetensors"
        released.append(load_file(weights))
    torch.testing.assert_close(*released)
