"""Token losses, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.measures.builtin.token_losses import TokenLoss
from psgrad.engine.measures.measure import Gathered, Measure
from psgrad.errors import MeasureError
from tests.engine.measures.own_passes import columns_of, gathered_of, setting_of

pytestmark = pytest.mark.usefixtures("on_device")

IGNORED = -100
VOCABULARY, WIDTH, ROWS, LENGTH = 11, 6, 4, 5


class LanguageModel(nn.Module):
    """Embedding, one causal mixing layer, a norm, and a head that may share the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.mix(x.cumsum(1)).tanh()
        return self.head(self.norm(x))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(output, target, ignore_index=IGNORED, reduction="none")
    return each.sum() / (target != IGNORED).sum().clamp(min=1)


def rows_of_text(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, t], and the next ids as targets; the first two of each row don't count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    target = torch.cat([ids[:, 1:], torch.full((ROWS, 1), IGNORED)], 1)
    target[:, :2] = IGNORED
    return ids, target


def measured(
    measure: Measure, model: nn.Module, ids: torch.Tensor, target: torch.Tensor, **facts: Any
) -> tuple[dict[str, torch.Tensor], Gathered]:
    """(the columns of all rows, what is gathered)."""
    setting = setting_of(model, loss, (ids,), target, **{"kind": "token", **facts})
    columns = columns_of(measure, setting, chunk_size=3)
    return columns, gathered_of(measure, setting, torch.arange(ROWS, 0, -1.0))


def test_token_loss_belongs_to_the_predicted_token() -> None:
    torch.manual_seed(2)
    model = LanguageModel(False).double()
    ids, target = rows_of_text(2)
    rows, gathered = measured(TokenLoss(), model, ids, target)
    plain = F.cross_entropy(model(ids).transpose(1, 2), target, ignore_index=IGNORED, reduction="none")
    expected = torch.cat([torch.zeros(ROWS, 1), plain[:, :-1]], 1).detach()
    torch.testing.assert_close(gathered.arrays["map_0"].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows["token_loss_max"], plain.amax(1).detach())
    assert gathered.arrays["counted_0"].tolist() == [[False, False, False, True, True]] * ROWS


def test_token_loss_of_labels_stays_at_its_token() -> None:
    torch.manual_seed(3)
    model = LanguageModel(False).double()
    ids, _ = rows_of_text(3)
    target = (ids + 1) % VOCABULARY
    target[:, 0] = IGNORED
    _, gathered = measured(TokenLoss(), model, ids, target)
    plain = F.cross_entropy(model(ids).transpose(1, 2), target, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(gathered.arrays["map_0"], plain.float().detach(), rtol=1e-5, atol=1e-6)


def test_token_maps_are_not_kept_without_inputs() -> None:
    ids, target = rows_of_text()
    _, gathered = measured(TokenLoss(), LanguageModel(False), ids, target, shows_inputs=False)
    assert not gathered.arrays


def test_token_loss_refuses_a_loss_of_one_value() -> None:
    ids, target = rows_of_text()
    with pytest.raises(MeasureError, match="token_loss needs a loss of positions"):
        TokenLoss().prepare(setting_of(LanguageModel(False), loss, (ids,), target, kind="class"))


def test_token_loss_refuses_inputs_without_tokens() -> None:
    model = nn.Linear(LENGTH, 3)
    setting = setting_of(model, loss, (torch.randn(ROWS, LENGTH),), torch.zeros(ROWS, 3).long(), kind="token")
    with pytest.raises(MeasureError, match="found no tokens"):
        TokenLoss().prepare(setting)
