"""Scores of pairs of tokens, against a loop of torch.autograd over the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.token_scores import TokenTerms, token_scores
from psgrad.errors import InfluenceError
from psgrad.ragged import Block

WORDS, LENGTH, IGNORED = 11, 7, -100


class Decoder(nn.Module):
    """Tied embedding, causal attention, an MLP and a norm: weights that are used at every position, and one
    that is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=1)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), -torch.inf, dtype=torch.float64), 1)
        return self.block(self.words(ids), src_mask=mask) @ self.words.weight.T


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return sum_loss(output, target) / (target != IGNORED).sum().clamp(min=1)


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")


def problem(criterion=mean_loss, rows: int = 6) -> tuple[Examples, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Decoder().double().eval()
    ids, target = torch.randint(0, WORDS, (rows, LENGTH)), torch.randint(0, WORDS, (rows, LENGTH))
    target[:, 2] = IGNORED
    return Examples(Objective(model, criterion), Block((ids,), target)), ids, target


def loop(examples: Examples, ids: torch.Tensor, target: torch.Tensor, mean: bool) -> dict[str, torch.Tensor]:
    """name -> [t, *shape]: the gradient of each token's part of one sample's loss."""
    model = examples.objective.model
    output, names = model(ids[None])[0], list(examples.params)
    parameters = dict(model.named_parameters())
    count = int((target != IGNORED).sum()) if mean else 1
    rows = []
    for position in range(LENGTH):
        part = nn.functional.cross_entropy(output[position], target[position], ignore_index=IGNORED)
        part = part / count if target[position] != IGNORED else 0 * output.sum()
        rows.append(torch.autograd.grad(part, [parameters[name] for name in names], retain_graph=True))
    return {name: torch.stack(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("criterion", [mean_loss, sum_loss])
def test_token_scores_are_those_of_a_loop_over_tokens_and_add_up_to_the_score(criterion) -> None:
    examples, ids, target = problem(criterion)
    fitted = EKFAC(fisher="empirical").fit(examples, Checkpoint())
    query = TokenTerms.of(examples, 1, IGNORED)
    places = query.counted.nonzero().flatten()
    training = [TokenTerms.of(examples, row, IGNORED) for row in range(len(examples))]
    found = token_scores(fitted, query, places, training)

    mean = criterion is mean_loss
    prepared = fitted.precondition(loop(examples, ids[1], target[1], mean))
    for row, scores in enumerate(found):
        own = loop(examples, ids[row], target[row], mean)
        wanted = sum(prepared[name].flatten(1) @ own[name].flatten(1).T for name in own)
        torch.testing.assert_close(scores, wanted[places], rtol=1e-9, atol=1e-12)
        assert (scores[:, 2] == 0).all()
    whole = torch.cat([block.scores for block in fitted.scores(examples)])[:, 1]
    torch.testing.assert_close(torch.stack([scores.sum() for scores in found]), whole, rtol=1e-9, atol=1e-12)


def test_token_scores_of_some_query_tokens_are_their_rows() -> None:
    examples, _, _ = problem()
    fitted = EKFAC(fisher="empirical").fit(examples, Checkpoint())
    query, training = TokenTerms.of(examples, 0, IGNORED), [TokenTerms.of(examples, 3, IGNORED)]
    (whole,) = token_scores(fitted, query, torch.arange(LENGTH), training)
    (some,) = token_scores(fitted, query, torch.tensor([5, 1]), training)
    torch.testing.assert_close(some, whole[[5, 1]], rtol=1e-12, atol=0)


def test_token_scores_need_a_loss_that_is_a_sum_over_tokens() -> None:
    examples, _, _ = problem(lambda output, target: mean_loss(output, target) ** 2)
    with pytest.raises(InfluenceError, match="add up to"):
        TokenTerms.of(examples, 0, IGNORED)
