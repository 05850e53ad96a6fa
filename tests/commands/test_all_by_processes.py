"""All configs of the examples, every measure and every influence method by two, three and four processes of
gloo, against one process: the same columns, the same order, the same verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from psgrad.plugins import MEASURES, METHODS, own_classes
from tests.commands.same_runs import assert_same_runs
from tests.forked_ranks import EndedRank, run_ranks
from tests.influence_workplace import InfluenceWorkplace
from tests.workplace import FEATURES, ROWS, Workplace

CONFIGS = Path(__file__).parents[2] / "configs"
COUNTS = [2, *(pytest.param(count, marks=pytest.mark.sweep) for count in (3, 4))]
SWEPT = pytest.mark.sweep

CHECKPOINTS = ["first.safetensors", "second.safetensors", "third.safetensors"]
OF_CHECKPOINTS = ["trajectory", "grand", "el2n_over_checkpoints", "forgetting", "vog", "moments"]
OF_TOKENS = ["token_loss"]
TWICE = ["cosine_to_mean", "cosine_to_class_mean"]
OF_A_MODEL = sorted({*own_classes(MEASURES)} - {*OF_CHECKPOINTS, *OF_TOKENS})
TOKENS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, x):
        return self.out(self.embedding(x).tanh())
"""


def run_both(place: Workplace, count: int, *words: str) -> list[EndedRank]:
    """The command by one process into `one`, and by several into `several`; both end alike."""
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    alone = place.command(*words, "--output", str(place.folder / "one"))
    ended = run_ranks(place.folder, count, *words, "--output", str(place.folder / "several"))
    assert [rank.code for rank in ended] == [alone.code, *[0] * (count - 1)], (alone.err, ended)
    assert [rank.out for rank in ended[1:]] == [""] * (count - 1)  # one process alone speaks
    return ended


def with_checkpoints(place: Workplace) -> None:
    for seed, name in enumerate(CHECKPOINTS):
        torch.manual_seed(10 + seed)
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3))
        save_file(model.state_dict(), place.folder / name)
    place.config["analyze"] = {"checkpoints": CHECKPOINTS, "measures": OF_CHECKPOINTS}


def with_tokens(place: Workplace) -> None:
    source = np.random.default_rng(2)
    place.use_model(TOKENS)
    place.save(x=source.integers(0, 7, (ROWS, 6)), y=source.integers(0, 7, (ROWS, 6)))
    place.config["loss"] = "token_cross_entropy"
    place.config["analyze"] = {"measures": OF_TOKENS}


def of_a_model(place: Workplace) -> None:
    """With options by which they are quick, or work over chunks."""
    options: dict[str, Any] = {
        "hessian_top_eigenvalue": {"iterations": 3},
        "hessian_trace": {"probes": 3},
        "integrated_gradients": {"steps": 3},
    }
    measures = [{"name": name, **options.get(name, {})} for name in OF_A_MODEL]
    place.config["analyze"] = {"measures": measures}


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prepare", [of_a_model, with_checkpoints, with_tokens])
@pytest.mark.parametrize("count", COUNTS)
def test_every_measure_by_processes(workplace: Workplace, count: int, prepare: Any) -> None:
    workplace.config["engine"] = {"chunk_size": 4}
    prepare(workplace)
    run_both(workplace, count, "analyze", "config.yaml", "--no-report")
    assert_same_runs(workplace.folder / "one", workplace.folder / "several")


@SWEPT
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_columns_of_a_second_pass_in_float64_by_processes(workplace: Workplace, count: int) -> None:
    """They are compared with sums over all samples, which are added in another order."""
    workplace.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    workplace.config["analyze"] = {"measures": TWICE}
    run_both(workplace, count, "analyze", "config.yaml", "--no-report")
    assert_same_runs(workplace.folder / "one", workplace.folder / "several", rounded=TWICE)


@SWEPT
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_config_of_influence_by_processes(workplace: Workplace, count: int) -> None:
    run_both(workplace, count, "influence", str(CONFIGS / "digits-influence.yaml"), "--no-report")
    assert_same_scores(workplace.folder, 1e-4)


# -- influence -----------------------------------------------------------------------------------------------

EXACT = {"conjugate_gradient": {"tolerance": 1e-12}}
INFLUENCE: dict[str, dict[str, Any]] = {
    "ekfac": {"name": "ekfac", "damping": 0.1},
    **{
        solver: {"name": "influence", "solver": solver, "damping": 0.5, **EXACT.get(solver, {})}
        for solver in ("exact", "dual", "conjugate_gradient")
    },
    "sampled": {"name": "influence", "curvature": "sampled", "damping": 0.5},
    **{name: {"name": name} for name in ("gradient_dot", "gradient_cosine", "tracin")},
    **{name: {"name": name, "dimension": 8} for name in ("projected_influence", "trak")},
}


def test_every_measure_and_method_is_tried() -> None:
    assert {method["name"] for method in INFLUENCE.values()} == {*own_classes(METHODS)}
    assert {*OF_A_MODEL, *OF_CHECKPOINTS, *OF_TOKENS} == {*own_classes(MEASURES)}


def assert_same_scores(folder: Path, bound: float) -> None:
    """In the same order, but for the rounding of sums over rows."""
    for name in ("scores", "self_influence", "queries"):
        wanted, found = (pd.read_parquet(folder / each / f"{name}.parquet") for each in ("one", "several"))
        pd.testing.assert_frame_equal(found, wanted, rtol=bound, atol=bound / 1000)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[SWEPT] * (name != "ekfac")) for name in INFLUENCE]
)
def test_every_method_by_processes(place: InfluenceWorkplace, method: str, count: int) -> None:
    place.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    place.config["influence"] |= {"method": INFLUENCE[method]}
    if method == "tracin":  # which is about a run
        place.save_checkpoint("later.safetensors", seed=3)
        paths = ("model.safetensors", "later.safetensors")
        place.config["influence"]["checkpoints"] = [{"path": path, "learning_rate": 0.1} for path in paths]
    run_both(place, count, "influence", "config.yaml", "--no-report")
    assert_same_scores(place.folder, 1e-6)
