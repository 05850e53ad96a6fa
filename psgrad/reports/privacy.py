"""The report of a private run: the guarantee as a sentence and as a table, and, apart from it, what
is NOT PRIVATE.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from decimal import ROUND_CEILING, Context
from typing import Any, TextIO

from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import facts_lines, print_table, write_json
from psgrad.reports.words import MISSING, count, number
from psgrad.run.results.privacy import DPPlanResult, DPStepResult
from psgrad.run.results.privacy_report import BudgetResult, BudgetRun

RELATIONS = {
    "add_or_remove_one": "neighbouring datasets differ by one record that is added or removed",
    "replace_one": "neighbouring datasets differ by one record that is replaced by another",
    "zero_out": "neighbouring datasets differ by one record that is replaced by one without a gradient",
}


def guarantee(step: dict[str, Any]) -> str:
    """What is promised of all that public/ holds, as one sentence that nothing can be cut from; `step` as in
    STEP_KEYS.
    """
    spent, accountant = tightest(step)
    if spent is None:
        promise = "no (epsilon, delta) is promised: " + "; ".join(step.get("why_not", {}).values())
    elif math.isinf(spent):
        promise = "no privacy is promised: epsilon is infinite"
    else:
        pair = f"epsilon {epsilon(spent)}, delta {compact(step['delta'])}"
        promise = f"({pair})-differential privacy by {accountant}"
    parts = [
        f"{promise}, after {count(step['steps'], 'step')}, for {step['unit']}",
        RELATIONS[step["relation"]],
        sampling_words(step),
        "seeded, so that no guarantee holds against who knows the seed" if seeded(step) else "no seed",
    ]
    if (budget := step.get("budget")) is not None:
        parts.append(
            "all runs on these data that name their budget, with settings that do not follow from the"
            f" results of others, stay within epsilon {compact(budget['epsilon'])} at delta"
            f" {compact(budget['delta'])} together"
        )
    parts.append(
        "released numbers are rounded to a public grid, and what is left of floating point adds at most"
        f" {epsilon(step['rounding']['residual_epsilon'])} to epsilon"
    )
    assumptions = step.get("assumptions", [])
    alone = any(each["name"] == "kernels" and each["status"] == "checked" for each in assumptions)
    beside = (
        " a kernel that rounds a record differently beside other records (privacy.records: alone has none"
        " beside it),"
    )
    parts.append(
        f"not covered: how long steps take and how much memory they need,{'' if alone else beside} and what"
        " the model's code keeps outside of the model and the loss (global variables, files)"
    )
    return "; ".join(parts)


def tightest(step: dict[str, Any]) -> tuple[float | None, str]:
    """The smaller of the epsilons of a step, both of which are upper bounds, and its accountant; None where
    there is none.
    """
    known = [
        (step[key], name)
        for key, name in (("epsilon_pld", "PLD"), ("epsilon_rdp", "RDP"))
        if step.get(key) is not None
    ]
    return min(known) if known else (None, "")


def seeded(step: dict[str, Any]) -> bool:
    return bool(step.get("insecure_deterministic"))


def write_step(result: DPStepResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', a line a question and the folder last, or 'json', the content of public/step.json.
    Public quantities only.
    """
    if style == "json":
        write_json(result.step, stream)
        return
    stream.write(f"{facts_lines(step_facts(result))}{result.folder}\n")


def write_budget(result: BudgetResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', what is spent and a row a run, or 'json', one object."""
    if style == "json":
        write_json(asdict(result), stream)
        return
    reserved = sum(run.reserved for run in result.runs)
    waiting = f"; {epsilon(result.epsilon_reserved)} with {count(reserved, 'step')} that are reserved"
    facts = [
        ("budget", f"epsilon {compact(result.epsilon)} at delta {compact(result.delta)}"),
        ("spent", f"epsilon {epsilon(result.epsilon_spent)}{waiting if reserved else ''}"),
        ("protects", f"{result.unit}; {RELATIONS[result.relation]} ({result.relation})"),
        ("file", f"{count(result.lines, 'line')}, the last with SHA-256 {result.sha256}"),
    ]
    columns = [
        TableColumn("run", lambda run: run.run[:12]),
        TableColumn("steps", lambda run: f"{run.steps:,}", True),
        TableColumn("reserved", lambda run: f"{run.reserved:,}", True),
        TableColumn("noise multiplier", _multipliers_words, True),
        TableColumn("epsilon alone", lambda run: epsilon(run.epsilon), True),
        TableColumn("sampling", lambda run: "; ".join(map(drawn_words, run.sampling))),
    ]
    stream.write(f"{facts_lines(facts)}\n")
    print_table(table("", "Runs", columns, result.runs), stream)


def _multipliers_words(run: BudgetRun) -> str:
    least, most = min(run.noise_multipliers, default=0.0), max(run.noise_multipliers, default=0.0)
    if not run.noise_multipliers:
        return MISSING
    return number(least) if least == most else f"{number(least)} to {number(most)}"


def write_plan_of_noise(result: DPPlanResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the setting and a row a multiplier, or 'json', one object."""
    if style == "json":
        keys = ("noise_multiplier", "noise_std", "epsilon_rdp", "epsilon_pld", "configured")
        plans = [{key: getattr(row, key) for key in keys} for row in result.rows]
        write_json({**result.setting, "plans": plans}, stream)
        return
    stream.write(facts_lines(plan_facts(result)) + "\n")
    print_table(plan_table(result), stream)


def step_facts(result: DPStepResult) -> list[tuple[str, str]]:
    """The guarantee and what it rests on: (question, answer). Nothing here follows from the data but by the
    noisy sums.
    """
    step = result.step
    insecure = "--insecure-deterministic: who knows the seed can draw the noise again, and take it off"
    divisor = compact(step["expected_batch_size"])
    return [
        ("privacy spent", spent_words(step)),
        *([("warning", insecure)] if seeded(step) else []),
        (
            "after",
            f"{step['steps']:,} of {count(step['planned_steps'], 'planned step')}{_planned_words(step)}",
        ),
        *_setting_facts(step),
        ("generator", str(step["generator"])),
        ("update", f"{step['optimizer']['name']} of the noisy sum / {divisor}{_trainable_words(step)}"),
        ("public", f"{result.folder / 'public'}: what the guarantee covers"),
        ("private", f"{result.folder / 'private'}: NOT PRIVATE: keep it secret"),
    ]


def plan_facts(result: DPPlanResult) -> list[tuple[str, str]]:
    """What the plan is made for: (question, answer)."""
    setting = result.setting
    facts = [
        ("plan", f"{count(setting['planned_steps'], 'step')}, delta {compact(setting['delta'])}"),
        *_setting_facts(setting),
    ]
    if setting.get("target_epsilon") is not None:
        facts.insert(
            1, ("target", f"epsilon {compact(setting['target_epsilon'])}, which the row marked * meets")
        )
    return facts


def plan_table(result: DPPlanResult) -> Table:
    """A row a noise multiplier: the standard deviation on the sum and what all planned steps cost by each
    accountant.
    """
    columns = [
        TableColumn("noise multiplier", lambda row: number(row.noise_multiplier), True),
        TableColumn("noise std on the sum", lambda row: number(row.noise_std), True),
        TableColumn("epsilon (RDP)", lambda row: epsilon(row.epsilon_rdp), True),
        TableColumn("epsilon (PLD)", lambda row: epsilon(row.epsilon_pld), True),
        TableColumn("steps", lambda row: f"{result.setting['planned_steps']:,}", True),
        TableColumn("", lambda row: "* configured" if row.configured else ""),
    ]
    return table("", "Noise multipliers", columns, result.rows)


def spent_words(step: dict[str, Any]) -> str:
    """Both accountants' epsilons with their delta; of one that has no answer, why."""
    parts, reasons = [], []
    for key, name in (("epsilon_pld", "PLD"), ("epsilon_rdp", "RDP")):
        if step.get(key) is not None:
            parts.append(f"{epsilon(step[key])} ({name})")
        elif reason := step.get("why_not", {}).get(key):
            reasons.append(f"no {name}: {reason}")
    words = (
        f"epsilon {', '.join(parts)} at delta {compact(step['delta'])}"
        if parts
        else f"no epsilon at delta {compact(step['delta'])}"
    )
    return "; ".join([words, *reasons])


def sampling_words(step: dict[str, Any]) -> str:
    """How batches are drawn, and accounted."""
    return drawn_words(step["sampling"])


def drawn_words(sampling: dict[str, Any]) -> str:
    if sampling["scheme"] == "fixed":
        return f"fixed batches of {count(sampling['batch_size'], 'record')}, without amplification"
    return f"Poisson sampling, each record by itself with probability {compact(sampling['sample_rate'])}"


def live_words(spent: float | None, delta: float) -> str:
    """The words beside the count of steps while they are taken; an accountant that does not cover the steps
    leaves it to the end.
    """
    if spent is None:
        return "epsilon at the end"
    return f"epsilon {epsilon(spent)} (RDP, delta {compact(delta)})"


def epsilon(value: float | None) -> str:
    """An upper bound with four significant digits, never rounded down; a dash where there is none."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "infinite"
    # From the shortest text that is this float: 1.8 as a float is a little more than 1.8, and is not 1.801.
    return compact(float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(float(value)))))


def compact(value: float) -> str:
    """As Python writes it with up to six digits, the exponent without its zero: 0.0712, 1e-5."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e+")


def _setting_facts(step: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("protects", f"{step['unit']}; {RELATIONS[step['relation']]} ({step['relation']})"),
        ("sampling", f"{sampling_words(step)} ({step['sampling']['scheme']})"),
    ]
    if step.get("clipping"):
        facts.append(("clipping", _clipping_words(step["clipping"])))
    if step.get("noise_multiplier") is not None:
        noise = (
            f", standard deviation {number(step['noise_std'])} on the sum ="
            f" {number(step['noise_multiplier'])} x sensitivity {number(step['sensitivity'])}"
        )
        facts.append(("noise", f"{step['mechanism']}{noise}"))
    elif step.get("sensitivity") is not None:
        words = f", a multiple of the sensitivity {number(step['sensitivity'])} on the sum"
        facts.append(("noise", f"{step['mechanism']}{words}"))
    return facts


def _clipping_words(clipping: dict[str, Any]) -> str:
    groups = clipping["groups"]
    bounds = sorted({group["bound"] for group in groups})
    rule = "normalised to below" if clipping.get("rule") == "automatic" else "clipped to"
    norms = (
        f"norm {number(bounds[0])}"
        if len(bounds) == 1
        else f"norms {number(bounds[0])} to {number(bounds[-1])}"
    )
    if len(groups) == 1:
        return f"each record's gradient {rule} {norms}"
    return f"each record's gradient {rule} {norms} in each of {count(len(groups), 'group')} of parameters"


def _planned_words(step: dict[str, Any]) -> str:
    planned, accountant = tightest(
        {"epsilon_pld": step.get("planned_epsilon_pld"), "epsilon_rdp": step.get("planned_epsilon_rdp")}
    )
    if planned is None or step["steps"] == step["planned_steps"]:
        return ""
    return f", which together cost epsilon {epsilon(planned)} ({accountant})"


def _trainable_words(step: dict[str, Any]) -> str:
    trainable = step.get("trainable")
    if not trainable:
        return ""
    trained, total = trainable["parameters"], trainable["of_parameters"]
    if trained == total:
        return f", all {trained:,} parameters"
    return f", {trained:,} of {total:,} parameters; the others stay as they were"
