"""Tables of samples and references, made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from psgrad.config.analysis import AnalyzeConfig
from psgrad.quality.references import Reference

Array = np.ndarray[Any, Any]


def samples(norms: Any, **columns: Any) -> pd.DataFrame:
    n = len(norms)
    about = {
        "id": [f"s{row}" for row in range(n)],
        "index": range(n),
        "fingerprint": [f"{row:032x}" for row in range(n)],
    }
    return pd.DataFrame({**about, "loss": np.ones(n), "grad_norm": np.asarray(norms, "float64"), **columns})


def trusted(scores: Any, labels: Any = None, kind: str = "data", **rest: Any) -> Reference:
    n = len(scores)
    groups = np.full(n, "all", dtype=object) if labels is None else np.asarray(labels, dtype=object)
    given = {"fingerprints": np.array([f"trusted {row}" for row in range(n)], dtype=object), **rest}
    return Reference(kind, "trusted.npz", np.asarray(scores, "float64"), groups, **given)


def config(review_fraction: float = 0.01, **outliers: Any) -> AnalyzeConfig:
    return AnalyzeConfig.model_validate({"review_fraction": review_fraction, "outliers": outliers})
