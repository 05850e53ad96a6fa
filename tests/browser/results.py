"""Results for the browser: a run with all that a page may have, and one with nothing but what is nasty, as
large as it may be.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample, top_samples
from psgrad.run.results.check import CheckResult, Finding, GateOutcome, Location
from psgrad.run.results.manifest import read_manifest
from tests.nasty import NASTY
from tests.reports import frames

FLAG = "window.psgradWasHere = true"
"""What an injected script would do."""

SCRIPTS = (
    f"<script>{FLAG}</script>",
    f"</script><script>{FLAG}</script>",
    f"<!--<script>{FLAG}//",
    f"<img src=x onerror='{FLAG}'>",
    f"' onmouseover='{FLAG}' x='",
    f'" autofocus onfocus="{FLAG}" tabindex="0',
    f"<svg onload='{FLAG}'></svg>",
    f"</title></style></textarea><script>{FLAG}</script>",
    f"]]><script>{FLAG}</script>",
    f"--><script>{FLAG}</script>",
    f"<a href='javascript:{FLAG}'>x</a>",
)


def measured(samples: pd.DataFrame, words: str = "margin") -> dict[str, MeasureResult]:
    """Measures of every form: columns, nested numbers, a spectrum, a matrix, checkpoints, tables. `words` are
    in all that is text.
    """
    n, rng = len(samples), np.random.default_rng(1)
    square = rng.normal(size=(12, 12))
    trajectory = {
        name: np.abs(rng.normal(size=(n, 3))).astype(np.float32)
        for name in ("loss", "grad_norm", "confidence")
    }
    found = [
        MeasureResult(
            words,
            words,
            words,
            words,
            words,
            {"margin": words},
            {"interval": {"low": 0.1, "high": None}, words: words},
        ),
        MeasureResult(
            "spectrum", "Spectrum", "C = G'G / n", "squared", arrays={"eigenvalues": np.exp(-np.arange(20.0))}
        ),
        MeasureResult("kernel", "Kernel", "K = JJ'", "squared", arrays={"gram": square @ square.T}),
        MeasureResult(
            "trajectory", "Trajectory", "", "", numbers={"checkpoints": [words, "b", "c"]}, arrays=trajectory
        ),
        MeasureResult(
            "table",
            "Table",
            "",
            "",
            tables={words: pd.DataFrame({words: [words] * 150, "x": np.arange(150.0)})},
        ),
    ]
    return {each.name: each for each in found}


def full(n: int = 900) -> AnalyzeResult:
    """A judged run with measures, a gate that failed, pictures, and only a part of the dataset."""
    rng = np.random.default_rng(0)
    samples = frames.classification(n)
    p = rng.uniform(size=n)
    samples = samples.assign(
        margin=np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
        p_value=p,
        q_value=np.minimum(1, p * 3),
        outlier_score=p,
        group="all",
    )
    finding = Finding(
        "outlier", "warning", samples["id"][0], 0, "f" * 32, "unlike the reference", Location("data.npz")
    )
    check = CheckResult(
        (GateOutcome("max_outliers", "failed", "18 outliers, at most 3", 18, 3),), (finding,), "out", n
    )
    judged = {"decided_by": "reference", "evaluable": True}
    manifest = {**frames.MANIFEST, "limit": n, "counts": {"in_dataset": 5000}, "outliers": judged}
    names = [
        f"class {name}"
        for name in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    ]
    return replace(
        frames.result(samples, class_names=names, manifest=manifest), measures=measured(samples), check=check
    )


def nasty() -> AnalyzeResult:
    """Every text nasty, with 200 classes and 500 layers."""
    texts = [*NASTY.values(), *SCRIPTS]
    samples = frames.classification(4000, classes=200)
    ids = [
        f"{texts[row % len(texts)]}{row}" if row >= len(texts) else texts[row] for row in range(len(samples))
    ]
    # Objects, as not every text is UTF-8.
    groups = pd.Series([texts[row % len(texts)] for row in range(len(samples))], dtype=object)
    samples = samples.assign(id=pd.Series(ids, dtype=object), margin=1.0, group=groups, reasons=groups)
    samples["rank"] = pd.Series(np.arange(1, len(samples) + 1), dtype="Int64").where(
        samples["status"] == "ok"
    )
    parameters = frames.parameters(500)
    parameters["parameter"] = pd.Series([texts[place % len(texts)] for place in range(500)], dtype=object)
    words = SCRIPTS[0]
    finding = Finding("outlier", "warning", words, 0, "f" * 32, words, Location(words), ignored_because=words)
    manifest = {
        "config": {"report": {"title": words}, "output": words},
        "model": {"factory": words, "notes": texts},
        "outliers": {
            "decided_by": "reference",
            "evaluable": False,
            "why_not": words,
            "caveats": texts,
            "groups": {"by": words, "each": {text: {} for text in texts}},
        },
        "limit": 0.5,
    }
    return AnalyzeResult(
        samples,
        parameters,
        read_manifest(manifest),
        Path("runs"),
        [
            TopSample(identifier, text=text)
            for identifier, text in zip(top_samples(samples, 60)["id"], texts, strict=False)
        ],
        [texts[place % len(texts)] or "x" for place in range(200)],
        measured(samples, words),
        CheckResult((GateOutcome(words, "failed", words),), (finding,) * 300, "out", 10, tuple(texts)),
    )
