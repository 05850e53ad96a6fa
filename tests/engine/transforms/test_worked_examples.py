"""The worked examples of torch.func's documentation and tutorials, run with the import replaced.

Each program takes the namespace that it would have imported from: `torch.func`, or ours. Its results must be
equal, whichever it was. At the end, some of them are held against what they mean: closed forms, and loops
over autograd.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad.engine.transforms as ours
from benchmarks.models import cnn, mlp

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


pytestmark = pytest.mark.usefixtures("float64")


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


# -- what grad, vjp, jvp and vmap are ------------------------------------------------------------------------


@program
def sine_and_its_derivatives(tf: Any) -> Any:
    x = torch.randn(())
    return (
        tf.grad(torch.sin)(x),
        tf.grad(tf.grad(torch.sin))(x),
        tf.vmap(tf.grad(tf.grad(tf.grad(torch.sin))))(torch.randn(5)),
    )


@program
def arguments_to_differentiate(tf: Any) -> Any:
    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        predicted = x @ weights["w"] + weights["b"]
        return (predicted - y).square().mean(), predicted

    weights, x, y = {"w": torch.randn(3), "b": torch.randn(())}, torch.randn(4, 3), torch.randn(4)
    return (
        tf.grad(loss, has_aux=True)(weights, x, y),
        tf.grad(loss, argnums=(0, 2), has_aux=True)(weights, x, y),
        tf.grad_and_value(loss, argnums=-1, has_aux=True)(weights, x, y),
    )


@program
def pulling_back(tf: Any) -> Any:
    x, y = torch.randn(5), torch.randn(5)
    _, of_one = tf.vjp(lambda x: x.sin().sum(), x)
    _, of_two = tf.vjp(lambda x, y: (x * y, x.sum() + y.prod()), x, y)
    value, of_aux, aux = tf.vjp(lambda x: ({"sine": x.sin()}, x.cos()), x, has_aux=True)
    cotangents = torch.randn(3, 5)
    several = tf.vmap(lambda g: of_aux({"sine": g}))(cotangents)
    return (
        of_one(torch.tensor(2.0)),
        of_two((y, torch.tensor(1.0))),
        of_two((x, torch.tensor(-1.0))),
        value,
        aux,
        several,
    )


@program
def pushing_forward(tf: Any) -> Any:
    x, y, along = torch.randn(5), torch.randn(5), torch.ones(5)
    one = tf.jvp(lambda x: x.sin() * x, (x,), (along,))
    two = tf.jvp(lambda x, y: (x * y, y.exp()), (x, y), (along, 2 * along))
    aux = tf.jvp(lambda x: (x.sin(), x.cos()), (x,), (along,), has_aux=True)
    return one, two, aux, tf.vmap(lambda t: tf.jvp(torch.tanh, (x,), (t,))[1])(torch.eye(5))


@program
def linearised(tf: Any) -> Any:
    value, push = tf.linearize(lambda x, y: (x.sin() * y, y.sum()), torch.randn(3), torch.randn(3))
    return value, push(torch.ones(3), torch.zeros(3)), push(torch.zeros(3), torch.randn(3))


@program
def dot_products_of_rows(tf: Any) -> Any:
    a, b = torch.randn(2, 5), torch.randn(5, 2)
    batched = tf.vmap(torch.dot, in_dims=(0, 1))
    every_pair = tf.vmap(tf.vmap(torch.dot, in_dims=(None, 0)), in_dims=(0, None))
    return batched(a, b), every_pair(a, a), tf.vmap(torch.dot, chunk_size=1)(a, a)


@program
def structures_and_axes(tf: Any) -> Any:
    def f(pair: dict[str, Tensor], scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return pair["x"] * scale, {"sum": pair["x"] + pair["y"]}

    pair = {"x": torch.randn(2, 4, 3), "y": torch.randn(2, 3)}
    mapped = tf.vmap(f, in_dims=({"x": 1, "y": None}, None), out_dims=(1, {"sum": -1}))
    return mapped(pair, torch.tensor(2.0)), tf.vmap(tf.vmap(torch.mm), in_dims=1)(
        torch.randn(3, 2, 4, 5), torch.randn(3, 2, 5, 4)
    )


@program
def what_no_grad_means_inside(tf: Any) -> Any:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            c = x**2
        return (x - c).sum()

    return (
        tf.grad(f)(torch.randn(3)),
        tf.jacrev(f)(torch.randn(3)),
        tf.jvp(f, (torch.randn(3),), (torch.ones(3),)),
    )


@program
def what_no_grad_means_outside(tf: Any) -> Any:
    x = torch.randn(3)
    with torch.no_grad():
        return tf.grad(lambda x: (x**3).sum())(x), tf.hessian(lambda x: (x**3).sum())(x)


@program
def detached_is_constant(tf: Any) -> Any:
    x = torch.randn(4)
    return tf.grad(lambda x: (x.detach() * x).sum())(x), tf.grad(
        lambda x: (x - x.sum().detach()).square().sum()
    )(x)


# -- per-sample gradients ------------------------------------------------------------------------------------


@program
def linear_regression(tf: Any) -> Any:
    def loss(weights: Tensor, example: Tensor, target: Tensor) -> Tensor:
        return ((example.dot(weights)).relu() - target) ** 2

    weights, examples, targets = torch.randn(3), torch.randn(64, 3), torch.randn(64)
    return tf.vmap(tf.grad(loss), in_dims=(None, 0, 0))(weights, examples, targets)


def image_loss(tf: Any, model: nn.Module) -> Callable[..., Tensor]:
    def loss(params: Any, buffers: Any, image: Tensor, label: Tensor) -> Tensor:
        predictions = tf.functional_call(model, (params, buffers), (image.unsqueeze(0),))
        return F.nll_loss(F.log_softmax(predictions, -1), label.unsqueeze(0))

    return loss


def digits(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 12, 12), torch.randint(10, (n,))


def digit_network() -> nn.Module:
    return cnn(image_size=12, channels=(4, 6), hidden=8)


@program
def per_sample_gradients_of_a_cnn(tf: Any) -> Any:
    model = digit_network()
    params, buffers = detached(model), dict(model.named_buffers())
    loss, (images, labels) = image_loss(tf, model), digits(6)
    in_dims = (None, None, 0, 0)
    return (
        tf.vmap(tf.grad(loss), in_dims=in_dims)(params, buffers, images, labels),
        tf.vmap(tf.grad(loss), in_dims=in_dims, chunk_size=4)(params, buffers, images, labels),
        tf.vmap(tf.grad_and_value(loss), in_dims=in_dims)(params, buffers, images, labels),
    )


@program
def clipped_and_summed(tf: Any) -> Any:
    """One private update: the norm is taken and the gradient scaled inside vmap."""
    model = mlp((5, 6, 3))
    params = detached(model)

    def clipped(params: Any, x: Tensor, label: Tensor) -> Any:
        gradient = tf.grad(lambda params: F.cross_entropy(tf.functional_call(model, params, (x,)), label))(
            params
        )
        norm = torch.stack([value.norm() for value in gradient.values()]).norm()
        return {name: value * (0.5 / norm).clamp(max=1) for name, value in gradient.items()}, norm

    result, norms = tf.vmap(clipped, (None, 0, 0))(params, torch.randn(7, 5), torch.randint(3, (7,)))
    return {name: value.sum(0) for name, value in result.items()}, norms


@program
def hessians_of_each_example(tf: Any) -> Any:
    def loss(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-y * (x @ weights))

    x, y = torch.randn(5, 3), torch.randn(5).sign()
    return tf.vmap(tf.hessian(loss), in_dims=(None, 0, 0))(torch.randn(3), x, y)


@program
def hessian_of_each_examples_network(tf: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))

    def loss(params: Any, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(tf.functional_call(model, params, (x,)), label)

    return tf.vmap(tf.hessian(loss), in_dims=(None, 0, 0))(
        detached(model), torch.randn(3, 2), torch.randint(2, (3,))
    )


@program
def attribution_to_the_inputs(tf: Any) -> Any:
    """Saliency, input times gradient, integrated gradients, and the mean over noisy copies, of each
    example.
    """
    model = digit_network()
    params = detached(model)
    images, labels = digits(3)

    def score(image: Tensor, label: Tensor) -> Tensor:
        return tf.functional_call(model, params, (image[None],))[0].gather(0, label[None])[0]

    def integrated(image: Tensor, label: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, 5)
        path = tf.vmap(lambda step: tf.grad(score)(step * image, label))(steps)
        return image * path.mean(0)

    noise = 0.1 * torch.randn(4, *images.shape[1:])
    smooth = tf.vmap(
        tf.vmap(lambda image, label, noise: tf.grad(score)(image + noise, label), (None, None, 0)),
        (0, 0, None),
    )
    saliency = tf.vmap(tf.grad(score))(images, labels)
    return (
        saliency,
        images * saliency,
        tf.vmap(integrated)(images, labels),
        smooth(images, labels, noise).mean(1),
    )


# -- Jacobians and Hessians ----------------------------------------------------------------------------------


def predict(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias).tanh()


def layer(width: int = 4, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(outputs, width), torch.randn(outputs), torch.randn(width)


@program
def jacobian_row_by_row(tf: Any) -> Any:
    weight, bias, x = layer()
    _, pull = tf.vjp(lambda x: predict(weight, bias, x), x)
    (rows,) = tf.vmap(pull)(torch.eye(3))
    columns = tf.vmap(lambda v: tf.jvp(lambda x: predict(weight, bias, x), (x,), (v,))[1])(torch.eye(4))
    return rows, columns


@program
def jacobians(tf: Any) -> Any:
    weight, bias, x = layer()
    return (
        tf.jacrev(predict, argnums=2)(weight, bias, x),
        tf.jacfwd(predict, argnums=2)(weight, bias, x),
        tf.jacrev(predict, argnums=(0, 1))(weight, bias, x),
        tf.jacfwd(predict, argnums=(0, 1))(weight, bias, x),
        tf.jacrev(predict, argnums=2, chunk_size=2)(weight, bias, x),
        tf.jacrev(lambda x: (x.sin(), {"norm": x.norm()}), has_aux=False)(x),
        tf.jacrev(lambda x: (x.sin(), x.cos()), has_aux=True)(x),
        tf.jacfwd(lambda x: (x.sin(), x.cos()), has_aux=True)(x),
    )


@program
def compositions_for_second_derivatives(tf: Any) -> Any:
    weight, bias, x = layer()
    return [
        tf.hessian(predict, argnums=2)(weight, bias, x),
        *(
            outer(inner(predict, argnums=2), argnums=2)(weight, bias, x)
            for outer in (tf.jacfwd, tf.jacrev)
            for inner in (tf.jacfwd, tf.jacrev)
        ),
        tf.hessian(lambda weight, bias: predict(weight, bias, x).sum(), argnums=(0, 1))(weight, bias),
        tf.jacfwd(tf.jacfwd(tf.jacrev(torch.sin)))(torch.randn(2)),
    ]


@program
def batched_jacobians(tf: Any) -> Any:
    weight, bias, _ = layer()
    x = torch.randn(6, 4)
    return (
        tf.vmap(tf.jacrev(predict, argnums=2), in_dims=(None, None, 0))(weight, bias, x),
        tf.vmap(tf.jacfwd(predict, argnums=2), in_dims=(None, None, 0))(weight, bias, x),
        tf.vmap(tf.hessian(predict, argnums=2), in_dims=(None, None, 0))(weight, bias, x),
        tf.jacrev(lambda x: predict(weight, bias, x).sum(0))(x).movedim(
            1, 0
        ),  # each output row depends on its own example alone
    )


@program
def hessian_vector_products(tf: Any) -> Any:
    def f(x: Tensor) -> Tensor:
        return x.sin().sum() * x.square().sum()

    x, v = torch.randn(8), torch.randn(8)
    forward_over_reverse = tf.jvp(tf.grad(f), (x,), (v,))[1]
    reverse_over_reverse = tf.vjp(tf.grad(f), x)[1](v)[0]
    reverse_over_forward = tf.grad(lambda x: tf.jvp(f, (x,), (v,))[1])(x)
    return (
        forward_over_reverse,
        reverse_over_reverse,
        reverse_over_forward,
        tf.vmap(lambda v: tf.jvp(tf.grad(f), (x,), (v,))[1])(torch.eye(8)),
    )


@program
def laplacian_of_a_network(tf: Any) -> Any:
    """As in physics-informed networks: the residual of a differential equation at each point, and its
    gradient in the weights.
    """
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    params, points = detached(model), torch.randn(4, 2)

    def u(params: Any, point: Tensor) -> Tensor:
        return tf.functional_call(model, params, (point,)).squeeze(-1)

    def residual(params: Any, point: Tensor) -> Tensor:
        return tf.hessian(u, argnums=1)(params, point).trace() + u(params, point)

    def loss(params: Any) -> Tensor:
        return tf.vmap(residual, (None, 0))(params, points).square().mean()

    return tf.vmap(residual, (None, 0))(params, points), tf.grad(loss)(params)


@program
def forces_from_an_energy(tf: Any) -> Any:
    """Lennard-Jones: the force is minus the gradient of the energy; a network is fitted to both."""
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    params, positions = detached(model), 1 + torch.rand(5, 1, 3)

    def energy(r: Tensor) -> Tensor:
        return 4 * ((1 / r) ** 12 - (1 / r) ** 6)

    def modelled(params: Any, position: Tensor) -> Tensor:
        return tf.functional_call(model, params, (position.norm(dim=1, keepdim=True),)).sum()

    true_forces = -tf.vmap(tf.grad(lambda position: energy(position.norm()).sum()))(positions)

    def loss(params: Any) -> Tensor:
        forces = -tf.vmap(tf.grad(modelled, argnums=1), (None, 0))(params, positions)
        return (forces - true_forces).square().mean()

    return true_forces, tf.grad_and_value(loss)(params)


@program
def motion_from_a_lagrangian(tf: Any) -> Any:
    """Euler and Lagrange: accelerations from first, mixed and second derivatives of one function, batched."""
    matrix = torch.randn(2, 2)

    def lagrangian(q: Tensor, v: Tensor) -> Tensor:
        return 0.5 * (v @ (matrix @ matrix.t() + (1 + q.square().sum()) * torch.eye(2)) @ v) - q.cos().sum()

    def acceleration(q: Tensor, v: Tensor) -> Tensor:
        mass = tf.hessian(lagrangian, argnums=1)(q, v)
        mixed = tf.jacrev(tf.grad(lagrangian, argnums=1), argnums=0)(q, v)
        return torch.linalg.solve(mass, tf.grad(lagrangian)(q, v) - mixed @ v)

    return tf.vmap(acceleration)(torch.randn(4, 2), torch.randn(4, 2))


# -- ensembles -----------------------------------------------------------------------------------------------


def ensemble(tf: Any, members: int = 3) -> tuple[Any, Any, Callable[..., Tensor]]:
    models = [
        nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).eval()
        for _ in range(members)
    ]
    params, buffers = tf.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    return params, buffers, lambda params, buffers, x: tf.functional_call(base, (params, buffers), (x,))


@program
def ensemble_with_different_minibatches(tf: Any) -> Any:
    params, buffers, call = ensemble(tf)
    return tf.vmap(call)(params, buffers, torch.randn(3, 5, 1, 4, 4))


@program
def ensemble_with_the_same_minibatch(tf: Any) -> Any:
    params, buffers, call = ensemble(tf)
    return tf.vmap(call, in_dims=(0, 0, None))(params, buffers, torch.randn(5, 1, 4, 4))


@program
def ensemble_of_convolutions(tf: Any) -> Any:
    models = [digit_network() for _ in range(3)]
    params, buffers = tf.stack_module_state(models)
    images, labels = digits(4)

    def loss(params: Any, buffers: Any, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(tf.functional_call(models[0], (params, buffers), (images,)), labels)

    return tf.vmap(tf.grad(loss), in_dims=(0, 0, None, None))(params, buffers, images, labels)


@program
def ensemble_of_per_sample_gradients(tf: Any) -> Any:
    models = [mlp((4, 5, 3)) for _ in range(2)]
    params, buffers = tf.stack_module_state(models)

    def loss(params: Any, buffers: Any, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(tf.functional_call(models[0], (params, buffers), (x,)), label)

    of_all = tf.vmap(tf.vmap(tf.grad(loss), (None, None, 0, 0)), (0, 0, None, None))
    return of_all(params, buffers, torch.randn(6, 4), torch.randint(3, (6,)))


@program
def many_networks_trained_at_once(tf: Any) -> Any:
    """Spirals: several steps of gradient descent, each member with its own start and its own learning
    rate.
    """
    models = [mlp((2, 6, 6, 2)) for _ in range(4)]
    params, _ = tf.stack_module_state(models)
    points, labels = torch.randn(10, 2), torch.randint(2, (10,))

    def step(params: Any, rate: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return F.cross_entropy(tf.functional_call(models[0], params, (points,)), labels)

        gradient, value = tf.grad_and_value(loss)(params)
        return {name: params[name] - rate * gradient[name] for name in params}, value

    values = []
    params = {name: value.detach() for name, value in params.items()}
    for _ in range(3):
        params, value = tf.vmap(step)(params, torch.tensor([0.1, 0.2, 0.3, 0.4]))
        values.append(value)
    return params, values


@program
def ensemble_with_dropout(tf: Any) -> Any:
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)) for _ in range(2)]
    params, buffers = tf.stack_module_state(models)

    def call(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return tf.functional_call(models[0], (params, buffers), (x,))

    return tf.vmap(call, (0, 0, None), randomness="same")(params, buffers, torch.randn(3, 4))


# -- learning to learn ---------------------------------------------------------------------------------------


def sinusoid(params: list[Tensor], x: Tensor) -> Tensor:
    x = F.relu(F.linear(x, params[0], params[1]))
    return F.linear(F.relu(F.linear(x, params[2], params[3])), params[4], params[5])


def sinusoid_params(width: int = 8) -> list[Tensor]:
    shapes = [(width, 1), (width,), (width, width), (width,), (1, width), (1,)]
    return [torch.randn(shape) / math.sqrt(shape[-1]) for shape in shapes]


@program
def maml_on_sinusoids(tf: Any) -> Any:
    """Each task's inner steps inside vmap; the outer gradient goes through them."""

    def adapted_loss(params: Any, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Tensor:
        for _ in range(2):
            gradients = tf.grad(lambda params: F.mse_loss(sinusoid(params, x), y))(params)
            params = [p - 0.05 * g for p, g in zip(params, gradients, strict=True)]
        return F.mse_loss(sinusoid(params, x_test), y_test)

    amplitude, phase = torch.rand(4, 1, 1), torch.rand(4, 1, 1)
    x, x_test = torch.randn(4, 5, 1), torch.randn(4, 5, 1)
    y, y_test = (amplitude * torch.sin(values + phase) for values in (x, x_test))

    def meta_loss(params: Any) -> Tensor:
        return tf.vmap(adapted_loss, in_dims=(None, 0, 0, 0, 0))(params, x, y, x_test, y_test).mean()

    return tf.grad_and_value(meta_loss)(sinusoid_params())


@program
def maml_with_a_module(tf: Any) -> Any:
    """Few-shot classification by a convolutional network: vmap over the tasks, grad inside, grad outside."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )

    def task(
        params: Any, support: Tensor, wanted: Tensor, query: Tensor, wanted_query: Tensor
    ) -> tuple[Tensor, Tensor]:
        def loss(params: Any) -> Tensor:
            return F.cross_entropy(tf.functional_call(model, params, (support,)), wanted)

        new = params
        for _ in range(2):
            gradient = tf.grad(loss)(new)
            new = {name: value - 0.1 * gradient[name] for name, value in new.items()}
        logits = tf.functional_call(model, new, (query,))
        return F.cross_entropy(logits, wanted_query), (logits.argmax(1) == wanted_query).sum()

    support, query = torch.randn(3, 4, 1, 6, 6), torch.randn(3, 2, 1, 6, 6)
    wanted, wanted_query = torch.randint(3, (3, 4)), torch.randint(3, (3, 2))

    def meta_loss(params: Any) -> tuple[Tensor, Tensor]:
        losses, right = tf.vmap(task, (None, 0, 0, 0, 0))(params, support, wanted, query, wanted_query)
        return losses.mean(), right

    return tf.grad_and_value(meta_loss, has_aux=True)(detached(model))


@program
def gradient_in_the_learning_rate(tf: Any) -> Any:
    x, y = torch.randn(6, 3), torch.randn(6)

    def after_training(log_rate: Tensor, weights: Tensor) -> Tensor:
        for _ in range(3):
            weights = weights - log_rate.exp() * tf.grad(lambda w: F.mse_loss(x @ w, y))(weights)
        return F.mse_loss(x @ weights, y)

    rates = torch.tensor([-3.0, -2.0])
    return tf.vmap(tf.grad(after_training), (0, None))(rates, torch.randn(3)), tf.grad(
        tf.grad(after_training)
    )(rates[0], torch.randn(3))


# -- neural tangent kernels ----------------------------------------------------------------------------------


def kernel_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def kernel_by_jacobians(
    tf: Any, model: nn.Module, params: Any, x1: Tensor, x2: Tensor, subscripts: str
) -> Tensor:
    def of_one(params: Any, x: Tensor) -> Tensor:
        return tf.functional_call(model, params, (x.unsqueeze(0),)).squeeze(0)

    first = tf.vmap(tf.jacrev(of_one), (None, 0))(params, x1)
    second = tf.vmap(tf.jacrev(of_one), (None, 0))(params, x2)
    products = [torch.einsum(subscripts, first[name].flatten(2), second[name].flatten(2)) for name in first]
    return torch.stack(products).sum(0)


def kernel_by_products(tf: Any, model: nn.Module, params: Any, x1: Tensor, x2: Tensor) -> Tensor:
    def of_one(params: Any, x: Tensor) -> Tensor:
        return tf.functional_call(model, params, (x.unsqueeze(0),)).squeeze(0)

    def entry(x1: Tensor, x2: Tensor) -> Tensor:
        output, pull = tf.vjp(lambda params: of_one(params, x1), params)

        def through(cotangent: Tensor) -> Tensor:
            return tf.jvp(lambda params: of_one(params, x2), (params,), pull(cotangent))[1]

        return tf.vmap(through)(torch.eye(output.numel()))

    return tf.vmap(tf.vmap(entry, (None, 0)), (0, None))(x1, x2)


@program
def tangent_kernel_by_jacobians(tf: Any) -> Any:
    model = kernel_network()
    x1, x2 = torch.randn(4, 1, 6, 6), torch.randn(3, 1, 6, 6)
    return [
        kernel_by_jacobians(tf, model, detached(model), x1, x2, subscripts)
        for subscripts in ("Naf,Mbf->NMab", "Naf,Maf->NM", "Naf,Maf->NMa")
    ]


@program
def tangent_kernel_by_products(tf: Any) -> Any:
    model = kernel_network()
    return kernel_by_products(tf, model, detached(model), torch.randn(4, 1, 6, 6), torch.randn(3, 1, 6, 6))


# -- modules as functions ------------------------------------------------------------------------------------


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.second(self.first(x).relu()) + self.shift


@program
def tied_weights_and_buffers(tf: Any) -> Any:
    model, x = TiedPair(), torch.randn(2, 3)
    params, buffers = detached(model), dict(model.named_buffers())

    def loss(params: Any, buffers: Any) -> Tensor:
        return tf.functional_call(model, (params, buffers), (x,), {"scale": 2.0}).square().sum()

    untied = {**params, "second.weight": torch.randn(3, 3)}
    return tf.grad(loss)(params, buffers), tf.functional_call(model, untied, (x,), tie_weights=False)


# -- the import replaced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_worked_example_equals_torch_func(name: str) -> None:
    torch.manual_seed(0)
    theirs = PROGRAMS[name](torch.func)
    torch.manual_seed(0)
    result = PROGRAMS[name](ours)
    torch.testing.assert_close(result, theirs, rtol=1e-9, atol=1e-11)


# -- what they mean ------------------------------------------------------------------------------------------


def test_worked_example_sine() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(ours.vmap(ours.grad(torch.sin))(x), x.cos())
    torch.testing.assert_close(ours.vmap(ours.grad(ours.grad(torch.sin)))(x), -x.sin())
    torch.testing.assert_close(ours.jvp(torch.sin, (x,), (torch.ones(5),)), (x.sin(), x.cos()))
    torch.testing.assert_close(ours.hessian(lambda x: x.sin().sum())(x), torch.diag(-x.sin()))


def test_worked_example_linear_regression() -> None:
    weights, x, y = torch.randn(3), torch.randn(8, 3), torch.randn(8)
    result = ours.vmap(ours.grad(lambda w, x, y: (x.dot(w) - y) ** 2), (None, 0, 0))(weights, x, y)
    torch.testing.assert_close(result, 2 * (x @ weights - y)[:, None] * x)


def test_worked_example_cnn_equals_the_loop() -> None:
    model = digit_network()
    images, labels = digits(6)
    result = ours.vmap(ours.grad(image_loss(ours, model)), (None, None, 0, 0))(
        detached(model), {}, images, labels
    )
    for sample in range(6):
        loss = F.cross_entropy(model(images[[sample]]), labels[[sample]])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(
            [value[sample] for value in result.values()], list(expected), rtol=1e-10, atol=1e-12
        )


def test_worked_example_logistic_regression_hessian() -> None:
    weights, x, y = torch.randn(3), torch.randn(5, 3), torch.randn(5).sign()
    result = ours.vmap(ours.hessian(lambda w, x, y: F.softplus(-y * (x @ w))), (None, 0, 0))(weights, x, y)
    share = torch.sigmoid(x @ weights)
    torch.testing.assert_close(result, (share * (1 - share))[:, None, None] * x[:, :, None] * x[:, None, :])


def test_worked_example_tangent_kernel() -> None:
    model = kernel_network()
    x1, x2 = torch.randn(4, 1, 6, 6), torch.randn(3, 1, 6, 6)
    by_jacobians = kernel_by_jacobians(ours, model, detached(model), x1, x2, "Naf,Mbf->NMab")
    torch.testing.assert_close(by_jacobians, kernel_by_products(ours, model, detached(model), x1, x2))


def test_worked_example_meta_gradient() -> None:
    params, x, y = sinusoid_params(), torch.randn(5, 1), torch.randn(5, 1)

    def after_one_step(params: list[Tensor], gradients: Any) -> Tensor:
        return F.mse_loss(sinusoid([p - 0.05 * g for p, g in zip(params, gradients, strict=True)], x), y)

    def meta_loss(params: list[Tensor]) -> Tensor:
        return after_one_step(params, ours.grad(lambda params: F.mse_loss(sinusoid(params, x), y))(params))

    leaves = [p.clone().requires_grad_() for p in params]
    inner = torch.autograd.grad(F.mse_loss(sinusoid(leaves, x), y), leaves, create_graph=True)
    expected = torch.autograd.grad(after_one_step(leaves, inner), leaves)
    torch.testing.assert_close(ours.grad(meta_loss)(params), list(expected))


def test_worked_example_ensemble() -> None:
    models = [mlp((4, 5, 3)) for _ in range(3)]
    params, buffers = ours.stack_module_state(models)
    assert all(value.requires_grad and value.is_leaf for value in params.values())
    x = torch.randn(6, 4)
    result = ours.vmap(lambda params, buffers: ours.functional_call(models[0], (params, buffers), (x,)))(
        params, buffers
    )
    torch.testing.assert_close(result, torch.stack([model(x) for model in models]))


def test_worked_example_integrated_gradients() -> None:
    """Completeness: attributions sum to what the score rises by from the zero image, as the steps get
    finer.
    """
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(3, 4)
    steps = (torch.arange(2000) + 0.5) / 2000
    path = ours.vmap(
        ours.vmap(lambda x, step: ours.grad(lambda x: model(x).sum())(step * x), (None, 0)), (0, None)
    )(x, steps)
    torch.testing.assert_close(
        (x * path.mean(1)).sum(1),
        (model(x) - model(torch.zeros(4))).squeeze(1).detach(),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "f",
    [lambda x: 2 * x.sum(), lambda x: torch.zeros(()), lambda x: x.detach().sum()],
    ids=["linear", "constant", "cut"],
)
def test_transform_results_are_plain_tensors(f: Callable[[Tensor], Tensor]) -> None:
    """Zeros for what does not depend on the input, too, are no values of a transform that has ended."""
    x = torch.randn(3)
    for value in (
        *ours.jvp(f, (x,), (x,)),
        *ours.jvp(ours.grad(f), (x,), (x,)),
        ours.grad(f)(x),
        ours.hessian(f)(x),
        ours.jacrev(f)(x),
    ):
        assert type(value) is Tensor
