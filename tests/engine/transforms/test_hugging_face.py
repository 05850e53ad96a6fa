"""Hugging Face models with random weights, by both of the library's ways to compute attention: each row's
gradient is the loop's, and no operator runs row by row. Needs the extra `hugging-face`.

Of the four rows one has no padding, on which the models branch. What padding does, and many more models, are
in tests/engine/gradients/test_hugging_face_tasks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, vmap
from tests.engine.gradients.agreement import (
    SMALLEST_SHARE,
    TOLERANCES,
    assert_close,
    assert_vectors_close,
)
from tests.engine.gradients.hugging_face import CASES, Case, Row, padded
from tests.engine.gradients.test_hugging_face_tasks import rows_alone, rows_of, together
from tests.engine.transforms.test_architectures import KernelCalls
from tests.oracles import Gradients

NAMES = ("bert", "distilbert", "roberta", "gpt2", "llama", "t5", "vit")
FIRST_OF_EACH = {case.architecture: case for case in reversed(CASES) if case.architecture in NAMES}
each_model = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            replace(case, config={**case.config, "attn_implementation": attention}), id=f"{name}-{attention}"
        )
        for name, case in FIRST_OF_EACH.items()
        for attention in ("sdpa", "eager")
        if (name, attention) != ("t5", "sdpa")
    ],
)


def batch_of(case: Case, dtype: torch.dtype) -> Row:
    return padded(case.rows(dtype), case.pad_token)


def by_vmap(loss: Callable[..., Tensor], params: Gradients, batch: Row) -> Gradients:
    return vmap(grad(loss), in_dims=(None, 0))(params, batch)


@pytest.mark.every(2)  # each model in float64, and in the sweep in float32
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@each_model
def test_hugging_face_gradients_equal_the_loop(case: Case, dtype: torch.dtype) -> None:
    model, batch = case.build(dtype), batch_of(case, dtype)
    loop, parameters = rows_alone(model, rows_of(batch), case.shared), dict(model.named_parameters())
    parts = loop.split([value.numel() for value in parameters.values()], 1)
    expected = {
        name: part.unflatten(1, value.shape)
        for (name, value), part in zip(parameters.items(), parts, strict=True)
    }
    whole, tolerance = loop.norm(dim=1), TOLERANCES[dtype]
    result, mapped = (together(model, batch, case.shared, way) for way in (per_sample_gradients, by_vmap))
    assert_vectors_close("deferred", result.materialise(), expected, whole, tolerance)
    assert_vectors_close("vmap(grad)", mapped, expected, whole, tolerance)
    for name, square in result.square_norms(per="parameter").items():
        norm = expected[name].flatten(1).norm(dim=1)
        assert_close(
            f"norm of {name}", square.sqrt(), norm, torch.maximum(norm, SMALLEST_SHARE * whole), tolerance
        )


@each_model
def test_hugging_face_kernel_count_independent_of_samples(case: Case) -> None:
    model, batch = case.build(torch.float32), batch_of(case, torch.float32)
    calls = []
    for rows in ([0, 1], [0, 1, 2, 3, 0]):
        with KernelCalls() as kernels:
            together(model, {name: value[rows] for name, value in batch.items()}, case.shared).materialise()
        calls.append(kernels.calls)
    assert calls[0] == calls[1]
