"""Made-up results of every shape that a report must bear."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.quality.judging import rank_samples
from psgrad.run.results import AnalyzeResult, TopSample, top_samples
from psgrad.run.results.manifest import read_manifest

MANIFEST: dict[str, Any] = {
    "config": {"loss": {"name": "cross_entropy"}, "report": {"title": None}},
    "versions": {"psgrad": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
    "model": {
        "factory": "digits.py:build",
        "parameters": 18_346,
        "trainable": 18_346,
        "checkpoint": "digits.safetensors",
        "sha256": "5f" * 32,
        "notes": ["the prefix 'module.' was stripped from every name"],
        "modules_imported": ["digits"],
    },
    "data": {"source": "digits.npz", "fingerprint": "a7" * 32},
    "engine": {"device": "cpu", "dtype": "float32", "chunk_size": 256},
    "self_check": {"samples": 3, "worst_relative_error": 2.1e-7},
    "timings": {"load": 0.412, "gradients": 3.07, "report": 1.91},
}


def classification(
    n: int = 1797, classes: int = 10, flipped: float = 0.03, nonfinite: int = 3, seed: int = 0
) -> pd.DataFrame:
    """A trained classifier's samples: most fit well, `flipped` of the labels are wrong, and some rows are not
    finite.
    """
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, n)
    is_flipped = rng.random(n) < flipped
    target = np.where(is_flipped, (truth + rng.integers(1, max(classes, 2), n)) % classes, truth)
    loss = np.where(is_flipped, rng.gamma(6, 0.7, n), np.exp(rng.normal(-5, 1.8, n)))
    norm = (1 - np.exp(-loss)) * np.exp(rng.normal(1.6, 0.45, n)) + 1e-9
    bad = rng.choice(n, min(nonfinite, n), replace=False)
    loss[bad], norm[bad] = np.nan, np.inf
    return rank_samples(
        pd.DataFrame(
            {
                "id": [f"digit-{index:07d}" for index in range(n)],
                "index": np.arange(n),
                "target": target,
                "prediction": np.where(rng.random(n) < 0.99, truth, target),
                "confidence": np.exp(-np.where(is_flipped, 0.1, np.nan_to_num(loss))),
                "loss": loss,
                "grad_norm": norm,
            }
        ),
        0.01,
    )


def regression(n: int = 400, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    target = rng.normal(size=n)
    prediction = target + rng.normal(scale=0.1, size=n)
    return rank_samples(
        pd.DataFrame(
            {
                "id": np.arange(n),
                "index": np.arange(n),
                "target": target,
                "prediction": prediction,
                "loss": (target - prediction) ** 2,
                "grad_norm": 2 * np.abs(target - prediction),
            }
        ),
        0.01,
    )


def parameters(count: int = 8, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    middle = np.exp(rng.normal(-2, 1, count))
    squares = middle**2 * rng.gamma(2, 1, count)
    return pd.DataFrame(
        {
            "parameter": [
                f"blocks.{index // 2}.{'weight' if index % 2 == 0 else 'bias'}" for index in range(count)
            ],
            "module": [f"blocks.{index // 2}" for index in range(count)],
            "shape": ["[64, 32, 3, 3]" if index % 2 == 0 else "[64]" for index in range(count)],
            "numel": [18432 if index % 2 == 0 else 64 for index in range(count)],
            "mean_norm": middle * 1.2,
            "std_norm": middle * 0.8,
            "min_norm": middle * 0.001,
            "q05": middle * 0.02,
            "median": middle,
            "q95": middle * 6,
            "max_norm": middle * 20,
            "share": squares / squares.sum(),
            "computed_as": "noL,niL->noi",
        }
    )


def result(
    samples: pd.DataFrame,
    layers: int = 8,
    inputs: str | None = "image",
    class_names: list[str] | None = None,
    manifest: dict[str, Any] | None = None,
) -> AnalyzeResult:
    given = MANIFEST if manifest is None else manifest
    status, zero = samples["status"].value_counts(), samples["grad_norm"] == 0
    listed = int((samples["is_outlier_issue"] & (samples["status"] == "ok")).sum())
    counts = {
        "samples": len(samples),
        **{name: int(status.get(name, 0)) for name in ("ok", "nonfinite", "skipped")},
        "zero_gradients": int((zero & (samples["status"] == "ok")).sum()),
        **dict.fromkeys(("outliers", "review"), listed),
    }
    return AnalyzeResult(
        samples=samples,
        parameters=parameters(layers),
        manifest=read_manifest({**given, "outliers": {**given.get("outliers", {}), "counts": counts}}),
        folder=Path("runs/digits"),
        top_inputs=(
            []
            if inputs is None
            else [_input(identifier, inputs) for identifier in top_samples(samples, 20)["id"]]
        ),
        class_names=class_names,
    )


def _input(identifier: Any, kind: str) -> TopSample:
    if kind == "text":
        return TopSample(
            identifier,
            text=f"def sample_{identifier}():\n    return '<script>alert(1)</script>' & more\n" * 9,
        )
    rng = np.random.default_rng(zlib.crc32(str(identifier).encode("utf-8", "replace")))
    rows, columns = np.mgrid[0:8, 0:8]
    image = 16 * np.exp(-((rows - rng.uniform(2, 6)) ** 2 + (columns - rng.uniform(2, 6)) ** 2) / 6)
    return TopSample(identifier, image=image.astype(np.float32)[None])
