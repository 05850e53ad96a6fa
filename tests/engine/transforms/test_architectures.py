"""The networks that people train: each sample's gradient is the loop's, and no operator runs sample by sample."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.objective import Objective
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.engine.transforms.levels import Tracer
from psgrad.errors import UnsupportedOperatorError
from tests.architectures import ARCHITECTURES
from tests.engine.gradients.agreement import SMALLEST_SHARE, TOLERANCES, assert_close, assert_vectors_close, flat, rows
from tests.models import CLASSES, Architecture
from tests.oracles import Gradients, one_sample_gradients, trainable

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


def members_of(objective: Objective, count: int = 2) -> Gradients:
    """The parameters of an ensemble, [count, *shape]: the network's own, and others near them."""
    return {
        name: torch.stack([value + 0.1 * member * torch.randn_like(value) for member in range(count)])
        for name, value in objective.params.items()
    }


@each_architecture
def test_an_ensemble_has_the_gradients_of_each_member(architecture: Architecture) -> None:
    """Two levels of samples: members with weights of their own, and for each of them the samples of a batch."""
    model = architecture.build(dtype=torch.float64)
    inputs, target = architecture.batch(3, dtype=torch.float64)
    objective = Objective(model, architecture.loss)
    params = members_of(objective)

    gradient = grad(lambda params, inputs, target: objective.loss(params, inputs, target)[0])
    of_samples = vmap(gradient, in_dims=(None, 0, 0), randomness=architecture.randomness)
    found = vmap(of_samples, in_dims=(0, None, None), randomness=architecture.randomness)(params, inputs, target)
    for member in range(2):
        with torch.no_grad():
            for name, parameter in trainable(model).items():
                parameter.copy_(params[name][member])
        expected = one_sample_gradients(model, architecture.loss, inputs, target)
        whole = flat(expected).norm(dim=1)
        assert_vectors_close(f"member {member}", {name: value[member] for name, value in found.items()}, expected, whole, 1e-9)


# Where PyTorch has no second derivative, or (that of weight norm) a wrong one: differences of its first ones tell.
WITHOUT_SECOND_DERIVATIVE_IN_TORCH = {
    "mlp-hardsigmoid",
    "mlp-with-multi-margin",
    "mlp-with-multi-label-margin",
    "mobilenet",
    "squeeze-excitation",
    "prototypes",
    "weight-norm",
    *(name for architecture in ARCHITECTURES if (name := architecture.name).startswith("bag-of-")),
}
# Nor has psgrad: refused by name.
WITHOUT_SECOND_DERIVATIVE = {"mlp-with-ctc"}
# no_grad speaks of reverse mode alone, in PyTorch as here: what it hides from a gradient has a tangent all the same.
HIDES_FROM_REVERSE_MODE = {"deep-equilibrium"}


@pytest.mark.parametrize(
    "architecture",
    [architecture for architecture in ARCHITECTURES if architecture.name not in WITHOUT_SECOND_DERIVATIVE],
    ids=lambda architecture: architecture.name,
)
def test_tangents_and_second_derivatives(architecture: Architecture) -> None:
    """Along one direction: the loss's tangent, and the gradient's, by forward and by reverse mode over reverse mode."""
    model = architecture.build(dtype=torch.float64)
    inputs, target = architecture.batch(1, dtype=torch.float64)
    objective = Objective(model, architecture.loss)
    start = {name: value.clone() for name, value in objective.params.items()}
    along = {name: torch.randn_like(value) for name, value in start.items()}

    def f(params: Gradients) -> Tensor:
        return objective.loss(params, tuple(value[0] for value in inputs), target[0])[0]

    with sdpa_kernel(SDPBackend.MATH):
        gradient = autograd_at(architecture, model, inputs, target, twice=architecture.name not in WITHOUT_SECOND_DERIVATIVE_IN_TORCH)
        rise = dot(gradient, along)
        if architecture.name in WITHOUT_SECOND_DERIVATIVE_IN_TORCH:
            step = 1e-5
            above, below = (
                autograd_at(architecture, moved(model, start, along, sign * step), inputs, target, twice=False) for sign in (1, -1)
            )
            curvature = {name: (above[name] - below[name]) / (2 * step) for name in above}
            tolerance = 1e-6
        else:
            leaves = list(trainable(model).values())
            curvature = dict(zip(along, torch.autograd.grad(rise, leaves, materialize_grads=True), strict=True))
            tolerance = 1e-9
    moved(model, start, along, 0)

    whole = flat(rows_of(curvature)).norm(dim=1)
    if architecture.name not in HIDES_FROM_REVERSE_MODE:
        _, tangent = jvp(f, (start,), (along,))
        scale = sum((gradient[name] * along[name]).abs().sum() for name in along)
        assert_close("tangent", tangent[None], rise.detach()[None], scale.detach()[None], 1e-9)
        pushed = jvp(grad(f), (start,), (along,))[1]
        assert_vectors_close("forward over reverse", rows_of(pushed), rows_of(curvature), whole, tolerance)
    pulled = vjp(grad(f), start)[1](along)[0]
    assert_vectors_close("reverse over reverse", rows_of(pulled), rows_of(curvature), whole, tolerance)


@pytest.mark.parametrize("name", sorted(WITHOUT_SECOND_DERIVATIVE))
def test_a_second_derivative_that_is_not_known_is_refused(name: str) -> None:
    (architecture,) = (architecture for architecture in ARCHITECTURES if architecture.name == name)
    inputs, target = architecture.batch(1)
    objective = Objective(architecture.build(), architecture.loss)
    gradient = grad(lambda params: objective.loss(params, tuple(value[0] for value in inputs), target[0])[0])
    with pytest.raises(UnsupportedOperatorError, match="_ctc_loss_backward"):
        vjp(gradient, objective.params)[1](objective.params)


def autograd_at(architecture: Architecture, model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, *, twice: bool) -> Gradients:
    """The gradient of the only sample, by autograd; `twice`: with a record of its own."""
    output = tree_map(lambda value: value[0], model(*inputs))
    parameters = trainable(model)
    found = torch.autograd.grad(architecture.loss(output, target[0]), list(parameters.values()), create_graph=twice, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def moved(model: nn.Module, start: Gradients, along: Gradients, step: float) -> nn.Module:
    """The model with other parameters."""
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(start[name] + step * along[name])
    return model


def dot(a: Gradients, b: Gradients) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def rows_of(gradients: Gradients) -> Gradients:
    return {name: value[None] for name, value in gradients.items()}


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
