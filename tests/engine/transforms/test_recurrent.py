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
from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.gradients.deferral import DeferredGradient
from psgrad.engine.gradients.terms import Product
from psgrad.engine.transforms import functional_call, grad, hessian, jvp, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.test_architectures import KernelCalls

LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "lstm-projected": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "gru": nn.GRU,
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
INPUTS, HIDDEN, TIMES, B = 3, 4, 5, 3

each_layer = pytest.mark.parametrize("name", LAYERS)


pytestmark = pytest.mark.usefixtures("float64")


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


@pytest.mark.every(2)
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
    BatchPass(objective.loss, objective.params, ((x,), torch.zeros(4)), 0, True, "error").run(
        gradients.__setitem__
    )
    for weight in ("weight_ih_l0", "weight_hh_l0"):
        (placed,) = gradients[f"layer.{weight}"].terms
        assert isinstance(placed.term, Product)
        assert placed.term.left.shape[:3] == (4, 1, TIMES)


# -- packed sequences whose lengths differ between samples ---------------------------------------------------

LENGTHS = torch.tensor([5, 2, 4, 2, 5, 1])


class PackedUse(nn.Module):
    """A recurrent layer on one packed sequence of a sample, and what is made of it."""

    def __init__(self, layer: nn.Module, use: Any, batch_first: bool = True) -> None:
        super().__init__()
        self.layer, self.use, self.batch_first = layer, use, batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(
            x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=self.batch_first
        )
        return self.use(self.layer, packed)

    def loss(self, params: dict[str, Tensor], x: Tensor, length: Tensor) -> Tensor:
        """Of one sample."""
        return total(functional_call(self, params, (x[None], length[None])))


def agrees_for_each_sample(model: PackedUse, **options: Any) -> None:
    """The gradients in the weights and in a factor of the input, beside autograd on one sample at a time."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    params["factor"] = torch.linspace(0.5, 1.5, INPUTS)
    x = torch.randn(len(LENGTHS), TIMES, INPUTS)

    def loss(params: dict[str, Tensor], x: Tensor, length: Tensor) -> Tensor:
        weights = {name: value for name, value in params.items() if name != "factor"}
        return model.loss(weights, x * params["factor"], length)

    found = [
        vmap(grad(loss), in_dims=(None, 0, 0), **options)(params, x, LENGTHS),
        per_sample_gradients(loss, params, x, LENGTHS, **options).materialise(),
    ]
    leaves = [*model.parameters(), params["factor"].clone().requires_grad_()]
    for sample, length in enumerate(LENGTHS):
        expected = torch.autograd.grad(
            total(model(x[sample, None] * leaves[-1], length[None])), leaves, materialize_grads=True
        )
        for gradients in found:
            torch.testing.assert_close(
                [value[sample] for value in gradients.values()], list(expected), rtol=1e-10, atol=1e-12
            )


def ends(layer: nn.Module, packed: Any) -> Any:
    return layer(packed)[1]


def padded_outputs(layer: nn.Module, packed: Any) -> Any:
    return pad_packed_sequence(layer(packed)[0], batch_first=True)[0].mean(1)


def unpacked(layer: nn.Module, packed: Any, batch_first: bool = True) -> Tensor:
    return pad_packed_sequence(layer(packed)[0], batch_first, padding_value=7.0)[0]


def unpacked_uses(layer: nn.Module, packed: Any) -> Any:
    """What runs for samples of all lengths at once."""
    first, second = unpacked(layer, packed), unpacked(layer, packed, batch_first=False)
    each = nn.functional.linear(second, torch.eye(second.size(-1)) + 0.1, torch.ones(second.size(-1))).tanh()
    return [first.sum(1), first.max(dim=1).values, each.mean(0), each.amax(-3), first.relu().mean(dim=-2)]


def unpacked_shape(layer: nn.Module, packed: Any) -> Any:
    first = unpacked(layer, packed)
    return first.sum(1) / first.shape[1] + first[:, -1] + first.mean((1, 2))[:, None]


def outputs_of_one_length(layer: nn.Module, packed: Any) -> Any:
    return pad_packed_sequence(layer(packed)[0], total_length=TIMES + 1, padding_value=0.5)


def mean_of_data(layer: nn.Module, packed: Any) -> Any:
    return layer(packed)[0].data.mean(0)


def sum_over_count(layer: nn.Module, packed: Any) -> Any:
    """Nothing but the shape says how many times there are."""
    return layer(packed)[1][-1] / packed.data.shape[0]


def ends_over_times(layer: nn.Module, packed: Any) -> Any:
    return layer(packed)[1][-1] / len(packed.batch_sizes)


def data_changed_before(layer: nn.Module, packed: Any) -> Any:
    return layer(packed._replace(data=packed.data.sin()))[1]


@each_layer
@pytest.mark.parametrize("both_ways", [False, True])
def test_packed_lengths_differ_ends(name: str, both_ways: bool) -> None:
    layer = LAYERS[name](INPUTS, HIDDEN, num_layers=2, bidirectional=both_ways, batch_first=True)
    agrees_for_each_sample(PackedUse(layer, ends))


@pytest.mark.parametrize(
    "use",
    [
        padded_outputs,
        unpacked_uses,
        unpacked_shape,
        outputs_of_one_length,
        mean_of_data,
        sum_over_count,
        ends_over_times,
        data_changed_before,
    ],
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_lengths_differ_uses(use: Any, batch_first: bool) -> None:
    layer = nn.GRU(INPUTS, HIDDEN, bidirectional=True)
    agrees_for_each_sample(PackedUse(layer, use, batch_first))


def test_unpacked_lengths_differ_runs_once() -> None:
    calls = []
    layer = nn.GRU(INPUTS, HIDDEN, batch_first=True)

    def loss(x: Tensor, length: Tensor) -> Tensor:
        calls.append(1)
        packed = pack_padded_sequence(x[None], length[None], batch_first=True, enforce_sorted=False)
        return padded_outputs(layer, packed).sum()

    vmap(loss)(torch.randn(len(LENGTHS), TIMES, INPUTS), LENGTHS)
    assert len(calls) == 1


def test_packed_lengths_differ_given_start() -> None:
    layer = nn.LSTM(INPUTS, HIDDEN)
    start = torch.randn(2, 1, 1, HIDDEN)
    agrees_for_each_sample(PackedUse(layer, lambda layer, packed: layer(packed, tuple(start))[1]))


def test_packed_lengths_differ_dropout_between_layers_runs_by_length() -> None:
    """A mask for as many rows as the longest sample has would depend on the others in the batch."""
    layer = nn.GRU(INPUTS, HIDDEN, num_layers=2, dropout=0.999999)
    agrees_for_each_sample(PackedUse(layer, ends), randomness="different")


def test_packed_lengths_differ_second_derivatives() -> None:
    layer = nn.LSTM(INPUTS, HIDDEN, batch_first=True)
    model = PackedUse(layer, ends)
    params = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(len(LENGTHS), TIMES, INPUTS)
    slope = lambda x, length: grad(model.loss, 1)(params, x, length).square().sum()
    found = vmap(grad(slope))(x, LENGTHS)
    for sample, length in enumerate(LENGTHS):
        leaf = x[sample].clone().requires_grad_()
        value = total(model(leaf[None], length[None]))
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), leaf)
        torch.testing.assert_close(found[sample], expected, rtol=1e-9, atol=1e-12)


def test_packed_lengths_differ_weights_of_each_sample() -> None:
    layer = nn.GRU(INPUTS, HIDDEN, batch_first=True)
    model = PackedUse(layer, ends)
    weights = {
        name: value.detach() * torch.linspace(0.5, 1.5, len(LENGTHS)).view(-1, *(1,) * value.dim())
        for name, value in model.named_parameters()
    }
    x = torch.randn(len(LENGTHS), TIMES, INPUTS)

    found = vmap(grad(model.loss))(weights, x, LENGTHS)
    for sample, length in enumerate(LENGTHS):
        own = {name: value[sample].clone().requires_grad_() for name, value in weights.items()}
        value = total(torch.func.functional_call(model, own, (x[sample, None], length[None])))
        expected = torch.autograd.grad(value, list(own.values()))
        torch.testing.assert_close(
            [value[sample] for value in found.values()], list(expected), rtol=1e-10, atol=1e-12
        )


def test_packed_lengths_differ_ends_take_one_program() -> None:
    """As many operators run for six lengths as for one."""
    model = PackedUse(nn.LSTM(INPUTS, HIDDEN, batch_first=True), ends)
    params = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(4, TIMES, INPUTS)

    calls = []
    for lengths in (torch.tensor([2, 3, 1, 5]), torch.tensor([2, 3, 2, 5])):
        with KernelCalls() as kernels:
            per_sample_gradients(model.loss, params, x, lengths)
        calls.append(kernels.calls["psgrad::recurrence"])
    assert calls == [1, 1]


@pytest.mark.parametrize("wrong", [0, TIMES + 1])
def test_packed_lengths_differ_wrong_length(wrong: int) -> None:
    model = PackedUse(nn.GRU(INPUTS, HIDDEN, batch_first=True), ends)
    x, lengths = torch.randn(3, TIMES, INPUTS), torch.tensor([2, wrong, 3])
    with pytest.raises(TransformError, match=f"with a length of {wrong} for {TIMES} times"):
        vmap(lambda x, length: total(model(x[None], length[None])))(x, lengths)


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


@pytest.mark.parametrize("cotangent", [float("nan"), float("inf"), float("-inf"), 2.0])
@pytest.mark.parametrize("at", [-1.0, 0.0, 1.0, float("nan"), float("inf")])
def test_recurrent_relu_of_dead_units_selects(at: float, cotangent: float) -> None:
    """A unit that is dead has a derivative of zero, whatever arrives at it, as in autograd."""
    layer = nn.RNN(1, 2, nonlinearity="relu")
    params = {name: torch.full_like(value, 0.5) for name, value in layer.named_parameters()}
    params["bias_ih_l0"] = torch.tensor([at, 1.0])
    x = torch.tensor([[0.3], [-0.2]])
    g = torch.tensor([[cotangent, 1.0], [1.0, cotangent]])

    def states(params: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, params, (x,))[0]

    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    expected = torch.autograd.grad(torch.func.functional_call(layer, leaves, (x,))[0], [*leaves.values()], g)
    found = vjp(states, params)[1](g)[0]
    torch.testing.assert_close([*found.values()], list(expected), equal_nan=True)
    mapped = vmap(lambda g: vjp(states, params)[1](g)[0])(g[None])
    torch.testing.assert_close([value[0] for value in mapped.values()], list(expected), equal_nan=True)


@each_layer
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_recurrent_layers_with_extreme_cotangents(name: str, packed: bool, scale: float) -> None:
    """Numbers where autograd has numbers, also where all gates are closed or a sequence has ended."""
    layer = LAYERS[name](INPUTS, HIDDEN, bidirectional=True)

    def use(layer: nn.Module, x: Tensor) -> Tensor:
        if not packed:
            return layer(x)[0]
        states, _ = layer(pack_padded_sequence(x, torch.tensor([5, 3, 3])))
        return pad_packed_sequence(states, padding_value=0.5, total_length=TIMES + 1)[0]

    x = torch.randn(TIMES, B, INPUTS) * scale
    params = dict(layer.named_parameters())
    leaf = x.clone().requires_grad_()
    out = use(layer, leaf)
    for number in (float("inf"), float("nan")):
        g = torch.randn_like(out)
        g[2, 1, 0] = g[4, 2, -1] = number
        expected = torch.autograd.grad(out, [*params.values(), leaf], g, retain_graph=True)
        renamed = {f"layer.{name}": value.detach() for name, value in params.items()}
        pull = vjp(lambda params, x: functional_call(Using(layer, use), params, (x,)), renamed, x)[1]
        of_params, of_x = pull(g)
        for found, theirs in zip((*of_params.values(), of_x), expected, strict=True):
            finite = theirs.isfinite()
            assert torch.equal(found.isfinite(), finite)
            torch.testing.assert_close(found[finite], theirs[finite])
