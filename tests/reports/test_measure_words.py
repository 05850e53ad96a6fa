"""What the page says of measures: whole sources and warnings, no matrix as a list of numbers, names without
what all begin with.
"""

from __future__ import annotations

from typing import Any

import pytest

from psgrad.commands.analyze_tables import result_of
from psgrad.engine.measures.measure import Gathered
from psgrad.plugins import MEASURES, own_classes
from psgrad.reports.page import ABOUT_LIMIT
from psgrad.reports.words import flat_words


def _facts(**numbers: Any) -> dict[str, str]:
    return dict(flat_words(numbers, ABOUT_LIMIT))


def test_facts_matrix_is_left_to_its_figure() -> None:
    assert _facts(rank_correlation=[[1.0, 0.5], [0.5, 1.0]], samples=7) == {"Samples": "7"}


def test_facts_without_a_value_are_left_out() -> None:
    found = _facts(samples=7, trace_by_projection=None, floor=None, warning=None, nested={"a": None, "b": 2})
    assert found == {"Samples": "7", "Nested b": "2"}


def test_facts_warning_is_whole() -> None:
    warning = (
        f"the checkpoints {'a' * 100}.safetensors and {'b' * 100}.safetensors rank the samples differently"
    )
    assert _facts(warning=warning) == {"Warning": warning}


def test_facts_names_lose_what_all_begin_with() -> None:
    names = [f"a_long_wrapper.of_the_model.layer.{number}.weight" for number in range(3)]
    assert _facts(layers=names) == {
        "Layers": "0.weight, 1.weight, 2.weight (all below a_long_wrapper.of_the_model.layer)"
    }
    assert _facts(places=["input 0"]) == {"Places": "input 0"}


def test_sources_and_meanings_of_known_measures_are_whole() -> None:
    texts = [
        text for kind in own_classes(MEASURES).values() for text in (kind.source, *kind.meanings.values())
    ]
    assert max(map(len, texts)) <= ABOUT_LIMIT


@pytest.mark.parametrize(
    ("loss", "unit"), [("nats", "nats"), ("nats per token", "nats per token"), (None, "loss")]
)
def test_units_of_measures_are_those_of_the_loss(loss: str | None, unit: str) -> None:
    for kind in own_classes(MEASURES).values():
        found = result_of(kind(), Gathered(), loss)
        assert not [each for each in (found.unit, *found.meanings.values()) if "{" in each]
    found = result_of(own_classes(MEASURES)["grand"](), Gathered(), loss)
    assert found.unit == f"{unit} per unit of parameter"
    assert f"({unit} per unit of parameter)" in found.meanings["grand"]
    assert (
        f"({unit} per checkpoint)"
        in result_of(own_classes(MEASURES)["trajectory"](), Gathered(), loss).meanings["loss_slope"]
    )
