"""GitLab's code quality report: a JSON list, which the merge request compares by fingerprint with that of the
target branch.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from psgrad.reports.ci.words import clean, more, sentence
from psgrad.results import CheckResult, Finding

LIMIT = 5_000
_SEVERITIES = {"error": "critical", "warning": "minor", "note": "info"}


def render(result: CheckResult) -> str:
    """An issue for each finding that is not ignored. What has no line stands in line 1, as an issue must have
    one.
    """
    listed = [finding for finding in result.findings if finding.state != "ignored"]
    issues = [_issue(finding) for finding in listed[:LIMIT]]
    left = result.count(state="new") + result.count(state="known") - len(issues)
    if left > 0:
        words = more(left)
        issues.append(
            {
                **_issue(listed[0]),
                "description": words,
                "check_name": "psgrad/more",
                "severity": "info",
                "fingerprint": _of(words),
            }
        )
    return json.dumps(issues, indent=1) + "\n"


def _issue(finding: Finding) -> dict[str, Any]:
    return {
        "description": sentence(finding),
        "check_name": f"psgrad/{finding.rule}",
        "fingerprint": finding.fingerprint,
        "severity": _SEVERITIES[finding.level],
        "location": {"path": clean(finding.location.path), "lines": {"begin": finding.location.line or 1}},
    }


def _of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
