"""How many bytes a measure gathers over the samples: what a process sends to another at the end of a pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from psgrad.engine.measures.builtin.norms import Distributions
from psgrad.plugins import MEASURES, own_classes
from tests.engine.measures.passes import classifier, gathered_bytes

MEASURES_BY_NAME = own_classes(MEASURES)
FLOAT64 = 8

# Of p parameters in k tensors, and c classes: sums of gradients, how many there are, and sums of squares.
GATHERED: dict[str, Callable[[int, int, int], int]] = {
    "cosine_to_mean": lambda p, k, c: FLOAT64 * (p + 1 + k),
    "noise_scale": lambda p, k, c: FLOAT64 * (p + 1 + k),
    "signal_to_noise": lambda p, k, c: FLOAT64 * (p + 1 + k),
    "mean_gradient": lambda p, k, c: FLOAT64 * (p + 1 + k),
    "cosine_to_class_mean": lambda p, k, c: FLOAT64 * ((c + 1) * (p + 1) + k),
}
# Histograms of each tensor's norms: of filled bins alone, so that the bytes depend on the norms.
HISTOGRAMS = "relative_norm"
# They need several checkpoints or tokens, which these samples do not have; none of them gathers.
NOT_HERE = {
    *("el2n_over_checkpoints", "forgetting", "grand", "moments", "trajectory", "vog"),
    "token_loss",
}


@pytest.mark.parametrize("name", sorted({*MEASURES_BY_NAME} - NOT_HERE - {HISTOGRAMS}))
@pytest.mark.parametrize(("samples", "classes"), [(8, 3), (40, 5)])
def test_measure_gathers_so_many_bytes(name: str, samples: int, classes: int) -> None:
    rows = classifier(samples, classes=classes)
    tensors = [p.numel() for p in rows.model.parameters()]
    expected = GATHERED[name](sum(tensors), len(tensors), classes) if name in GATHERED else 0
    assert gathered_bytes(rows, MEASURES_BY_NAME[name]) == expected


def test_histograms_of_norms_do_not_grow_with_the_samples() -> None:
    rows = classifier(200)
    tensors = len(list(rows.model.parameters()))
    most = tensors * (6 * FLOAT64 + 2 * FLOAT64 * Distributions.BINS)
    found = gathered_bytes(rows, MEASURES_BY_NAME[HISTOGRAMS])
    assert tensors * 6 * FLOAT64 < found < most
