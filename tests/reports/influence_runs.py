"""Made-up results of `psgrad influence`, of every shape that a report must bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.run.results import TopSample
from psgrad.run.results.influence import ALL_INDEX, ALL_QUERIES, InfluenceResult, ranked_pairs, shown_rows
from psgrad.run.results.manifest import read_manifest
from tests.reports import frames

UNIT = "predicted rise of the query's loss, in nats, if the training example were removed"

FACTS = {
    "solver": "exact",
    "curvature": "gauss_newton",
    "damping": 0.0123,
    "residual": 3.1e-13,
    "spectrum": {"largest": 4.5},
}


def examples(count: int, prefix: str, seed: int, classes: int = 10, nonfinite: int = 0) -> pd.DataFrame:
    """Rows that are well classified, but for some."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, count)
    prediction = np.where(rng.random(count) < 0.95, target, (target + 1) % classes)
    loss = np.where(target == prediction, np.exp(rng.normal(-5, 1.8, count)), rng.gamma(6, 0.7, count))
    frame = pd.DataFrame(
        {
            "id": [f"{prefix}-{index:05d}" for index in range(count)],
            "index": np.arange(count),
            "target": target,
            "prediction": prediction,
            "confidence": np.exp(-np.where(target == prediction, np.minimum(loss, 1), 0.2)),
            "loss": loss,
            "status": "ok",
        }
    )
    frame.loc[rng.choice(count, nonfinite, replace=False), "status"] = "nonfinite"
    return frame


def strongest(scores: np.ndarray[Any, Any], k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The values and the rows, [2, k, m] each, of the strongest in scores [m, n]: positive ones, then
    negative ones; NaN is none.
    """
    values, rows = [], []
    for sign in (1, -1):
        sizes = np.where(sign * scores > 0, sign * scores, 0.0)
        order = np.argsort(-sizes, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(sizes, order, 1)
        values.append(sign * found.T)
        rows.append(np.where(found > 0, order, -1).T)
    return np.stack(values), np.stack(rows)


def result(
    n: int = 300,
    m: int = 20,
    inputs: str | None = "image",
    k: int = 10,
    nonfinite: int = 2,
    classes: int = 10,
    scores: np.ndarray[Any, Any] | None = None,
    checkpoints: int = 1,
    **changes: Any,
) -> InfluenceResult:
    """A result with scores [m, n], by default heavy-tailed, of the sign that follows from the labels."""
    rng = np.random.default_rng(0)
    training = examples(n, "digit", 1, classes, nonfinite=min(nonfinite, n))
    queries = examples(m, "test", 2, classes).rename(columns={"loss": "measurement"})
    if scores is None:
        alike = np.where(queries["target"].to_numpy()[:, None] == training["target"].to_numpy(), 1.0, -0.3)
        scores = alike * np.exp(rng.normal(-9, 2, (m, n)))
    scores = np.where((training["status"] == "ok").to_numpy(), scores, np.nan)
    gone = training["status"] != "ok"
    overall = scores.mean(axis=0)
    training["grad_norm"] = np.sqrt(training["loss"]).mask(gone)
    training["self_influence"] = (training["loss"] ** 1.1 * np.exp(rng.normal(-2, 0.4, n))).mask(gone)
    training["overall"] = overall
    ids = training["id"].to_numpy()
    pairs = [
        ranked_pairs([ALL_QUERIES], [ALL_INDEX], ids, *strongest(overall[None], k)),
        ranked_pairs(queries["id"].to_numpy(), np.arange(m), ids, *strongest(scores, k)),
    ]
    table = pd.concat(pairs, ignore_index=True)
    if checkpoints > 1:
        table = table.assign(score_std=table["score"].abs() / 7, rank_stability=0.5)
        queries = queries.assign(agreement=np.linspace(0.2, 0.6, m))
    shown, rows = shown_rows(table, queries, 6, 6)
    manifest = read_manifest(changes.pop("manifest", frames.MANIFEST))
    return InfluenceResult(
        **{
            "scores": table,
            "queries": queries,
            "training": training,
            "manifest": manifest,
            "folder": Path("runs/digits-influence"),
            "method": "influence",
            "unit": UNIT,
            "predicts_removal": True,
            "shown": {query: scores[query] for query in shown},
            "query_inputs": (
                {query: made_up(queries["id"][query], query, inputs) for query in shown} if inputs else {}
            ),
            "training_inputs": {row: made_up(ids[row], row, inputs) for row in rows} if inputs else {},
            "facts": [FACTS] * checkpoints,
            **changes,
        }
    )


def made_up(identifier: Any, seed: int, kind: str) -> TopSample:
    """An input that can be looked at: 'image', 'text', or 'large', a picture of noise."""
    rng = np.random.default_rng(seed)
    if kind == "text":
        return TopSample(
            identifier,
            text=f"def sample_{seed}(x):\n    return '<script>alert({seed})</script>' & more\n" * 9,
        )
    if kind == "large":
        return TopSample(identifier, image=rng.integers(0, 256, (3, 256, 320), dtype=np.uint8))
    rows, columns = np.mgrid[0:8, 0:8]
    image = np.exp(-((rows - rng.uniform(2, 6)) ** 2 + (columns - rng.uniform(2, 6)) ** 2) / 6)
    return TopSample(identifier, image=image.astype(np.float32)[None])
