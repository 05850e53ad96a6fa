"""Baselines: the findings of a run that are accepted, and its scores as a reference for later samples.
They only shrink, unless `grow` is set.

The file of a baseline is JSON: {"tool": "psgrad", "kind": "baseline", "version": 1, "run": {...}, "findings":
[{fingerprint, rule, id}], "reference": {...}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.config.values import require_regular
from psgrad.errors import ConfigError, DataError
from psgrad.quality.findings import KNOWN, NEW
from psgrad.quality.references import DIGITS, Reference, measured_as, reference_of, scored_by
from psgrad.run.results import RULES
from psgrad.run.results.check import Baseline, BaselineChange, Known
from psgrad.run.results.manifest import RunManifest

VERSION = 1

# Every run has a review list, and no gate counts it: none of its entries is accepted or refused.
ACCEPTABLE = tuple(rule for rule in RULES if rule != "review")


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file. Raises ConfigError if there is none, DataError for a file that is not one."""
    require_regular(path, "baseline")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no baseline {path}",
            hint=f"check the path; psgrad baseline save RUN --output {path} makes one of a finished run",
        ) from None
    except (OSError, ValueError) as error:
        raise _not_a_baseline(path, str(error)) from error
    if not isinstance(content, dict) or content.get("tool") != "psgrad" or content.get("kind") != "baseline":
        raise _not_a_baseline(path, "it has no mark of a baseline of psgrad")
    if content.get("version") != VERSION:
        raise DataError(
            f"the baseline {path} has the format version {content.get('version')!r}; expected version"
            f" {VERSION}, the only one that this psgrad reads",
            hint="use the psgrad that wrote it, or save the baseline again",
        )
    try:
        listed = content["findings"]
        findings = tuple(Known(*(str(each[key]) for key in ("fingerprint", "rule", "id"))) for each in listed)
    except (KeyError, TypeError) as error:
        raise _not_a_baseline(path, f"its findings are damaged: {error}") from error
    return Baseline(findings, content.get("run") or {}, content.get("reference"))


def written(baseline: Baseline) -> dict[str, Any]:
    """The baseline as its file has it, findings by rule and fingerprint, so that changes are few lines."""
    places = {rule: place for place, rule in enumerate(RULES)}
    last = len(places)
    findings = sorted(baseline.findings, key=lambda each: (places.get(each.rule, last), each.fingerprint))
    return {
        "tool": "psgrad",
        "kind": "baseline",
        "version": VERSION,
        "run": dict(baseline.run),
        "findings": [dict(vars(each)) for each in findings],
        "reference": None if baseline.reference is None else dict(baseline.reference),
    }


def mark_known(named: pd.DataFrame, baseline: Baseline) -> pd.DataFrame:
    """The named samples, with those that the baseline holds marked as known."""
    is_known = named["fingerprint"].isin({each.fingerprint for each in baseline.findings})
    return named.assign(state=named["state"].mask(is_known & (named["state"] == NEW), KNOWN))


def gone(named: pd.DataFrame, baseline: Baseline) -> int:
    """How many entries of the baseline a run no longer has."""
    present = set(named["fingerprint"])
    return sum(each.fingerprint not in present for each in baseline.findings)


def changed(
    before: Baseline | None,
    named: pd.DataFrame,
    run: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    path: Path,
    grow: bool,
) -> BaselineChange:
    """The new baseline of a run; `before` is the previous one.

    Without one, or with `grow`, it holds all findings of the run that are not ignored, and the run's scores.
    Else it holds those of its entries that the run has still, and its scores stay: with scores that are
    renewed by every run, the reference would follow any drift.
    """
    acceptable = named[named["rule"].isin(ACCEPTABLE) & (named["state"].isin((NEW, KNOWN)))]
    columns = (acceptable["fingerprint"], acceptable["rule"], acceptable["id"].map(str))
    present = {each[0]: Known(*each) for each in zip(*columns, strict=True)}
    had = {each.fingerprint: each for each in before.findings} if before is not None else {}
    new = {fingerprint: each for fingerprint, each in present.items() if fingerprint not in had}
    remaining = {fingerprint: each for fingerprint, each in had.items() if fingerprint in present}
    takes = before is None or grow
    scores = reference if takes or before is None or before.reference is None else before.reference
    return BaselineChange(
        Baseline(tuple({**remaining, **(new if takes else {})}.values()), run, scores),
        str(path),
        dropped=len(had) - len(remaining),
        taken=len(new) if takes else 0,
        refused=0 if takes else len(new),
        first=before is None,
        reference_kept=not takes and before is not None and before.reference is not None,
    )


def _not_a_baseline(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} can't be read as a baseline: {why[:200]}; expected a file as psgrad baseline save writes it",
        hint="save the baseline again, or take it back from version control",
    )


SAVED_ROWS = 20_000
"""How many rows of a reference a baseline holds at most; more would not tell more outliers apart than 1 in
2,000 at a rate of 0.1.
"""


def saved_reference(samples: pd.DataFrame, run: RunManifest, most: int = SAVED_ROWS) -> dict[str, Any]:
    """The scores of a finished run for a baseline, as plain values: of all samples with one.

    Of more than `most` those with the smallest fingerprints stay, which is a random choice: a fingerprint
    is a digest. Flagged samples stay, too: a reference without the large scores would flag sound samples.
    """
    outliers = run.setting("analyze", "outliers") or {}
    score = scored_by(
        outliers.get("score", "grad_norm"), [each["name"] for each in outliers.get("detectors", [])]
    )
    by = outliers.get("group_by")
    whole = reference_of(samples, score, by, "run", "")
    scored = np.flatnonzero(~np.isnan(whole.scores))
    chosen = np.sort(scored[np.argsort(whole.fingerprints[scored], kind="stable")[:most]])
    groups = {
        str(label): {
            "scores": whole.scores[rows].tolist(),
            "fingerprints": [str(each)[:DIGITS] for each in whole.fingerprints[rows]],
        }
        for label in sorted(set(whole.labels[chosen].tolist()))
        for rows in [chosen[whole.labels[chosen] == label]]
    }
    return {
        "score": score,
        "tail": outliers.get("tail", "upper"),
        "group_by": by,
        "measured_as": measured_as(run),
        "versions": {name: run.versions.get(name) for name in ("psgrad", "torch")},
        "samples": len(samples),
        "nonfinite": len(samples) - len(scored),
        "groups": groups,
    }


def read_reference(content: Mapping[str, Any], source: str, score: str, by: str | None) -> Reference:
    """The reference that a baseline holds, for judging by this score within these groups.

    Raises DataError where it is not as `saved_reference` made it, ConfigError where it has another score or
    other groups.
    """
    try:
        groups = content["groups"]
        parts = [
            (str(label), np.asarray(group["scores"], "float64"), group["fingerprints"])
            for label, group in groups.items()
        ]
        theirs, their_groups, nonfinite = content["score"], content["group_by"], int(content["nonfinite"])
        fit = all(scores.ndim == 1 and len(scores) == len(prints) for _, scores, prints in parts)
        if not fit or not isinstance(theirs, str):
            raise ValueError("scores and fingerprints are not in step")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the reference in {source} can't be read: {type(error).__name__}: {error}; expected a"
            " baseline as psgrad baseline save writes it",
            hint="save the baseline again",
        ) from error
    for what, has, wanted in (("score", theirs, score), ("group_by", their_groups, by)):
        if has != wanted:
            raise ConfigError(
                f"the baseline {source} holds a reference with {what} {has}, and analyze.outliers.{what} is"
                f" {wanted}",
                hint=(
                    f"set analyze.outliers.{what} to {'null' if has is None else has}, or save the baseline"
                    f" of a run with {wanted}"
                ),
            )
    caveats = (f"{nonfinite} samples of the reference had no score, and are not in it",) if nonfinite else ()
    return Reference(
        "baseline",
        source,
        np.concatenate([np.empty(0), *(scores for _, scores, _ in parts)]),
        np.array([label for label, scores, _ in parts for _ in scores], dtype=object),
        np.array([str(each) for _, _, prints in parts for each in prints], dtype=object),
        caveats=caveats,
    )
