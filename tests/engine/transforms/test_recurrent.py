"""Recurrent layers: every option against PyTorch's own layers, packed sequences, and what becomes of the
recurrent weight.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.gradients.deferral import DeferredGradient
from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.gradients.terms import Product
from psgrad.engine.transforms import functional_call, grad, hessian, jvp, vmap
from psgrad.errors import TransformError

LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "lstm-projected": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "gru": nn.GRU,
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
INPUTS, HIDDEN, TIMES, B = 3, 4, 5, 3

each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def total(results: Any) -> Tensor:
    """One number that depends on each entry of each result, and on its place."""
    leaves = [leaf for leaf in tree_flatten(results)[0] if leaf.is_floating_point()]
    return sum((leaf * torch.linspace(0.5, 2, leaf.numel()).view(leaf.shape)).sin().sum() for leaf in leaves)


def agrees(layer: nn.Module, use: Any, x: Tensor) -> None:
    """The gradients in weights and input of `total(use(layer, x))`."""
    params = dict(layer.named_parameters())
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(total(use(layer, leaf)), [*params.values(), leaf])

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return total(
            functional_call(
                Using(layer, use), {f"layer.{name}": value for name, value in params.items()}, (x,)
            )
        )

    found, of_x = grad(loss, (0, 1))({name: value.detach() for name, value in params.items()}, x)
    torch.testing.assert_close([*found.values(), of_x], list(expected), rtol=1e-10, atol=1e-12)


class Using(nn.Module):
    def __init__(self, layer: nn.Module, use: Any) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.layer, x)


@each_layer
@pytest.mark.parametrize(
    ("layers", "both_ways", "batch_first", "bias"),
    list(product((1, 2), (False, True), (False, True), (False, True))),
)
def test_recurrent_options(name: str, layers: int, both_ways: bool, batch_first: bool, bias: bool) -> None:
    layer = LAYERS[name](
        INPUTS, HIDDEN, num_layers=layers, bidirectional=both_ways, batch_first=batch_first, bias=bias
    )
    agrees(layer, lambda layer, x: layer(x), torch.randn(TIMES, B, INPUTS))


@each_layer
@pytest.mark.parametrize("lengths", [[5, 3, 3], [2, 5, 4]], ids=["sorted", "in-any-order"])
@pytest.mark.parametrize("both_ways", [False, True])
def test_recurrent_packed_sequences(name: str, lengths: list[int], both_ways: bool) -> None:
    layer = LAYERS[name](INPUTS, HIDDEN, num_layers=2, bidirectional=both_ways)

    def use(layer: nn.Module, x: Tensor) -> Any:
        packed = pack_padded_sequence(
            x, torch.tensor(lengths), enforce_sorted=lengths == sorted(lengths, reverse=True)
        )
        states, ends = layer(packed)
        padded, found = pad_packed_sequence(states, padding_value=0.5, total_length=TIMES + 1)
        assert found.tolist() == lengths
        return padded, ends

    agrees(layer, use, torch.randn(TIMES, B, INPUTS))


def test_recurrent_dropout_between_layers() -> None:
    layer = nn.GRU(INPUTS, HIDDEN, num_layers=3, dropout=0.5)

    def use(layer: nn.Module, x: Tensor) -> Any:
        torch.manual_seed(1)
        return layer(x)

    agrees(layer, use, torch.randn(TIMES, B, INPUTS))


def test_recurrent_unbatched_input_and_initial_state() -> None:
    layer = nn.LSTM(INPUTS, HIDDEN)
    agrees(
        layer,
        lambda layer, x: layer(x, (x[:1, :1].expand(1, HIDDEN), x[1:2, 1:2].expand(1, HIDDEN))),
        torch.randn(TIMES, INPUTS),
    )


@each_layer
def test_recurrent_tangents_and_second_derivatives(name: str) -> None:
    layer = LAYERS[name](2, 3, num_layers=2)
    x, direction = torch.randn(3, 1, 2), torch.randn(3, 1, 2)

    def f(x: Tensor) -> Tensor:
        return total(layer(x))

    value, tangent = jvp(f, (x,), (direction,))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    torch.testing.assert_close(value, f(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(tangent, (gradient * direction).sum(), rtol=1e-10, atol=1e-12)
    rows = [torch.autograd.grad(entry, leaf, retain_graph=True)[0] for entry in gradient.flatten()]
    torch.testing.assert_close(
        hessian(f)(x), torch.stack(rows).view(*x.shape, *x.shape), rtol=1e-9, atol=1e-11
    )


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


@each_layer
def test_recurrent_weight_is_one_term(name: str) -> None:
    model = Last(LAYERS[name](INPUTS, HIDDEN, batch_first=True))
    x = torch.randn(4, TIMES, INPUTS)
    objective = Objective(model, lambda output, target: output.square().sum())
    gradients: dict[str, DeferredGradient] = {}  # as the pass leaves them, before small ones are materialised
    Pass(objective.loss, objective.params, ((x,), torch.zeros(4)), 0, True, "error").run(
        gradients.__setitem__
    )
    for weight in ("weight_ih_l0", "weight_hh_l0"):
        (placed,) = gradients[f"layer.{weight}"].terms
        assert isinstance(placed.term, Product)
        assert placed.term.left.shape[:3] == (4, 1, TIMES)


@pytest.mark.parametrize("both_ways", [False, True])
def test_recurrent_lengths_differ_between_samples(both_ways: bool) -> None:
    """They decide how many operators run: the samples of each length are run together."""
    layer = nn.GRU(INPUTS, HIDDEN, batch_first=True, bidirectional=both_ways)
    params = {name: value.detach() for name, value in layer.named_parameters()}
    x, lengths = torch.randn(6, TIMES, INPUTS), torch.tensor([5, 2, 4, 2, 5, 2])

    def loss(params: dict[str, Tensor], x: Tensor, length: Tensor) -> Tensor:
        return total(
            functional_call(layer, params, (pack_padded_sequence(x[None], length[None], batch_first=True),))[
                1
            ]
        )

    ways = [
        vmap(grad(loss), in_dims=(None, 0, 0))(params, x, lengths),
        per_sample_gradients(loss, params, x, lengths).materialise(),
    ]
    for sample, length in enumerate(lengths.tolist()):
        expected = torch.autograd.grad(total(layer(x[sample, None, :length])[1]), list(layer.parameters()))
        for found in ways:
            torch.testing.assert_close(
                [value[sample] for value in found.values()], list(expected), rtol=1e-10, atol=1e-12
            )


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_given_state(cell: Any) -> None:
    layer = cell(INPUTS, HIDDEN)
    state = torch.randn(2, B, HIDDEN)

    def use(layer: nn.Module, x: Tensor) -> Any:
        return layer(x, (state[0], state[1]) if cell is nn.LSTMCell else state[0])

    agrees(layer, use, torch.randn(B, INPUTS))


def test_recurrent_length_zero_refused() -> None:
    layer = nn.GRU(INPUTS, HIDDEN)
    with pytest.raises(TransformError, match="gru on sequences of length 0"):
        grad(lambda x: total(layer(x)))(torch.randn(0, B, INPUTS))


def test_recurrent_norms_alone() -> None:
    model = Last(nn.LSTM(INPUTS, HIDDEN, batch_first=True))
    params = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(4, TIMES, INPUTS)
    gradients = per_sample_gradients(
        lambda params, x: functional_call(model, params, (x[None],)).sum(), params, x
    )
    written_out = {name: value.flatten(1).square().sum(1) for name, value in gradients.materialise().items()}
    torch.testing.assert_close(gradients.square_norms(per="parameter"), written_out)
