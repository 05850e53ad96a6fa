"""The results of `psgrad dp-step` and its `--plan`, public and private values apart; and of
`psgrad dp-audit`, a lower bound on epsilon beside the accounted one and the checks of noise and bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from psgrad.wording import ShortRepr

STEP_COLUMNS = (
    "step",
    "batch_size",
    "clip_fraction",
    "mean_loss",
    "median_norm",
    "max_norm",
    "nonfinite",
    "bound",
)
"""The columns of the private table of steps. A fraction, mean, median or largest of an empty batch is NaN."""


@dataclass(frozen=True, kw_only=True)
class StepStatement:
    """What public/step.json holds; the fields are its keys, in its order. Each follows from the config, the
    model's shapes, the ledger or the noisy sums alone.

    guarantee says in a sentence what is promised, of the other fields. Epsilons are None where there is none
    to state; `why_not` then has the reason under the same key, and `accounting_notes` what makes one larger
    than it need be. noise_std: the standard deviation of the noise on the sum, noise_multiplier times
    `sensitivity`. rounding: `grid`, of which released numbers are multiples (None without noise), `formula`,
    from which it follows, and `residual_epsilon`, what floating point may add to epsilon. unit: a
    part of a sentence, "one row". trainable: {"parameters", "tensors", "of_parameters"}. budget: {"id",
    "epsilon", "delta"} of all runs on the data, None without one. assumptions: see `assumptions_of`.
    model_sha256: of public/model.safetensors.
    """

    format: int
    versions: dict[str, str]
    guarantee: str | None
    steps: int
    planned_steps: int
    epsilon_rdp: float | None
    epsilon_pld: float | None
    delta: float
    relation: str
    unit: str
    scheme: str
    sample_rate: float | None
    noise_multiplier: float
    sensitivity: float
    noise_std: float
    expected_batch_size: float
    mechanism: str
    rounding: dict[str, Any]
    generator: str
    insecure_deterministic: bool
    clipping: dict[str, Any]
    sampling: dict[str, Any]
    optimizer: dict[str, Any]
    trainable: dict[str, int]
    target_epsilon: float | None
    planned_epsilon_rdp: float | None
    planned_epsilon_pld: float | None
    rdp_order: float | None
    why_not: dict[str, str]
    accounting_notes: dict[str, str]
    budget: dict[str, Any] | None = None
    assumptions: list[dict[str, str]] = field(default_factory=list)
    ledger: dict[str, Any]
    model_sha256: str | None

    def content(self) -> dict[str, Any]:
        """The keys and values of the file."""
        return dict(vars(self))


_OTHER_RUNS = "the settings of runs on these data do not follow from the results of others"


def assumptions_of(step: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the guarantee rests on, of the keys of a statement, and of `records` and `preflight` of the run:
    {"name", "status", "text"}, with the status 'checked' for what the run tests while it runs, and 'assumed'
    for what nobody can test from inside.
    """
    alone, fixed = step.get("records") == "alone", step["scheme"] == "fixed"
    preflight = step.get("preflight", "not checked")
    drawn = "batches of one size, each as likely" if fixed else "each record is drawn by itself, at the rate"
    kernels = (
        "each record is computed by itself" if alone else "no place in a chunk moves a record over a kink"
    )
    mixing = f"no layer, loss or dataset mixes records; {preflight}"
    each = [
        ("contribution", True, "a record's clipped gradient has norm at most C (1 - margin), in float64"),
        ("independence", True, "parameters, buffers and values of the modules stay as they were"),
        ("no mixing", not preflight.startswith("not checked"), mixing),
        ("Python state", False, "the code keeps nothing of a record in globals, files or C objects"),
        ("coins", True, "PyTorch's, NumPy's and Python's generators are seeded from a secret for each chunk"),
        ("other generators", False, "no other source of random numbers is used while records are computed"),
        ("grid", True, "sums are float64, and what is released is rounded to a public grid"),
        ("kernels", alone, kernels),
        ("sampling", False, f"{drawn}, and the generator's bits are as good as random"),
        *((("other runs", False, _OTHER_RUNS),) if step.get("budget") else ()),
        ("host", False, "nobody sees the process, its memory, its timing or the private folder"),
    ]
    return [
        {"name": name, "status": "checked" if checked else "assumed", "text": text}
        for name, checked, text in each
    ]


STEP_KEYS = tuple(each.name for each in fields(StepStatement))
"""The keys of public/step.json, in its order."""


@dataclass(frozen=True, repr=False)
class DPStepResult(ShortRepr):
    """The result of `psgrad dp-step`.

    Public: `step`, the content of public/step.json (StepStatement); `curve`, (number of steps, epsilon after
    them) by RDP, for all planned steps, empty where RDP does not cover them; `notes`, lines that reveal
    nothing about the data.

    NOT PRIVATE: `steps`, one row for each step of this run (STEP_COLUMNS: `batch_size` the records drawn,
    `clip_fraction` the share of them whose norm was above its bound, `nonfinite` the records left out).
    """

    step: dict[str, Any]
    folder: Path
    curve: list[tuple[int, float]]
    steps: pd.DataFrame
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class NoisePlan(ShortRepr):
    """The cost of one noise multiplier over all planned steps; None where an accountant gives no result.

    `noise_std` is the standard deviation on the sum.
    `configured` marks the multiplier of the config, or of its target epsilon.
    """

    noise_multiplier: float
    noise_std: float
    epsilon_rdp: float | None
    epsilon_pld: float | None
    configured: bool = False


@dataclass(frozen=True, repr=False)
class DPPlanResult(ShortRepr):
    """What `psgrad dp-step --plan` predicts, without the data: one NoisePlan a multiplier, smallest
    multiplier first.

    `setting` holds the keys of STEP_KEYS that are known before a run: planned_steps, delta, relation, unit,
    scheme, sampling, sample_rate, sensitivity, expected_batch_size, mechanism, target_epsilon, why_not.
    """

    rows: list[NoisePlan]
    setting: dict[str, Any]


@dataclass(frozen=True)
class NoiseAudit:
    """The results of the check of what is drawn: how many numbers of noise, their standard deviation over the
    declared one, question -> p-value, and alarms.
    """

    numbers: int
    spread: float
    p_values: dict[str, float]
    alarms: list[str]


@dataclass(frozen=True)
class NeighbourPair:
    """A batch and its neighbour, with the same random numbers.

    Attributes:
        pair: how they differ, in words.
        distance: between their clipped sums.
        sensitivity: what it may be.
        ratio: the one over the other, of the sums or of a clipping group, whichever is more.
        differing: what is published besides the noisy sums and is not the same for both.
        finite: whether all released numbers are.
        holds: whether all is as declared, up to the rounding of the sums.
    """

    pair: str
    distance: float
    sensitivity: float
    ratio: float
    differing: list[str]
    finite: bool
    holds: bool


@dataclass(frozen=True, repr=False)
class DPAuditResult(ShortRepr):
    """The result of an audit.

    Attributes:
        epsilon: the lower bound, wrong with a probability of at most 1 - `confidence` if the mechanism does
            what it declares.
        accounted: the epsilon that is accounted for these steps, None if there is none; by which accountant:
            `accountant`.
        delta, confidence, steps, canaries: the settings of the audit.
        declared: whether what was counted is possible under the declared guarantee.
        noise_at_most: the largest possible noise, as a share of the declared one; infinite where nothing is
            refuted, None where no noise is declared.
        evidence: what was counted, in words.
        reach: the norm of a clipped canary, as a share of the most that a record can have.
        noise: the results of the noise check.
        pairs: neighbours; none if only canaries took part.
        untested: what the audit did not look at, and may be wrong still.
        records: records of the dataset that took part, 0 for canaries alone. If there are any, this result is
            NOT PRIVATE.
        relation, scheme, unit, mechanism: of the guarantee.
        file: where this was written.
    """

    epsilon: float
    accounted: float | None
    accountant: str
    delta: float
    confidence: float
    steps: int
    canaries: int
    declared: bool
    noise_at_most: float | None
    evidence: str
    reach: float
    noise: NoiseAudit
    pairs: list[NeighbourPair]
    untested: list[str]
    records: int
    relation: str
    scheme: str
    unit: str
    mechanism: str
    file: Path
    notes: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """The contradictions to the declared guarantee, a sentence each."""
        result = []
        if not self.declared:
            result.append(f"canaries are told apart better than the declared steps allow: {self._excess()}")
        result += [f"what is drawn is not as declared: {alarm}" for alarm in self.noise.alarms]
        for pair in self.pairs:
            if not pair.holds:
                result.append(f"{pair.pair}: {_broken(pair)}")
        return result

    def _excess(self) -> str:
        accounted = "none" if self.accounted is None else f"{self.accounted:.4g}"
        noise = f", at most {self.noise_at_most:.0%} of the declared noise"
        return f"epsilon is at least {self.epsilon:.4g}, accounted {accounted}{noise}"

    @property
    def verdict(self) -> str:
        """'consistent' where nothing contradicts the declared guarantee, else 'VIOLATION'."""
        return "VIOLATION" if self.violations else "consistent"


def _broken(pair: NeighbourPair) -> str:
    if not pair.finite:
        return "what is released is not finite"
    if pair.differing:
        return f"what is published differs in {', '.join(pair.differing)}"
    if pair.ratio <= 1:
        return f"its contribution moves by {pair.ratio:.4g} of the declared sensitivity"
    ratio = f"{pair.ratio:.4g}" if pair.ratio >= 1.001 else f"1 + {pair.ratio - 1:.2g}"
    return f"the sums are {ratio} times the declared sensitivity apart"
