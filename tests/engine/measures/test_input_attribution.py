"""Attribution to inputs, beside captum's, PyTorch's own gradients and the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captum.attr import InputXGradient, Saliency
from captum.attr import IntegratedGradients as CaptumIntegratedGradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.config import LossConfig
from psgrad.data.loss import resolve_loss
from psgrad.engine.execution.objective import Forward
from psgrad.engine.measures.builtin.input_attribution import (
    Attribution,
    GradientXInput,
    InputGradient,
    IntegratedGradients,
)
from psgrad.errors import MeasureError
from psgrad.user_code import resolve
from tests.engine.measures.own_passes import columns_of, gathered_of, setting_of
from tests.small_models import ARCHITECTURES, Architecture

pytestmark = pytest.mark.usefixtures("on_device")

N = 6
CONFIGS = Path(__file__).parents[3] / "configs"
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
ALL = (InputGradient(), GradientXInput(), IntegratedGradients(steps=3))
each_measure = pytest.mark.parametrize("measure", ALL, ids=lambda each: each.name)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


def classifier(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 9, 4)).to(dtype).eval()
    return model, torch.randn(N, 1, 5, 5, dtype=dtype), torch.arange(N) % 4


def of_classes(model: nn.Module, inputs: Tensor, target: Tensor, **facts: object) -> object:
    return setting_of(model, F.cross_entropy, (inputs,), target, kind="class", classes=4, **facts)


def maps_of(measure: Attribution, setting: object, norms: Tensor | None = None) -> Tensor:
    """The maps of all samples, in their order."""
    norms = torch.ones(len(setting), dtype=torch.float64) if norms is None else norms
    gathered = gathered_of(measure, setting, norms.cpu())  # where columns are
    return gathered.arrays["map_0"][gathered.arrays["rows"].argsort()]


# -- beside others' ------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("of", ["target", "prediction"])
def test_attribution_logit_gradients_equal_captum(dtype: torch.dtype, of: str) -> None:
    model, inputs, target = classifier(dtype)
    chosen = target if of == "target" else model(inputs).argmax(1)
    setting = of_classes(model, inputs, target)
    saliency = Saliency(model).attribute(inputs, target=chosen, abs=False)
    result = columns_of(InputGradient(of=of), setting)
    torch.testing.assert_close(
        result["input_gradient"], saliency.flatten(1).norm(dim=1).double(), **tolerance(dtype)
    )
    product = InputXGradient(model).attribute(inputs, target=chosen).detach()
    result = columns_of(GradientXInput(of=of), setting)
    torch.testing.assert_close(
        result["gradient_x_input"], product.flatten(1).sum(1).double(), **tolerance(dtype)
    )
    torch.testing.assert_close(
        result["gradient_x_input_l1"], product.abs().flatten(1).sum(1).double(), **tolerance(dtype)
    )


@BOTH
@pytest.mark.parametrize(("of", "baseline"), [("target", 0.0), ("prediction", 0.5)])
def test_attribution_integrated_gradients_equal_captum(dtype: torch.dtype, of: str, baseline: float) -> None:
    model, inputs, target = classifier(dtype)
    chosen = target if of == "target" else model(inputs).argmax(1)
    captum = CaptumIntegratedGradients(model)
    expected, delta = captum.attribute(
        inputs,
        target=chosen,
        n_steps=7,
        method="gausslegendre",
        baselines=baseline,
        return_convergence_delta=True,
    )
    measure = IntegratedGradients(of=of, steps=7, baseline=baseline)
    setting = of_classes(model, inputs, target)
    result = columns_of(measure, setting)
    near = {"rtol": 1e-5, "atol": 1e-5}  # captum's own steps are in single precision
    torch.testing.assert_close(result["integrated_gradients"], expected.flatten(1).sum(1).double(), **near)
    torch.testing.assert_close(
        result["integrated_gradients_l1"], expected.abs().flatten(1).sum(1).double(), **near
    )
    torch.testing.assert_close(result["integrated_gradients_gap"], delta.double(), **near)
    torch.testing.assert_close(maps_of(measure, setting), expected.float())


@pytest.mark.parametrize(
    "architecture", [each for each in ARCHITECTURES if each.name != "gpt"], ids=lambda each: each.name
)
def test_attribution_loss_gradient_of_every_architecture(architecture: Architecture) -> None:
    model = architecture.build()
    (inputs,), target = architecture.batch(N)
    expected = []
    for row in range(N):
        one = inputs[row : row + 1].clone().requires_grad_()
        expected.append(torch.autograd.grad(architecture.loss(model(one)[0], target[row]), one)[0].norm())
    result = columns_of(InputGradient(), setting_of(model, architecture.loss, (inputs,), target))
    torch.testing.assert_close(result["input_gradient"], torch.stack(expected).double(), rtol=1e-5, atol=1e-7)


# -- what must hold ------------------------------------------------------------------------------------------


@each_measure
@settings(deadline=None, max_examples=5)
@given(chunk=st.integers(1, 20), start=st.integers(0, N - 1))
def test_attribution_independent_of_chunks_and_resume(measure: Attribution, chunk: int, start: int) -> None:
    setting = of_classes(*classifier())
    whole, part = columns_of(measure, setting, 10**6), columns_of(measure, setting, chunk, start)
    for name, column in part.items():
        torch.testing.assert_close(column, whole[name][start:], rtol=1e-10, atol=1e-12)


@each_measure
def test_attribution_nonfinite_rows(measure: Attribution) -> None:
    model, inputs, target = classifier()
    dirty = inputs.clone()
    dirty[1, 0, 2, 2], dirty[4] = math.nan, math.inf
    result, clean = (columns_of(measure, of_classes(model, x, target)) for x in (dirty, inputs))
    for name, column in result.items():
        assert torch.isnan(column[[1, 4]]).all(), name
        torch.testing.assert_close(column[[0, 2, 3, 5]], clean[name][[0, 2, 3, 5]], rtol=1e-10, atol=1e-12)


@each_measure
def test_attribution_maps(measure: Attribution) -> None:
    setting = of_classes(*classifier())
    result = columns_of(measure, setting)
    norms = torch.tensor([3.0, 9, math.nan, 1, 7, 5], dtype=torch.float64)
    gathered = gathered_of(measure, setting, norms)
    assert gathered.arrays["rows"].tolist() == [1, 4, 5, 0, 3]
    maps = gathered.arrays["map_0"].flatten(1).double()
    whole = maps.sum(1) if measure.additive else maps.norm(dim=1)
    torch.testing.assert_close(whole, result[measure.name][[1, 4, 5, 0, 3]], rtol=1e-5, atol=1e-6)
    assert "ids_0" not in gathered.arrays


@each_measure
def test_attribution_no_maps_without_inputs(measure: Attribution) -> None:
    setting = of_classes(*classifier(), shows_inputs=False)
    columns_of(measure, setting)
    assert not gathered_of(measure, setting, torch.ones(N)).arrays


def test_attribution_ignored_label() -> None:
    model, inputs, target = classifier()
    target[2] = -100
    result = columns_of(InputGradient(of="target"), of_classes(model, inputs, target))["input_gradient"]
    assert torch.isnan(result).tolist() == [row == 2 for row in range(N)]


class TwoInputs(nn.Module):
    """A category [n], tokens [n, t] looked up twice, a table row [n, 3] and a mask [n, t] of whole numbers,
    to two classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.token, self.other, self.place = (nn.Embedding(k, 4) for k in (3, 9, 9, 5))
        self.head = nn.Linear(7, 2)

    def forward(self, kind: Tensor, tokens: Tensor, row: Tensor, mask: Tensor) -> Tensor:
        words = self.token(tokens) * self.other(tokens).tanh() + self.place(torch.arange(5))
        mean = (words * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(torch.cat([(mean * self.kind(kind)).tanh(), row.square()], dim=1))


def two_inputs() -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    torch.manual_seed(1)
    mask = (torch.arange(5)[None] <= torch.arange(N)[:, None] % 5).long()
    inputs = (torch.randint(3, (N,)), torch.randint(9, (N, 5)), torch.randn(N, 3, dtype=torch.float64), mask)
    return TwoInputs().double(), inputs, torch.arange(N) % 2


def loss_parts(
    model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, row: int
) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Of one row what the model takes in (kind, token, other, floats), and the loss as a function of them,
    computed by hand.
    """
    kind, tokens, floats, mask = (x[row] for x in inputs)
    values = [model.kind(kind), model.token(tokens), model.other(tokens), floats]

    def loss(kind: Tensor, token: Tensor, other: Tensor, floats: Tensor) -> Tensor:
        words = token * other.tanh() + model.place.weight
        mean = (words * mask[:, None]).sum(0) / mask.sum()
        return F.cross_entropy(model.head(torch.cat([(mean * kind).tanh(), floats.square()])), target[row])

    return [value.detach().requires_grad_() for value in values], loss


def test_attribution_several_inputs() -> None:
    model, inputs, target = two_inputs()
    messages: list[str] = []
    setting = setting_of(model, F.cross_entropy, inputs, target, say=messages.append)
    slope, product = columns_of(InputGradient(), setting), columns_of(GradientXInput(), setting)
    measure = GradientXInput()
    columns_of(measure, setting)
    gathered = gathered_of(measure, setting, torch.arange(N, 0, -1).double())
    assert gathered.numbers["places"] == [
        "kind, call 0, of input 0",
        "token, call 0, of input 1",
        "other, call 0, of input 1",
        "input 2",
    ]
    assert torch.equal(gathered.arrays["ids_1"], inputs[1])
    assert torch.equal(gathered.arrays["ids_0"], inputs[0])
    for row in range(N):
        values, loss = loss_parts(model, inputs, target, row)
        g = torch.autograd.grad(loss(*values), values)
        parts = [g[0].norm(), torch.cat([g[1], g[2]]).norm(), g[3].norm()]
        for number, part in enumerate(parts):
            assert slope[f"input_gradient_{number}"][row].item() == pytest.approx(part.item(), rel=1e-10)
        assert slope["input_gradient"][row].item() == pytest.approx(
            torch.stack(parts).norm().item(), rel=1e-10
        )
        by_position = (g[1] * values[1] + g[2] * values[2]).sum(1).detach()
        torch.testing.assert_close(gathered.arrays["map_1"][row], by_position.float())
        whole = sum((x * y).sum() for x, y in zip(g, values, strict=True))
        assert product["gradient_x_input"][row].item() == pytest.approx(whole.item(), rel=1e-10)
    why = "held fixed, as no embedding takes their whole numbers: input 3 of the model"
    assert messages == [
        f"{name}: {why}" for name in ("input_gradient", "gradient_x_input", "gradient_x_input")
    ]


@each_measure
def test_attribution_weighted_loss_is_of_the_inputs_of_the_model(measure: Attribution) -> None:
    model, inputs, target = classifier()
    plain = columns_of(measure, of_classes(model, inputs, target))
    weights = torch.linspace(0.25, 3, N, dtype=torch.float64)
    facts = {"forward": Forward(weighted=True), "kind": "class", "classes": 4}
    weighted = columns_of(measure, setting_of(model, F.cross_entropy, (inputs, weights), target, **facts))
    assert weighted.keys() == plain.keys()
    for name, column in plain.items():
        torch.testing.assert_close(weighted[name], column * weights.to(column), rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_attribution_token_as_baseline() -> None:
    model, inputs, target = two_inputs()
    inputs = (inputs[0] % 3, inputs[1] % 3, *inputs[2:])
    result = columns_of(
        IntegratedGradients(steps=40, baseline_token=2), setting_of(model, F.cross_entropy, inputs, target)
    )
    other = (torch.full_like(inputs[0], 2), torch.full_like(inputs[1], 2), 0 * inputs[2], inputs[3])
    rise = F.cross_entropy(model(*inputs), target, reduction="none") - F.cross_entropy(
        model(*other), target, reduction="none"
    )
    torch.testing.assert_close(result["integrated_gradients"], rise.detach(), rtol=1e-8, atol=1e-8)
    assert result["integrated_gradients_gap"].abs().max() < 1e-8


# -- ids -----------------------------------------------------------------------------------------------------


def test_attribution_tied_embedding() -> None:
    """configs/text.yaml: the head is the embedding. The model is run by hand from what is looked up, on
    weights that stay as they are.
    """
    model = resolve("text/model.py:build", CONFIGS)(width=16, layers=1, heads=2, positions=12).double().eval()
    tokens = torch.randint(256, (N, 13))
    criterion = resolve_loss(LossConfig(name="token_cross_entropy"), CONFIGS)
    inputs, target = tokens[:, :-1], tokens[:, 1:]
    setting = setting_of(model, criterion.function, (inputs,), target, kind="token", classes=256)
    slope, product = columns_of(InputGradient(), setting), columns_of(GradientXInput(), setting)
    measure = GradientXInput()
    measure.prepare(setting)
    maps = maps_of(measure, setting)
    for row in range(N):
        x = model.embedding.weight[inputs[row]].detach().requires_grad_()
        hidden = model.norm(model.blocks((x + model.positions)[None]))
        loss = F.cross_entropy(F.linear(hidden[0], model.embedding.weight.detach()), target[row])
        (g,) = torch.autograd.grad(loss, x)
        assert slope["input_gradient"][row].item() == pytest.approx(g.norm().item(), rel=1e-10)
        assert product["gradient_x_input"][row].item() == pytest.approx(
            (g * x).sum().item(), rel=1e-9, abs=1e-12
        )
        torch.testing.assert_close(maps[row], (g * x).sum(1).detach().float())


class Shifted(nn.Module):
    def __init__(self, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head, self.shift = nn.Embedding(9, 4), nn.Linear(4, 2), shift

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(self.shift(ids)).flatten(1, -2).mean(1))


@pytest.mark.parametrize(
    "shift",
    [lambda ids: ids.clamp(max=7), lambda ids: ids[:, 1:], lambda ids: ids[:, :-1], lambda ids: ids.roll(1)],
)
def test_attribution_changed_ids_refused(shift: Callable[[Tensor], Tensor]) -> None:
    setting = setting_of(
        Shifted(shift), F.cross_entropy, (torch.randint(9, (N, 6)),), torch.zeros(N, dtype=torch.int64)
    )
    with pytest.raises(MeasureError, match="found no input of this model to attribute to") as caught:
        InputGradient().prepare(setting)
    assert "shifted, clipped or cut" in str(caught.value)


@each_measure
def test_attribution_restores_model_after_error(measure: Attribution) -> None:
    class Failing(Shifted):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            self.calls += 1
            if self.calls > 3:
                raise ValueError("on purpose")
            return out

    model = Failing(lambda ids: ids)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    setting = setting_of(
        model, F.cross_entropy, (torch.randint(9, (N, 6)),), torch.zeros(N, dtype=torch.int64)
    )
    with pytest.raises(Exception, match="on purpose"):
        columns_of(measure, setting, chunk_size=2)
    model.calls = -1000
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    columns_of(measure, setting)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        k: v.tolist() for k, v in before.items()
    }


# -- refusals ------------------------------------------------------------------------------------------------


def test_attribution_logits_without_classes_refused() -> None:
    setting = setting_of(nn.Linear(3, 1), F.mse_loss, (torch.randn(4, 3),), torch.randn(4, 1), kind="value")
    with pytest.raises(MeasureError, match="looks at the class of each sample, and this loss has a value"):
        InputGradient(of="prediction").prepare(setting)
    InputGradient().prepare(setting)


def test_attribution_path_of_random_model_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    setting = setting_of(model, F.cross_entropy, (torch.randn(4, 3),), torch.arange(4))
    with pytest.raises(MeasureError, match="integrated_gradients needs derivatives in the input") as caught:
        columns_of(IntegratedGradients(), setting)
    assert "random" in str(caught.value)
    assert torch.isfinite(columns_of(InputGradient(), setting)["input_gradient"]).all()


def test_attribution_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        IntegratedGradients(steps=0)


def test_attribution_gauss_legendre_exact_for_polynomials() -> None:
    """A cubic loss of one number: the attribution is the rise, with two steps."""
    setting = setting_of(
        nn.Linear(1, 1).double(),
        lambda out, _: out.sum() ** 3,
        (torch.randn(N, 1, dtype=torch.float64),),
        torch.zeros(N),
    )
    assert columns_of(IntegratedGradients(steps=2), setting)["integrated_gradients_gap"].abs().max() < 1e-12
    assert np.polynomial.legendre.leggauss(2)[1].sum() == pytest.approx(2)
