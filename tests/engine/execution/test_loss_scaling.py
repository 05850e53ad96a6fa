"""Mixed precision in float16: gradients that would vanish or overflow are those of float32, as each sample's
loss is scaled by a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.self_check import self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients, per_sample_square_norms
from psgrad.ragged import Block
from tests.oracles import one_sample_gradients
from tests.small_models import Tied

ROWS = 6
EPS = torch.finfo(torch.float16).eps
# Times the loss: from gradients below float16's smallest number, 6e-8, to such that overflow.
SIZES = (1e-12, 1e-7, 1e-3, 1.0, 1e3, 1e6)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)),
        lambda: torch.randn(ROWS, 9),
    ),
    "images": (images, lambda: torch.randn(ROWS, 1, 8, 8)),
    "tied": (Tied, lambda: torch.randint(20, (ROWS, 4))),
}


def stream_of(
    name: str, dtype: torch.dtype | None, **options: Any
) -> tuple[Stream, Objective, tuple[tuple[Tensor, ...], Tensor]]:
    """Rows of a case whose losses have other sizes, the last input."""
    torch.manual_seed(0)
    build, draw = CASES[name]
    model, inputs, target = build().eval(), draw(), torch.randint(5, (ROWS,))
    sizes = torch.tensor(SIZES)

    def loss(output: Tensor, pair: Tensor) -> Tensor:
        return F.cross_entropy(output, pair[0].long()) * pair[1]

    objective = Objective(model, loss, autocast=dtype)
    pairs = torch.stack([target.float(), sizes], 1)
    stream = Stream(
        objective.loss,
        objective.params,
        lambda start, stop: Block((inputs[start:stop],), pairs[start:stop]),
        chunk_size=ROWS,
        scales_losses=dtype == torch.float16,
        **options,
    )
    return stream, objective, ((inputs,), pairs)


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    return ((found - expected) / expected).abs()


@pytest.mark.parametrize("name", CASES)
def test_norms_and_gradients_of_each_size_are_those_of_float32(name: str) -> None:
    """Beside a loop of autograd in float32; the losses of a chunk differ by 18 powers of ten."""
    stream, _, _ = stream_of(name, torch.float16)
    _, exact, (inputs, target) = stream_of(name, None)
    expected = one_sample_gradients(exact.model, exact.criterion, inputs, target)
    norms = sum(value.double().flatten(1).square().sum(1) for value in expected.values()).sqrt()  # type: ignore[union-attr]
    block = stream.load_block(0, ROWS)
    gradients: PerSampleGradients = stream.computed(per_sample_gradients, block)
    assert relative_errors(gradients.square_norms().sqrt(), norms).max() < 8 * EPS
    found = stream.computed(per_sample_square_norms, block)
    assert relative_errors(found.square_norms().sqrt(), norms).max() < 8 * EPS
    for parameter, value in gradients.materialise().items():
        apart = (value - expected[parameter]).double().flatten(1).norm(dim=1)
        assert (apart / norms).max() < 16 * EPS, parameter
    summed = gradients.weighted_sum((1 / norms).float())
    for parameter, total in summed.items():
        rows = expected[parameter].double() / norms.reshape(-1, *[1] * total.dim())
        torch.testing.assert_close(total.double(), rows.sum(0), rtol=0, atol=ROWS * 16 * EPS)


def test_a_sample_has_the_same_gradient_whatever_is_beside_it() -> None:
    stream, _, _ = stream_of("perceptron", torch.float16)
    together = stream.computed(per_sample_square_norms, stream.load_block(0, ROWS)).square_norms()
    for row in range(ROWS):
        alone = stream.computed(per_sample_square_norms, stream.load_block(row, row + 1)).square_norms()
        assert float(alone / together[row]) == pytest.approx(1, abs=EPS / 8)


def test_without_a_scale_of_its_own_a_small_gradient_vanishes_and_a_large_one_overflows() -> None:
    """What the other tests would miss if losses were not scaled."""
    _, objective, (inputs, target) = stream_of("perceptron", torch.float16)
    found = per_sample_square_norms(
        objective._loss, objective.params, inputs, target, in_dims=(0, 0), has_aux=True
    ).square_norms()
    _, exact, _ = stream_of("perceptron", None)
    expected = per_sample_square_norms(
        exact.loss, exact.params, inputs, target, in_dims=(0, 0), has_aux=True
    ).square_norms()
    assert float(found[0]) == 0 < float(expected[0])
    assert not found[-1].isfinite()


def test_self_check_says_how_far_float16_is_from_float32() -> None:
    """Beside plain gradients in float32: in float16 these would vanish and overflow, too."""
    stream, objective, _ = stream_of("perceptron", torch.float16)
    found = self_check(objective, stream, ROWS, ROWS)
    assert found.rounding == found.errors
    assert 0 < found.worst < 8 * EPS
