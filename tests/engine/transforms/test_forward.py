"""jvp, linearize, jacrev, jacfwd, hessian and stack_module_state, held against torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten

from psgrad.engine import transforms
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import hessian, jacfwd, jacrev, jvp, linearize, stack_module_state

W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).cos() * 2
X = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
T = torch.tensor([1.0, -2.0, 0.7], dtype=torch.float64)


def same(one: Any, other: Any) -> None:
    (ours, our_spec), (theirs, their_spec) = tree_flatten(one), tree_flatten(other)
    assert our_spec == their_spec
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def vector(x: Tensor) -> Tensor:
    return torch.tanh(W @ x) * x.sum() + functional.layer_norm(W @ x, (4,))


def number(x: Tensor) -> Tensor:
    return vector(x).square().sum()


def smooth(x: Tensor) -> Tensor:
    return torch.tanh(W @ x) * x.sum() + functional.softmax(W @ x, 0)


def tree(d: dict[str, Tensor], y: Tensor) -> dict[str, Any]:
    return {"a": d["w"] @ y, "b": (torch.sin(d["c"]) * y, d["w"].sum())}


def writes(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = x[1]
    z = y.view(3, 1)
    z.mul_(x[0])
    y.relu_()
    return y.sum() + z.square().sum()


D = {"w": W, "c": T}

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "jvp with aux": lambda tf: tf.jvp(lambda x: (vector(x), x * 2), (X,), (T,), has_aux=True),
    "jvp under no_grad": lambda tf: tf.jvp(torch.no_grad()(vector), (X,), (T,)),
    "jvp of writes": lambda tf: tf.jvp(writes, (X,), (T,)),
    "jvp of jvp": lambda tf: tf.jvp(lambda x: tf.jvp(smooth, (x,), (T,))[1], (X,), (T,)),
    "jvp of grad": lambda tf: tf.jvp(tf.grad(number), (X,), (T,)),
    "grad of jvp": lambda tf: tf.grad(lambda x: tf.jvp(writes, (x,), (T,))[1])(X),
    "jvp with perturbations apart": lambda tf: tf.jvp(
        lambda x: x * tf.jvp(lambda y: x * y, (X,), (T,))[1], (X,), (T,)
    ),
    "vmap of jvp over tangents": lambda tf: tf.vmap(lambda t: tf.jvp(vector, (X,), (t,))[1])(W),
    "linearize of two": lambda tf: tf.linearize(tree, D, X)[1]({"w": W.sin(), "c": X}, T),
    "jacrev by threes": lambda tf: tf.jacrev(tree, (0, 1), chunk_size=3)(D, X),
    "jacrev of a tree in a tree": lambda tf: tf.jacrev(tree)(D, X),
    "jacfwd of a tree in a tree": lambda tf: tf.jacfwd(tree)(D, X),
    "jacfwd of a constant": lambda tf: tf.jacfwd(lambda x: W)(X),
    "jacrev(jacfwd)": lambda tf: tf.jacrev(tf.jacfwd(smooth))(X),
    "jacfwd(jacfwd)": lambda tf: tf.jacfwd(tf.jacfwd(smooth))(X),
    "vmap(jacrev)": lambda tf: tf.vmap(tf.jacrev(vector))(W),
    "vmap(jacfwd)": lambda tf: tf.vmap(tf.jacfwd(vector))(W),
    "third": lambda tf: tf.jacfwd(tf.hessian(lambda x: x.prod().sin()))(X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_forward_mode_equals_torch_func(name: str) -> None:
    same(PROGRAMS[name](transforms), PROGRAMS[name](torch.func))


def test_forward_over_forward_layer_norm() -> None:
    """torch.func's are wrong there (its derivative of a layer norm's statistics has none of its own): reverse
    over reverse is not.
    """
    same(jacfwd(jacfwd(number))(X), torch.func.jacrev(torch.func.jacrev(number))(X))
    same(jacrev(jacfwd(number))(X), torch.func.jacrev(torch.func.jacrev(number))(X))


@pytest.mark.parametrize("heads_of_keys", [2, 4])
def test_fused_attention_tangents_and_second_derivatives(heads_of_keys: int) -> None:
    torch.manual_seed(0)
    q, k = (
        torch.randn(2, 4, 3, 2, dtype=torch.float64),
        torch.randn(2, heads_of_keys, 3, 2, dtype=torch.float64),
    )
    mask = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, k.cos(), mask, enable_gqa=heads_of_keys != 4
        ).square()

    def expected(tf: Any) -> list[Any]:
        return [
            tf.jvp(attend, (q, k), (q.cos(), k.sin())),
            tf.grad(lambda q, k: tf.grad(lambda q, k: attend(q, k).sum(), 1)(q, k).square().sum(), (0, 1))(
                q, k
            ),
        ]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = expected(torch.func)
    same(expected(transforms), theirs)
    value, push = linearize(attend, q, k)
    same((value, push(q.cos(), k.sin())), theirs[0])


def test_linearize_runs_the_function_once() -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return vector(x)

    _, push = linearize(counted, X)
    first, second = push(T), push(X)
    same((first, second), (jvp(vector, (X,), (T,))[1], jvp(vector, (X,), (X,))[1]))
    assert len(runs) == 1


def test_forward_mode_complex_tangents() -> None:
    z, t = torch.complex(X, T), torch.complex(T, X)
    for function in (
        torch.sin,
        lambda z: z.conj() * z,
        torch.abs,
        lambda z: torch.view_as_real(z),
        lambda z: (z**3).real,
        lambda z: z / (1 + z * z),
    ):
        same(jvp(function, (z,), (t,)), torch.func.jvp(function, (z,), (t,)))


def test_stack_module_state() -> None:
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double() for _ in range(4)]
    for ours, theirs in zip(stack_module_state(models), torch.func.stack_module_state(models), strict=True):
        same(ours, theirs)
        assert all(
            ours[name].requires_grad == theirs[name].requires_grad and ours[name].is_leaf for name in theirs
        )


def test_forward_mode_memory_format_of_tangents() -> None:
    """A view of a value need not be one of its tangent."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    t = torch.randn(4, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    same(jvp(lambda x: x.view(6, 4).unsqueeze(0).squeeze(0), (x,), (t,))[1], t.reshape(6, 4))


def test_per_sample_gradients_of_loss_with_derivatives() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        def output(x: Tensor) -> Tensor:
            return transforms.functional_call(model, params, (x,))

        along = jvp(output, (x,), (x.sin(),))[1]
        curvature = hessian(lambda x: output(x).sum())(x)
        return along.square().sum() + jacfwd(output)(x).square().sum() + curvature.square().sum()

    def by_others(params: dict[str, Tensor], x: Tensor) -> Tensor:
        """The orders of derivation in which torch.func's are right (differences of values say so): not
        `jacfwd`, not `jacrev(jacrev)`.
        """

        def output(x: Tensor) -> Tensor:
            return torch.func.functional_call(model, params, (x,))

        jacobian = torch.func.jacrev(output)(x)
        curvature = torch.func.hessian(lambda x: output(x).sum())(x)
        return (jacobian @ x.sin()).square().sum() + jacobian.square().sum() + curvature.square().sum()

    result = per_sample_gradients(loss, params, W)
    expected = [torch.func.grad(by_others)(params, x) for x in W]
    for name, gradient in result.materialise().items():
        torch.testing.assert_close(
            gradient, torch.stack([row[name] for row in expected]), rtol=1e-9, atol=1e-10
        )
    squares = torch.stack([torch.stack([g.square().sum() for g in row.values()]).sum() for row in expected])
    torch.testing.assert_close(result.square_norms(), squares)
