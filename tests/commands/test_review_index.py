"""`psgrad review` by a stored index: its numbers against the same step computed densely, which rows are read,
and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import block_diag

import psgrad
from psgrad.commands.influence_setup import set_up_influence
from psgrad.commands.review import read_before, with_source
from psgrad.commands.review_index import index_before
from psgrad.commands.review_prediction import ChangedRows, predicted
from psgrad.config import Config
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.ranks import OneProcess
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.errors import PsgradError
from psgrad.run.run import Run
from tests.commands.test_review import CLASSES, FEATURES, ROWS, Place
from tests.engine.gradients.matrices import matrix

DAMPING = 0.05


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("review-index"))


def with_index(place: Place, **index: Any) -> dict[str, Any]:
    config = place.config(seconds=0)
    name = "-".join(map(str, index.values()))
    index = {"path": str(place.folder / f"index-{name}"), "dtype": "float64", **index}
    method = {"name": "projected_influence", "damping": DAMPING}
    config["influence"] |= {"method": method, "index": index}
    return config


def changed(place: Place) -> dict[str, np.ndarray]:
    """Rows removed, others flipped, and new ones at the end."""
    head = place.more(12)
    head["y"][10:20] = (head["y"][10:20] + 1) % CLASSES
    return {name: values[5:] for name, values in head.items()}


def as_read(rows: dict[str, np.ndarray]) -> torch.Tensor:
    """Fractions of a file are read as float32."""
    return torch.from_numpy(rows["x"]).float().double()


def rows_of(place: Place, rows: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, p] both, weight first: gradients of losses, and of margins times the root of p (1 - p)."""
    inputs, labels = as_read(rows), torch.from_numpy(rows["y"])
    extended = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    p = (inputs @ place.start["weight"].T + place.start["bias"]).softmax(1)
    slope = p - F.one_hot(labels, CLASSES)
    own = p.gather(1, labels[:, None])
    both = torch.einsum("nc,nf->ncf", slope, extended)
    loss = torch.cat([both[:, :, :-1].flatten(1), both[:, :, -1]], 1)
    return loss, loss / (1 - own) * (own * (1 - own)).sqrt()


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"projection": "none", "features": "loss"},
    "of margins": {"projection": "none", "features": "margin"},
    "sparse": {"projection": "sparse", "dimension": 9, "features": "loss"},
    "two-sided, of margins": {"projection": "two-sided", "dimension": 4, "features": "margin"},
}


@pytest.mark.parametrize("name", KINDS)
def test_prediction_by_an_index_is_the_dense_step_of_the_projected_rows(place: Place, name: str) -> None:
    config, head = with_index(place, **KINDS[name]), changed(place)
    psgrad.influence_index(config, overwrite=True)
    path = place.write("head.npz", head)
    found = psgrad.review(config, place.folder / "base.npz", path, overwrite=True, report=False)

    shapes = {"weight": torch.empty(CLASSES, FEATURES), "bias": torch.empty(CLASSES)}
    projection = Projector(
        KINDS[name]["projection"], KINDS[name].get("dimension", 2048), 0, 0, shapes
    ).projection
    p_of = torch.eye(18, dtype=torch.float64)
    if projection is not None:
        parts = [matrix(projection, each, tuple(shape.shape)) for each, shape in shapes.items()]
        p_of = torch.cat(parts, 1) if projection.per == "total" else torch.from_numpy(block_diag(*parts))
    _, roots = rows_of(place, head)
    curvature = p_of @ roots.T @ roots @ p_of.T + DAMPING * len(roots) * torch.eye(
        len(p_of), dtype=torch.float64
    )
    added = rows_of(place, {key: np.r_[head[key][5:15], head[key][-12:]] for key in ("x", "y")})[0]
    removed = rows_of(place, {key: np.r_[place.rows[key][:5], place.rows[key][10:20]] for key in "xy"})[0]
    slope = p_of @ (added.sum(0) - removed.sum(0))
    step = -p_of.T @ torch.linalg.solve(curvature, slope)
    there = {
        "weight": place.start["weight"] + step[:15].reshape(CLASSES, FEATURES),
        "bias": place.start["bias"] + step[15:],
    }
    labels = torch.from_numpy(place.queries["y"])
    before, after = (
        F.cross_entropy(as_read(place.queries) @ state["weight"].T + state["bias"], labels, reduction="none")
        for state in (place.start, there)
    )
    assert (found.counts["added"], found.counts["removed"], found.counts["changed"]) == (12, 5, 10)
    np.testing.assert_allclose(found.queries["loss"], before, rtol=1e-12)
    np.testing.assert_allclose(found.queries["predicted_change"], after - before, rtol=1e-8, atol=1e-10)
    assert found.trust.index == config["influence"]["index"]["path"]
    assert not found.trust.exact
    assert found.totals[0].low is not None


class Only:
    """A reader that refuses all rows but some."""

    def __init__(self, reader: CheckedReader, rows: np.ndarray) -> None:
        self.reader, self.samples, self.rows = reader, reader.samples, rows

    def __len__(self) -> int:
        return len(self.reader)

    def take(self, rows: Any) -> Any:
        assert np.isin(np.asarray(rows), self.rows).all(), "a row that did not change was read"
        return self.reader.take(rows)


def test_of_the_training_data_only_changed_rows_are_read_with_an_index(place: Place) -> None:
    content = with_index(place, projection="sparse", dimension=8)
    psgrad.influence_index(content, overwrite=True)
    path = place.write("head.npz", changed(place))
    config = with_source(Config.model_validate(content), path)
    run: Run[Any] = Run.open(place.folder / "only", OneProcess(), lambda _: None)
    setup = set_up_influence(config, run)
    before = read_before(setup, with_source(config, place.folder / "base.npz"))
    index = index_before(config, setup, before)
    assert index is not None
    added, removed = np.r_[5:15, ROWS - 5 : ROWS + 7], np.r_[0:5, 10:20]
    after: Any = Only(setup.common.reader, added)
    views = [replace(view, training=replace(view.training, rows=after)) for view in setup.views]
    setup = replace(setup, common=replace(setup.common, reader=after), views=views)
    old: Any = Only(before, removed)
    rows = ChangedRows(old, added, removed, index)
    every = [np.ones(len(setup.query_rows), bool)]
    found = predicted(setup, rows, {"loss": setup.common.criterion.function}, every, "loss")
    assert np.isfinite(found.changes["loss"]).all()
    assert np.abs(found.changes["loss"]).max() > 0
    with pytest.raises(AssertionError, match="did not change"):
        predicted(setup, replace(rows, index=None), {"loss": setup.common.criterion.function}, every, "loss")


def test_an_index_of_other_data_is_refused_and_a_method_that_reads_none(place: Place) -> None:
    config = with_index(place, projection="sparse", dimension=7)
    head, base = place.write("head.npz", place.flipped(2)), place.folder / "base.npz"

    def refused(words: str, base: Path = base) -> None:
        with pytest.raises(PsgradError, match=words):
            psgrad.review(config, base, head, overwrite=True, report=False)

    refused("there is no index")
    psgrad.influence_index(config, overwrite=True)
    refused("data", place.write("other.npz", place.without(3)))
    config["influence"]["method"] = "influence"
    refused("does not read an index")
