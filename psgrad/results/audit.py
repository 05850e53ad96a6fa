"""What `psgrad dp-audit` yields: a lower bound on epsilon beside the accounted one, and what was found about the noise and the bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from psgrad.results.short_repr import ShortRepr


@dataclass(frozen=True)
class AuditBound:
    """What one method says of epsilon.

    Attributes:
        method: which one, in words.
        epsilon: the largest that it refutes, at the audit's delta.
        noise: the noise that there is at most, as a share of what is declared; None for a method that knows no mechanism, infinite
            where it refutes nothing.
        evidence: what was counted, in words.
    """

    method: str
    epsilon: float
    noise: float | None
    evidence: str


@dataclass(frozen=True)
class NoiseAudit:
    """What the noise looked like: how many numbers, their standard deviation over the declared one, question -> p-value, and alarms."""

    numbers: int
    spread: float
    p_values: dict[str, float]
    alarms: list[str]


@dataclass(frozen=True)
class NeighbourPair:
    """A batch and its neighbour, with the same random numbers.

    Attributes:
        pair: how they differ, in words.
        distance: between their clipped sums. sensitivity: what it may be. ratio: the one over the other.
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
    """What an audit found.

    Attributes:
        epsilon: the lower bound, wrong with a probability of at most 1 - `confidence` if the mechanism does what it declares.
        accounted: the epsilon that is accounted for these steps, None where there is none to state; by which accountant: `accountant`.
        delta, confidence, steps, canaries: what the audit was asked for.
        guesses, right: of the attack that needs no assumption: how many coins it guessed, how many rightly.
        declared: whether the guesses leave what is declared standing.
        reach: the norm of a clipped canary, as a share of the most that a record can have.
        bounds: epsilon by each method.
        noise: what it looked like.
        pairs: neighbours; none where only canaries took part.
        records: records of the dataset that went along, 0 for canaries alone. Where there are any, this result is NOT PRIVATE.
        relation, scheme, unit, mechanism: what the guarantee is about.
        file: where this was written.
    """

    epsilon: float
    accounted: float | None
    accountant: str
    delta: float
    confidence: float
    steps: int
    canaries: int
    guesses: int
    right: int
    declared: bool
    reach: float
    bounds: list[AuditBound]
    noise: NoiseAudit
    pairs: list[NeighbourPair]
    records: int
    relation: str
    scheme: str
    unit: str
    mechanism: str
    file: Path
    notes: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """What contradicts the declared guarantee, a sentence each."""
        found = []
        if not self.declared:
            found.append(f"canaries are told apart better than the declared steps allow: {self._excess()}")
        found += [f"the noise is not as declared: {alarm}" for alarm in self.noise.alarms]
        for pair in self.pairs:
            if not pair.holds:
                found.append(f"{pair.pair}: {_broken(pair)}")
        return found

    def _excess(self) -> str:
        accounted = "none" if self.accounted is None else f"{self.accounted:.4g}"
        least = min((bound.noise for bound in self.bounds if bound.noise is not None), default=1.0)
        noise = f", at most {least:.0%} of the declared noise" if least < 1 else ""
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
    return f"the sums are {pair.ratio:.4g} times the declared sensitivity apart"
