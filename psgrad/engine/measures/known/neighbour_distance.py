"""How far each sample's gradient is from those nearest to it, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.projected import COLUMN, Projected, spread
from psgrad.errors import MeasureError

# Rows whose neighbours are looked at together.
_ROWS = 4096


@dataclass
class NeighbourDistance(Measure):
    """The mean distance to the nearest samples in the space of projected gradients, Euclidean and by angle, and who they are.

    A mislabelled sample's gradient lies among those of the class that it was given, or alone: see the label share. Among more than
    `reference` samples the neighbours are looked for in a random subset of so many, by the seed of the run: time and memory then grow
    with the samples, not with their square; distances are longer than among all, for all samples alike. A sample is never its own
    neighbour. A zero gradient has no angle with others.

    Options:
        neighbours: how many; as many as there are, where there are fewer.
        reference: samples among which neighbours are looked for, at most.
        save: whether all neighbours are written to measures/neighbour_distance.safetensors, as rows of the dataset, nearest first:
            `neighbours` by Euclidean distance and `neighbours_by_angle`, [samples, neighbours], -1 where there are none.
    """

    neighbours: int = 10
    reference: int = 10_000
    save: bool = False

    name: ClassVar[str] = "neighbour_distance"
    title: ClassVar[str] = "Distance to the nearest gradients"
    formula: ClassVar[str] = "mean over the k nearest j of |P g_i - P g_j|_2, or of 1 - cos(P g_i, P g_j)"
    unit: ClassVar[str] = "loss per unit of parameter; by angle 0 to 2"
    source: ClassVar[str] = "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided by k"
    cost: ClassVar[str] = "2 x samples x min(samples, reference) x dimension products, after the pass; memory for `reference` rows beside"
    meanings: ClassVar[Mapping[str, str]] = {
        "neighbour_distance": "mean Euclidean distance to the nearest projected gradients (loss per unit of parameter)",
        "neighbour_angle_distance": "mean of 1 - cosine to the projected gradients that point most alike (0 to 2)",
        "neighbour_label_share": "share of the neighbours by angle that have another label (0 to 1); where labels are classes",
        "nearest_neighbour": "row of the sample whose projected gradient is nearest by Euclidean distance (-1: none)",
        "nearest_by_angle": "row of the sample whose projected gradient points most alike (-1: none)",
    }
    needs: ClassVar[tuple[str, ...]] = (COLUMN,)

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"got {self.neighbours} neighbours, expected at least 1")
        if self.reference < 2:
            raise ValueError(f"got {self.reference} as reference, expected at least 2 samples to look among")

    def prepare(self, setting: Setting) -> None:
        self._setting = setting
        try:
            import sklearn  # noqa: F401
        except ImportError as error:
            raise MeasureError(
                f"{self.name} needs scikit-learn, which is not installed", next_step="pip install scikit-learn, or leave the measure out"
            ) from error

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        setting = self._setting
        found = Projected.of(rows, setting.examples.flat.size)
        directed = torch.nonzero((found.rows != 0).any(1)).squeeze(1)
        places = found.places[directed]
        if len(found.places) > self.reference:
            setting.say(
                f"{self.name}: neighbours are looked for among {self.reference:,} of {len(found.places):,} samples, drawn at random"
            )
        distances, near = _nearest(found.rows, "euclidean", self.neighbours, self.reference, setting.seed)
        angles, alike = _nearest(_unit(found.rows[directed]), "cosine", self.neighbours, self.reference, setting.seed)
        by_distance = spread(torch.where(near >= 0, found.places[near], -1), found.places, len(setting))
        by_angle = spread(torch.where(alike >= 0, places[alike], -1), places, len(setting))
        columns = {
            "neighbour_distance": spread(distances, found.places, len(setting)),
            "neighbour_angle_distance": spread(angles, places, len(setting)),
            "nearest_neighbour": by_distance[:, 0],
            "nearest_by_angle": by_angle[:, 0],
        }
        labels = setting.targets
        if labels is not None and labels.dim() == 1:
            other = (labels[by_angle] != labels.unsqueeze(1)).double().mean(1)
            columns["neighbour_label_share"] = other.where(by_angle[:, 0] >= 0, torch.nan)
        numbers: dict[str, Any] = {
            "neighbours": int((near[:1] >= 0).sum()),
            "samples": len(found.places),
            "among": min(len(found.places), self.reference),
            "median_distance": _median(distances),
            "median_angle_distance": _median(angles),
            "distance_error": found.noise / 2**0.5,
        }
        arrays = {"neighbours": by_distance, "neighbours_by_angle": by_angle} if self.save else {}
        return Gathered(columns, numbers, arrays=arrays)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Rows of length one; first by their largest entry, as squares may vanish."""
    rows = rows / rows.abs().amax(1, keepdim=True)
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def _nearest(rows: torch.Tensor, metric: str, count: int, most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean distance to the nearest rows [m] float64, which rows they are [m, count] int64, nearest first, -1 where there are none).

    Neighbours are looked for among `most` rows, drawn by the seed, where there are more. Distances are taken again from differences, as
    those by inner products lose the digits of rows that nearly agree.
    """
    from sklearn.neighbors import NearestNeighbors

    m, values = len(rows), rows.numpy()
    chosen = np.arange(m) if m <= most else np.sort(np.random.default_rng(seed).choice(m, most, replace=False))
    means = torch.full((m,), torch.nan, dtype=torch.float64)
    near = torch.full((m, count), -1, dtype=torch.int64)
    if m < 2:
        return means, near
    # of unit vectors the nearest by Euclidean distance are those by angle
    search = NearestNeighbors(algorithm="brute", metric="euclidean").fit(values[chosen])
    own = search.kneighbors(n_neighbors=min(count, len(chosen) - 1), return_distance=False)  # no row is its own neighbour
    others = np.setdiff1d(np.arange(m), chosen)
    for start in range(0, len(chosen), _ROWS):
        _note(rows, metric, chosen[start : start + _ROWS], chosen[own[start : start + _ROWS]], means, near)
    for start in range(0, len(others), _ROWS):
        some = others[start : start + _ROWS]
        found = search.kneighbors(values[some], n_neighbors=min(count, len(chosen)), return_distance=False)
        _note(rows, metric, some, chosen[found], means, near)
    return means, near


def _note(rows: torch.Tensor, metric: str, some: Any, found: Any, means: torch.Tensor, near: torch.Tensor) -> None:
    """Write the neighbours [s, k] of some rows [s], and their mean distances."""
    places, neighbours = torch.from_numpy(some), torch.from_numpy(found)
    each = [torch.linalg.vector_norm(rows[neighbours[:, k]].double() - rows[places].double(), dim=1) for k in range(neighbours.shape[1])]
    distances, order = torch.stack(each, 1).sort(dim=1, stable=True)
    near[places, : neighbours.shape[1]] = neighbours.gather(1, order)
    means[places] = (distances.square() / 2 if metric == "cosine" else distances).mean(1)


def _median(values: torch.Tensor) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if len(finite) else None
