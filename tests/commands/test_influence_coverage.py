"""Which parameters influence scores are about."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from psgrad.commands.influence_setup import coverage
from psgrad.reports.influence_page import render_influence
from psgrad.run.results.manifest import InfluenceFacts
from tests.reports.influence_runs import result


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)


def test_influence_coverage_counts_numbers_and_names_what_is_left_out() -> None:
    model, made = Small(), result(4, 1, nonfinite=0)
    every = {name for name, _ in model.named_parameters()}
    for covered, words in (
        (every - {"embed.weight"}, "Scores are about 40 of 60 parameters (66.7%). Left out, as frozen or"),
        (every - {"embed.weight"}, "influence.parameters: embed.weight."),
        (every, "Scores are about all 60 parameters."),
    ):
        facts = InfluenceFacts(coverage=coverage(model, covered))
        page = render_influence(replace(made, manifest=replace(made.manifest, influence=facts)), [])
        assert words in page
