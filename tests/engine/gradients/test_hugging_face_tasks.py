"""Hugging Face models and tasks with rows of unequal length: the gradients of a padded batch are those of
each row alone.

The oracle is PyTorch's autograd on one row at a time, without padding, in float64, with the library's own
loss (`labels=`). docs/explanation/padding.md has what was found: which padding leaves the numbers as they
are, and which does not.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients, per_sample_square_norms
from psgrad.engine.transforms import functional_call
from tests.engine.gradients.hugging_face import (
    CASES,
    CHANGED_BY_PADDING,
    MIXTURES,
    MORE,
    Case,
    Row,
    decoder,
    padded,
)

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "float64"])


class WithoutFloat32(TorchFunctionMode):
    """float64 wherever a model asks for float32, which differs with the shape of a kernel's arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def each(*cases: Case) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def rows_alone(model: nn.Module, rows: list[Row], shared: dict[str, Any]) -> Tensor:
    """[n, p]: the gradient of each row's loss, by autograd."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):  # PyTorch's grouped kernel takes no float64
        model.set_experts_implementation("eager")
    parameters = list(model.parameters())
    found = []
    for row in rows:
        loss = model(**{name: wide(value)[None] for name, value in row.items()}, **shared).loss
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(found)


def wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def rows_of(batch: Row) -> list[Row]:
    n = len(next(iter(batch.values())))
    return [{name: value[i] for name, value in batch.items()} for i in range(n)]


def together(model: nn.Module, batch: Row, shared: dict[str, Any], query: Any = per_sample_gradients) -> Any:
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: dict[str, Tensor], row: Row) -> Tensor:
        one = {name: value[None] for name, value in row.items()}
        return functional_call(model, params, (), {**one, **shared}).loss

    return query(loss, params, batch)


def flat(gradients: PerSampleGradients) -> Tensor:
    return torch.cat([value.flatten(1) for value in gradients.materialise().values()], 1)


def assert_rows_are_those_alone(case: Case, dtype: torch.dtype, batch: Row | None = None) -> None:
    model, rows = case.build(dtype), case.rows(dtype)
    batch = padded(rows, case.pad_token) if batch is None else batch
    tolerance = TOLERANCES[dtype]
    with WithoutFloat32():
        expected = rows_alone(model, rows, case.shared)
    with WithoutFloat32() if dtype == torch.float64 else nullcontext():
        norms = together(model, batch, case.shared, per_sample_square_norms).square_norms().sqrt()
        gradients = flat(together(model, batch, case.shared))
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=tolerance, atol=0)
    error = (gradients - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= tolerance


@pytest.mark.long
@pytest.mark.every(4)
@each(*CASES, *MIXTURES)
@each_dtype
def test_padded_rows_have_the_gradients_of_rows_alone(case: Case, dtype: torch.dtype) -> None:
    assert_rows_are_those_alone(case, dtype)


@pytest.mark.sweep
@each(*MORE)
@each_dtype
def test_padded_rows_of_more_architectures(case: Case, dtype: torch.dtype) -> None:
    assert_rows_are_those_alone(case, dtype)


@each(*MIXTURES)
def test_expert_weights_keep_factors(case: Case) -> None:
    model = case.build(torch.float64)
    assert model.config._experts_implementation == "grouped_mm"
    gradients = per_sample_kinds(together(model, padded(case.rows(torch.float64), 0), {}, unsettled))
    experts = {name: kinds for name, kinds in gradients.items() if name.endswith(("up_proj", "down_proj"))}
    assert len(experts) == 4
    assert set().union(*experts.values()) == {"GroupedProduct"}


def unsettled(*args: Any) -> PerSampleGradients:
    return per_sample_gradients(*args, settle=False)


def per_sample_kinds(gradients: PerSampleGradients) -> dict[str, set[str]]:
    """name -> the kinds of its terms, of the rows of each outcome of a branch."""
    return {
        name: {
            type(placed.term).__name__ for part in gradients.parts for placed in part.gradients[name].terms
        }
        for name in gradients.shapes
    }


# -- what padding changes, in the library itself -------------------------------------------------------------


@each(*CHANGED_BY_PADDING)
def test_padding_that_changes_the_numbers_of_the_library(case: Case) -> None:
    """If this fails, the library has changed: docs/explanation/padding.md says otherwise."""
    model, rows = case.build(torch.float64), case.rows(torch.float64)
    alone = rows_alone(model, rows, case.shared)
    batch = padded(rows, case.pad_token)
    changed = rows_alone(model, rows_of(batch), case.shared)
    error = (changed - alone).norm(dim=1) / alone.norm(dim=1)
    assert error[1] < 1e-12  # the longest row has no padding
    assert not (error[0] < 0.01)
    found = flat(together(model, batch, case.shared))
    torch.testing.assert_close(found, changed, equal_nan=True)


@each(*CHANGED_BY_PADDING)
@each_dtype
def test_rows_of_equal_length_where_padding_changes_the_numbers(case: Case, dtype: torch.dtype) -> None:
    model, rows = case.build(dtype), case.rows(dtype)[:1] * 2
    expected = rows_alone(model, rows, case.shared).norm(dim=1)
    found = together(model, padded(rows, case.pad_token), case.shared, per_sample_square_norms)
    torch.testing.assert_close(found.square_norms().sqrt(), expected, rtol=TOLERANCES[dtype], atol=0)


@pytest.mark.long
def test_padding_before_the_text_needs_position_ids_and_no_loss_at_its_first_token() -> None:
    case = decoder("llama")
    rows = case.rows(torch.float64)
    batch = padded(rows, 0)
    behind = batch["attention_mask"].sum(1)
    longest = batch["attention_mask"].shape[1]
    places = (torch.arange(longest) + behind[:, None]) % longest  # what stood behind comes before
    before = {name: value.gather(1, places) for name, value in batch.items()}
    before["position_ids"] = (before["attention_mask"].cumsum(1) - 1).clamp(min=0)
    first = before["attention_mask"].cumsum(1) == 1
    assert (before["labels"][first & (before["attention_mask"] == 1)] == -100).all()
    assert_rows_are_those_alone(case, torch.float64, before)
