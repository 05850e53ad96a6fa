"""Outliers by an isolation forest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from psgrad.quality.detector import Detector, FloatArray


@dataclass(frozen=True)
class IsolationForest(Detector):
    """How few random cuts along single columns set a row apart from the others: scikit-learn's
    `IsolationForest.score_samples`, with the sign turned.

    On gradients this is Outlier Gradient Analysis: a row is strange for where it points as well as for how
    long it is.

    Options:
        trees: how many; scores of few vary with the seed.
        samples_per_tree: rows that each tree is grown on, fewer where there are fewer.
    """

    trees: int = 200
    samples_per_tree: int = 256

    name: ClassVar[str] = "isolation_forest"
    title: ClassVar[str] = "Isolation forest"
    unit: ClassVar[str] = "0 to 1; 0.5 where a row is set apart as late as the average one"
    source: ClassVar[str] = (
        "Liu, Ting, Zhou: Isolation Forest (2008), equation 2; on gradients Chhabra et al.: Outlier Gradient"
        " Analysis (2024), section 4"
    )

    def __post_init__(self) -> None:
        if self.trees < 1:
            raise ValueError(f"got {self.trees} trees, expected at least 1")
        if self.samples_per_tree < 2:
            raise ValueError(
                f"got {self.samples_per_tree} samples_per_tree, expected at least 2: one row is never set"
                " apart from others"
            )

    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        from sklearn.ensemble import IsolationForest as Forest

        # trees take float32, and cuts are the same at any scale; a power of two costs no digits
        usual = rows if reference is None else reference
        exponent = np.frexp(max(np.abs(rows).max(), np.abs(usual).max()))[1]
        rows, usual = np.ldexp(rows, -exponent), np.ldexp(usual, -exponent)
        forest = Forest(
            n_estimators=self.trees, max_samples=min(self.samples_per_tree, len(usual)), random_state=seed
        )
        return np.asarray(-forest.fit(usual).score_samples(rows), dtype=np.float64)
