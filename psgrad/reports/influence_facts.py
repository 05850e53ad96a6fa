"""What the method of an influence run says of its fit, as pairs of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgrad.reports.influence_terminal import method_words
from psgrad.reports.sections import FACT_LIMIT
from psgrad.reports.words import brief, number
from psgrad.results import InfluenceResult
from psgrad.results.manifest import read_manifest

MAX_FACTS = 30
MAX_ITEMS = 20


def fit_facts(result: InfluenceResult) -> list[tuple[str, str]]:
    """What the method says of its fit, and the checkpoints."""
    influence = read_manifest(result.manifest).influence
    rates = [each.get("learning_rate") for each in influence.checkpoints]
    paths = [str(each.get("path")) for each in influence.checkpoints]
    found: list[tuple[str, Any]] = [
        ("Method", method_words(result.method)),
        ("Measurement", result.measurement),
        ("Normalised by", None if influence.normalize == "none" else influence.normalize),
        ("Checkpoints", ", ".join(paths) if len(paths) > 1 else None),
        (
            "Learning rates",
            ", ".join(map(_plain, rates)) if any(rate is not None for rate in rates) else None,
        ),
    ]
    each = [flattened(facts) for facts in result.facts]
    for name in dict.fromkeys(name for facts in each for name in facts):
        values = [_plain(facts.get(name)) for facts in each]
        found.append((_NAMES.get(name, name), values[0] if len(set(values)) == 1 else ", ".join(values)))
    return [(brief(name, 60), brief(str(value), FACT_LIMIT)) for name, value in found if value][:MAX_FACTS]


_NAMES = {
    "Solver because": "Why this solver",
    "Calibrated because": "Why, or why not",
    "Leverage": "Leverage correction",
}


def flattened(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested facts as one dict whose names are sentences' beginnings: {"spectrum": {"largest": 3}} is
    {"Spectrum largest": 3}.
    """
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{before} {key}".strip() if before else str(key).replace("_", " ").capitalize()
        if isinstance(value, Mapping):
            found |= flattened(value, name)
        elif value is not None:
            found[name] = value
    return found


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value[:MAX_ITEMS]))
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
