"""Collectives over a named sample axis, against explicit batched computations differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgrad.engine.transforms import (
    all_gather,
    axis_index,
    axis_size,
    checkpoint,
    custom_vjp,
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    pmax,
    pmean,
    pmin,
    psum,
    vjp,
    vmap,
)
from psgrad.errors import TransformError
from tests.engine.transforms.nests import agree

pytestmark = pytest.mark.usefixtures("float64")


# Each collective in a loss of one sample [3], and the same for all samples [n, 3].
COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "psum": (lambda x: x * psum(x.sin(), "s"), lambda x: x * x.sin().sum(0)),
    "pmean": (lambda x: x * pmean(x.sin(), "s"), lambda x: x * x.sin().mean(0)),
    "pmax": (lambda x: x * pmax(x.sin(), "s"), lambda x: x * x.sin().amax(0)),
    "pmin": (lambda x: x * pmin(x.sin(), "s"), lambda x: x * x.sin().amin(0)),
    "all_gather": (
        lambda x: (all_gather(x.sin(), "s") @ x).exp().sum() * x,
        lambda x: (x @ x.sin().T).exp().sum(1, keepdim=True) * x,
    ),
    "axis_index": (
        lambda x: all_gather(x, "s").index_select(0, (axis_index("s")[None] + 4) % 5)[0] * x,
        lambda x: x.roll(1, 0) * x,
    ),
    "axis_size": (lambda x: x * axis_size("s"), lambda x: x * len(x)),
    "of what is shared": (
        lambda x: x * psum(torch.ones(3), "s") + all_gather(torch.ones(3), "s").sum(0),
        lambda x: x * len(x) + len(x),
    ),
    "of collectives": (
        lambda x: psum(x * pmean(x, "s"), "s").cos() * x,
        lambda x: (x * x.mean(0)).sum(0).cos() * x,
    ),
    "in a checkpoint": (
        lambda x: checkpoint(lambda x: x * psum(x.sin(), "s"), x),
        lambda x: x * x.sin().sum(0),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_named_axis_values_and_derivatives(name: str) -> None:
    one, all_of_them = COLLECTIVES[name]
    x, along = torch.randn(5, 3), torch.randn(5, 3)

    def total(x: Tensor) -> Tensor:
        return (all_of_them(x) ** 2).sum()

    f = vmap(one, axis_name="s")
    agree(f(x), all_of_them(x).expand(5, 3))
    gradient = torch.func.grad(total)(x)
    agree(grad(lambda x: (f(x) ** 2).sum())(x), gradient)
    # inside vmap: of the sum of all samples' losses, in what one sample holds
    agree(vmap(grad(lambda x: (one(x) ** 2).sum()), axis_name="s")(x), gradient)
    tangent = torch.func.jvp(all_of_them, (x,), (along,))[1]
    agree(jvp(f, (x,), (along,))[1], tangent)
    agree(vmap(lambda x, t: jvp(one, (x,), (t,))[1], axis_name="s")(x, along), tangent)
    if name != "in a checkpoint":
        second = torch.func.hessian(total)(x)
        for outer in (jacrev, jacfwd):
            for inner in (jacrev, jacfwd):
                agree(outer(inner(lambda x: (f(x) ** 2).sum()))(x), second)
        hvp = torch.func.jvp(torch.func.grad(total), (x,), (along,))[1]
        agree(
            vmap(lambda x, t: jvp(grad(lambda x: (one(x) ** 2).sum()), (x,), (t,))[1], axis_name="s")(
                x, along
            ),
            hvp,
        )
        agree(
            grad(lambda x: (vmap(grad(lambda x: (one(x) ** 2).sum()), axis_name="s")(x) * along).sum())(x),
            hvp,
        )


def test_named_axis_pytrees_and_ties() -> None:
    x = torch.tensor([1.0, 3.0, 3.0])
    total = vmap(lambda x: psum({"a": x, "b": [x * 2]}, "s"), axis_name="s")(x)
    agree(total, {"a": torch.full((3,), 7.0), "b": [torch.full((3,), 14.0)]})
    agree(grad(lambda x: vmap(lambda x: pmax(x, "s"), axis_name="s")(x)[0])(x), torch.tensor([0.0, 0.5, 0.5]))


# -- losses that cross samples -------------------------------------------------------------------------------


def test_named_axis_contrastive_loss() -> None:
    n, temperature = 6, 0.2
    images, texts = torch.randn(n, 5), torch.randn(n, 4)
    params = {"image": torch.randn(5, 3), "text": torch.randn(4, 3)}

    def info_nce(params: dict[str, Tensor], image: Tensor, text: Tensor) -> Tensor:
        query, key = F.normalize(image @ params["image"], dim=0), F.normalize(text @ params["text"], dim=0)
        logits = all_gather(key, "batch") @ query / temperature
        return F.cross_entropy(logits[None], axis_index("batch")[None])

    def explicit(params: dict[str, Tensor]) -> Tensor:
        query, key = F.normalize(images @ params["image"], dim=1), F.normalize(texts @ params["text"], dim=1)
        return F.cross_entropy(query @ key.T / temperature, torch.arange(n), reduction="none")

    mapped = vmap(info_nce, (None, 0, 0), axis_name="batch")
    agree(mapped(params, images, texts), explicit(params))
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = dict(
        zip(params, torch.autograd.grad(explicit(leaves).sum(), list(leaves.values())), strict=True)
    )
    agree(grad(lambda p: mapped(p, images, texts).sum())(params), expected)
    agree(jacrev(lambda p: mapped(p, images, texts))(params), torch.func.jacrev(explicit)(params))

    per_sample = vmap(grad(info_nce), (None, 0, 0), axis_name="batch")(params, images, texts)
    agree({name: g.sum(0) for name, g in per_sample.items()}, expected)
    own = {name: p.expand(n, *p.shape).clone().requires_grad_() for name, p in params.items()}
    query = F.normalize(torch.einsum("ni,nij->nj", images, own["image"]), dim=1)
    key = F.normalize(torch.einsum("ni,nij->nj", texts, own["text"]), dim=1)
    loss = F.cross_entropy(query @ key.T / temperature, torch.arange(n), reduction="sum")
    agree(per_sample, dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True)))


class BatchNormByName(nn.Module):
    """Statistics over the samples of the axis, said out loud."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        mean = pmean(x, "batch")
        variance = pmean((x - mean) ** 2, "batch")
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


def test_named_axis_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 6), BatchNormByName(6), nn.Tanh(), nn.Linear(6, 1))
    reference = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).train()
    reference.load_state_dict(model.state_dict(), strict=False)
    x, params = torch.randn(8, 4), {name: p.detach() for name, p in model.named_parameters()}
    mapped = vmap(lambda p, x: functional_call(model, p, (x,)).square().sum(), (None, 0), axis_name="batch")
    agree(mapped(params, x), reference(x).square().sum(1).detach())
    expected = torch.autograd.grad(reference(x).square().sum(), list(reference.parameters()))
    agree(list(grad(lambda p: mapped(p, x).sum())(params).values()), list(expected))


# -- nests ---------------------------------------------------------------------------------------------------


def test_named_axis_two_names() -> None:
    a = torch.randn(2, 4, 3)

    def one(x: Tensor) -> Tensor:
        gathered = psum(all_gather(x.exp(), "outer") ** 2, "inner").sum(0)
        return (
            psum(x, "outer") * pmean(x.sin(), "inner")
            + pmax(x, "outer") * all_gather(x, "inner").cos().sum(0)
            + gathered
        )

    def explicit(a: Tensor) -> Tensor:
        gathered = (a.exp() ** 2).sum((0, 1))
        return a.sum(0) * a.sin().mean(1, keepdim=True) + a.amax(0) * a.cos().sum(1, keepdim=True) + gathered

    def loss(x: Tensor) -> Tensor:
        return one(x).square().sum()

    both = vmap(vmap(one, axis_name="inner"), axis_name="outer")
    agree(both(a), explicit(a))
    agree(
        vmap(vmap(one, axis_name="outer"), axis_name="inner")(a.transpose(0, 1)), explicit(a).transpose(0, 1)
    )
    expected = torch.func.grad(lambda a: explicit(a).square().sum())(a)
    agree(grad(lambda a: both(a).square().sum())(a), expected)
    agree(vmap(vmap(grad(loss), axis_name="inner"), axis_name="outer")(a), expected)
    agree(vmap(grad(lambda x: vmap(loss, axis_name="inner")(x).sum()), axis_name="outer")(a), expected)
    tangent = torch.func.jvp(explicit, (a,), (a.cos(),))[1]
    agree(jvp(both, (a,), (a.cos(),))[1], tangent)
    agree(
        vmap(lambda x: jvp(vmap(one, axis_name="inner"), (x,), (x.cos(),))[1], axis_name="outer")(a), tangent
    )


def test_named_axis_repeated_name_means_innermost() -> None:
    a = torch.randn(2, 4)
    agree(
        vmap(vmap(lambda x: psum(x, "s"), axis_name="s"), axis_name="s")(a),
        a.sum(1, keepdim=True).expand(2, 4),
    )


def test_named_axis_custom_vjp() -> None:
    f = custom_vjp(lambda x: x * pmean(x, "s"))
    f.defvjp(lambda x: (x * pmean(x, "s"), None), lambda residuals, g: (psum(g, "s") * 7,))
    x = torch.randn(5)
    agree(grad(lambda x: vmap(f, axis_name="s")(x).sum())(x), torch.full((5,), 35.0))
    agree(vmap(grad(f), axis_name="s")(x), torch.full((5,), 35.0))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "no axis at all": (lambda x: psum(x, "s"), "no axis named 's'.*\n.*there is none"),
    "another name": (
        lambda x: vmap(lambda x: vmap(lambda x: pmean(x, "t"), axis_name="r")(x), axis_name="s")(x),
        "in scope: 'r', 's'",
    ),
    "chunks": (
        lambda x: vmap(lambda x: psum(x, "s"), axis_name="s", chunk_size=2)(x),
        "has to run in chunks",
    ),
    "a split batch": (
        lambda x: vmap(lambda x: psum(x, "s") if x.sum() > 0 else x, axis_name="s")(x),
        "has to run sample by sample",
    ),
    "no tensor": (lambda x: vmap(lambda x: psum(3.0, "s") * x, axis_name="s")(x), "was given a float"),
    "after its end": (lambda x: ways_back(x)[0](torch.ones(3)), "after its vmap has ended"),
}


def ways_back(x: Tensor) -> list[Any]:
    result: list[Any] = []
    vmap(lambda x: result.append(vjp(lambda x: psum(x, "s"), x)[1]) or x, axis_name="s")(x)
    return result


@pytest.mark.parametrize("refused", REFUSED)
def test_named_axis_refused(refused: str) -> None:
    program, words = REFUSED[refused]
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], [1.0, 1.0, 1.0]])
    with pytest.raises(TransformError, match=words):
        program(x)


def test_named_axis_one_chunk_and_no_samples() -> None:
    x = torch.randn(3, 2)
    agree(vmap(lambda x: psum(x, "s"), axis_name="s", chunk_size=3)(x), x.sum(0).expand(3, 2))
    assert vmap(lambda x: psum(x, "s"), axis_name="s")(x[:0]).shape == (0, 2)
    agree(
        hessian(lambda x: vmap(lambda x: psum(x, "s"), axis_name="s")(x).square().sum())(x[:, 0]),
        torch.full((3, 3), 6.0),
    )
