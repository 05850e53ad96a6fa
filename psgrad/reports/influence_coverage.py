"""Which parameters scores are about, as a section of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psgrad.reports.sections import Part, Section, Text
from psgrad.reports.tables import Column, table
from psgrad.reports.words import FACT_LIMIT, brief, identifier, percent
from psgrad.results import InfluenceResult
from psgrad.results.manifest import read_manifest

# Parameters that are named.
_NAMED = 8


def coverage_words(rows: list[dict[str, Any]]) -> str:
    """How many of the parameters scores are about, and which they are not."""
    whole, covered = (sum(row[key] for row in rows) for key in ("parameters", "covered"))
    share = percent(covered / whole)
    if covered == whole:
        return f"Scores are about all {whole:,} parameters."
    names = [name for row in rows for name in row["left_out"]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"Scores are about {covered:,} of {whole:,} parameters ({share}). Left out, as frozen"
        f" or not named by influence.parameters: {', '.join(map(identifier, names[:_NAMED]))}{more}."
    )


def coverage_sections(result: InfluenceResult) -> Iterator[Section]:
    """The section, where a run has said which parameters it covers."""
    rows = read_manifest(result.manifest).influence.coverage
    if not rows:
        return
    parts: list[Part] = [Text(brief(coverage_words(rows), 2 * FACT_LIMIT))]
    if len(rows) > 1:
        columns = [
            Column("part", lambda row: row["part"]),
            Column("parameters", lambda row: f"{row['parameters']:,}", True),
            Column("covered", lambda row: percent(row["covered"] / max(1, row["parameters"])), True),
        ]
        if any(row["blocks"] for row in rows):
            columns.append(Column("blocks of the curvature", _blocks))
        parts.append(table("coverage", "The parts of the model", columns, rows, tall=False))
    yield Section("Which parameters", parts)


def _blocks(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in row["blocks"].items())
