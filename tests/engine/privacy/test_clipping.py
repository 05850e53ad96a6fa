"""Clipping as a value: its groups, what it promises, and the factors that keep the promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from psgrad.engine.privacy.clipping import MARGIN, Clipping, Group
from psgrad.engine.privacy.records import Relation
from psgrad.errors import ConfigError

pytestmark = pytest.mark.usefixtures("on_device")

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "head.weight", "scale"]


def norms_of(*rows: list[float]) -> dict[str, torch.Tensor]:
    """The squared norms, by parameter, of norms in a row for each, a record a column."""
    values = torch.tensor(rows, dtype=torch.float64)
    return {name: row.square() for name, row in zip(NAMES, values, strict=False)}


# -- groups --------------------------------------------------------------------------------------------------


def test_clipping_per_layer_groups() -> None:
    clipping = Clipping.per_layer(NAMES, 3.0)
    assert [(group.name, group.parameters) for group in clipping.groups] == [
        ("encoder.0", ("encoder.0.weight", "encoder.0.bias")),
        ("encoder.1", ("encoder.1.weight",)),
        ("head", ("head.weight",)),
        ("", ("scale",)),
    ]
    assert {group.bound for group in clipping.groups} == {1.5}


@pytest.mark.parametrize("make", [Clipping.flat, Clipping.per_layer, Clipping.per_parameter])
@pytest.mark.parametrize(
    ("relation", "times"), [("add_or_remove_one", 1), ("zero_out", 1), ("replace_one", 2)]
)
def test_clipping_sensitivity_of_groups(make: Any, relation: Relation, times: int) -> None:
    clipping = make(NAMES, 0.7)
    assert clipping.sensitivity(relation) == pytest.approx(0.7 * times, rel=1e-15)
    assert sorted(clipping.parameters) == sorted(NAMES)


def test_clipping_patterns_in_order() -> None:
    clipping = Clipping.by_pattern(NAMES, {"encoder.*.bias": 3.0, "encoder.*": 4.0, "*": 12.0})
    assert [group.parameters for group in clipping.groups] == [
        ("encoder.0.bias",),
        ("encoder.0.weight", "encoder.1.weight"),
        ("head.weight", "scale"),
    ]
    assert clipping.sensitivity("add_or_remove_one") == 13.0
    assert clipping.sensitivity("replace_one") == 26.0


def test_clipping_patterns_refused() -> None:
    with pytest.raises(ConfigError, match=r"no clipping group takes the parameter 'head.weight'") as caught:
        Clipping.by_pattern(NAMES, {"encoder.*": 1.0})
    assert "end the groups with the pattern '*'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"the clipping group 'decoder.\*' has no parameter"):
        Clipping.by_pattern(NAMES, {"decoder.*": 1.0, "*": 1.0})
    with pytest.raises(ConfigError, match=r"the clipping group 'head.\*' has no parameter"):
        Clipping.by_pattern(NAMES, {"*": 1.0, "head.*": 1.0})


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e-30, 1e30])
def test_clipping_bound_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="the clipping norm of 'all' is") as caught:
        Clipping.flat(NAMES, bound)
    assert "a positive number from 1e-20 to 1e+20" in str(caught.value)


def test_clipping_arguments_refused() -> None:
    with pytest.raises(ConfigError, match="the clipping rule is 'normalise'"):
        Clipping.flat(NAMES, 1.0, rule="normalise")
    with pytest.raises(ConfigError, match="there is no parameter to clip"):
        Clipping.flat([], 1.0)
    with pytest.raises(ConfigError, match="the parameter 'scale' is in two clipping groups, 'one' and 'two'"):
        Clipping((Group("one", ("scale",), 1.0), Group("two", ("scale",), 1.0)))


# -- factors -------------------------------------------------------------------------------------------------


def weights_of(clipping: Clipping, norms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return clipping.by_parameter(clipping.factors(clipping.group_norms(norms)))


def test_clipping_factors() -> None:
    clipping = Clipping.flat(NAMES, 2.0)
    weights = weights_of(
        clipping,
        norms_of([0.0, 1.2, 3.0, 1e100], [0.0, 1.0, 4.0, 0.0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    )
    assert list(weights) == NAMES
    assert weights["scale"][:2].tolist() == [1.0, 1.0]
    torch.testing.assert_close(
        weights["scale"], torch.tensor([1, 1, 0.4, 2e-100], dtype=torch.float64), rtol=2 * MARGIN, atol=0
    )
    assert all(weight is weights["scale"] for weight in weights.values())


def test_clipping_factors_by_group() -> None:
    clipping = Clipping.by_pattern(NAMES, {"encoder.*": 1.0, "*": 10.0})
    weights = weights_of(clipping, norms_of([3.0, 0.1], [4.0, 0.1], [12.0, 0.1], [5.0, 30.0], [0.0, 40.0]))
    inside = torch.tensor([1 / 13, 1], dtype=torch.float64)
    outside = torch.tensor([1, 0.2], dtype=torch.float64)
    for name in NAMES:
        torch.testing.assert_close(
            weights[name], inside if name.startswith("encoder") else outside, rtol=2 * MARGIN, atol=0
        )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [Clipping.flat, Clipping.per_parameter])
@pytest.mark.parametrize("rule", ["clip", "automatic"])
def test_clipping_factors_nonfinite_group(bad: float, make: Any, rule: str) -> None:
    weights = weights_of(make(NAMES, 1.0, rule=rule), norms_of(*([[0.1, bad, 0.0]] + [[0.1, 0.1, 0.0]] * 4)))
    assert all(weight[1] == 0 for weight in weights.values())
    assert all((weight[[0, 2]] > 0).all() for weight in weights.values())


@given(
    st.lists(st.floats(0, 1e300), min_size=1, max_size=5),
    st.floats(1e-19, 1e19),
    st.sampled_from(["clip", "automatic"]),
)
@example([7.812345735190313e299], 1e-19, "clip")  # the factor is a subnormal number
@example([0.0, 1e-30, 0.99], 0.5, "automatic")
def test_clipping_factors_below_bound(norms: list[float], bound: float, rule: Any) -> None:
    """Rounding takes less than the margin off, and adds nothing."""
    result = Clipping.flat(["w"], bound, rule=rule).factors(torch.tensor([norms], dtype=torch.float64))[0]
    for factor, norm in zip(result.tolist(), norms, strict=True):
        exact = bound / (norm + 0.01) if rule == "automatic" else min(1.0, bound / norm) if norm else 1.0
        assert factor * norm < bound or (factor, norm) == (1.0, bound)
        assert factor <= exact
        assert factor >= exact * (1 - 1e-6) or exact < 2.0**-120


def test_clipping_groups_of_other_parameters_refused() -> None:
    clipping = Clipping.flat(["encoder.0.weight", "frozen"], 1.0)
    with pytest.raises(
        ConfigError, match=r"in no group: encoder\.0\.bias; without gradient: frozen"
    ) as caught:
        weights_of(clipping, norms_of([1.0], [1.0]))
    assert "of every parameter that is trained" in str(caught.value)
