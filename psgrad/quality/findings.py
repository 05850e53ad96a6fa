"""From a judged table of samples to findings: which rule names which sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from psgrad.config import GateConfig
from psgrad.quality.fingerprints import finding_fingerprints
from psgrad.results import RULES, Finding, Location
from psgrad.results.findings import FINDINGS_OF_A_RULE, Level

NEEDED = ("id", "index", "fingerprint", "status", "is_outlier_issue", "loss", "grad_norm")
WELCOME = ("reasons", "group", "rank", "p_value", "q_value", "outlier_score")
"""Columns of samples.parquet that findings are made of, beside the score that samples are judged by."""

NEW, KNOWN, IGNORED = "new", "known", "ignored"
_STATES = (NEW, KNOWN, IGNORED)


def named_samples(samples: pd.DataFrame, manifest: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each sample and rule that names it, the gravest rule first: rule, row (its place in `samples`), id, fingerprint.

    State and the reason for ignoring are put in by `settle`. `manifest` says whether a reference has decided who is an outlier.
    """
    ok = samples["status"].to_numpy(object) == "ok"
    listed = samples["is_outlier_issue"].to_numpy(bool) & ok
    decided = manifest.get("outliers", {}).get("decided_by") == "reference"
    masks = {
        "nonfinite": samples["status"].to_numpy(object) == "nonfinite",
        "outlier" if decided else "review": listed,
        "zero-gradient": ok & (samples["grad_norm"].to_numpy("float64") == 0),
    }
    plain = samples.reset_index(drop=True)
    parts = [
        pd.DataFrame(
            {
                "rule": rule,
                "row": np.flatnonzero(masks[rule]),
                "id": plain["id"].to_numpy(object)[masks[rule]],
                "fingerprint": finding_fingerprints(rule, plain, masks[rule]),
            }
        )
        for rule in RULES
        if rule in masks
    ]
    return pd.concat(parts, ignore_index=True).assign(state=NEW, ignored_because=None)


def counts_of(named: pd.DataFrame) -> dict[str, dict[str, int]]:
    """rule -> state -> how many."""
    counted = named.groupby(["rule", "state"], observed=True).size()
    return {rule: {state: int(counted.get((rule, state), 0)) for state in _STATES} for rule in RULES}


def levels_of(gate: GateConfig) -> dict[str, Level]:
    """How grave each rule is: an outlier is an error where a gate counts outliers."""
    nonfinite: dict[str, Level] = {"error": "error", "warning": "warning", "ignore": "note"}
    counted = gate.max_outliers is not None or gate.max_fraction is not None
    return {
        "nonfinite": nonfinite[gate.nonfinite],
        "outlier": "error" if counted else "warning",
        "zero-gradient": "warning",
        "review": "note",
    }


def in_order(named: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """The gravest rule first, of a rule new findings first, then by rank, then by row; at most FINDINGS_OF_A_RULE of each rule."""
    rank = samples["rank"].to_numpy("float64", na_value=np.inf)[named["row"].to_numpy(int)] if "rank" in samples else 0.0
    keys = named.assign(
        rule_place=named["rule"].map({rule: place for place, rule in enumerate(RULES)}).astype(int),
        state_place=named["state"].map({state: place for place, state in enumerate(_STATES)}).astype(int),
        rank=rank,
    )
    ordered = keys.sort_values(["rule_place", "state_place", "rank", "row"], kind="stable")
    return ordered[ordered.groupby("rule", sort=False).cumcount() < FINDINGS_OF_A_RULE]


def records(
    ordered: pd.DataFrame, samples: pd.DataFrame, gate: GateConfig, score: str, location: Location, lines: Mapping[int, int]
) -> Iterator[Finding]:
    """The findings of an ordered table. `lines`: row -> its line in the data file, where that has lines."""
    levels = levels_of(gate)
    rows = samples.iloc[ordered["row"].to_numpy(int)]
    columns = [column for column in dict.fromkeys((score, "grad_norm", "loss", "p_value", "q_value", "outlier_score")) if column in rows]
    numbers = {column: rows[column].to_numpy("float64", na_value=np.nan).tolist() for column in columns}
    reasons, groups, indices = (_texts(rows, "reasons"), _texts(rows, "group"), rows["index"].tolist())
    for place, found in enumerate(ordered.itertuples(index=False)):
        values = {column: _finite(numbers[column][place]) for column in columns}
        index = int(indices[place])
        yield Finding(
            rule=str(found.rule),
            level=levels[str(found.rule)],
            id=found.id if isinstance(found.id, int) and not isinstance(found.id, bool) else str(found.id),
            index=index,
            fingerprint=str(found.fingerprint),
            message=_message(str(found.rule), score, {column: numbers[column][place] for column in columns}),
            location=Location(location.path, lines.get(index, location.line)),
            reasons=tuple(part for part in (reasons[place] or "").split("; ") if part),
            group=groups[place],
            values=values,
            state=found.state,  # type: ignore[arg-type]
            ignored_because=found.ignored_because,  # type: ignore[arg-type]
        )


def _message(rule: str, score: str, values: Mapping[str, float]) -> str:
    """What the rule says, with the numbers that bear on it. The sample's id is not in it: each format writes ids in its own way."""
    shown = [column for column in dict.fromkeys((score, "grad_norm", "loss")) if column in values]
    if rule == "outlier":
        shown += [column for column in ("p_value", "q_value") if column in values]
    return f"{RULES[rule]} ({', '.join(f'{column} {values[column]:.4g}' for column in shown)})"


def _texts(rows: pd.DataFrame, column: str) -> list[str | None]:
    if column not in rows:
        return [None] * len(rows)
    return [None if each is None or each != each or each is pd.NA else str(each) for each in rows[column].tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
