"""The verdict of a review: the limits of the config against what is predicted and measured, and the changed
rows as findings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pandas as pd

from psgrad import __version__
from psgrad.commands.check import row_lines, shown_path
from psgrad.config import Config
from psgrad.run.results import CheckResult, Finding, GateOutcome, Location
from psgrad.run.results.check import FINDINGS_OF_A_GATE, FINDINGS_OF_A_RULE, CheckFacts
from psgrad.run.results.review import SUSPECT, GroupChange, Trust

RULE = "changed-row"
AGREES = 0.3
"""The rank agreement of prediction and measurement below which a prediction is not believed."""


def review_check(
    config: Config,
    folder: Path,
    totals: tuple[GroupChange, ...],
    changes: pd.DataFrame,
    trust: Trust,
    warnings: tuple[str, ...],
) -> CheckResult:
    """The outcome of each limit of the config's section review."""
    findings = list(_findings(config, changes))
    outcomes = [*_limits(config, totals, trust)]
    most, found = config.review.max_suspect, int((changes["suspect"] >= SUSPECT).sum())
    if most is not None:
        words = f"{found:,} added rows look wrong by themselves, and {most:,} may"
        prints = tuple(each.fingerprint for each in findings[:FINDINGS_OF_A_GATE])
        outcomes.append(
            GateOutcome("max_suspect", "passed" if found <= most else "failed", words, found, most, prints)
        )
    counts = {RULE: {"new": found, "known": 0, "ignored": 0}}
    facts = CheckFacts(counts, score="predicted_effect", psgrad=__version__)
    return CheckResult(tuple(outcomes), tuple(findings), str(folder), len(changes), warnings, facts)


def _limits(config: Config, totals: tuple[GroupChange, ...], trust: Trust) -> Iterator[GateOutcome]:
    """The outcome of each limit on the queries. A set of queries fails where the prediction, or what was
    measured, is above the limit; the limit is not evaluable where prediction and measurement disagree and
    either of them is.
    """
    review = config.review
    for key, limits in (("max_increase", review.max_increase), ("max_margin_fall", review.max_margin_fall)):
        for level, limit in limits.items():
            rule, own = f"{key}.{level}", [each for each in totals if each.level == level]
            if not own:
                yield GateOutcome(rule, "not evaluable", f"the queries have no {level}", None, limit)
                continue
            worst = max(own, key=lambda each: _amount(key, each))
            found = _amount(key, worst)
            if not math.isfinite(found):
                yield GateOutcome(rule, "not evaluable", f"the queries have no {key}", None, limit)
                continue
            outcome, words = _judged(key, worst, found, limit, trust)
            yield GateOutcome(rule, outcome, words, found, limit)


def _amount(key: str, total: GroupChange) -> float:
    """The rise of the loss, or the fall of the margin, as predicted or measured: the larger one."""
    falls = key == "max_margin_fall"
    both = (total.margin_predicted, total.margin_measured) if falls else (total.predicted, total.measured)
    known = [-each if falls else each for each in both if each is not None and math.isfinite(each)]
    return max(known, default=math.nan)


def _judged(
    key: str, total: GroupChange, found: float, limit: float, trust: Trust
) -> tuple[Literal["passed", "failed", "not evaluable"], str]:
    what = "mean loss rises" if key == "max_increase" else "mean margin falls"
    which = "all queries" if total.level == "overall" else f"{total.level} {total.name}"
    words = f"of {which} the {what} by {found:.4g}, and may by {limit:g}"
    if trust.why_not == "nothing changed":
        return "passed", "no row changed"
    if not trust.exact and not trust.tried:
        why = f"not known: the prediction is no amount by itself, and was not checked: {trust.why_not}"
        return "not evaluable", f"{words} as predicted; {why}"
    agrees = not trust.tried or (trust.agreement is not None and trust.agreement >= AGREES)
    if found <= limit:
        return "passed", words
    if agrees:
        return "failed", words
    shown = "none" if trust.agreement is None else f"{trust.agreement:.2f}"
    return "not evaluable", f"{words}; prediction and measurement disagree (rank agreement {shown})"


def _findings(config: Config, changes: pd.DataFrame) -> Iterator[Finding]:
    """The added rows that look wrong by themselves, the most harmful first."""
    data = config.data
    source = (
        data.path[0] if isinstance(data.path, list) else data.path or data.images or data.dataset or "data"
    )
    path = config.base / str(source)
    suspects = changes[changes["suspect"] >= SUSPECT].head(FINDINGS_OF_A_RULE)
    in_one_file = len(suspects) > 0 and path.is_file() and not isinstance(data.path, list)
    lines = row_lines(path, suspects["after"].tolist()) if in_one_file else {}
    for row in suspects.to_dict("records"):
        content = f"{RULE}\n{row['id']}\n{row['kind']}".encode("utf-8", "surrogatepass")
        values = {"predicted_effect": float(row["predicted_effect"]), "suspect": float(row["suspect"])}
        yield Finding(
            RULE,
            "warning",
            str(row["id"]),
            int(row["after"]),
            hashlib.sha256(content).hexdigest()[:32],
            f"the row was {row['kind']}, and looks wrong by itself",
            Location(shown_path(path), lines.get(int(row["after"]))),
            tuple(part for part in str(row["reasons"]).split("; ") if part),
            values=values,
        )
