"""Judged tables, findings and finished runs without a model, for the tests of gates and of their formats."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.run import RunFolder
from psgrad.run.results import CheckResult, Finding, GateOutcome, Location
from psgrad.run.results.check import CheckFacts

REFERENCE: dict[str, Any] = {
    "decided_by": "reference",
    "evaluable": True,
    "why_not": None,
    "smallest_flaggable": 1,
    "fdr": 0.1,
}
"""What judging says where a reference was large enough to flag a single outlier."""

NO_REFERENCE: dict[str, Any] = {
    "decided_by": "review list",
    "evaluable": False,
    "why_not": "there is no reference",
}


def table(
    rows: int = 10,
    listed: tuple[int, ...] = (),
    nonfinite: tuple[int, ...] = (),
    zero: tuple[int, ...] = (),
    ids: list[Any] | None = None,
    prints: list[str] | None = None,
) -> pd.DataFrame:
    """A judged table: row k has the (k+1)-th smallest norm."""
    norm = np.arange(1.0, rows + 1)
    norm[list(nonfinite)], norm[list(zero)] = np.nan, 0.0
    own = ids if ids is not None else [f"s{row}" for row in range(rows)]
    status = np.full(rows, "ok", dtype=object)
    status[list(nonfinite)] = "nonfinite"
    issue = np.zeros(rows, dtype=bool)
    issue[[*listed, *nonfinite]] = True
    return pd.DataFrame(
        {
            "id": own,
            "index": np.arange(rows),
            "fingerprint": prints or [hashlib.sha256(repr(each).encode()).hexdigest()[:32] for each in own],
            "loss": norm / 10,
            "grad_norm": norm,
            "rank": pd.Series(norm).rank(ascending=False).astype("Int64"),
            "is_outlier_issue": issue,
            "reasons": np.where(issue, "first; second", ""),
            "status": status,
            "group": "all",
        }
    )


def finished(
    folder: Path, frame: pd.DataFrame, outliers: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """The folder of a finished run with this table; `changes` are of the manifest."""
    run = RunFolder.create(folder, overwrite=True)
    run.write_table("samples.parquet", frame)
    manifest: dict[str, Any] = {
        "version": 1,
        "command": "analyze",
        "state": "finished",
        "config": {"data": {"path": "data.parquet"}, "gate": {}},
        "config_folder": ".",
        "counts": {"samples": len(frame), "in_dataset": len(frame)},
        "outliers": outliers or NO_REFERENCE,
    }
    run.write_manifest({**manifest, **changes})
    return folder


def finding(rule: str = "nonfinite", **changes: Any) -> Finding:
    """A finding with these changes; its fingerprint is that of its rule and id."""
    levels = {"nonfinite": "error", "outlier": "error", "zero-gradient": "warning", "review": "note"}
    content: dict[str, Any] = {
        "id": "a",
        "index": 0,
        "message": "a message",
        "location": Location("data.csv", 3),
        "values": {"loss": 1.5},
    }
    content |= changes
    digest = hashlib.sha256(f"{rule} {content['id']!r} {content['index']}".encode()).hexdigest()[:32]
    return Finding(**{"rule": rule, "level": levels[rule], "fingerprint": digest, **content})


def verdict(*findings: Finding, outcome: str = "failed", more: int = 0, **changes: Any) -> CheckResult:
    """A verdict on these findings, by the gate nonfinite; `more` of the first one's rule are counted and not
    kept.
    """
    counts: dict[str, dict[str, int]] = {}
    for each in findings:
        states = counts.setdefault(each.rule, {"new": 0, "known": 0, "ignored": 0})
        states[each.state] += 1
    if more:
        counts[findings[0].rule]["new"] += more
    gate = GateOutcome(
        "nonfinite",
        outcome,
        "some are not finite",
        len(findings) + more,
        0,
        tuple(each.fingerprint for each in findings),
    )  # type: ignore[arg-type]
    content: dict[str, Any] = {"outcomes": (gate,), "findings": findings, "run": "out", "samples": 100}
    return CheckResult(**{**content, "facts": CheckFacts(counts), **changes})
