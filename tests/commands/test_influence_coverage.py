"""Which parameters influence scores are about."""

from __future__ import annotations

from torch import nn

from psgrad.commands.influence_setup import coverage
from psgrad.reports.influence_page import coverage_words


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)


def test_influence_coverage_counts_numbers_and_names_what_is_left_out() -> None:
    model = Small()
    found = coverage(model, {"mlp.weight", "mlp.bias", "head.weight"})
    assert found == {"parameters": 60, "covered": 40, "left_out": ["embed.weight"]}
    assert coverage_words(found) == (
        "Scores are about 40 of 60 parameters (66.7%). Left out, as frozen or not named by"
        " influence.parameters: embed.weight."
    )
    whole = coverage(model, {name for name, _ in model.named_parameters()})
    assert coverage_words(whole) == "Scores are about all 60 parameters."
