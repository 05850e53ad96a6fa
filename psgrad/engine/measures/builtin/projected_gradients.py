"""The random projection of each sample's gradient to few numbers, and its distance to the nearest others.

Other measures use projected gradients, too: the rows of finite samples and the error of their inner products;
and a random choice of samples, for measures whose cost grows faster than the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting
from psgrad.errors import MeasureError

COLUMN = "projected_gradients"

# The share of the memory that is free before a run for rows that are kept to its end.
_SHARE = 0.5
# A pass holds its rows in pieces, and then once more as a whole.
_COPIES = 2


@dataclass
class GradientProjection(Measure):
    """A row of few numbers for each sample, for other measures and for the detectors of outliers.

    Options:
        dimension: columns of the projection; 1 / sqrt(dimension) is the error of a cosine. If a gradient has
            no more numbers than that, nothing is projected.
        kind: 'sparse' (a few instructions for each number), or 'none', all numbers of all parameters.
        save: whether the rows are written to measures/projected_gradients.safetensors, [samples, dimension].
    """

    dimension: int = 256
    kind: Literal["sparse", "none"] = "sparse"
    save: bool = False

    name: ClassVar[str] = COLUMN
    title: ClassVar[str] = "Projected gradients"
    formula: ClassVar[str] = "P g_i, with E[<P g_i, P g_j>] = <g_i, g_j>"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = (
        "Charikar, Chen, Farach-Colton: Finding frequent items in data streams (2002); Kane, Nelson: Sparser"
        " Johnson-Lindenstrauss transforms (2014), section 3"
    )
    cost: ClassVar[str] = (
        "one pass over the numbers of each gradient; 4 bytes x samples x dimension of memory"
    )
    needs_factors = True

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"got {self.dimension} as dimension, expected at least 1 column")

    def prepare(self, setting: Setting) -> None:
        params = setting.examples.params
        self._projector = Projector(self.kind, self.dimension, setting.seed, 0, params)
        self._parameters = setting.examples.flat.size
        number = max((parameter.dtype for parameter in params.values()), key=lambda dtype: dtype.itemsize)
        each = self._projector.width * max(number.itemsize, 4)
        needed, free = _COPIES * each * len(setting), free_host_memory()
        if needed > _SHARE * free:
            fitting = int(self._projector.width * _SHARE * free / needed)
            raise MeasureError(
                f"{self.name}: {len(setting):,} rows of {self._projector.width:,} numbers take"
                f" {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB of memory are free; expected at"
                f" most half of the free memory: up to {fitting:,} columns",
                hint=(
                    f"set dimension: {max(1, fitting)} or less of {self.name}"
                    if fitting
                    else "look at fewer samples (--limit), or use a machine with more memory"
                ),
            )

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        return {COLUMN: self._projector(gradients)}

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        projected = FiniteProjections.of(rows, self._parameters)
        norms = rows["grad_norm"][projected.places]
        counted = norms > 0
        squares = torch.linalg.vector_norm(projected.rows, dim=1, dtype=torch.float64)[counted].square()
        off = squares / norms[counted].square() - 1
        numbers = {
            "dimension": projected.rows.shape[1],
            "kind": "none" if projected.exact else self.kind,
            "parameters": self._parameters,
            "square_norm_error": float(off.square().mean().sqrt()) if len(off) else None,
            "expected_square_norm_error": 2**0.5 * projected.noise,
        }
        return Gathered(numbers=numbers, arrays={COLUMN: rows[COLUMN]} if self.save else {})


# Rows whose neighbours are searched together.
_ROWS = 4096


@dataclass
class NeighbourDistance(Measure):
    """The mean distance to the nearest samples in the space of projected gradients, Euclidean and by
    angle, and the nearest sample.

    Of more than `reference` samples, neighbours are searched in a random subset of that size, and
    distances are longer, for all samples alike. A sample is never its own neighbour. A zero gradient
    has no angle with others. `distance_error` is the relative error of a distance, at one standard
    deviation.

    Options:
        neighbours: how many; all, if there are fewer.
        reference: the largest number of samples among which neighbours are searched.
        save: whether all neighbours are written to measures/neighbour_distance.safetensors, as rows of the
            dataset, nearest first: `neighbours` by Euclidean distance and `neighbours_by_angle`, [samples,
            neighbours], -1 if there are none.
    """

    neighbours: int = 10
    reference: int = 5_000
    save: bool = False

    name: ClassVar[str] = "neighbour_distance"
    title: ClassVar[str] = "Distance to the nearest gradients"
    formula: ClassVar[str] = "mean over the k nearest j of |P g_i - P g_j|_2, or of 1 - cos(P g_i, P g_j)"
    unit: ClassVar[str] = "{loss} per unit of parameter; by angle 0 to 2"
    source: ClassVar[str] = (
        "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided"
        " by k"
    )
    cost: ClassVar[str] = (
        "2 x samples x min(samples, reference) x dimension products, after the pass; and memory for"
        " `reference` rows"
    )
    meanings: ClassVar[Mapping[str, str]] = {
        "neighbour_distance": (
            "mean Euclidean distance to the nearest projected gradients ({loss} per unit of parameter)"
        ),
        "neighbour_angle_distance": (
            "mean of 1 - cosine to the projected gradients with the smallest angle (0 to 2)"
        ),
        "neighbour_label_share": (
            "share of the neighbours by angle that have another label (0 to 1); if labels are classes"
        ),
        "nearest_neighbour": (
            "row of the sample whose projected gradient is nearest by Euclidean distance (-1: none)"
        ),
        "nearest_by_angle": "row of the sample whose projected gradient has the smallest angle (-1: none)",
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
                f"{self.name} needs scikit-learn, which is not installed",
                hint="pip install scikit-learn, or leave the measure out",
            ) from error

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        setting = self._setting
        projected = FiniteProjections.of(rows, setting.examples.flat.size)
        directed = projected.rows.any(1)
        places = projected.places[directed]
        if len(projected.places) > self.reference:
            setting.say(
                f"{self.name}: neighbours are looked for among {self.reference:,} of"
                f" {len(projected.places):,} samples, drawn at random"
            )
        options = self.neighbours, self.reference, setting.seed
        distant = _NearestRows(projected.rows, False, *options)
        turned = _NearestRows(
            projected.rows if len(places) == len(projected.places) else projected.rows[directed],
            True,
            *options,
        )
        near, alike = distant.near, turned.near
        by_distance = spread(
            torch.where(near >= 0, projected.places[near], -1), projected.places, len(setting)
        )
        by_angle = spread(torch.where(alike >= 0, places[alike], -1), places, len(setting))
        columns = {
            "neighbour_distance": spread(distant.means, projected.places, len(setting)),
            "neighbour_angle_distance": spread(turned.means, places, len(setting)),
            "nearest_neighbour": by_distance[:, 0],
            "nearest_by_angle": by_angle[:, 0],
        }
        labels = setting.targets
        if labels is not None and labels.dim() == 1:
            labelled = by_angle >= 0
            other = labelled & (labels[by_angle] != labels.unsqueeze(1))
            # nothing by nothing is NaN
            columns["neighbour_label_share"] = other.sum(1) / labelled.sum(1).double()
        numbers: dict[str, Any] = {
            "neighbours": int((near[:1] >= 0).sum()),
            "samples": len(projected.places),
            "among": min(len(projected.places), self.reference),
            "median_distance": _median(distant.means),
            "median_angle_distance": _median(turned.means),
            "distance_error": projected.noise / 2**0.5,
        }
        arrays = {"neighbours": by_distance, "neighbours_by_angle": by_angle} if self.save else {}
        return Gathered(columns, numbers, arrays=arrays)


class _NearestRows:
    """The nearest of some rows [m, k], by Euclidean distance or by angle, for all of them.

    With more than `most` rows, the neighbours are searched among `most` of them, drawn by the seed. No tensor
    of m x m numbers is made.

    Attributes:
        means: [m] float64, mean distance to the nearest.
        near: [m, count] int64, which rows they are, nearest first, -1 for none.
    """

    def __init__(self, rows: torch.Tensor, by_angle: bool, count: int, most: int, seed: int) -> None:
        from sklearn.neighbors import NearestNeighbors

        self.rows, self.by_angle = rows, by_angle
        m = len(rows)
        self.means = torch.full((m,), torch.nan, dtype=torch.float64)
        self.near = torch.full((m, count), -1, dtype=torch.int64)
        if m < 2:
            return
        chosen = (
            np.arange(m) if m <= most else np.sort(np.random.default_rng(seed).choice(m, most, replace=False))
        )
        search = NearestNeighbors(algorithm="brute").fit(self._at(torch.from_numpy(chosen)).numpy())
        own = search.kneighbors(
            n_neighbors=min(count, len(chosen) - 1), return_distance=False
        )  # no row is its own neighbour
        for start in range(0, len(chosen), _ROWS):
            self._note(
                torch.from_numpy(chosen[start : start + _ROWS]),
                torch.from_numpy(chosen[own[start : start + _ROWS]]),
            )
        others = np.setdiff1d(np.arange(m), chosen)
        for start in range(0, len(others), _ROWS):
            some = torch.from_numpy(others[start : start + _ROWS])
            neighbours = search.kneighbors(
                self._at(some).numpy(), n_neighbors=min(count, len(chosen)), return_distance=False
            )
            self._note(some, torch.from_numpy(chosen[neighbours]))

    def _at(self, places: torch.Tensor) -> torch.Tensor:
        """Some rows; by angle of length one, as of unit vectors the nearest are those of the smallest
        angle.
        """
        rows = self.rows[places]
        if not self.by_angle:
            return rows
        rows = rows / rows.abs().amax(1, keepdim=True)  # first by the largest entry: squares may vanish
        return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)

    def _note(self, places: torch.Tensor, nearest: torch.Tensor) -> None:
        """Store the neighbours [s, count] of some rows [s].

        Distances are computed again, from differences: those by inner products lose the digits of rows that
        nearly agree.
        """
        rows = self._at(places).double()
        each = [
            torch.linalg.vector_norm(self._at(nearest[:, k]).double() - rows, dim=1)
            for k in range(nearest.shape[1])
        ]
        distances, order = torch.stack(each, 1).sort(dim=1, stable=True)
        self.near[places, : nearest.shape[1]] = nearest.gather(1, order)
        self.means[places] = (distances.square() / 2 if self.by_angle else distances).mean(1)


def _median(values: torch.Tensor) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if len(finite) else None


@dataclass(frozen=True)
class FiniteProjections:
    """The projected gradients of the samples that are finite.

    Attributes:
        rows: [m, k].
        places: [m] int64, which samples they are.
        exact: whether nothing was projected: a row is the whole gradient.
    """

    rows: torch.Tensor
    places: torch.Tensor
    exact: bool

    @classmethod
    def of(cls, rows: Mapping[str, torch.Tensor], parameters: int) -> FiniteProjections:
        """The finite ones of `rows`, name -> [n, ...], which are those of Measure.gather. parameters: p,
        numbers in a gradient.
        """
        column = rows[COLUMN]
        places = torch.nonzero(rows["ok"] & torch.isfinite(column).all(1)).squeeze(1)
        return cls(
            column if len(places) == len(column) else column[places], places, column.shape[1] == parameters
        )

    @property
    def noise(self) -> float:
        """The standard deviation of <Px, Py> / (|x| |y|) for orthogonal x and y; that of |Px|^2 / |x|^2 is
        sqrt(2) times it.
        """
        return 0.0 if self.exact else 1 / math.sqrt(self.rows.shape[1])


def spread(values: torch.Tensor, places: torch.Tensor, samples: int) -> torch.Tensor:
    """[n, ...]: values [m, ...] at these places [m] of n samples; elsewhere NaN, or -1 among whole
    numbers.
    """
    whole = values.new_full((samples, *values.shape[1:]), math.nan if values.is_floating_point() else -1)
    whole[places] = values
    return whole


def chosen_rows(
    usable: torch.Tensor, count: int, seed: int, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows, ascending int64: at most `count` of those that are usable [n] bool, drawn by the seed.

    With labels [n] equally many of each class; if a class has fewer, the others share its places.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nonzero(usable).squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    if labels is not None and len(rows) > count:
        # each class's first, then each one's second, and so on: the classes have equal numbers as long as
        # they last
        of_class = torch.unique(labels[rows], return_inverse=True)[1]
        order = of_class.argsort(stable=True)
        sizes = torch.bincount(of_class)
        turn = torch.empty_like(order)
        turn[order] = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[of_class[order]]
        rows = rows[turn.argsort(stable=True)]
    return rows[:count].sort().values
