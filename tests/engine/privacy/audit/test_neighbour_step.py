"""One step on a dataset and on a neighbour with the same random numbers: what may differ, and mistakes that
make more differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.privacy.audit import Replayed, compare_neighbours
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation, record_loss
from tests.engine.privacy.audit.mechanisms import HalfNoise, Unclipped

FEATURES, CLASSES, RECORDS = 6, 3, 12
NOISE = Noise(1.3)


def parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "inner.weight": (5, FEATURES),
        "inner.bias": (5,),
        "head.weight": (CLASSES, 5),
        "head.bias": (CLASSES,),
    }
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = F.linear(x, params["inner.weight"], params["inner.bias"]).relu()
    return F.cross_entropy(F.linear(hidden, params["head.weight"], params["head.bias"]), y)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 3 * torch.randn(RECORDS, FEATURES, dtype=dtype), torch.randint(CLASSES, (RECORDS,))


def with_another(x: Tensor, y: Tensor, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """One record more, whose inputs are the first one's, changed."""
    return torch.cat([x, value(x[:1])]), torch.cat([y, y[:1]])


CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "added": lambda x, y: with_another(x, y, lambda one: -5 * one),
    "removed": lambda x, y: (x[1:], y[1:]),
    "NaN": lambda x, y: with_another(x, y, lambda one: one * math.nan),
    "infinite": lambda x, y: with_another(x, y, lambda one: one * math.inf),
    "huge": lambda x, y: with_another(x, y, lambda one: one * 1e30),
}
REPLACEMENTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "another": lambda x, y: (torch.cat([-7 * x[:1], x[1:]]), torch.cat([(y[:1] + 1) % CLASSES, y[1:]])),
    "NaN": lambda x, y: (torch.cat([x[:1] * math.nan, x[1:]]), y),
    "huge": lambda x, y: (torch.cat([x[:1] * 1e30, x[1:]]), y),
}
CLIPPINGS: dict[str, Callable[[dict[str, Tensor]], Clipping]] = {
    "flat": lambda params: Clipping.flat(params, 0.3),
    "layer": lambda params: Clipping.per_layer(params, 0.3),
    "automatic": lambda params: Clipping.flat(params, 0.3, rule="automatic"),
}


def replayed(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    clipping: Callable[[dict[str, Tensor]], Clipping],
    relation: Relation,
    dtype: torch.dtype = torch.float64,
    empty: bool = False,
    **options: Any,
) -> Replayed:
    params, (x, y) = parameters(dtype), batch(dtype)
    if empty:
        x, y = x[:0], y[:0]
    made = clipping(params)
    noise = options.pop("noise", NOISE)
    first, second = batch_source(loss, params, x, y), batch_source(loss, params, *change(x, y))
    return compare_neighbours(first, second, made, noise, relation, pair="a pair", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=CLIPPINGS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_neighbours_added_or_removed_record(change: Any, clipping: Any, dtype: torch.dtype) -> None:
    result = replayed(change, clipping, "add_or_remove_one", dtype)
    assert result.holds
    assert result.differing == ()
    assert result.ratio <= 1 + 1e-5


@pytest.mark.parametrize("clipping", CLIPPINGS.values(), ids=CLIPPINGS)
@pytest.mark.parametrize("change", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_neighbours_replaced_record(change: Any, clipping: Any) -> None:
    result = replayed(change, clipping, "replace_one")
    assert result.holds
    assert result.sensitivity == pytest.approx(0.6)


def test_neighbours_measured_sensitivity() -> None:
    """A record that is longer than the bound: all of it; one that is not finite, nothing; one in another's
    place, more than a bound.
    """
    assert replayed(CHANGES["removed"], CLIPPINGS["flat"], "add_or_remove_one").ratio == pytest.approx(
        1, abs=1e-6
    )
    assert replayed(CHANGES["NaN"], CLIPPINGS["flat"], "add_or_remove_one").ratio == 0
    assert replayed(REPLACEMENTS["another"], CLIPPINGS["flat"], "replace_one").ratio > 0.5


def test_neighbours_empty_batch() -> None:
    def two_of_one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return batch(torch.float64)[0][:1], batch(torch.float64)[1][:1]

    result = replayed(two_of_one, CLIPPINGS["flat"], "add_or_remove_one", empty=True)
    assert result.holds
    assert result.ratio == pytest.approx(1, abs=1e-6)


def test_neighbours_record_of_several_rows() -> None:
    """A user of three rows is removed, and with them no more than one bound; row by row it would be up to
    three.
    """
    params, (x, y) = parameters(torch.float64), batch(torch.float64)
    users = x.reshape(4, 3, FEATURES)
    targets = y.reshape(4, 3)
    weights = torch.ones(4, 3, dtype=torch.float64)
    of_one = record_loss(lambda params, inputs, target: loss(params, inputs[0], target), has_aux=False)

    def of_user(params: dict[str, Tensor], rows: Tensor, target: Tensor, each: Tensor) -> Tensor:
        return of_one(params, (rows, each), target)  # type: ignore[no-any-return]

    clipping = Clipping.flat(params, 0.3)
    sources = [
        batch_source(of_user, params, users[start:], targets[start:], weights[start:]) for start in (0, 1)
    ]
    assert compare_neighbours(*sources, clipping, NOISE, "add_or_remove_one").holds
    rows = [batch_source(loss, params, x[start:], y[start:]) for start in (0, 3)]
    assert not compare_neighbours(*rows, clipping, NOISE, "add_or_remove_one").holds


# -- mistakes ------------------------------------------------------------------------------------------------


def test_neighbours_finds_missing_clipping() -> None:
    result = replayed(CHANGES["removed"], lambda params: Unclipped.flat(params, 0.3), "add_or_remove_one")
    assert not result.holds
    assert result.ratio > 2


def test_neighbours_finds_wrong_relation() -> None:
    def opposite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return REPLACEMENTS["another"](x, y)

    assert not replayed(opposite, CLIPPINGS["flat"], "add_or_remove_one").holds


def test_neighbours_finds_nonfinite_sum() -> None:
    def poisoned(clipping: Clipping) -> ClippedSum:
        result = plain(clipping)
        return replace(result, sums={name: value * math.nan for name, value in result.sums.items()})

    params, data = parameters(torch.float64), batch(torch.float64)
    plain: GradientSource = batch_source(loss, params, *data)
    result = compare_neighbours(plain, poisoned, Clipping.flat(params, 0.3), NOISE, "add_or_remove_one")
    assert not result.finite
    assert not result.holds
    assert math.isnan(result.ratio)


class SkipsEmpty(Noise):
    """Draws no noise for sums of zero, as a step does that skips an empty batch."""

    def add(self, sums: Any, clipping: Any, relation: Any, generator: Any) -> dict[str, Tensor]:
        return (
            dict(sums)
            if not any(value.any() for value in sums.values())
            else super().add(sums, clipping, relation, generator)
        )


@pytest.mark.parametrize("empty_first", [False, True])
def test_neighbours_finds_data_dependent_draws(empty_first: bool) -> None:
    params, (x, y) = parameters(torch.float64), batch(torch.float64)
    sources = [
        batch_source(loss, params, x[:count], y[:count]) for count in ((0, 1) if empty_first else (1, 0))
    ]
    result = compare_neighbours(*sources, Clipping.flat(params, 0.3), SkipsEmpty(1.3), "add_or_remove_one")
    assert "the random draws" in result.differing
    assert not result.holds


def test_neighbours_half_noise_not_detected() -> None:
    """Frozen noise says nothing of its size: the game of canaries does."""
    assert replayed(CHANGES["removed"], CLIPPINGS["flat"], "add_or_remove_one", noise=HalfNoise(1.3)).holds
