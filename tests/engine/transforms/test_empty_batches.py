"""A batch of no samples: each operator and network returns the shapes of one sample behind an axis of length
zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.transforms import vjp, vmap
from psgrad.errors import PsgradError
from tests.architectures import ARCHITECTURES
from tests.engine.transforms.operators import entries, few_or_all_samples, programs
from tests.engine.transforms.refused import AGREEING, UNJUDGED, UNJUDGED_MAPPED
from tests.engine.transforms.test_recurrent import PackedUse, padded_outputs
from tests.seeds import set_seed
from tests.small_models import Architecture

DATABASE = entries()
# AGREEING read numbers, and how many residuals lstsq has depends on the ranks: an empty batch has neither.
SKIPPED = {*UNJUDGED, *UNJUDGED_MAPPED, *AGREEING.split(), "linalg.lstsq"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(4)
@few_or_all_samples
@pytest.mark.parametrize("name", [name for name in DATABASE if name not in SKIPPED])
def test_operator_on_empty_batch(name: str, most: int) -> None:
    """Results and cotangents, with all tensors mapped and with each of them alone."""
    for program in programs(DATABASE[name], most=most):

        def of_sample(*tensors: Tensor, program: Any = program) -> Any:
            def tracked(*leaves: Tensor) -> Any:
                values = program(*program.with_leaves(tensors, leaves))
                return tuple(values[i] for i in program.tracked), tuple(values)

            if not program.tracked:
                return tuple(program(*tensors)), ()
            out, pull, values = vjp(tracked, *program.leaves(tensors), has_aux=True)
            return values, tuple(pull(tuple(torch.ones_like(value) for value in out)))

        count = len(program.tensors)
        ways = [(0,) * count, *(tuple(0 if i == k else None for i in range(count)) for k in range(count))]
        for where in ways if count else []:
            given = [
                tensor if axis is None else tensor.new_zeros(0, *tensor.shape)
                for tensor, axis in zip(program.tensors, where, strict=True)
            ]
            set_seed(0)
            try:
                values, cotangents = vmap(of_sample, where, randomness="same")(*given)
            except PsgradError:
                continue  # refused by name, as for any batch
            shapes = [value.shape for value in (*program.results, *program.leaves(program.tensors))]
            found = [tuple(value.shape) for value in (*values, *cotangents)]
            assert found == [(0, *shape) for shape in shapes[: len(found)]], (program.name, where)


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.every(4)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_queries_on_empty_batch(architecture: Architecture) -> None:
    objective = Objective(architecture.build(), architecture.loss)
    inputs, target = architecture.batch(2)
    arguments = tuple(value[:0] for value in inputs), target[:0]
    options: Any = {"has_aux": True, "randomness": "different"}
    grads = per_sample_gradients(objective.loss, objective.params, *arguments, **options)
    norms = per_sample_square_norms(objective.loss, objective.params, *arguments, **options)
    shapes = {name: value.shape for name, value in objective.params.items()}
    assert {name: value.shape for name, value in grads.materialise().items()} == {
        name: (0, *shape) for name, shape in shapes.items()
    }
    sums = grads.weighted_sum(torch.zeros(0))
    assert {name: value.shape for name, value in sums.items()} == shapes
    assert not any(value.any() for value in sums.values())
    assert grads.losses.shape == grads.square_norms().shape == norms.square_norms().shape == (0,)
    assert grads.dot(objective.params).shape == (0,)
    assert grads.gram().shape == (0, 0)


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences_of_empty_batch(layer: Any) -> None:
    model = PackedUse(layer(3, 4, bidirectional=True), padded_outputs)
    params = {name: value.detach() for name, value in model.named_parameters()}
    x, lengths = torch.randn(0, 5, 3), torch.zeros(0, dtype=torch.int64)
    grads = per_sample_gradients(model.loss, params, x, lengths)
    assert {name: value.shape for name, value in grads.materialise().items()} == {
        name: (0, *value.shape) for name, value in params.items()
    }


@pytest.mark.parametrize("n", [0, 2])
def test_queries_of_embedding_without_columns(n: int) -> None:
    loss = lambda params, tokens: params["table"][tokens].square().sum() + params["bias"].sum()
    params = {"table": torch.randn(5, 0), "bias": torch.randn(3)}
    grads = per_sample_gradients(loss, params, torch.randint(5, (n, 4)))
    assert grads.materialise()["table"].shape == (n, 5, 0)
    assert grads.square_norms().tolist() == [3.0] * n
