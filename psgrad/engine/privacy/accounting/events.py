"""The cost of one step: the event that a ledger line holds and an accountant reads.

A step draws records by a scheme, sums their clipped gradients, and adds noise whose standard deviation is the
noise multiplier times the sum's sensitivity under a relation between datasets. These three say all that
epsilon depends on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import FIELDS, Sampling, Scheme
from psgrad.errors import ConfigError

MECHANISM = "gaussian"
"""The noise of every step, as ledgers and statements name it."""
Events = Sequence[tuple["StepEvent", int]]
"""(event, how many such steps), in the order in which they are taken."""

# The relations that an accountant covers, for each scheme.
RELATIONS: dict[Scheme, tuple[Relation, ...]] = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "fixed": ("replace_one", "zero_out"),
}
# Noise multipliers beyond these have squares that float64 can't hold together with their products.
_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True)
class StepEvent:
    """One step, as an accountant's event.

    Attributes:
        noise_multiplier: z; the noise has standard deviation z * sensitivity on the sum, where the
            sensitivity is that of the relation (doubled where a record is replaced).
        sampling: how the batch was drawn.
        relation: which datasets are neighbours.

    Raises ConfigError for a multiplier that is negative or not finite, and for what no accountant covers.
    """

    noise_multiplier: float
    sampling: Sampling
    relation: Relation

    def __post_init__(self) -> None:
        _assert_one_of("relation", self.relation, get_args(Relation))
        number = isinstance(self.noise_multiplier, int | float) and not isinstance(
            self.noise_multiplier, bool
        )
        if not number or not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(
                f"the noise multiplier is {self.noise_multiplier!r}; expected a finite number, at least 0"
                " (no noise)",
            )
        if self.noise_multiplier and not _LEAST <= self.noise_multiplier <= _MOST:
            raise ConfigError(
                f"the noise multiplier is {self.noise_multiplier!r}; expected 0 for no noise, or a number"
                f" from {_LEAST:g} to {_MOST:g}, whose square an accountant can hold",
                hint=("choose a multiplier near 1, or a target_epsilon, from which it is computed"),
            )
        scheme = self.sampling.scheme
        if self.relation not in RELATIONS[scheme]:
            raise ConfigError(
                f"no accountant covers {scheme} sampling under {self.relation}; expected one of"
                f" {', '.join(RELATIONS[scheme])}",
                hint="take `scheme: poisson`: one record does not change the size of a fixed batch",
            )

    @property
    def sample_rate(self) -> float:
        """The probability that a step is accounted to draw a record with: 1 for fixed batches, which are not
        amplified.
        """
        return 1.0 if self.sampling.sample_rate is None else float(self.sampling.sample_rate)

    # The factor 2 of replaced records. Noise has standard deviation z * S, where S is C if a record is added,
    # removed or loses its gradient, and 2C if it is replaced. The two accountants take different numbers for
    # the same noise: RDP of a Gaussian takes standard deviation / sensitivity; dp-accounting's privacy loss
    # distributions take standard deviation / C, and under REPLACE_ONE they move the sum by 2C themselves. No
    # other place of psgrad depends on this.

    @property
    def rdp_multiplier(self) -> float:
        """The multiplier for RDP: standard deviation / sensitivity."""
        return float(self.noise_multiplier)

    @property
    def pld_multiplier(self) -> float:
        """The multiplier for dp-accounting's privacy loss distributions: standard deviation / bound of one
        record.
        """
        return 2.0 * self.noise_multiplier if self.relation == "replace_one" else float(self.noise_multiplier)

    def line(self) -> dict[str, Any]:
        """The event as plain JSON fields, for a ledger line; `event_of` reads them."""
        return {
            "noise_multiplier": self.noise_multiplier,
            **self.sampling.describe(),
            "relation": self.relation,
            "mechanism": MECHANISM,
        }


def event_of(line: Mapping[str, Any]) -> StepEvent:
    """The event of a ledger line. Other fields than those of `StepEvent.line` are ignored.

    Raises ConfigError for a line that lacks a field, or holds what no event can, and for other noise.
    """

    def field(name: str) -> Any:
        if name not in line:
            raise ConfigError(
                f"a ledger line has no field {name!r}: {dict(line)}; is it of a step of psgrad?"
            )
        return line[name]

    if field("mechanism") != MECHANISM:
        raise ConfigError(
            f"the noise of a ledger line is {line['mechanism']!r}; expected {MECHANISM}, the only mechanism",
            hint="begin a new run",
        )
    scheme = field("scheme")
    _assert_one_of("sampling scheme", scheme, get_args(Scheme))
    field(FIELDS[scheme])
    # A line with a number of another scheme contradicts itself; Sampling raises the error.
    numbers = {name: line.get(name) for name in FIELDS.values()}
    return StepEvent(field("noise_multiplier"), Sampling(scheme, **numbers), field("relation"))


def merged(events: Iterable[tuple[StepEvent, int]]) -> dict[StepEvent, int]:
    """How many steps of each event, in order of first appearance, none of zero steps.

    Raises ConfigError for a number of steps that is not a natural number, and for events under different
    relations: their costs don't add up to a guarantee under either.
    """
    counts: dict[StepEvent, int] = {}
    for event, steps in events:
        try:
            number = operator.index(steps)
        except TypeError:
            number = -1
        if number < 0 or isinstance(steps, bool):
            raise ConfigError(f"the number of steps is {steps!r}; expected a whole number, at least 0")
        if number:
            counts[event] = counts.get(event, 0) + number
    relations = list(dict.fromkeys(event.relation for event in counts))
    if len(relations) > 1:
        raise ConfigError(
            f"the steps were taken under several relations: {', '.join(relations)}; expected one"
        )
    return counts


def _assert_one_of(what: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"the {what} is {value!r}; expected one of {', '.join(choices)}")
