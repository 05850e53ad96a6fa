"""Events of steps: their ledger lines, from which anyone recomputes epsilon, and what no accountant
covers.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.privacy.accounting import (
    StepEvent,
    epsilon_pld,
    epsilon_rdp,
    event_of,
    merged,
)
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError
from tests.engine.privacy.accountants import fixed, poisson

EVENTS = [
    poisson(1.1, 0.0712),
    poisson(1.1, 0.0712, "zero_out"),
    poisson(0.7, 1.0, "replace_one"),
    fixed(3.0),
    fixed(3.0, "zero_out"),
    poisson(0.0, 0.3),
]


# -- ledger lines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_step_event_round_trip(event: StepEvent) -> None:
    line = json.loads(json.dumps(event.line()))
    assert event_of(line) == event
    # A ledger's lines have more: what else is in them does not matter.
    assert (
        event_of(
            {"kind": "step", "position": 7, "previous": "abc", "clipping": "def", "sensitivity": 2.0, **line}
        )
        == event
    )


@given(st.just(0.0) | st.floats(1e-100, 1e100), st.floats(1e-9, 1.0))
def test_step_event_round_trip_precision(multiplier: float, rate: float) -> None:
    event = poisson(multiplier, rate)
    assert event_of(json.loads(json.dumps(event.line()))) == event


def test_step_event_line_fields() -> None:
    assert poisson(1.0, 0.01, "zero_out").line() == {
        "noise_multiplier": 1.0,
        "scheme": "poisson",
        "sample_rate": 0.01,
        "relation": "zero_out",
        "mechanism": "gaussian",
    }


@pytest.mark.parametrize("missing", ["noise_multiplier", "scheme", "sample_rate", "relation", "mechanism"])
def test_step_event_missing_field_refused(missing: str) -> None:
    line = poisson(1.0, 0.1).line()
    del line[missing]
    with pytest.raises(ConfigError, match=f"a ledger line has no field '{missing}'"):
        event_of(line)


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        ({"batch_size": 32}, "batch_size is given, and is none of poisson sampling"),
        ({"scheme": "shuffled"}, "the sampling scheme is 'shuffled'"),
        # A ledger of discrete noise costs what psgrad can no longer draw or account.
        ({"mechanism": "discrete_gaussian"}, "the noise of a ledger line is 'discrete_gaussian'"),
        ({"mechanism": "laplace"}, "the noise of a ledger line is 'laplace'"),
        ({"mechanism": None}, "the noise of a ledger line is None"),
    ],
)
def test_step_event_contradictory_line_or_other_noise_refused(change: dict[str, Any], wording: str) -> None:
    with pytest.raises(ConfigError, match=wording):
        event_of(poisson(1.0, 0.1).line() | change)


def library_epsilons(lines: list[dict[str, Any]], delta: float) -> tuple[float | None, float | None]:
    """RDP and PLD epsilon of ledger lines with dp-accounting alone: what docs/guides/private-training.md
    tells an auditor to run.
    """
    import dp_accounting as dpa
    from dp_accounting import pld, rdp

    relations = {
        "add_or_remove_one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": dpa.NeighboringRelation.REPLACE_ONE,
        "zero_out": dpa.NeighboringRelation.REPLACE_SPECIAL,
    }
    relation = relations[lines[0]["relation"]]

    def event(line: dict[str, Any], multiplier: float) -> Any:
        gaussian = dpa.GaussianDpEvent(multiplier)
        return (
            gaussian
            if line["scheme"] == "fixed"
            else dpa.PoissonSampledDpEvent(line["sample_rate"], gaussian)
        )

    by_moments, by_losses = rdp.RdpAccountant(neighboring_relation=relation), pld.PLDAccountant(relation)
    for line in {json.dumps(line, sort_keys=True) for line in lines}:
        fields, count = json.loads(line), sum(json.dumps(other, sort_keys=True) == line for other in lines)
        # REPLACE_ONE doubles the sensitivity in PLDAccountant, which wants the noise over one record's bound;
        # RDP wants it over what the sum moves by, which a line's noise_multiplier is.
        plain = event(fields, fields["noise_multiplier"])
        doubled = event(
            fields,
            (
                2 * fields["noise_multiplier"]
                if fields["relation"] == "replace_one"
                else fields["noise_multiplier"]
            ),
        )
        by_losses.compose(doubled, count)
        by_moments = (
            by_moments.compose(plain, count)
            if by_moments is not None and by_moments.supports(plain)
            else None
        )
    return None if by_moments is None else by_moments.get_epsilon(delta), by_losses.get_epsilon(delta)


@pytest.mark.long
@pytest.mark.parametrize(
    "events",
    [
        [(poisson(2.0, 0.0712), 300)],
        [
            (poisson(2.0, 0.02, "zero_out"), 50),
            (poisson(3.0, 0.02, "zero_out"), 25),
            (poisson(2.0, 0.04, "zero_out"), 3),
        ],
        [(poisson(1.5, 0.02, "replace_one"), 100)],
        [(fixed(20.0), 40), (fixed(25.0), 10)],
        [(fixed(20.0, "zero_out"), 40)],
    ],
    ids=lambda events: "-".join(event.sampling.scheme for event, _ in events) + "-" + events[0][0].relation,
)
def test_step_event_epsilon_by_dp_accounting(events: list[tuple[StepEvent, int]]) -> None:
    lines = [json.loads(json.dumps(event.line())) for event, steps in events for _ in range(steps)]
    spent = merged((event_of(line), 1) for line in lines).items()
    rdp, pld = library_epsilons(lines, 1e-5)
    ours = epsilon_rdp(spent, 1e-5)
    assert (ours.value is None) == (rdp is None)
    if rdp is not None:
        assert ours.value == pytest.approx(rdp, rel=1e-9)
    value = epsilon_pld(spent, 1e-5)
    assert value.interval == 1e-4
    assert value.value == pytest.approx(pld, rel=1e-9)


@pytest.mark.parametrize("accountant", [epsilon_rdp, epsilon_pld])
def test_step_event_no_noise_has_no_epsilon_and_no_step_none(accountant: Any) -> None:
    assert accountant([(poisson(0.0, 0.1), 1), (poisson(1.0, 0.1), 5)], 1e-5).value == math.inf
    assert accountant([(fixed(0.0), 1)], 1e-5).value == math.inf
    assert accountant([(poisson(0.0, 0.1), 0)], 1e-5).value == 0.0
    assert accountant([], 1e-5).value == 0.0


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf, True, "1"])
def test_step_event_invalid_multiplier_refused(multiplier: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the noise multiplier is .*; expected a finite number, at least 0"
    ):
        poisson(multiplier, 0.1)


@pytest.mark.parametrize(
    ("make", "wording"),
    [
        (
            lambda: fixed(1.0, "add_or_remove_one"),
            "no accountant covers fixed sampling under add_or_remove_one",
        ),
        (lambda: poisson(1.0, 0.1, "add_one"), "the relation is 'add_one'"),
    ],
)
def test_step_event_uncovered_combination_refused(make: Any, wording: str) -> None:
    with pytest.raises(ConfigError, match=wording):
        make()


@pytest.mark.parametrize("steps", [-1, 2.0, 0.5, True, "3", None])
def test_step_event_fractional_steps_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"the number of steps is .*; expected a whole number"):
        epsilon_rdp([(poisson(1.0, 0.1), steps)], 1e-5)


def test_step_event_numpy_steps() -> None:
    assert merged([(poisson(1.0, 0.1), np.int64(3))]) == {poisson(1.0, 0.1): 3}


def test_step_event_equal_events_merged() -> None:
    one, other = poisson(1.0, 0.1), poisson(2.0, 0.1)
    assert merged([(one, 2), (other, 1), (one, 3), (other, 0)]) == {one: 5, other: 1}
    assert merged([(one, 0)]) == {}


def test_step_event_two_relations_refused() -> None:
    with pytest.raises(ConfigError, match="several relations: add_or_remove_one, zero_out"):
        epsilon_rdp([(poisson(1.0, 0.1), 1), (poisson(1.0, 0.1, "zero_out"), 1)], 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan, "1e-5", True])
@pytest.mark.parametrize("accountant", [epsilon_rdp, epsilon_pld])
def test_step_event_delta_range(accountant: Any, delta: Any) -> None:
    with pytest.raises(ConfigError, match=r"delta is .*; expected a number above 0 and below 1"):
        accountant([(poisson(1.0, 0.1), 1)], delta)


def test_step_event_equality_and_hash() -> None:
    assert {poisson(1.0, 0.1): 1}[
        StepEvent(1.0, Sampling("poisson", sample_rate=0.1), "add_or_remove_one")
    ] == 1
