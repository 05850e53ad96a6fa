"""Measures of rows of unequal length: what they say of a row is what they say of it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.examples import Examples
from psgrad.engine.measures.builtin.input_attribution import InputGradient, IntegratedGradients
from psgrad.engine.measures.mean_gradient import MeanGradient
from psgrad.engine.measures.measure import Setting
from psgrad.engine.measures.passes import row_pass
from tests.engine.execution.ragged_models import Case, case
from tests.engine.measures.own_passes import columns_of, gathered_of

LENGTHS = (3, 6, 1, 3, 5)


def setting(ragged: Case, only: int | None = None, **options: Any) -> Setting:
    """Of all rows, or of one alone."""
    rows = ragged.rows(LENGTHS)
    rows = rows if only is None else rows[only : only + 1]
    options = {"model_size": ModelSize(1, 10**12), **options}
    examples = Examples(ragged.objective, ragged.block(rows), options)
    facts: dict[str, Any] = {"kind": "class", "classes": 2, "shows_inputs": True}
    return Setting(examples, **facts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (InputGradient, "mean"),
        (InputGradient, "lstm"),
        (IntegratedGradients, "mean"),
    ],
)
def test_attribution_of_ragged_rows_is_that_of_each_alone(make: Any, kind: str) -> None:
    ragged = case(kind)
    whole = columns_of(make(), setting(ragged), chunk_size=5)
    for row in range(len(LENGTHS)):
        alone = columns_of(make(), setting(ragged, only=row), chunk_size=1)
        for name, column in alone.items():
            torch.testing.assert_close(whole[name][row : row + 1], column, rtol=1e-9, atol=1e-12)


def test_attribution_maps_of_ragged_rows_end_where_the_row_does() -> None:
    ragged = case("mean")
    measure, here = InputGradient(), setting(ragged)
    columns_of(measure, here)
    norms = torch.arange(len(LENGTHS)).flip(0).double() + 1  # shown in the order of rows
    arrays = gathered_of(measure, here, norms).arrays
    assert arrays["rows"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["ids_0"].shape == arrays["map_0"].shape == (5, 6)
    rows = ragged.rows(LENGTHS)
    for place, length in enumerate(LENGTHS):
        assert torch.equal(arrays["ids_0"][place, :length], rows[place][0][0])
        assert (arrays["ids_0"][place, length:] == -1).all()
        assert (arrays["map_0"][place, length:] == 0).all()
        assert (arrays["map_0"][place, :length] != 0).all()


def test_rows_that_a_measure_asks_about_are_not_padded() -> None:
    seen: list[tuple[int, ...]] = []

    def ask(inputs: Any, target: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(tuple(inputs[0].shape))
        return {"row": rows, "length": torch.full((len(rows),), inputs[0].shape[1])}

    (chunk,) = row_pass(setting(case("mean")).examples, ask, 5, range(5))
    assert chunk.values["row"].tolist() == [0, 1, 2, 3, 4]
    assert chunk.values["length"].tolist() == list(LENGTHS)
    assert sorted(seen) == [(1, 1), (1, 5), (1, 6), (2, 3)]


def test_mean_gradient_of_ragged_rows() -> None:
    ragged = case("gpt2")
    found = {}
    for chunk_size in (5, 1):
        here, measure = setting(ragged, chunk_size=chunk_size), MeanGradient()
        measure.prepare(here)
        list(here.examples.stream.run(len(LENGTHS), [measure]))
        found[chunk_size] = measure.mean
    torch.testing.assert_close(found[5], found[1], rtol=1e-9, atol=1e-12)
