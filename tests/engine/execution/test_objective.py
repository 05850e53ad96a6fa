"""A model and a loss as one function of one sample: what models may return, and that they are left as they
were.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.errors import LossError, ModelError
from tests.oracles import one_sample_gradients


def grads_of(
    objective: Objective, inputs: tuple[Tensor, ...], target: Tensor | None = None, **options: Any
) -> PerSampleGradients:
    in_dims = (0, None if target is None else 0)
    return per_sample_gradients(
        objective.loss, objective.params, inputs, target, in_dims=in_dims, has_aux=True, **options
    )


class Returns(nn.Module):
    """A linear layer whose output is wrapped by a function."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x))


class Record(OrderedDict[str, Any]):
    """A model library's output: a dict whose keys are attributes."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = namedtuple("Pair", "logits hidden")


@pytest.mark.parametrize(
    ("wrap", "pick"),
    [
        (lambda y: y, lambda output: output),
        (lambda y: {"logits": y, "note": "a text", "nothing": None}, lambda output: output["logits"]),
        (lambda y: Record(logits=y, hidden=(y, y)), lambda output: output.logits + 0 * output["hidden"][1]),
        (lambda y: (y, 2 * y), lambda output: output[0]),
        (lambda y: [y], lambda output: output[0]),
        (lambda y: Pair(y, y), lambda output: output.logits),
        (lambda y: {"deep": [(y,)]}, lambda output: output["deep"][0][0]),
    ],
    ids=["tensor", "dict", "record", "tuple", "list", "named tuple", "nested"],
)
def test_whatever_the_model_returns_loses_its_batch_axis(wrap: Any, pick: Any) -> None:
    model, inputs, target = Returns(wrap), torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = pick(output)
        assert logits.shape == (3,)
        return F.cross_entropy(logits, target)

    found = grads_of(Objective(model, loss), (inputs,), target).materialise()
    # another layer: for the names alone
    expected = one_sample_gradients(Returns(lambda y: y), F.cross_entropy, (inputs,), target)
    assert found.keys() == expected.keys()
    model.wrap = lambda y: y
    torch.testing.assert_close(found, one_sample_gradients(model, F.cross_entropy, (inputs,), target))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, target: output, "a tensor of shape (3,)"),
        (lambda output, target: output.sum(0, keepdim=True), "a tensor of shape (1,)"),
        (lambda output, target: 0.5, "float"),
        (lambda output, target: (output.sum(), output), "tuple"),
        (lambda output, target: None, "NoneType"),
        (lambda output, target: output.argmax(), "torch.int64"),
        (lambda output, target: output.sum() > 0, "torch.bool"),
    ],
    ids=["vector", "one entry", "number", "pair", "nothing", "integer", "bool"],
)
def test_a_loss_that_is_no_real_number_is_refused(loss: Any, words: str) -> None:
    objective = Objective(nn.Linear(4, 3), loss)
    with pytest.raises(LossError) as failure:
        grads_of(objective, (torch.randn(2, 4),))
    assert words in str(failure.value)
    assert failure.value.exit_code == 3


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for model in (nn.Linear(4, 3).requires_grad_(False), nn.ReLU()):
        with pytest.raises(ModelError, match="no parameter that requires a gradient"):
            Objective(model, F.cross_entropy)


def test_without_a_target_the_loss_gets_none() -> None:
    seen = []

    def loss(output: Tensor, target: None) -> Tensor:
        seen.append(target)
        return output.square().sum()

    grads_of(Objective(nn.Linear(4, 3), loss), (torch.randn(2, 4),))
    assert seen == [None]


def test_the_summary_comes_beside_the_loss() -> None:
    objective = Objective(
        nn.Linear(4, 3), F.cross_entropy, lambda output, target: {"top": output.argmax(), "known": target}
    )
    inputs, target = torch.randn(5, 4), torch.randint(3, (5,))
    grads = grads_of(objective, (inputs,), target)
    assert grads.aux["known"].tolist() == target.tolist()
    assert grads.aux["top"].tolist() == objective.model(inputs).argmax(1).tolist()


class Everything(nn.Module):
    """Buffers, tied and frozen parameters, recurrent layers (which keep a second list of their weights),
    hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.one, self.two, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.two(torch.relu(self.one(self.norm(x)))) * self.scale)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_bit_for_bit(fails: bool) -> None:
    model = Everything().eval()
    identities = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
    before = copy.deepcopy(model.state_dict())
    keys = {name: set(vars(module)) for name, module in model.named_modules()}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("in the middle")
        return F.cross_entropy(output, target)

    objective = Objective(model, loss)
    try:
        grads = grads_of(objective, (torch.randn(5, 4),), torch.randint(3, (5,)))
        grads.materialise()
        grads.weighted_sum(torch.rand(5))
    except ValueError:
        assert fails
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)} == identities
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.frozen.parameters())
    assert all(parameter.requires_grad for parameter in model.one.parameters())
