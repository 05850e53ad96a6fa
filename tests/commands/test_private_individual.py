"""The private table of what each record's own norms cost it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.engine.privacy.accounting import StepEvent, epsilon_rdp
from psgrad.engine.privacy.sampling import Sampling
from tests.private_workplace import PrivateWorkplace

TABLE = "private/NOT_PRIVATE_individual_epsilon.parquet"


@pytest.fixture
def private(private: PrivateWorkplace) -> PrivateWorkplace:
    # Weights that stay, so that each record's norm does.
    private.privacy["optimizer"] = {"name": "SGD", "kwargs": {"lr": 0.0}}
    private.privacy["individual_every"] = 1
    return private


def norms_of(private: PrivateWorkplace) -> np.ndarray[Any, Any]:
    """The norm of each record's gradient, by psgrad analyze."""
    config = {key: value for key, value in private.config.items() if key != "privacy"}
    (private.folder / "analyze.yaml").write_text(json.dumps({**config, "output": "norms"}))
    assert private.workplace.command("analyze", "analyze.yaml").code == 0
    found: np.ndarray[Any, Any] = pd.read_parquet(private.folder / "norms" / "samples.parquet")[
        "grad_norm"
    ].to_numpy()
    return found


def epsilon_of(share: float, steps: int, multiplier: float = 2.0) -> float:
    sampling = Sampling("poisson", sample_rate=0.5)
    if not share:
        return 0.0
    event = StepEvent(multiplier / share, sampling, "add_or_remove_one")
    return epsilon_rdp([(event, steps)], 0.01).value or 0.0


@pytest.mark.long
def test_individual_table_has_the_closed_form_of_records_whose_norm_stays(private: PrivateWorkplace) -> None:
    norms = norms_of(private)
    private.privacy["clipping"]["norm"] = bound = float(np.quantile(norms, 0.7))
    private.succeeded("--steps", "3")
    private.succeeded("--resume", "--steps", "2")
    table = pd.read_parquet(private.run_folder / TABLE)
    shares = np.minimum(norms / bound, 1.0)
    expected = [epsilon_of(math.ceil(share * 100 - 1e-9) / 100, 5) for share in shares.tolist()]
    assert table["epsilon"].tolist() == pytest.approx(expected, rel=1e-6)
    assert len(set(table["epsilon"])) > 5
    assert table["epsilon"].max() <= private.step()["epsilon_rdp"] * (1 + 1e-9)
    assert table.attrs["steps"] == 5
    assert "NOT PRIVATE" in table.attrs["warning"]
    assert table.attrs["kind"] == "by the norms of every step"


@pytest.mark.long
def test_individual_table_counts_steps_that_it_missed_with_the_bound(private: PrivateWorkplace) -> None:
    private.privacy["clipping"]["norm"] = 1e6
    private.succeeded("--steps", "3")
    (private.run_folder / "private" / "NOT_PRIVATE_individual_moments.npz").unlink()
    private.succeeded("--resume")
    table = pd.read_parquet(private.run_folder / TABLE)
    assert table["epsilon"].min() >= epsilon_of(1.0, 3) * (1 - 1e-9)
    assert table.attrs["steps"] == 4


@pytest.mark.long
def test_individual_table_of_few_norms_says_that_it_is_an_estimate(private: PrivateWorkplace) -> None:
    private.privacy["individual_every"] = 2
    private.succeeded("--steps", "3")
    assert pd.read_parquet(private.run_folder / TABLE).attrs["kind"].startswith("an estimate")


def test_individual_table_is_not_made_unless_asked_for(private: PrivateWorkplace) -> None:
    del private.privacy["individual_every"]
    private.succeeded()
    assert not (private.run_folder / TABLE).exists()
    assert b"individual" not in private.public()
