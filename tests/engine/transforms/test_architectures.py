"""The networks that people train: each sample's gradient is the loop's, in any nesting, and no operator runs
sample by sample.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.self_check import differentiable_kernels
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.engine.transforms.interpreter import InterpretedTracer
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import UnsupportedOperatorError
from tests.architectures import ARCHITECTURES
from tests.engine.gradients.agreement import (
    SMALLEST_SHARE,
    TOLERANCES,
    assert_close,
    assert_vectors_close,
    flat,
    rows,
)
from tests.oracles import Gradients, one_sample_gradients, trainable
from tests.small_models import CLASSES, Architecture

each_architecture = pytest.mark.parametrize(
    "architecture", ARCHITECTURES, ids=lambda architecture: architecture.name
)


@dataclass(frozen=True)
class Case:
    """An architecture's network, and a batch for it."""

    architecture: Architecture
    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor

    @classmethod
    def of(cls, architecture: Architecture, samples: int, dtype: torch.dtype, device: torch.device) -> Case:
        inputs, target = architecture.batch(samples, dtype=dtype)
        model = architecture.build(dtype=dtype).to(device)
        return cls(architecture, model, tuple(value.to(device) for value in inputs), target.to(device))

    def exact(self) -> Case:
        """The same weights and data in float64: a loop over these has no error that is not psgrad's own."""
        inputs, target = tree_map(
            lambda value: value.double() if value.is_floating_point() else value, (self.inputs, self.target)
        )
        return Case(self.architecture, copy.deepcopy(self.model).double(), inputs, target)

    def moved(self, params: Gradients) -> Case:
        """The same with other parameters."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, parameter in trainable(model).items():
                parameter.copy_(params[name])
        return Case(self.architecture, model, self.inputs, self.target)

    @property
    def objective(self) -> Objective:
        return Objective(self.model, self.architecture.loss)

    def loss(self, params: Gradients, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Of one sample, for psgrad."""
        return self.objective.loss(params, inputs, target)[0]

    def loss_of_first(self, params: Gradients) -> Tensor:
        return self.loss(params, tuple(value[0] for value in self.inputs), self.target[0])

    def deferred(self) -> PerSampleGradients:
        randomness = self.architecture.randomness
        return per_sample_gradients(
            self.objective.loss,
            self.objective.params,
            self.inputs,
            self.target,
            has_aux=True,
            randomness=randomness,
        )

    def by_loop(self) -> Gradients:
        return one_sample_gradients(self.model, self.architecture.loss, self.inputs, self.target)

    def autograd_of_first(self, *, twice: bool) -> Gradients:
        """The gradient of the first sample, by autograd; `twice`: with a record of its own."""
        parameters = trainable(self.model)
        with differentiable_kernels(self.model):
            output = tree_map(lambda value: value[0], self.model(*(value[:1] for value in self.inputs)))
        loss = self.architecture.loss(output, self.target[0])
        result = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=twice, materialize_grads=True
        )
        return dict(zip(parameters, result, strict=True))


def skip_weight_norm_on_a_gpu(architecture: Architecture, device: torch.device) -> None:
    if device.type == "cuda" and architecture.name == "weight-norm":
        pytest.skip("PyTorch's kernel rounds to float32 in float64, too, on a GPU")


@each_architecture
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32", marks=pytest.mark.sweep),
        pytest.param(torch.float64, id="float64"),
    ],
)
def test_architecture_gradients_equal_the_loop(
    architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> None:
    skip_weight_norm_on_a_gpu(architecture, device)
    case = Case.of(architecture, 5, dtype, device)
    expected = case.exact().by_loop()
    whole = flat(expected).norm(dim=1)
    assert whole.any()

    result = case.deferred()
    assert_vectors_close("deferred", result.materialise(), expected, whole, TOLERANCES[dtype])
    for name, square in result.square_norms(per="parameter").items():
        norm = rows(expected[name]).norm(dim=1)
        assert_close(
            f"norm of {name}",
            square.sqrt(),
            norm,
            torch.maximum(norm, SMALLEST_SHARE * whole),
            TOLERANCES[dtype],
        )

    mapped = vmap(grad(case.loss), in_dims=(None, 0, 0), randomness=architecture.randomness)
    assert_vectors_close(
        "vmap(grad)",
        mapped(case.objective.params, case.inputs, case.target),
        expected,
        whole,
        TOLERANCES[dtype],
    )


@pytest.mark.every(2)
@each_architecture
def test_ensemble_gradients_equal_each_member(architecture: Architecture, device: torch.device) -> None:
    """Two levels of samples: members with weights of their own, and for each of them the samples of a
    batch.
    """
    case = Case.of(architecture, 3, torch.float64, device)
    members = {
        name: torch.stack([value, value + 0.1 * torch.randn_like(value)])
        for name, value in case.objective.params.items()
    }
    of_samples = vmap(grad(case.loss), in_dims=(None, 0, 0), randomness=architecture.randomness)
    result = vmap(of_samples, in_dims=(0, None, None), randomness=architecture.randomness)(
        members, case.inputs, case.target
    )
    for member in range(2):
        expected = case.moved({name: value[member] for name, value in members.items()}).by_loop()
        whole = flat(expected).norm(dim=1)
        assert_vectors_close(
            f"member {member}", {name: value[member] for name, value in result.items()}, expected, whole, 1e-9
        )


# Where PyTorch has no second derivative, or (that of weight norm) a wrong one: differences of its first ones
# tell.
WITHOUT_SECOND_DERIVATIVE_IN_TORCH = {
    "mlp-hardsigmoid",
    "mlp-with-multi-margin",
    "mlp-with-multi-label-margin",
    "mobilenet",
    "squeeze-excitation",
    "prototypes",
    "weight-norm",
}
# Nor has psgrad: refused by name.
WITHOUT_SECOND_DERIVATIVE = {"mlp-with-ctc"}
# no_grad speaks of reverse mode alone, in PyTorch as here: what it hides from a gradient has a tangent all
# the same.
HIDES_FROM_REVERSE_MODE = {"deep-equilibrium"}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "architecture",
    [architecture for architecture in ARCHITECTURES if architecture.name not in WITHOUT_SECOND_DERIVATIVE],
    ids=lambda architecture: architecture.name,
)
def test_architecture_tangents_and_second_derivatives(
    architecture: Architecture, device: torch.device
) -> None:
    """Along one direction: the loss's tangent, and the gradient's, by forward and by reverse mode over
    reverse mode.
    """
    skip_weight_norm_on_a_gpu(architecture, device)
    case = Case.of(architecture, 1, torch.float64, device)
    params = case.objective.params
    along = {name: torch.randn_like(value) for name, value in params.items()}

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative in PyTorch
        if architecture.name in WITHOUT_SECOND_DERIVATIVE_IN_TORCH:
            gradient = case.autograd_of_first(twice=False)
            step, tolerance = 1e-5, 1e-6
            below, above = (
                case.moved(
                    {name: value + by * along[name] for name, value in params.items()}
                ).autograd_of_first(twice=False)
                for by in (-step, step)
            )
            curvature = {name: (above[name] - below[name]) / (2 * step) for name in along}
        else:
            gradient, tolerance = case.autograd_of_first(twice=True), 1e-9
            rise = torch.stack([(gradient[name] * along[name]).sum() for name in along]).sum()
            second = torch.autograd.grad(rise, list(trainable(case.model).values()), materialize_grads=True)
            curvature = dict(zip(along, second, strict=True))

    expected = {name: value[None] for name, value in curvature.items()}
    whole = flat(expected).norm(dim=1)

    def agrees(way: str, found: Gradients) -> None:
        assert_vectors_close(
            way, {name: value[None] for name, value in found.items()}, expected, whole, tolerance
        )

    agrees("reverse over reverse", vjp(grad(case.loss_of_first), params)[1](along)[0])
    if architecture.name not in HIDES_FROM_REVERSE_MODE:
        agrees("forward over reverse", jvp(grad(case.loss_of_first), (params,), (along,))[1])
        products = torch.cat([(gradient[name].detach() * along[name]).flatten() for name in along])
        tangent = jvp(case.loss_of_first, (params,), (along,))[1]
        assert_close("tangent", tangent, products.sum(), products.abs().sum(), 1e-9)


@pytest.mark.parametrize("name", sorted(WITHOUT_SECOND_DERIVATIVE))
def test_architecture_unknown_second_derivative_refused(name: str, device: torch.device) -> None:
    (architecture,) = (architecture for architecture in ARCHITECTURES if architecture.name == name)
    case = Case.of(architecture, 1, torch.float32, device)
    params = case.objective.params
    with pytest.raises(UnsupportedOperatorError, match="_ctc_loss_backward"):
        vjp(grad(case.loss_of_first), params)[1](params)


def test_vmap_randomness_different_variational_autoencoder(device: torch.device) -> None:
    """With randomness='different', the noise of a variational autoencoder is one native draw with an axis of
    samples.
    """
    params = {"encoder": torch.randn(4, 3, device=device), "decoder": torch.randn(3, 2, device=device)}
    x = torch.randn(5, 1, 3, device=device)

    def loss(params: Gradients, x: Tensor, noise: Tensor | None = None) -> Tensor:
        mean, log_deviation = (x @ params["encoder"].t()).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if noise is None else noise
        return (((mean + noise * log_deviation.exp()) @ params["decoder"].t()) - x).square().sum()

    torch.manual_seed(3)
    drawn = per_sample_gradients(loss, params, x, randomness="different")
    torch.manual_seed(3)
    noise = torch.randn(5, 1, 2, device=device)
    given = per_sample_gradients(loss, params, x, noise)
    torch.testing.assert_close(drawn.materialise(), given.materialise())
    assert noise.unique().numel() == noise.numel()


class KernelCalls(TorchDispatchMode):
    """Counts the operators that run on plain tensors, by name: what is left when all transforms have had
    their say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            with self:
                return InterpretedTracer.__torch_dispatch__(op, types, args, kwargs)
        self.calls[op.name()] += 1
        return op(*args, **(kwargs or {}))


def calls_for(architecture: Architecture, samples: int, device: torch.device) -> Counter[str]:
    case = Case.of(architecture, samples, torch.float32, device)
    with KernelCalls() as kernels:
        case.deferred().materialise()
    return kernels.calls


@pytest.mark.every(2)
@each_architecture
def test_architecture_kernel_count_independent_of_samples(
    architecture: Architecture, device: torch.device
) -> None:
    calls = calls_for(architecture, 2, device)
    assert calls.total() > 5
    assert calls == calls_for(architecture, 5, device)


class SampleBySample(nn.Module):
    """A model that knows of the samples behind its batch of one, and takes them one at a time as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for sample in x.value.value:
            torch.sin(sample)
        return self.layer(x)


def test_architecture_kernel_count_shows_a_loop(device: torch.device) -> None:
    looping = Architecture(
        "loop", SampleBySample, lambda n: (torch.randn(n, 3), torch.zeros(n, dtype=torch.int64))
    )
    assert [calls_for(looping, samples, device)["aten::sin"] for samples in (2, 5)] == [2, 5]


def test_architecture_count() -> None:
    names = [architecture.name for architecture in ARCHITECTURES]
    assert len(set(names)) == len(names)
    assert len([name for name in names if not name.startswith("mlp-")]) >= 40
