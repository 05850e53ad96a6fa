"""Long names and values are cut so that they are still told apart, and a correlation below 1 is never written
as 1.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.reports.words import number
from psgrad.wording import (
    common_prefix,
    correlation,
    listed_names,
    parameter_names,
    short_repr,
    shorten_middle,
)

LORA = [
    f"m.base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_A.default.weight"
    for layer in range(4)
    for part in "qkv"
]


@given(st.text(max_size=60), st.integers(4, 40))
def test_shorten_middle_keeps_the_limit_and_both_ends(text: str, limit: int) -> None:
    short = shorten_middle(text, limit)
    assert len(short) <= limit
    assert short == text or (short[0] == text[0] and short[-1] == text[-1] and "…" in short)


@given(
    st.lists(st.text(alphabet="ab.", min_size=1, max_size=40), min_size=1, max_size=12, unique=True),
    st.integers(12, 30),
)
def test_parameter_names_are_unlike_whatever_the_names_are(names: list[str], limit: int) -> None:
    found = parameter_names(names, limit)
    assert len(set(found)) == len(names)
    assert all(len(each) <= limit for each in found)


def test_long_parameter_names_lose_their_common_beginning() -> None:
    assert common_prefix(LORA) == "m.base_model.model.model.layers."
    assert parameter_names(LORA, 44)[:2] == [
        "0.self_attn.q_proj.lora_A.default.weight",
        "0.self_attn.k_proj.lora_A.default.weight",
    ]
    narrow = parameter_names(LORA, 24)
    assert len(set(narrow)) == len(LORA)
    assert narrow[0].startswith("0.")
    assert "…" in narrow[0]


def test_a_list_of_parameters_names_the_first_and_what_all_begin_with() -> None:
    words = listed_names(LORA)
    assert words.startswith("0.self_attn.q_proj.lora_A.default.weight, 0.self_attn.k_proj")
    assert words.endswith("and 7 more (all below m.base_model.model.model.layers)")
    assert listed_names(["a", "b"]) == "a, b"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.9957, "0.9957"),
        (0.99996, "0.9999"),
        (-0.99999, "-0.9999"),
        (1.0, "1"),
        (1 - 1e-16, "1"),
        (-1.0, "-1"),
        (None, "–"),
        (0.5, "0.5000"),
    ],
)
def test_a_correlation_is_never_rounded_up(value: float | None, words: str) -> None:
    assert correlation(value) == words


@given(st.floats(-1, 1).filter(lambda value: 1 - abs(value) > 1e-9))
def test_no_number_below_one_is_written_as_one(value: float) -> None:
    assert abs(float(number(value))) != 1
    assert abs(float(correlation(value))) < 1


def test_values_are_cut_inside_their_quotes() -> None:
    digest = "sha256:" + "0123456789abcdef" * 8
    words = short_repr(digest)
    assert len(words) == 80
    assert words[0] == words[-1] == "'"
    assert short_repr({"a": list(range(100))})[-2:] == "]}"
