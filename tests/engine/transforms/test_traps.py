"""What goes wrong silently in transforms made of dispatched operators: handled, or refused with the user's
line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from psgrad.engine.transforms import functional_call, grad, vmap
from psgrad.engine.transforms.rules import registry
from psgrad.errors import TransformError, UnsupportedOperatorError

ROOT = Path(__file__).parents[3]


def refusal(program: Callable[[], Any]) -> str:
    """The message of the refusal; it names a line of this file."""
    with pytest.raises(TransformError) as caught:
        program()
    message = str(caught.value)
    assert re.search(r"test_traps\.py:\d+", message), message
    return message


# -- a plain tensor that a traced value is written to --------------------------------------------------------

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda plain, x: plain.add_(x),
    "copy_": lambda plain, x: plain.copy_(x),
    "[0] =": lambda plain, x: plain.__setitem__(0, x[0]),
    "[:] =": lambda plain, x: plain.__setitem__(slice(None), x),
    "[mask] =": lambda plain, x: plain.__setitem__(torch.tensor([True, True, True]), x),
    "index_put_": lambda plain, x: plain.index_put_((torch.tensor([0]),), x[:1]),
    "through a view": lambda plain, x: plain.view(3, 1)[1].mul_(x[0]),
    "out=": lambda plain, x: torch.mul(x, 2.0, out=plain),
    "fill_": lambda plain, x: plain.fill_(x[0]),
    "masked_fill_": lambda plain, x: plain.masked_fill_(torch.tensor([True, False, True]), x[0]),
    "+=": lambda plain, x: plain.__iadd__(x),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap(grad)"])
def test_write_into_closure_tensor_refused(name: str, transform: str) -> None:
    captured = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        WRITES[name](captured, x)
        return (captured * x).sum()

    wrapped = {"grad": grad(f), "vmap": vmap(f), "vmap(grad)": vmap(grad(f))}[transform]
    x = torch.ones(3) if transform == "grad" else torch.ones(2, 3)
    assert "writes in place" in refusal(lambda: wrapped(x))
    assert torch.equal(captured, torch.zeros(3))


def test_write_into_closure_tensor_between_uses_refused() -> None:
    captured = torch.ones(3)

    def f(x: Tensor) -> Tensor:
        y = x * captured
        captured.add_(1)
        return y.sum()

    assert "outside the transformed function" in refusal(lambda: grad(f)(torch.ones(3)))
    assert "outside the transformed function" in refusal(
        lambda: grad(lambda m: vmap(f)(m).sum())(torch.ones(2, 3))
    )
    assert torch.equal(captured, torch.ones(3))


def test_write_into_closure_counter() -> None:
    counter = torch.zeros((), dtype=torch.long)

    def f(x: Tensor) -> Tensor:
        counter.add_(1)
        return x.square().sum()

    assert torch.equal(grad(f)(torch.ones(3)), 2 * torch.ones(3))
    assert counter == 1


# -- autograd.Function ---------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The identity, with the gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def test_autograd_function_without_setup_context_refused() -> None:
    def f(x: Tensor) -> Tensor:
        return Reversed.apply(x * 2).sum()

    for program in (
        lambda: grad(f)(torch.ones(3)),
        lambda: vmap(grad(f))(torch.ones(2, 3)),
        lambda: grad(grad(f))(torch.ones(())),
    ):
        assert "Reversed" in refusal(program)
    assert torch.equal(vmap(f)(torch.ones(2, 3)), torch.full((2,), 6.0))


class ReversedWithGrad(Reversed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 1


def test_autograd_function_with_grad_in_forward_refused() -> None:
    with pytest.raises(TransformError):
        grad(lambda x: ReversedWithGrad.apply(x).sum())(torch.ones(3))


class UsesGrad(torch.autograd.Function):
    """A Function of the user's own whose forward calls a transform: nothing of it is in that
    transform's way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return grad(lambda x: x.sin().sum())(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_transform_in_forward_of_autograd_function() -> None:
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(UsesGrad.apply(x).detach(), x.detach().cos())


def test_torch_checkpoint_reentrant_refused() -> None:
    layer = nn.Linear(3, 3)
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def f(params: Any, x: Tensor, reentrant: bool) -> Tensor:
        return checkpoint(
            lambda x: functional_call(layer, params, (x,)).sin(), x, use_reentrant=reentrant
        ).sum()

    message = refusal(lambda: grad(f)(params, torch.ones(2, 3), True))
    assert "CheckpointFunction" in message
    assert "use_reentrant=False" in message
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = torch.autograd.grad(
        functional_call(layer, leaves, (torch.ones(2, 3),)).sin().sum(), list(leaves.values())
    )
    torch.testing.assert_close(list(grad(f)(params, torch.ones(2, 3), False).values()), list(expected))


def test_custom_operator_without_rule_refused() -> None:
    with torch.library._scoped_library("psgrad_tests", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x.numpy() * 2, "CPU")
        assert "psgrad_tests::double" in refusal(
            lambda: grad(lambda x: torch.ops.psgrad_tests.double(x).sum())(torch.ones(3))
        )
        assert "psgrad_tests::double" in refusal(lambda: vmap(torch.ops.psgrad_tests.double)(torch.ones(3)))


# -- layers without a gradient of one sample -----------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_batch_norm_in_training_refused() -> None:
    model = Net().train()
    params = dict(model.named_parameters())
    before = {name: b.clone() for name, b in model.named_buffers() if b.dtype.is_floating_point}

    def loss(params: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],)).sum()

    message = refusal(lambda: vmap(grad(loss), (None, 0))(params, torch.randn(4, 3)))
    assert "BatchNorm in training mode" in message
    assert "body.1 (BatchNorm1d)" in message
    assert "model.eval()" in message
    assert "GroupNorm" in message
    assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in before.items())


def test_batch_norm_over_positions_refused() -> None:
    """Here PyTorch itself has nothing to say: a sample has many values a channel."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    params = dict(model.named_parameters())
    message = refusal(
        lambda: vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).sum()), (None, 0))(
            params, torch.randn(4, 1, 5, 5)
        )
    )
    assert "BatchNorm in training mode" in message
    assert "1 (BatchNorm2d)" in message


def test_group_norm_of_one_value_refused() -> None:
    """PyTorch has one error for this and for BatchNorm of one row; the advice differs."""
    norm = nn.GroupNorm(4, 4)
    message = refusal(lambda: vmap(grad(lambda x: norm(x[None]).sum()))(torch.randn(3, 4)))
    assert "(in the model (GroupNorm)" in message
    assert "GroupNorm of groups that have one value each" in message
    assert "use fewer groups than channels" in message
    assert "BatchNorm" not in message


def test_embedding_scale_grad_by_freq_refused() -> None:
    tokens = torch.tensor([0, 0, 1])
    message = refusal(
        lambda: grad(lambda w: F.embedding(tokens, w, scale_grad_by_freq=True).sum())(torch.randn(3, 2))
    )
    assert "scale_grad_by_freq=False" in message


# -- what depends on one sample's data -----------------------------------------------------------------------


def _branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


DATA_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0]),
    "tolist": lambda x: x * sum(x.tolist()),
    "unique": lambda x: x.unique(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_vmap_data_dependent_operator_refused(name: str) -> None:
    f = DATA_DEPENDENT[name]
    line = inspect.getsourcelines(f)[1]
    with pytest.raises(TransformError) as caught:
        vmap(f)(torch.randn(2, 3))
    named = [int(n) for n in re.findall(r"test_traps\.py:(\d+)", str(caught.value))]
    assert line in named, str(caught.value)


@pytest.mark.parametrize("name", ["item", "float", "tolist", "branch", "mask"])
def test_grad_data_dependent_operator(name: str) -> None:
    f, x = (
        {**DATA_DEPENDENT, "branch": _branch, "mask": lambda x: x[x > 0]}[name],
        torch.tensor([1.5, -0.5, 2.5]),
    )
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), torch.autograd.grad(f(leaf).sum(), leaf)[0])


def test_grad_numpy_refused() -> None:
    assert "NumPy" in refusal(lambda: grad(lambda x: torch.from_numpy(x.numpy()).sum())(torch.ones(3)))


# -- operators without a rule --------------------------------------------------------------------------------


@torch.library.custom_op("psgrad_traps::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("psgrad_traps::odder", mutates_args=())
def odder(x: Tensor) -> Tensor:
    return x.clone()


def test_operator_without_rule_refused() -> None:
    def program() -> Tensor:
        return grad(lambda x: odd(x).sum())(torch.eye(3))

    with pytest.raises(UnsupportedOperatorError) as caught:
        program()
    message = str(caught.value)
    assert "psgrad_traps::odd " in message
    assert f"test_traps.py:{inspect.getsourcelines(program)[1] + 1}" in message
    page = re.search(r"docs/[\w/-]+\.md", message)
    assert page is not None
    assert (ROOT / page[0]).is_file()


def test_operator_without_rule_names_layer() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return odd(x)

    model = nn.Sequential(nn.Linear(3, 3), Odd())
    message = refusal(lambda: vmap(grad(lambda x: model(x).sum()))(torch.randn(2, 3, 3)))
    assert "1 (Odd)" in message


def test_operator_without_rule_inside_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.decomposition_table, torch.ops.psgrad_traps.odder.default, odd)
    message = refusal(lambda: vmap(odder)(torch.ones(2, 3)))
    assert "psgrad_traps::odder " in message
    assert "operator psgrad_traps::odd has no rule" in message


def test_resize_refused() -> None:
    assert "resize" in refusal(lambda: grad(lambda x: (x * 1).resize_(2).sum())(torch.ones(1, 3)))


# -- writes into what an outer transform batches -------------------------------------------------------------


def test_vmap_grad_write_into_batched_closure_value_refused() -> None:
    """An inner gradient may need the old value, and does not follow the tensor that is written to."""

    def written_after_use(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).sum()
        x.mul_(2)
        return y

    message = refusal(
        lambda: vmap(lambda x: grad(lambda w: written_after_use(x, w))(torch.ones(3)))(torch.ones(2, 3))
    )
    assert "from outside the transformed function" in message


def test_vmap_grad_write_into_value_of_batched_closure() -> None:
    def written_after_use(x: Tensor, w: Tensor) -> Tensor:
        z = x * 2
        y = (z * w).sum()
        z.mul_(5)
        noise = torch.zeros_like(x).uniform_()
        scaled = (noise * w).sum()
        noise.zero_()
        return y + z.sum() + scaled - scaled.detach()

    xs = torch.randn(4, 3, dtype=torch.float64)
    torch.manual_seed(0)
    result = vmap(lambda x: grad(lambda w: written_after_use(x, w))(x.cos()), randomness="different")(xs)
    torch.manual_seed(0)
    torch.testing.assert_close(result, xs * 2 + torch.zeros_like(xs).uniform_())
