"""Which parameters are trained: what patterns choose, however many names a parameter has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psgrad.errors import ConfigError, ModelError
from psgrad.models.factory import choose_trainable


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 5, bias=True)
        self.head.weight = self.embedding.weight


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_what_matches_is_trained_and_nothing_else() -> None:
    model = Tied()
    assert choose_trainable(model, ["body.0.*", "*.bias"], "privacy.trainable") == [
        "body.0.weight",
        "body.0.bias",
        "body.1.bias",
        "head.bias",
    ]
    assert trained(model) == ["body.0.weight", "body.0.bias", "body.1.bias", "head.bias"]


def test_a_tied_parameter_is_frozen_only_if_all_its_names_are() -> None:
    model = Tied()
    assert choose_trainable(model, ["head.*"], "privacy.trainable") == ["head.weight", "head.bias"]
    assert trained(model) == ["embedding.weight", "head.bias"]
    choose_trainable(model, ["body.*"], "privacy.trainable")
    assert not model.embedding.weight.requires_grad


def test_a_pattern_thaws_what_the_factory_froze() -> None:
    model = Tied().requires_grad_(False)
    choose_trainable(model, ["head.bias"], "privacy.trainable")
    assert trained(model) == ["head.bias"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["body.*", "haed.*"], r"no parameter matches 'haed\.\*'; did you mean head\.\*\?; expected"),
        (["Head.*"], r"no parameter matches 'Head\.\*'; did you mean head\.\*\?"),
        (["head"], r"no parameter matches 'head'.*\n  hint: a pattern is matched with the whole"),
        (["head.wieght"], r"did you mean head\.weight\?"),
        (["zzz"], "no parameter matches 'zzz'; expected"),
        ([], "privacy.trainable chooses no parameter"),
    ],
)
def test_patterns_that_choose_nothing(patterns: list[str], expected: str) -> None:
    model = Tied()
    before = trained(model)
    with pytest.raises(ConfigError, match=expected):
        choose_trainable(model, patterns, "privacy.trainable")
    assert trained(model) == before


def test_whole_numbers_are_not_trained() -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    model.adapter = nn.Parameter(torch.zeros(3))
    with pytest.raises(
        ModelError, match=r"chooses codes, which is of type torch\.int8 and can't have a gradient"
    ):
        choose_trainable(model, ["*"], "privacy.trainable")
    assert choose_trainable(model, ["adapter"], "privacy.trainable") == ["adapter"]
