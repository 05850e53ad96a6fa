"""Chunks are replayed where weights are in half precision, in a file or in fewer bits: the tracers' numbers,
and weights of a file are moved no more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.chunk_replay import NOT_REPLAYED
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.recompute import Recompute, RecomputedForward
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_sources import Quantised
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.transforms.recorder import Recording, record
from psgrad.engine.transforms.shortening import shorten
from psgrad.ragged import Block
from tests.engine.execution.test_stored import CPU, in_file

ROWS, CHUNK = 30, 4


class Layers(nn.Module):
    """A table, and layers, each used again by a view of its weight; one by a value of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).mean(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) @ (2 * self.blocks[1].weight).t() + x @ block.weight.t()
        found: Tensor = self.head(x)
        return found


def half_precision(file: Path) -> tuple[nn.Module, Supply | None]:
    torch.manual_seed(0)
    model = Layers()
    model.blocks.requires_grad_(False).to(torch.bfloat16)
    return place(model, CPU, torch.float32, "as-saved"), None


def offloaded(file: Path) -> tuple[nn.Module, Supply | None]:
    supply = Supply(CPU, 800)  # three of the square weights
    return place(in_file(Layers, file), CPU, torch.float32, "as-saved", supply), supply


def _whole(parts: Mapping[str, Tensor], first: int, count: int) -> Tensor:
    return parts["packed"].reshape(-1)[first : first + count].float() * parts["scale"]


def quantised(file: Path) -> tuple[nn.Module, Supply | None]:
    model, _ = half_precision(file)
    for block in model.blocks:  # type: ignore[union-attr]
        scale = block.weight.float().abs().max() / 127  # type: ignore[union-attr,operator]
        packed = (block.weight.float() / scale).round().to(torch.int8)  # type: ignore[union-attr,operator]
        source = Quantised({"packed": packed, "scale": scale}, _whole, (8, 8), torch.float32)
        block.weight = nn.Parameter(Stored(source, torch.float32), requires_grad=False)  # type: ignore[union-attr]
    return model, None


KINDS = {"half precision": half_precision, "offloaded": offloaded, "quantised": quantised}


def norms(kind: str, file: Path, again: bool, **options: Any) -> tuple[Tensor, Stream, Supply | None]:
    torch.manual_seed(1)
    words, labels = torch.randint(11, (ROWS, 5)), torch.randint(3, (ROWS,))
    model, supply = KINDS[kind](file)
    if again:
        for name, block in model.blocks.named_children():  # type: ignore[union-attr,operator]
            block.forward = RecomputedForward(Recompute(True), name, block.forward)
    objective = Objective(model, F.cross_entropy)
    rows = Block((words,), labels)
    stream = Stream(objective.loss, objective.params, rows, chunk_size=CHUNK, supply=supply, **options)
    chunks = [columns.values["grad_norm"] for columns in stream.run(ROWS, [GradientNorms()])]
    return torch.cat(chunks), stream, supply


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_replayed_with_weights(kind: str, again: bool, tmp_path: Path) -> None:
    expected, _, before = norms(kind, tmp_path / "plain.safetensors", again, capture="off")
    found, stream, supply = norms(kind, tmp_path / "replayed.safetensors", again)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    assert stream.counts.replayed == ROWS // CHUNK - NOT_REPLAYED
    assert not stream.counts.reasons
    if supply is not None and before is not None:  # no weight, and nothing as large, stays with a program
        assert 0.9 * before.moved <= supply.moved <= 1.25 * before.moved


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_keeps_no_value_of_weights_that_lie_elsewhere(kind: str, tmp_path: Path) -> None:
    model, _ = KINDS[kind](tmp_path / "weights.safetensors")
    stored = model.blocks[1].weight  # type: ignore[index]
    plain, x = torch.ones(8, 8), torch.ones(3, 8)
    with torch.no_grad():
        _, recording, _ = record(lambda: x @ (2 * stored).t() + x @ (2 * stored.t()) + x @ (2 * plain), [x])
    assert isinstance(recording, Recording)
    hoisted = shorten(recording, hoists=True).hoisted
    assert [str(kernel.op) for kernel in hoisted] == ["aten.mul.Tensor"]  # of the plain matrix
