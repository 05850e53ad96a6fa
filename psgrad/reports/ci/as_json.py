"""One JSON object: check.json with the findings in it. ASCII alone, so that no text in it can be anything but
text.
"""

from __future__ import annotations

import json

from psgrad.results import CheckResult
from psgrad.results.findings import check_content, finding_content


def render(result: CheckResult) -> str:
    """All of a verdict, with every finding that is kept."""
    content = {**check_content(result), "findings": [finding_content(finding) for finding in result.findings]}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
