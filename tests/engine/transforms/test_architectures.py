"""The networks that people train: each sample's gradient is the loop's, and no operator runs sample by sample."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.objective import Objective
from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.levels import Tracer
from tests.architectures import ARCHITECTURES
from tests.engine.gradients.agreement import SMALLEST_SHARE, TOLERANCES, assert_close, assert_vectors_close, flat, rows
from tests.models import CLASSES, Architecture
from tests.oracles import Gradients, one_sample_gradients

SAMPLES = 5

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)


def deferred(objective: Objective, inputs: tuple[Tensor, ...], target: Tensor, randomness: str) -> PerSampleGradients:
    return per_sample_gradients(objective.loss, objective.params, inputs, target, has_aux=True, randomness=randomness)


def vmapped(objective: Objective, inputs: tuple[Tensor, ...], target: Tensor, randomness: str) -> Gradients:
    gradient = grad(lambda params, inputs, target: objective.loss(params, inputs, target)[0])
    return vmap(gradient, in_dims=(None, 0, 0), randomness=randomness)(objective.params, inputs, target)


@each_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_gradients_equal_the_loop(architecture: Architecture, dtype: torch.dtype) -> None:
    model = architecture.build(dtype=dtype)
    inputs, target = architecture.batch(SAMPLES, dtype=dtype)
    objective = Objective(model, architecture.loss)

    # The loop runs in float64 on the same weights and inputs, so that all of the error is psgrad's own.
    exact_inputs, exact_target = (tuple(value.double() if value.is_floating_point() else value for value in x) for x in (inputs, (target,)))
    expected = one_sample_gradients(copy.deepcopy(model).double(), architecture.loss, exact_inputs, *exact_target)
    whole = flat(expected).norm(dim=1)
    assert whole.any()

    found = deferred(objective, inputs, target, architecture.randomness)
    assert_vectors_close("deferred", found.materialise(), expected, whole, TOLERANCES[dtype])
    assert_vectors_close("vmap(grad)", vmapped(objective, inputs, target, architecture.randomness), expected, whole, TOLERANCES[dtype])
    for name, square in found.square_norms(per="parameter").items():
        norm = rows(expected[name]).norm(dim=1)
        assert_close(f"norm of {name}", square.sqrt(), norm, torch.maximum(norm, SMALLEST_SHARE * whole), TOLERANCES[dtype])


class KernelCalls(TorchDispatchMode):
    """Counts the operators that run on plain tensors, by name: what is left when all transforms have had their say."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            with self:
                return Tracer.__torch_dispatch__(op, types, args, kwargs)
        self.calls[op.name()] += 1
        return op(*args, **(kwargs or {}))


def calls_for(architecture: Architecture, samples: int) -> Counter[str]:
    objective = Objective(architecture.build(), architecture.loss)
    inputs, target = architecture.batch(samples)
    with KernelCalls() as kernels:
        deferred(objective, inputs, target, architecture.randomness).materialise()
    return kernels.calls


@each_architecture
def test_as_many_kernels_run_for_two_samples_as_for_five(architecture: Architecture) -> None:
    assert calls_for(architecture, 2) == calls_for(architecture, 5)


def test_the_count_would_show_a_loop() -> None:
    class SampleBySample(nn.Module):
        """A model that knows the samples behind its batch of one, and takes them one at a time."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            physical = x.value.value
            for row in physical:
                self.layer(row)
            return self.layer(x)

    looping = Architecture("loop", SampleBySample, lambda n: (torch.randn(n, 3), torch.zeros(n, dtype=torch.int64)))
    two, five = calls_for(looping, 2), calls_for(looping, 5)
    assert five["aten::linear"] - two["aten::linear"] == 3 or five["aten::addmm"] - two["aten::addmm"] == 3


def test_there_are_as_many_architectures_as_promised() -> None:
    names = [architecture.name for architecture in ARCHITECTURES]
    assert len(set(names)) == len(names)
    assert len([name for name in names if not name.startswith("mlp-")]) >= 40
