"""Scores of several checkpoints on one scale, against the definition in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from psgrad.engine.influence.method import ScoreBlock
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot, TracIn
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.projected import TRAK
from psgrad.engine.influence.ranking import CheckpointAgreement, is_relative, joined_self, on_one_scale

pytestmark = pytest.mark.usefixtures("on_device")


def made(checkpoints: int = 3, n: int = 17, m: int = 4) -> torch.Tensor:
    """[T, n, m] scores whose sizes differ by checkpoint and query."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(0, -6, checkpoints * m, dtype=torch.float64).reshape(checkpoints, 1, m)
    common = torch.randn(1, n, m, generator=generator, dtype=torch.float64)
    return sizes * (common + torch.randn(checkpoints, n, m, generator=generator, dtype=torch.float64))


def in_blocks(scores: torch.Tensor, *cuts: int) -> list[list[ScoreBlock]]:
    edges = [0, *cuts, scores.shape[1]]
    return [
        [ScoreBlock(start, stop, {"": each[start:stop]}) for each in scores]
        for start, stop in itertools.pairwise(edges)
    ]


def test_on_one_scale_divides_by_the_root_mean_square_whatever_the_blocks() -> None:
    scores = made()
    expected = scores.numpy() / np.sqrt(np.mean(scores.numpy() ** 2, axis=1, keepdims=True))
    for cuts in ((), (5,), (1, 2, 16)):
        parts = list(on_one_scale(in_blocks(scores, *cuts)))
        found = np.stack(
            [np.concatenate([blocks[place].scores[""].numpy() for blocks in parts]) for place in range(3)]
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_on_one_scale_of_layers_takes_the_scale_of_their_sum() -> None:
    scores = made(2)
    blocks = [[ScoreBlock(0, 17, {"a": 0.25 * each, "b": 0.75 * each}) for each in scores]]
    (found,) = on_one_scale(blocks)
    whole = found[0].scores["a"] + found[0].scores["b"]
    np.testing.assert_allclose(whole.square().mean(0), np.ones(4), rtol=1e-12)
    np.testing.assert_allclose(found[0].scores["b"], 3 * found[0].scores["a"], rtol=1e-12)


def test_on_one_scale_keeps_zeros_and_leaves_nan_out_of_the_scale() -> None:
    scores = made(2)
    scores[0, :, 1] = 0.0
    scores[1, 3, 2] = torch.nan
    (found,) = on_one_scale(in_blocks(scores))
    assert bool((found[0].scores[""][:, 1] == 0).all())
    rest = scores[1, :, 2].numpy()
    expected = rest / np.sqrt(np.nanmean(rest**2))
    np.testing.assert_allclose(found[1].scores[""][:, 2], expected, rtol=1e-12)


def test_is_relative_for_means_of_several_checkpoints_only() -> None:
    for method in (Influence(), EKFAC(), GradientDot()):
        assert is_relative(method, 2)
        assert not is_relative(method, 1)
    for method in (TracIn(), TRAK(), GradientCosine()):
        assert not is_relative(method, 2)


def test_joined_self_weighs_checkpoints_alike() -> None:
    early, late = torch.tensor([100.0, 300.0, 200.0]).double(), torch.tensor([0.2, 0.1, 0.3]).double()
    expected = sum(each.numpy() / np.sqrt(np.mean(each.numpy() ** 2)) for each in (early, late)) / 2
    np.testing.assert_allclose(joined_self(Influence(), [early, late]), expected, rtol=1e-12)
    np.testing.assert_allclose(joined_self(Influence(), [late]), late)


def test_agreement_is_the_mean_correlation_of_pairs_of_checkpoints() -> None:
    scores = made()
    found = CheckpointAgreement()
    for blocks in in_blocks(scores, 4, 9):
        found.add([block.scores[""] for block in blocks])
    expected = []
    for query in range(4):
        correlations = np.corrcoef(scores[:, :, query].numpy())
        expected.append(np.mean(correlations[np.triu_indices(3, 1)]))
    np.testing.assert_allclose(found.correlation(), expected, rtol=1e-9)


def test_agreement_of_a_checkpoint_without_scores_is_nan() -> None:
    scores = made(2)
    scores[1, :, 0] = 0.0
    scores[0, 2, 1] = torch.nan
    found = CheckpointAgreement()
    found.add(list(scores))
    correlation = found.correlation()
    assert bool(correlation[0].isnan())
    rest = np.delete(scores[:, :, 1].numpy(), 2, axis=1)
    assert float(correlation[1]) == pytest.approx(np.corrcoef(rest)[0, 1], rel=1e-9)
