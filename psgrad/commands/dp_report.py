"""`psgrad dp-report`: what the public files of a private run say of its privacy: to an attacker, for groups,
at other deltas, and of what a claim must name.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from psgrad.engine.privacy.accounting import epsilon_pld, epsilon_rdp, event_of, merged, tightest_epsilon
from psgrad.engine.privacy.accounting.trade_off import (
    epsilon_at,
    gaussian_parameter,
    group_epsilon,
    profile_of,
    true_positive_rate,
)
from psgrad.errors import DataError
from psgrad.reports.privacy_report import render
from psgrad.run import RunFolder
from psgrad.run.folders import LEDGER, PUBLIC
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import LedgerContent
from psgrad.run.private_runs import PREFIX
from psgrad.run.results.manifest import read
from psgrad.run.results.privacy import StepStatement, assumptions_of
from psgrad.run.results.privacy_report import DPReport

_PAGE, _FIGURE = f"{PUBLIC}/report.html", f"{PUBLIC}/epsilon.png"
_FALSE_POSITIVES = (0.001, 0.01)
_GROUPS = (2, 5, 10)
# What step.json says must be what the ledger gives; another version of dp-accounting may differ this much.
_CLOSE = 1e-3
_OF_HEADER = ("planned_steps", "delta", "relation", "unit", "sampling", "mechanism", "optimizer")


def dp_report(run: Path) -> DPReport:
    """The privacy of the run in a folder, from its public files alone; the page is written there.

    Raises LedgerError for a ledger that is damaged, and DataError where there is no private run.
    """
    ledger = Ledger.read(run / LEDGER)
    said = read_step(run, ledger)
    step = {**said, **{key: ledger.header.get(key) for key in (*_OF_HEADER, "budget")}}
    delta, events = step["delta"], list(merged((event_of(line), 1) for line in ledger.steps).items())
    profile, found = profile_of(events), tightest_epsilon(events, delta)
    deltas = sorted({delta, *(10.0**-power for power in range(4, 11))}, reverse=True)
    audit, notes = audit_of(run, step)
    report = DPReport(
        run=run,
        step=step,
        epsilon=found.value,
        epsilons=[(each, found.value if each == delta else epsilon_at(profile, each)) for each in deltas],
        mu=gaussian_parameter(profile, delta),
        attacks=[(rate, true_positive_rate(profile, rate)) for rate in _FALSE_POSITIVES],
        groups=[(records, group_epsilon(profile, records, delta)) for records in _GROUPS],
        audit=audit,
        assumptions=step.get("assumptions") or assumptions_of(step),
        problems=problems_of(run, said, ledger),
        notes=notes,
        page=run / _PAGE,
    )
    figure = run / _FIGURE
    page = render(report, figure.read_bytes() if figure.is_file() else None)
    RunFolder(run).write_bytes(_PAGE, page.encode("utf-8", "replace"))
    return report


def read_step(run: Path, ledger: LedgerContent) -> dict[str, Any]:
    """The content of public/step.json. Raises DataError where there is none, or one of them is not what
    psgrad writes.
    """
    path = run / PUBLIC / "step.json"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}; expected the folder of a"
            " run of psgrad dp-step, or a copy of its folder public/",
            hint="check the path",
        ) from error
    hint = "a file was edited, or another version of psgrad wrote it; put the files back"
    try:
        step = read(StepStatement, content, str(path)).content()
    except DataError as error:
        raise DataError(error.message, hint=hint) from error
    if (
        {*_OF_HEADER} <= ledger.header.keys()
        and all("noise_grid" in line for line in ledger.steps)
        and isinstance(step["rounding"].get("residual_epsilon"), (int, float))
    ):
        return step
    raise DataError(
        f"{path} is not what psgrad dp-step writes beside its ledger",
        hint=hint,
    )


def problems_of(run: Path, step: dict[str, Any], ledger: LedgerContent) -> list[str]:
    """Where the public files contradict each other, a sentence each."""
    lines, mark = ledger.steps, (step["ledger"].get("ledger_position"), step["ledger"].get("ledger_sha256"))
    found = [
        f"step.json and the ledger differ in {key}" for key in _OF_HEADER if step[key] != ledger.header[key]
    ]
    if mark not in enumerate(ledger.digests, 1):
        found.append("step.json belongs to another ledger, or lines of the ledger are missing")
    if step["steps"] != len(lines):
        found.append(
            f"step.json counts {step['steps']} steps, and the ledger has {len(lines)}: what follows is of the"
            " ledger; psgrad dp-step --resume brings both together"
        )
    else:
        events = list(merged((event_of(line), 1) for line in lines).items())
        for key, accountant in (("epsilon_rdp", epsilon_rdp), ("epsilon_pld", epsilon_pld)):
            value, said = accountant(events, step["delta"]).value, step[key]
            if said is not None and value is not None and not math.isclose(value, said, rel_tol=_CLOSE):
                found.append(f"step.json has {key} {said:.6g}, and its ledger's steps cost {value:.6g}")
    for number, line in enumerate(lines, 1):
        if not math.isclose(line["noise_std"], line["noise_multiplier"] * line["sensitivity"], rel_tol=1e-9):
            found.append(f"the noise of step {number} is not its multiplier times its sensitivity")
            break
    weights, digest = run / PUBLIC / "model.safetensors", step["model_sha256"]
    whole = digest is None or not weights.is_file()
    if not whole and hashlib.sha256(weights.read_bytes()).hexdigest() != digest:
        found.append(f"{PUBLIC}/model.safetensors is not the file that step.json was written with")
    return found


def audit_of(run: Path, step: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The public result of psgrad dp-audit beside the run, None without one; and what to know of it."""
    folder = run.with_name(f"{run.name}-audit")
    try:
        found = json.loads((folder / PUBLIC / "audit.json").read_bytes())
    except (OSError, ValueError):
        there = f"there is no audit in {folder}"
        if (folder / "private" / f"{PREFIX}audit.json").is_file():
            there = f"the audit in {folder} took records of the dataset and is NOT PRIVATE: left out"
        return None, [f"{there}; psgrad dp-audit CONFIG --canaries-only makes one that may be shown"]
    of_run = {key: step[key] for key in ("relation", "scheme", "unit", "mechanism", "delta")}
    other = [key for key, value in of_run.items() if found.get(key) != value]
    if other:
        return None, [f"the audit in {folder} is of another setting ({', '.join(other)}), and is left out"]
    return found, []
