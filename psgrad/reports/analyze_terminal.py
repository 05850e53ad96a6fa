"""The end of an analyze run on a terminal, and as one JSON object for the next program
(`psgrad analyze --json`).
"""

from __future__ import annotations

import json
from typing import Any

from psgrad.reports.analyze_tables import column_of, nonfinite_ids
from psgrad.reports.labels import label_warning, label_words
from psgrad.reports.tables import Table, table
from psgrad.reports.words import count, identifier, number, printable
from psgrad.run.results import AnalyzeResult, top_samples
from psgrad.run.results.check import check_content

SCHEMA_VERSION = 1
MAX_NAMED = 20


def top_table(result: AnalyzeResult, n: int) -> Table:
    """The first n ranks. Columns without a value are left out: labels where there are none, q-values where
    there was no reference.
    """
    samples, score = result.samples, str(result.manifest.judged.score)
    present = {name for name in ("target", "prediction", "q_value") if name in samples}
    names = ["rank", "id", *(each for each in ("target", "prediction") if each in present)]
    if "group" in samples and samples["group"].nunique() > 1:
        names.append("group")
    names += ["loss", "grad_norm"]
    if score not in ("loss", "grad_norm", "log_norm") and score in samples:
        names.append(score)
    names += ["percentile", *({"q_value"} & present)]
    columns = [
        column_of(name, result) for name in names if name not in present or samples[name].notna().any()
    ]
    return table("top", "The first ranks", columns, top_samples(samples, n).to_dict("records"))


def summary(result: AnalyzeResult) -> str:
    """What was done and found, in a few lines."""
    samples, manifest = result.samples, result.manifest
    judged, check = manifest.judged, manifest.self_check
    found = (
        f"{judged.listed:,} unlike the reference at a false discovery rate of {number(judged.fdr)}"
        if judged.referenced
        else f"{judged.listed:,} in the review list (a list to look at, not a verdict)"
    )
    nonfinite = f"{judged.counts.nonfinite:,} with a loss or gradient that is not finite"
    lines = [f"{count(len(samples))}, {found}, {nonfinite}"]
    if manifest.labels is not None:
        agreement = label_words(manifest.labels, result.class_names)
        lines += [f"labels: {agreement}"] if agreement else []
        warning = label_warning(manifest.labels, result.class_names)
        lines += [f"warning: {warning}"] if warning else []
    if skipped := judged.counts.skipped:
        lines.append(f"{count(skipped)} without a rank (status: skipped); the column reasons says why")
    if judged.referenced:
        undecided, limit = f"not evaluable: {judged.why_not}", f"resolution limit: {judged.resolution}"
        lines.append(printable(limit if judged.evaluable else undecided))
    if judged.loss_agreement.words:
        lines.append(printable(judged.loss_agreement.words))
    if check.samples:
        lines.append(
            f"self-check: worst relative error {number(check.worst_relative_error)} "
            f"over {check.samples} samples, against a plain one-sample gradient"
        )
        if check.worst_error_of_autocast is not None:
            apart = number(check.worst_error_of_autocast)
            of_norms = number(check.worst_norm_error_of_autocast)
            lines.append(
                f"mixed precision: gradients differ from float32's by up to {apart} of their norm on these"
                f" samples, norms by up to {of_norms}"
            )
    elif check.reason:
        lines.append(f"self-check: skipped, as {check.reason}")
    return "\n".join(lines)


def nonfinite_words(result: AnalyzeResult) -> str | None:
    """The samples that are not finite by name; None where there are none."""
    bad = nonfinite_ids(result.samples)
    if not len(bad):
        return None
    names = ", ".join(map(identifier, bad[:MAX_NAMED]))
    more = f" and {len(bad) - MAX_NAMED:,} more (status: nonfinite)" if len(bad) > MAX_NAMED else ""
    return f"warning: not finite, in loss or gradient: {names}{more}"


def run_content(result: AnalyzeResult, top: int) -> dict[str, Any]:
    """Plain values that JSON has: numbers that are not finite are null.

    schema_version, folder; samples, in_dataset and partial (whether rows were left out); nonfinite, review;
    top: the samples with the largest gradient norms with all their columns; measures: the numbers of each;
    labels, self_check, engine, timings (s) as in manifest.json; check: the gate's verdict without its
    findings, which are in findings.jsonl, or null.
    """
    samples, manifest = result.samples, result.manifest.content()
    in_dataset = result.manifest.counts.in_dataset or len(samples)
    record = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(result.folder),
        "samples": len(samples),
        "in_dataset": in_dataset,
        "partial": len(samples) < in_dataset,
        "nonfinite": result.manifest.judged.counts.nonfinite,
        "review": result.manifest.judged.listed,
        "top": json.loads(top_samples(samples, top).to_json(orient="records", double_precision=15)),
        "measures": {name: dict(measure.numbers) for name, measure in result.measures.items()},
        **{about: manifest.get(about) for about in ("labels", "self_check", "engine", "timings")},
        "check": None if result.check is None else check_content(result.check),
    }
    found: dict[str, Any] = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
    return found
