"""Baselines: the accepted findings of a run. They only shrink, unless `grow` is set.

The file is JSON: {"tool": "psgrad", "kind": "baseline", "version": 1, "run": {...}, "findings":
[{fingerprint, rule, id}], "reference": {...}}. The reference is the scores by which later samples can be
judged: see psgrad/quality/references.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from psgrad.errors import ConfigError, DataError
from psgrad.quality.findings import KNOWN, NEW
from psgrad.results import RULES
from psgrad.results.findings import Baseline, BaselineChange, Known

VERSION = 1

# Every run has a review list, and no gate counts it: none of its entries is accepted or refused.
ACCEPTABLE = tuple(rule for rule in RULES if rule != "review")


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file. Raises ConfigError if there is none, DataError for a file that is not one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no baseline {path}",
            next_step=f"check the path; psgrad baseline save RUN --output {path} makes one of a finished run",
        ) from None
    except (OSError, ValueError) as error:
        raise _not_a_baseline(path, str(error)) from error
    if not isinstance(content, dict) or content.get("tool") != "psgrad" or content.get("kind") != "baseline":
        raise _not_a_baseline(path, "it has no mark of a baseline of psgrad")
    if content.get("version") != VERSION:
        raise DataError(
            f"the baseline {path} has the format version {content.get('version')!r}",
            expected=f"version {VERSION}, the only one that this psgrad reads",
            next_step="use the psgrad that wrote it, or save the baseline again",
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
        f"{path} can't be read as a baseline: {why[:200]}",
        expected="a file as psgrad baseline save writes it",
        next_step="save the baseline again, or take it back from version control",
    )
