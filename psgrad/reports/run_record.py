"""A finished run as one JSON object, for the next program: `psgrad analyze --json`."""

from __future__ import annotations

import json
from typing import Any

from psgrad.results import AnalyzeResult, top_samples
from psgrad.results.records import check_record

SCHEMA_VERSION = 1


def run_record(result: AnalyzeResult, top: int) -> dict[str, Any]:
    """Plain values that JSON has: numbers that are not finite are null.

    schema_version, folder; samples, in_dataset and partial (whether rows were left out); nonfinite, review; top: the samples with the
    largest gradient norms with all their columns; measures: the numbers of each; self_check, engine, timings (s) as in manifest.json;
    check: the gate's verdict without its findings, which are in findings.jsonl, or null.
    """
    counts = result.manifest.get("counts") or {}
    samples = result.samples
    in_dataset = counts.get("in_dataset", len(samples))
    record = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(result.folder),
        "samples": len(samples),
        "in_dataset": in_dataset,
        "partial": len(samples) < in_dataset,
        "nonfinite": int((samples["status"] == "nonfinite").sum()),
        "review": int((samples["is_outlier_issue"] & (samples["status"] == "ok")).sum()),
        "top": json.loads(top_samples(samples, top).to_json(orient="records", double_precision=15)),
        "measures": {name: dict(measure.numbers) for name, measure in result.measures.items()},
        **{about: result.manifest.get(about) for about in ("self_check", "engine", "timings")},
        "check": None if result.check is None else check_record(result.check),
    }
    found: dict[str, Any] = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
    return found
